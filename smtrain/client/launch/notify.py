"""Notify of the end of a run: a command and a webhook from this process, on AWS an EventBridge
rule.

A notification never changes the outcome of the run: if one fails, a line says so.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from smtrain.client.backends.choose import sagemaker
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.jobs.job import Job
from smtrain.client.launch.stages import Chain
from smtrain.core.aws_errors import why_refused
from smtrain.core.config import JobConfig, Stage
from smtrain.core.config.outputs import Occasion
from smtrain.core.errors import ConfigError, JobError, first_line
from smtrain.core.text import Say, clean

PATIENCE: float = 30
"""Seconds that a command or a webhook may take, connecting included."""
_STATUS: dict[Occasion, str] = {"finished": "Completed", "failed": "Failed", "stopped": "Stopped"}


@dataclass(frozen=True)
class RunEvent:
    """The notification as JSON."""

    run: str
    what: Occasion
    stage: Stage
    job: str
    reason: str
    """The reason of a failure; else empty."""
    text: str
    """The notification in one sentence. Chats show a field of this name."""
    at: float
    """Seconds since 1970."""


def require_notifiable(chain: Chain, stages: Sequence[Stage], say: Say) -> None:
    """Make sure before anything starts that the end can be notified.

    Raises `ConfigError` or `JobError` for a notification that would reach no one.
    """
    if chain.config.notify.webhook_env:
        _url(chain.config.notify.webhook_env)
    if chain.config.notify.sns and not chain.target.record.queues:
        put_event_rule(chain.config, sagemaker(chain.target), stages, say)


@contextmanager
def told_of(chain: Chain, stage: Stage, job: Job, say: Say) -> Iterator[None]:
    """Notify before the error of a job that ends badly is raised further."""
    try:
        yield
    except JobError as error:
        tell(chain.config, event_of(chain.config.name, stage, job, error), say)
        raise


def notify_finished(chain: Chain, stage: Stage, job: Job, say: Say) -> None:
    """Notify that a run, or a single stage, has ended well."""
    if job.known_done:
        tell(chain.config, event_of(chain.config.name, stage, job, None), say)


def event_of(run: str, stage: Stage, job: Job, error: Exception | None) -> RunEvent:
    """The outcome of a run: `error` is the exception that following its job raised; None if the run
    has finished.
    """
    occasion: Occasion = "finished"
    if error is not None:
        occasion = "stopped" if job.status == "Stopped" else "failed"
    reason = clean(first_line(error)) if error else ""
    sentences = {"finished": f"run {run} has finished", "failed": f"{job.name} failed: {reason}"}
    return RunEvent(
        run,
        occasion,
        stage,
        job.name,
        reason,
        sentences.get(occasion, f"{job.name} was stopped"),
        time.time(),
    )


def tell(config: JobConfig, event: RunEvent, say: Say) -> None:
    """Start the command and post to the webhook that the config names."""
    settings = config.notify
    if event.what not in settings.on:
        return
    body = json.dumps(asdict(event)).encode()
    if settings.command:
        environment = {
            **os.environ,
            "SMTRAIN_RUN": event.run,
            "SMTRAIN_EVENT": event.what,
            "SMTRAIN_JOB": event.job,
        }
        try:
            process = subprocess.run(
                settings.command, input=body, env=environment, timeout=PATIENCE, check=False
            )
            if process.returncode:
                say(f"notify.command: {settings.command[0]} ended with status {process.returncode}")
        except (OSError, subprocess.TimeoutExpired) as error:
            say(f"notify.command: {settings.command[0]} failed ({first_line(error)})")
    if settings.webhook_env:
        _post(settings.webhook_env, body, say)


def _post(variable: str, body: bytes, say: Say) -> None:
    """Post JSON to the URL in a variable; say if it fails, but never the URL, with which anyone may
    write.
    """
    try:
        request = urllib.request.Request(  # noqa: S310  `_url` allows http and https only
            _url(variable), data=body, headers={"Content-Type": "application/json"}
        )
    except ConfigError as error:
        say(first_line(error))
        return
    outcomes: list[str] = []

    def send() -> None:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE):  # noqa: S310
                outcomes.append("")
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
                outcomes.append(f"refused the message (HTTP {error.code})")
            elif not _is_late(error):
                outcomes.append(f"could not be told ({type(error).__name__})")

    # urlopen limits each read, and looking up a name has no limit, so the thread is left behind
    # after the whole time.
    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    sending.join(PATIENCE)
    outcome = outcomes[0] if outcomes else f"did not answer within {PATIENCE:g} s"
    if outcome:
        say(f"notify.webhook_env: the URL in {variable} {outcome}")


def _is_late(error: Exception) -> bool:
    return isinstance(error, TimeoutError) or isinstance(
        getattr(error, "reason", None), TimeoutError
    )


def _url(variable: str) -> str:
    """The webhook's URL.

    Raises `ConfigError`, which does not show it, if no request could be sent to it.
    """
    url = os.environ.get(variable, "")
    lacks = None if _is_http_url(url) else "holds no http URL" if url else "is not set"
    if lacks:
        raise ConfigError(
            [
                f"notify.webhook_env: the variable {variable} {lacks}; export it, or take the"
                " key out"
            ],
            code="config.missing_key",
        )
    return url


def _is_http_url(text: str) -> bool:
    """Whether http.client accepts the URL: it refuses blanks, control characters and bad ports only
    when it sends.
    """
    try:
        parts = urllib.parse.urlsplit(text)
        _ = parts.port
    except ValueError:
        return False
    printable = text.isascii() and text.isprintable() and " " not in text
    return printable and parts.scheme in ("http", "https") and bool(parts.hostname)


def put_event_rule(
    config: JobConfig, place: SageMakerBackend, stages: Sequence[Stage], say: Say
) -> None:
    """Make the EventBridge rule that notifies the topic on AWS.

    Raises `JobError` if it cannot be made.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    if config.notify.sns is None:
        return
    if not place.record.rented:
        say("notify.sns: works only for jobs on AWS; take the key out")
        return
    client = place.client("events")
    try:
        client.put_rule(**put_rule(config, stages))
        answer = client.put_targets(**put_targets(config))
        if answer.get("FailedEntryCount"):
            raise JobError(
                f"notify.sns: EventBridge does not accept {config.notify.sns} as a target"
            )
    except (ClientError, BotoCoreError) as error:
        refusal = why_refused(
            error, "allow yourself events:PutRule, events:PutTargets and events:TagResource"
        )
        raise JobError(
            f"notify.sns: the rule {rule_name(config)} could not be made: {refusal}, or take the"
            " key out",
            code=refusal.code,
        ) from None


def rule_name(config: JobConfig) -> str:
    """One rule a run."""
    return f"smtrain-{config.name}"


def put_rule(config: JobConfig, stages: Sequence[Stage]) -> dict[str, Any]:
    """EventBridge's PutRule: the last stage's end, and failures and stops of any; a pure
    function.
    """
    occasions = config.notify.on
    bad = [_STATUS[occasion] for occasion in occasions if occasion != "finished"]
    ways: list[dict[str, Any]] = []
    if "finished" in occasions:
        ways.append(
            {
                "TrainingJobName": [_name_prefix(config, stages[-1])],
                "TrainingJobStatus": ["Completed"],
            }
        )
    if bad:
        ways.append(
            {
                "TrainingJobName": [_name_prefix(config, stage) for stage in stages],
                "TrainingJobStatus": bad,
            }
        )
    pattern = {
        "source": ["aws.sagemaker"],
        "detail-type": ["SageMaker Training Job State Change"],
        "detail": ways[0] if len(ways) == 1 else {"$or": ways},
    }
    return {
        "Name": rule_name(config),
        "Description": f"ends of the jobs of run {config.name}, to {config.notify.sns}",
        "EventPattern": json.dumps(pattern, sort_keys=True),
        "State": "ENABLED",
        "Tags": [{"Key": "smtrain:run", "Value": config.name}],
    }


def put_targets(config: JobConfig) -> dict[str, Any]:
    """EventBridge's PutTargets: the topic."""
    return {"Rule": rule_name(config), "Targets": [{"Id": "topic", "Arn": config.notify.sns}]}


def _name_prefix(config: JobConfig, stage: Stage) -> dict[str, str]:
    return {"prefix": f"{config.name}-{stage}-"}
