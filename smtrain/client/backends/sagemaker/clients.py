"""boto3 clients of AWS or of the local control plane, and the defaults of an account."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from smtrain.client.backends.sagemaker.calls import (
    NO_REGION,
    add_answer_checks,
    aws_session,
    retry_config,
    transfer_config,
)
from smtrain.core.aws_errors import spell, why_refused
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.extras import pause_collector
from smtrain.core.files import parse_json
from smtrain.core.targets import TARGETS, TargetName, TargetRecord

# The file in which Studio, its spaces and notebook instances describe themselves (SageMaker
# Developer Guide).
STUDIO = Path("/opt/ml/metadata/resource-metadata.json")

PRICE_REGION = "us-east-1"
"""A region with an endpoint of the Price List API, which has the prices of all regions."""

if TYPE_CHECKING:
    import boto3

    from smtrain.plane.client import Endpoint


@dataclass(frozen=True)
class Clients:
    """boto3 clients of AWS in a region, or of the local control plane; only `session` and `client`
    connect.
    """

    name: TargetName
    region: str | None = None
    is_fallback: bool = False
    """Whether `region` is one of compute.fallback_regions; the local control plane otherwise has
    one region, whatever a config names.
    """

    def __post_init__(self) -> None:
        if self.name not in get_args(TargetName) or not self.record.sagemaker:
            raise ConfigError(
                f"target: got {self.name!r}; this needs SageMaker, so it is local or aws",
                code="config.wrong_value",
            )

    @property
    def record(self) -> TargetRecord:
        return TARGETS[self.name]

    @cached_property
    def session(self) -> boto3.Session:
        """The boto3 session; for `local` this starts the control plane if none runs."""
        if self.name == "local":
            from smtrain.plane.client import ensure_running

            endpoint = ensure_running()
            if self.is_fallback:
                endpoint = replace(endpoint, region=self.region_name())
            return add_answer_checks(reviving_session(endpoint))
        return aws_session(self.region)

    def client(self, service: str) -> Any:
        """A boto3 client that retries throttled calls and lost answers."""
        from botocore.exceptions import NoRegionError

        try:
            session: Any = self.session  # boto3-stubs know no service by a plain string
            with pause_collector():
                region = {"region_name": PRICE_REGION} if service == "pricing" else {}
                return session.client(service, config=retry_config(service), **region)
        except NoRegionError:
            raise ConfigError([NO_REGION], code="config.missing_key") from None

    @cached_property
    def sagemaker(self) -> Any:
        return self.client("sagemaker")

    @cached_property
    def s3(self) -> Any:
        return self.client("s3")

    @cached_property
    def transfers(self) -> Any:
        """The client for file transfers: waits longer for a slow line than `s3` does."""
        session: Any = self.session
        return self.s3 if self.name == "local" else session.client("s3", config=transfer_config())

    @cached_property
    def logs(self) -> Any:
        return self.client("logs")

    def region_name(self) -> str:
        """The region that jobs run in."""
        if self.name == "local":
            return str(self.region if self.is_fallback else _plane().REGION)
        region = self.region or self.session.region_name
        if not region:
            raise ConfigError([NO_REGION], code="config.missing_key")
        return region

    def default_bucket(self) -> str:
        """The bucket if the config names none: SageMaker's own default on AWS."""
        if self.name == "local":
            bucket = str(_plane().BUCKET)
            return f"{bucket}-{self.region}" if self.is_fallback else bucket
        return f"sagemaker-{self.region_name()}-{self.account()}"

    def default_role(self) -> str | None:
        """The role if the config names none; only the local control plane has one."""
        return str(_plane().ROLE) if self.name == "local" else None

    def role(self, role: str | None) -> str:
        """The ARN of a role given by ARN or name; by default Studio's role, or the local control
        plane's.

        Raises `ConfigError` if there is no role, or if IAM does not return it.
        """
        role = role or self.default_role() or _studio_role()
        if not role:
            raise ConfigError(
                "compute.role: is needed on AWS; set the ARN or the name of SageMaker's execution"
                " role",
                code="config.missing_key",
            )
        if role.startswith("arn:"):
            return role
        if self.name == "local":
            return f"{str(self.default_role()).rpartition('/')[0]}/{role}"
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return str(self.client("iam").get_role(RoleName=role)["Role"]["Arn"])
        except (BotoCoreError, ClientError) as error:
            code = error.response["Error"].get("Code") if isinstance(error, ClientError) else None
            if code == "NoSuchEntity":
                raise ConfigError(
                    f"compute.role: IAM did not find the role {role!r} ({code}); correct the name,"
                    " or give the role's ARN",
                    code="config.wrong_value",
                ) from None
            refusal = why_refused(error, "allow yourself iam:GetRole")
            raise ConfigError(
                f"compute.role: IAM did not return the ARN of the role {role!r}: {refusal}, or give"
                " the role's ARN",
                code=refusal.code,
            ) from None

    def account(self, otherwise: str = "set output.s3_uri in the config") -> str:
        """The AWS account, from STS.

        Raises `JobError` if that fails; `otherwise` is the alternative that it names.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return str(self.client("sts").get_caller_identity()["Account"])
        except (BotoCoreError, ClientError) as error:
            raise JobError(
                f"AWS did not say which account this is: {spell(error)}; or {otherwise}"
            ) from None


def reviving_session(endpoint: Endpoint) -> boto3.Session:
    """A session that restarts the local control plane if it has died, and repeats the call.

    Calls raise `LocalError` if the control plane was stopped on purpose or cannot be started.
    """
    from botocore.exceptions import ConnectionError as NoConnection
    from botocore.exceptions import HTTPClientError

    from smtrain.plane.client import revive

    def look(caught_exception: Exception | None = None, **_: Any) -> None:
        if isinstance(caught_exception, NoConnection | HTTPClientError):
            revive(endpoint)

    session = endpoint.session()
    session.events.register_first("needs-retry", look)  # clients take a session's handlers over
    return session


def _plane() -> Any:
    """The client side of the control plane; imported lazily, as it brings an HTTP client."""
    from smtrain.plane import client

    return client


def _studio_role() -> str | None:
    try:
        metadata = parse_json(STUDIO.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return metadata.get("ExecutionRoleArn") if isinstance(metadata, dict) else None
