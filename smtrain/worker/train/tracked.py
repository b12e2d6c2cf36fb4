"""The trackers of a job that sends its steps itself (`track.by: job`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib import import_module

from smtrain.core.config import JobConfig
from smtrain.core.config.secret import Secret
from smtrain.core.errors import SmtrainError
from smtrain.core.protocol.container import Container
from smtrain.core.tracking.buffer import Buffered
from smtrain.core.tracking.open import open_trackers
from smtrain.core.tracking.settings import VARIABLE, Tracked, id_of, parameters, parse

FLUSH = 30.0
"""Seconds that a job waits at its end for trackers."""


def trackers_of(config: JobConfig, container: Container) -> list[Buffered]:
    """Those that the job's environment names, if it is to feed them itself; none of them is waited for."""
    track = parse(os.environ.get(VARIABLE))
    if track is None or track.by != "job":
        return []
    run_uri = os.environ.get("SMTRAIN_CHECKPOINTS", config.name).removesuffix("/").removesuffix("/checkpoints")
    given = parameters(config.model_dump(mode="json", exclude_defaults=True))
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    told = Tracked(config.name, container.job, id_of(run_uri), stamp, given, {"smtrain.job": container.job})
    return open_trackers(track, told, container.output_data_dir, _say, _secret())


def close(trackers: list[Buffered], status: str | None) -> None:
    """Send what is left, for so long as a job may wait; says what could not be sent."""
    until = time.monotonic() + FLUSH
    for tracker in trackers:
        if left := tracker.close(status, max(0.1, until - time.monotonic())):
            _say(f"{left} steps could not be tracked; metrics.jsonl has them")


def _secret() -> Callable[[Secret], str]:
    """The entry scripts' own reader of secrets, which beside them alone talks to AWS."""
    try:
        read: Callable[[Secret], str] = import_module("token_by_name").read
    except ModuleNotFoundError:

        def read(named: Secret) -> str:
            raise SmtrainError(f"the secret {named.secret or named.ssm} can only be read inside a job")

    return read


def _say(text: str) -> None:
    print(text, flush=True)
