"""`smtrain iam policy CONFIG`: the least that the execution role and the caller must be allowed, as IAM's JSON."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.core.text import say

app = options.app()


@app.callback()
def iam() -> None:
    """Permissions that a config needs."""


@app.command()
def policy(
    config: options.Config,
    caller: Annotated[bool, typer.Option("--caller", help="Only the policy of whoever runs smtrain.")] = False,
    role: Annotated[bool, typer.Option("--role", help="Only the policy of the execution role.")] = False,
    trust: Annotated[bool, typer.Option("--trust", help="Only the role's trust policy.")] = False,
    tune: options.WithTuning = False,
    endpoint: options.WithEndpoint = None,
    group: options.WithGroup = None,
    pipeline: options.WithPipeline = None,
    target: options.To = None,
    set_: options.Set = None,
) -> None:
    """Print the policies of caller and role and the role's trust policy, for this config and nothing else."""
    from smtrain.client.iam import policies, trust_policy_of

    options.on_aws(config, target, set_, "policy")
    if trust and not (caller or role):
        say(
            json.dumps(trust_policy_of(tune=tune, endpoint=endpoint, group=group, pipeline=pipeline), indent=2),
            whole=True,
        )
        return
    made = policies(
        config, target=options.name_of(target), set_=set_ or (), tune=tune, endpoint=endpoint, group=group,
        pipeline=pipeline,
    )  # fmt: skip
    chosen = {name: made[name] for name, wanted in (("caller", caller), ("role", role), ("trust", trust)) if wanted}
    say(json.dumps(next(iter(chosen.values())) if len(chosen) == 1 else chosen or made, indent=2), whole=True)
