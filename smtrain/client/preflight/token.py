"""Check that the hub token's secret exists. Its value is not read."""

from __future__ import annotations

from collections.abc import Iterator

from smtrain.client.preflight.context import Absent, Context
from smtrain.client.preflight.findings import Finding
from smtrain.core.config.checks.weights import gated_faults


def token(context: Context) -> Iterator[Finding]:
    """`model.token`, which the fetch stage reads."""
    named = context.config.model.token
    if not {"fetch", "prepare"} & set(context.stages):
        return
    for _, fault in gated_faults(context.config):
        text, _, remedy = fault.partition(": accept")
        yield Finding("token", "fault", text, f"accept{remedy}")
    if named is None:
        return
    name = str(named.secret or named.ssm)
    region = context.chain.target.region_name()
    try:
        if named.secret:
            context.ask("secretsmanager", "describe_secret", absent=["ResourceNotFoundException"], SecretId=name)
        else:
            plain = name.partition(":parameter")[2] or name
            only = [{"Key": "Name", "Option": "Equals", "Values": [plain]}]
            if not context.ask("ssm", "describe_parameters", ParameterFilters=only)["Parameters"]:
                raise Absent
    except Absent:
        kind = "secret" if named.secret else "SSM parameter"
        yield Finding(
            "token", "fault", f"there is no {kind} {name} in {region}",
            "create it, or correct model.token", 
        )  # fmt: skip
    else:
        yield Finding("token", "ok", f"{name} is there")
