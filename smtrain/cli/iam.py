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
    config_options: options.ConfigOptions,
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

    record = config_options.target_with("policy", lambda target: target.rented or target.pod_roles)
    if trust and not (caller or role or record.pod_roles):
        say(json.dumps(trust_policy_of(**asdict(services)), indent=2), raw=True)
        return
    all_policies = policies(
        config_options.config,
        target=config_options.target_name,
        set_=config_options.keys(),
        **asdict(services),
    )
    selection = {
        name: all_policies[name]
        for name, is_wanted in (("caller", caller), ("role", role), ("trust", trust))
        if is_wanted
    }
    say(
        json.dumps(
            next(iter(selection.values())) if len(selection) == 1 else selection or all_policies,
            indent=2,
        ),
        raw=True,
    )
