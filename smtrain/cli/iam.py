"""`smtrain iam policy CONFIG`: minimal policies of the execution role and the caller, as IAM's
JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.core.text import say

app = options.app()


@app.callback()
def iam() -> None:
    """Permissions that a config needs.

    $ smtrain iam policy run.yaml  # all three policies
    """


@app.command(
    groups={
        "Which policy": "--caller --role --trust",
        "What else it must allow": "--tune --endpoint --group --pipeline",
        "The config": "--set --target",
    }
)
def policy(
    chosen: options.ConfigOptions,
    services: options.ServiceOptions,
    caller: Annotated[
        bool, typer.Option("--caller", help="Only the policy of the user who runs smtrain.")
    ] = False,
    role: Annotated[
        bool, typer.Option("--role", help="Only the policy of the execution role.")
    ] = False,
    trust: Annotated[bool, typer.Option("--trust", help="Only the role's trust policy.")] = False,
) -> None:
    """Print the policies of caller and role and the role's trust policy, for this config and
    nothing else.

    $ smtrain iam policy run.yaml --role  # the policy of the execution role
    $ smtrain iam policy run.yaml --trust  # who may take that role
    """
    from smtrain.client.iam import policies, trust_policy_of

    chosen.refuse_local("policy")
    if trust and not (caller or role):
        say(json.dumps(trust_policy_of(**asdict(services)), indent=2), raw=True)
        return
    every = policies(
        chosen.config, target=chosen.target_name, set_=chosen.keys(), **asdict(services)
    )
    named = {
        name: every[name]
        for name, wanted in (("caller", caller), ("role", role), ("trust", trust))
        if wanted
    }
    say(
        json.dumps(next(iter(named.values())) if len(named) == 1 else named or every, indent=2),
        raw=True,
    )
