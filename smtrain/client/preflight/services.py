"""Check services in the config: the hub token's secret (its value is not read), and SageMaker's
managed MLflow.
"""

from __future__ import annotations

from collections.abc import Iterator

from smtrain.client.config.checks.weights import gated_faults
from smtrain.client.findings import Finding
from smtrain.client.preflight.context import CheckUnavailable, Context, ResourceMissing
from smtrain.core.config.track import MLFLOW_ARN


def token(context: Context) -> Iterator[Finding]:
    """`model.token`, which the fetch stage reads."""
    token_source = context.config.model.token
    if not {"fetch", "prepare"} & set(context.stages):
        return
    for _, fault in gated_faults(context.config):
        text, _, remedy = fault.partition(": accept")
        yield Finding("token", "fault", text, f"accept{remedy}")
    if token_source is None:
        return
    name = str(token_source.secret or token_source.ssm)
    region = context.chain.target.region_name()
    try:
        if token_source.secret:
            context.ask(
                "secretsmanager",
                "describe_secret",
                absent=["ResourceNotFoundException"],
                SecretId=name,
            )
        else:
            plain = name.partition(":parameter")[2] or name
            name_filter = [{"Key": "Name", "Option": "Equals", "Values": [plain]}]
            if not context.ask("ssm", "describe_parameters", ParameterFilters=name_filter)[
                "Parameters"
            ]:
                raise ResourceMissing
    except ResourceMissing:
        kind = "secret" if token_source.secret else "SSM parameter"
        yield Finding(
            "token",
            "fault",
            f"there is no {kind} {name} in {region}",
            "create it, or correct model.token",
        )
    else:
        yield Finding("token", "ok", f"{name} is there")


_NOT_FOUND_CODES = ("ResourceNotFound", "ResourceNotFoundException", "ValidationException")


def tracker(context: Context) -> Iterator[Finding]:
    """Only for managed MLflow: a server of your own may only be reachable from the job."""
    arn = context.config.track.mlflow
    if not context.on_aws or not arn or not MLFLOW_ARN.fullmatch(arn):
        return
    name, region = arn.rpartition("/")[2], arn.split(":")[3]
    if region != context.config.compute.region:
        raise CheckUnavailable(f"{name} is in {region}", "look there")
    app = ":mlflow-app/" in arn
    kind = "MLflow app" if app else "MLflow tracking server"
    try:
        if app:
            status = str(
                context.ask("sagemaker", "describe_mlflow_app", absent=_NOT_FOUND_CODES, Arn=arn)[
                    "Status"
                ]
            )
            active = not status.endswith("Failed") and not status.startswith("Delet")
        else:
            server = context.ask(
                "sagemaker",
                "describe_mlflow_tracking_server",
                absent=_NOT_FOUND_CODES,
                TrackingServerName=name,
            )
            status, active = str(server["TrackingServerStatus"]), server.get("IsActive") == "Active"
    except ResourceMissing:
        yield Finding(
            "tracker", "fault", f"there is no {kind} {name} in {region}", "correct track.mlflow"
        )
        return
    if active:
        yield Finding("tracker", "ok", f"the {kind} {name} is {status}")
    else:
        start = (
            f"aws sagemaker start-mlflow-tracking-server --tracking-server-name {name} --region"
            f" {region}"
        )
        yield Finding(
            "tracker",
            "warning",
            f"the {kind} {name} is {status}: what is sent to it waits for it",
            "see what became of it in SageMaker Studio" if app else f"start it: {start}",
        )
