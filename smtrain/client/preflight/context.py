"""The context of all checks: the resolved config, its requests and plan, and read-only access to
AWS.
"""

from __future__ import annotations

import copy
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smtrain.client.backends.choose import sagemaker
from smtrain.client.findings import Finding
from smtrain.client.iam.statements import OtherCommands
from smtrain.client.launch.stages import Chain
from smtrain.core.aws_errors import spell
from smtrain.core.config import JobConfig, Stage
from smtrain.core.errors import ConfigError
from smtrain.core.files import parse_object, read_object
from smtrain.core.protocol.uris import RUN, split_uri

if TYPE_CHECKING:
    from smtrain.client.planner.result import Plan

Check = Callable[["Context"], Iterator[Finding]]
REACH = "log in (`aws configure` or `aws sso login`), and see that this machine reaches AWS"
# Error codes of AWS services for a missing right; S3's HEAD requests have no body, only the status.
DENIED_CODES = {
    "AccessDenied",
    "AccessDeniedException",
    "UnauthorizedOperation",
    "UnauthorizedAccess",
    "Forbidden",
    "403",
}


class CheckUnavailable(Exception):  # noqa: N818 - not an error of the user
    """Something could not be read, so the check has no result; the text says what and why."""

    def __init__(
        self, text: str, remedy: str = "check it yourself, or get that permission"
    ) -> None:
        super().__init__(text)
        self.remedy = remedy


class ServiceUnreachable(CheckUnavailable):
    """A service does not answer, or there are no credentials: reported once, not by every check."""


class PlanUnavailable(CheckUnavailable):
    """There is no plan: reported once, with all checks that need it."""


class ResourceMissing(Exception):  # noqa: N818
    """AWS answers that the thing does not exist."""


@dataclass
class Context:
    """One config on one target, and the stages to launch."""

    chain: Chain
    stages: Sequence[Stage]
    other_commands: OtherCommands = field(default_factory=OtherCommands)
    """Commands that are used with the config, in addition to running its stages."""

    def __post_init__(self) -> None:
        self._clients: dict[str, Any] = {}
        self._unreached: dict[str, ServiceUnreachable] = {}
        self.answered = False
        self._lock = threading.Lock()

    @property
    def config(self) -> JobConfig:
        return self.chain.config

    @property
    def model_path(self) -> str:
        """`model.path` of the config; for a run:// path the prefix of that run's model."""
        model_path = self.chain.given.model.path
        return self.config.model.path if model_path.startswith(RUN) else model_path

    @property
    def on_aws(self) -> bool:
        return self.chain.target.record.rented

    @cached_property
    def requests(self) -> dict[Stage, dict[str, Any]]:
        """The CreateTrainingJob request of each stage's first attempt; makes no network call."""
        dry = copy.copy(self.chain)
        dry.look = False
        return {stage: dry.plan(stage).request for stage in self.stages}

    @cached_property
    def plan(self) -> Plan | ConfigError:
        """The plan, or the error that prevents it. For a model in S3 its config.json is read."""
        from smtrain.client.planner.plan import plan
        from smtrain.client.planner.this_machine import is_here, plan_here

        config = self.chain.given
        if is_here(config):
            try:
                return plan_here(config, measure=False)
            except ConfigError as error:
                return error
        target = self.chain.target.name
        try:
            return plan(config, target=target)
        except ConfigError as error:
            try:
                hf_config = (
                    described_in(self, config.model.path)
                    if config.model.path.startswith("s3://")
                    else None
                )
                if hf_config is None:
                    return error
                with tempfile.TemporaryDirectory() as folder:
                    Path(folder, "config.json").write_text(json.dumps(hf_config), "utf-8")
                    return plan(config, model=folder, target=target)
            except CheckUnavailable:
                return error
            except ConfigError as another:
                return another

    def client(self, service: str) -> Any:
        """A client of the target. Checks run in parallel, and making clients is not thread-safe."""
        with self._lock:
            if service not in self._clients:
                self._clients[service] = sagemaker(self.chain.target).client(service)
            return self._clients[service]

    def ask(
        self, service: str, operation: str, *, absent: Sequence[str] = (), **arguments: Any
    ) -> dict[str, Any]:
        """Make one read.

        Raises `ResourceMissing` for these error codes, `CheckUnavailable` if it is not allowed or
        not answered.
        """
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        client = self.client(service)
        if self._unreached and (service in self._unreached or not self.answered):
            raise self._unreached.get(service) or next(iter(self._unreached.values()))
        if not hasattr(client, operation):
            raise CheckUnavailable(
                f"the installed boto3 does not know {operation}", "pip install --upgrade boto3"
            )
        try:
            answer: dict[str, Any] = getattr(client, operation)(**arguments)
        except ClientError as error:
            self.answered = True
            code = str(error.response.get("Error", {}).get("Code"))
            if code in absent:
                raise ResourceMissing(error.response["Error"].get("Message", code)) from None
            action = f"{service}:{client.meta.method_to_api_mapping[operation]}"
            if code in DENIED_CODES:
                raise CheckUnavailable(f"you may not {action}") from None
            raise CheckUnavailable(f"{action} was answered with {code}") from None
        except (BotoCoreError, ResponseParserError) as error:
            raise self.note_unreached(service, error) from None
        self.answered = True
        return answer

    def note_unreached(self, service: str, error: Exception) -> ServiceUnreachable:
        """Note that a service gave no answer; it is not asked again, nor is another until one has
        answered.
        """
        reason, _, remedy = str(spell(error)).partition("; ")
        return self._unreached.setdefault(service, ServiceUnreachable(reason, remedy or REACH))


def described_in(context: Context, path: str) -> dict[str, Any] | None:
    """The config.json of a model folder, local or in S3; None if it has none."""
    if path.startswith("s3://"):
        return json_of(context, path, "config.json")
    file = Path(path) / "config.json"
    if "://" in path or not file.is_file():
        return None
    return read_object(file)


def json_of(context: Context, uri: str, name: str) -> dict[str, Any] | None:
    bucket, prefix = split_uri(uri.rstrip("/") + "/")
    try:
        body = context.ask(
            "s3",
            "get_object",
            absent=["NoSuchKey", "NoSuchBucket"],
            Bucket=bucket,
            Key=prefix + name,
        )
        answer = parse_object(body["Body"].read())
    except ResourceMissing:
        return None
    except ValueError:
        raise CheckUnavailable(f"{uri.rstrip('/')}/{name} is no JSON object") from None
    return answer
