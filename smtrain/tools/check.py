"""`smtrain.check`, with the checks that read the first records of the data as stage prepare does.

The client knows no tokenizer; here both meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smtrain.client.config.load import Source
from smtrain.client.findings import Report
from smtrain.client.iam.statements import OtherCommands
from smtrain.client.launch.stages import Chain
from smtrain.client.preflight.asked_prices import asked_prices
from smtrain.client.preflight.checks import report_on, require_launchable
from smtrain.client.preflight.context import Check
from smtrain.core.config import Stage
from smtrain.core.public_api import public
from smtrain.core.targets import TargetName
from smtrain.core.text import Say
from smtrain.tools.check_records import conversations, documents, pairs

RECORD_CHECKS: Mapping[str, Check] = {
    "documents": documents,
    "pairs": pairs,
    "conversations": conversations,
}
"""The checks that follow those of the client."""


@public
def check(
    source: Source | None = None,
    *,
    stage: Stage | None = None,
    tune: bool = False,
    endpoint: str | None = None,
    group: str | None = None,
    pipeline: str | None = None,
    prices: bool = False,
    target: TargetName | None = None,
    set_: Sequence[str] = (),
    **sections: Any,
) -> Report:
    """Find everything that can stop a run, or make it a waste of money, before it starts;
    changes nothing.

    Things that may not be read are warnings. If the config cannot be loaded, the report has all of
    its faults.

    Args:
        source: The config: a YAML file's path, a mapping, or a `JobConfig`. None: `sections` are
            all of it. For a model's folder, whether smtrain trains it, and what is missing.
        stage: The only stage to check. Default: all stages of the config.
        tune: Also check what `smtrain tune` needs on AWS.
        endpoint: Also check what an endpoint of this name needs on AWS.
        group: Also check what registering a version in this model package group needs.
        pipeline: Also check what a SageMaker pipeline of this name needs.
        prices: Also ask AWS for the prices of the machines, and store them for plans in
            $SMTRAIN_HOME/prices-aws.toml.
        target: the name of a target, instead of the config's `target`.
        set_: `a.b=value` texts, as for `--set`; the value is read as YAML. Overrides `source` and
            `sections`.
        **sections: The config's sections as mappings, merged into `source`.

    Returns:
        One finding for each thing that was checked; `ok` is False if any is a fault.

    Raises:
        JobError: The target cannot be reached.

    Examples:
        >>> report = smtrain.check("llama.yaml")
        >>> report.ok
        True
        >>> [finding.text for finding in report.faults]
        []
    """
    other_commands = OtherCommands(tune, endpoint, group, pipeline)
    return report_on(
        source,
        sections,
        stage=stage,
        other_commands=other_commands,
        target=target,
        set_=set_,
        extra_checks={**RECORD_CHECKS, **({"asked_prices": asked_prices} if prices else {})},
    )


def look_first(chain: Chain, stages: Sequence[Stage], say: Say) -> None:
    """Check a run before anything of it is started: show warnings, and raise `JobError` with all
    faults.
    """
    require_launchable(chain, stages, say, RECORD_CHECKS)
