"""Where jobs go: AWS, or the control plane on this machine. Both are a boto3 session, a bucket and a role."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from smtrain.client.backends.sagemaker.calls import aws_session, checked, retrying, spell, transferring
from smtrain.client.backends.sagemaker.region import UNKNOWN
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.extras import collector_paused

if TYPE_CHECKING:
    import boto3

    from smtrain.client.backends.sagemaker.retry import Patience
    from smtrain.plane.client import Endpoint

TargetName = Literal["local", "aws", "slurm"]
"""Where jobs run. A `Target` is local or aws; slurm is `client.backends.slurm.place.SlurmPlace`."""


@dataclass(frozen=True)
class Target:
    """A place that takes CreateTrainingJob requests. Nothing is contacted before `session` or `client` is used."""

    name: TargetName
    region: str | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(TargetName) or self.name == "slurm":
            raise ConfigError([f"target: got {self.name!r}; it is local, aws or slurm"])

    @cached_property
    def session(self) -> boto3.Session:
        """The boto3 session; for `local` this starts the control plane if none runs."""
        if self.name == "local":
            from smtrain.plane.client import ensure_running

            return checked(reviving(ensure_running()))
        return aws_session(self.region)

    def client(self, service: str) -> Any:
        """A boto3 client that retries what AWS throttles, and what gets lost on the way."""
        from botocore.exceptions import NoRegionError

        try:
            session: Any = self.session  # boto3-stubs know no service by a plain string
            with collector_paused():
                return session.client(service, config=retrying(service))
        except NoRegionError:
            raise ConfigError([UNKNOWN]) from None

    @cached_property
    def sagemaker(self) -> Any:
        return self.client("sagemaker")

    @cached_property
    def s3(self) -> Any:
        return self.client("s3")

    @cached_property
    def transfers(self) -> Any:
        """The client that moves files: patient with a slow line, where `s3` answers whoever waits for it."""
        session: Any = self.session
        return self.s3 if self.name == "local" else session.client("s3", config=transferring())

    @cached_property
    def logs(self) -> Any:
        return self.client("logs")

    def region_name(self) -> str:
        """The region that jobs run in."""
        if self.name == "local":
            return str(_local().REGION)
        region = self.region or self.session.region_name
        if not region:
            raise ConfigError([UNKNOWN])
        return region

    def default_bucket(self) -> str:
        """The bucket used when the config names none: SageMaker's own default on AWS."""
        if self.name == "local":
            return str(_local().BUCKET)
        return f"sagemaker-{self.region_name()}-{self.account()}"

    def default_role(self) -> str | None:
        """The role used when the config names none; only the local control plane has one."""
        return str(_local().ROLE) if self.name == "local" else None

    # ---- place.protocol.JobPlace
    queues = False
    """SageMaker knows no dependencies: a stage is created when the one before has ended."""

    def role(self, role: str | None) -> str:
        from smtrain.client.backends.sagemaker.role import role_arn

        return role_arn(role, self)

    def base(self, given: str | None) -> str:
        return (given or f"s3://{self.default_bucket()}/smtrain").rstrip("/")

    def in_place(self, path: Path | str) -> str | None:
        """A job sees nothing of this machine."""
        return None

    def preview(self, requests: Sequence[Mapping[str, Any]]) -> str:
        return json.dumps(requests[0] if len(requests) == 1 else requests, indent=2)

    def describe(self, name: str, patience: Patience) -> dict[str, Any]:
        return _api().describe(self, name, patience)  # type: ignore[no-any-return]

    def rows(self, contains: str | None, page: int) -> Iterator[list[dict[str, Any]]]:
        return _api().rows(self, contains, page)  # type: ignore[no-any-return]

    def stop(self, name: str) -> None:
        _api().stop(self, name)

    def tags(self, told: Mapping[str, Any]) -> list[dict[str, str]]:
        return _api().tags(self, told["TrainingJobArn"])  # type: ignore[no-any-return]

    def log_page(
        self, name: str, host: str | None, start: int, pattern: str | None, token: str | None, patience: Patience
    ) -> dict[str, Any]:
        return _api().log_page(self, name, host, start, pattern, token, patience)  # type: ignore[no-any-return]

    def last_events(self, name: str, count: int, patience: Patience) -> list[dict[str, Any]]:
        return _api().last_events(self, name, count, patience)  # type: ignore[no-any-return]

    def listing(self, uri: str) -> list[dict[str, Any]]:
        from smtrain.client.backends.sagemaker.s3 import list_objects

        return list_objects(self, uri)

    def read(self, uri: str) -> bytes:
        return _api().read(self, uri)  # type: ignore[no-any-return]

    def fetch(self, bucket: str, key: str, path: Path) -> None:
        _api().fetch(self, bucket, key, path)

    def account(self, otherwise: str = "set output.s3_uri in the config") -> str:
        """The AWS account, as STS tells it. Raises `JobError` where it does not; `otherwise` is what helps then too."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return str(self.client("sts").get_caller_identity()["Account"])
        except (BotoCoreError, ClientError) as error:
            raise JobError(f"AWS did not say which account this is: {spell(error)}; or {otherwise}") from None


def reviving(endpoint: Endpoint) -> boto3.Session:
    """A session whose calls start the local control plane again where it has died, and are then repeated.

    They raise `LocalError` where it was stopped on purpose or cannot be started.
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


def _api() -> Any:
    from smtrain.client.backends.sagemaker import sagemaker_api

    return sagemaker_api


def _local() -> Any:
    """The control plane's client half; loaded when asked for, as it brings an HTTP client."""
    from smtrain.plane import client as endpoint

    return endpoint
