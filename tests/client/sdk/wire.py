"""Requests to SageMaker, caught before the socket: each call's body and headers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import botocore.session

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.sdk import build, installed_sdk
from smtrain.stages import STAGES

# The SDK of this environment; .venv has v3, .venv/v2 has v2 (scripts/test runs these tests in
# both).
SDK = installed_sdk()
# A model outside every hub, on an engine that compiles as it runs.
OF_ANY_CONFIG = [stage for stage in STAGES if stage not in ("fetch", "compile", "evaluate")]


class Stopped(Exception):
    """Raised instead of sending."""


@dataclass
class Wire:
    """Calls in order; the first CreateTrainingJob ends the launch."""

    calls: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def __call__(self, request: Any, event_name: str, **_: Any) -> None:
        service, operation = event_name.removeprefix("before-send.").split(".")
        self.calls.append(f"{service}:{operation}")
        if operation == "CreateTrainingJob":
            self.bodies.append(request.body)
            self.headers.append({key: str(value) for key, value in request.headers.items()})
        raise Stopped(event_name)


@cache
def _session() -> tuple[Any, list[Callable[..., None]]]:
    """A boto3 session whose clients pass their requests to the last function of the list."""
    import boto3

    bare = botocore.session.Session(
        session_vars={
            "profile": (None, None, None, None),
            "config_file": (None, None, "/dev/null", None),
            "credentials_file": (None, None, "/dev/null", None),
        }
    )
    session = boto3.Session(
        botocore_session=bare,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-west-2",
    )
    wires: list[Callable[..., None]] = []
    session.events.register("before-send", lambda **event: wires[-1](**event))
    return session, wires


def target_with(wire: Callable[..., None]) -> SageMakerBackend:
    """An AWS target whose every client calls `wire` instead of sending."""
    session, wires = _session()
    wires.append(wire)
    target = SageMakerBackend("aws", "us-west-2")
    target.__dict__["session"] = session
    return target


def start(job: Any, **arguments: Any) -> Any:
    """Run an SDK's object without waiting."""
    return (job.train if SDK == "v3" else job.fit)(wait=False, **arguments)


def sent(request: dict[str, Any], *, through_sdk: bool = True) -> Wire:
    """Send a request through the SDK of this environment, or through boto3."""
    wire = Wire()
    target = target_with(wire)
    try:
        if through_sdk:
            assert SDK
            start(build(SDK, target, request))
        else:
            target.sagemaker.create_training_job(**request)
    except Stopped:
        pass
    return wire


def canonical(body: bytes | dict[str, Any]) -> str:
    """JSON objects have no order; everything else of a body is kept."""
    return (
        json.dumps(body if isinstance(body, dict) else json.loads(body), indent=2, sort_keys=True)
        + "\n"
    )
