"""`policies(config)`: the three documents, from the config's requests; only STS is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smtrain.client.backends.choose import sagemaker, target_of
from smtrain.client.iam.policy import caller_policy, role_policy, trust_policy
from smtrain.client.iam.services import Beside
from smtrain.client.launch.stages import Chain
from smtrain.client.planner.resolve import load_config
from smtrain.core.config.load import Source
from smtrain.core.facts.sagemaker import TargetName
from smtrain.core.public import public
from smtrain.stages import stages_of

ROLE_NAME = "smtrain-training"


def trust_policy_of(
    *, tune: bool = False, endpoint: str | None = None, group: str | None = None, pipeline: str | None = None
) -> dict[str, Any]:
    """The role's trust policy, which names no account, so AWS is not asked."""
    return trust_policy(Beside(tune, endpoint, group, pipeline))


@public
def policies(
    source: Source | None = None, *, target: TargetName | None = None, set_: Sequence[str] = (), tune: bool = False,
    endpoint: str | None = None, group: str | None = None, pipeline: str | None = None, **sections: Any,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Policies by `caller`, `role` and `trust`.

    `compute.role` may name a role that does not exist yet; its ARN is made with the account, for which AWS is asked.
    The default name is smtrain-training. With `tune` the policies allow `smtrain tune`, with `endpoint` an endpoint of
    this name for the model (`smtrain deploy`, `chat --endpoint`, `undeploy`), with `group` its registration in this
    model package group (`smtrain register`), with `pipeline` a pipeline of this name (`smtrain pipeline`). Raises
    `ConfigError` as loading does, and `JobError` if the account or the region is unknown.
    """
    beside = Beside(tune, endpoint, group, pipeline)
    config = load_config(source, set_=set_, target=target, **sections)
    place = sagemaker(target_of(config, target))
    name = config.compute.role or ROLE_NAME
    if place.name == "aws" and not name.startswith("arn:"):
        role = f"arn:aws:iam::{place.account('give compute.role as an ARN')}:role/{name}"
        config = config.model_copy(update={"compute": config.compute.model_copy(update={"role": role})})
    chain = Chain(config, place, look=False)
    requests = {stage: chain.plan(stage).request for stage in stages_of(chain.config, place.name)}
    return {
        "caller": caller_policy(chain.config, requests, beside),
        "role": role_policy(chain.config, requests, beside),
        "trust": trust_policy(beside),
    }
