"""Feed a job's trackers while it is followed: from its first step on, each step once."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from smtrain.client.backends.choose import sagemaker
from smtrain.client.follow.reading import pages
from smtrain.core.config.section import Secret
from smtrain.core.errors import JobError
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.files import home, parse_json
from smtrain.core.git import commit_of, describe_commit
from smtrain.core.protocol.log_lines import STEP_PATTERN, Line, machine_record, step_record
from smtrain.core.protocol.requests import groups_of
from smtrain.core.text import Say
from smtrain.core.tracking.buffer import Buffered, open_trackers
from smtrain.core.tracking.settings import (
    VARIABLE,
    TrackedRun,
    TrackedStep,
    id_of,
    parameters,
    parse,
)

if TYPE_CHECKING:
    from smtrain.client.jobs.job import Job

FLUSH = 30.0
"""Seconds that the end of a follow waits for the trackers."""


class TrackerFeed:
    """Feeds a job's trackers without delaying the follower; does nothing for a job without
    trackers.
    """

    def __init__(self, job: Job, description: dict[str, Any], say: Say, is_whole_log: bool) -> None:
        """`is_whole_log`: the follower begins with the job's first line, so no earlier steps are
        missing.
        """
        self._job, self._say = job, say
        self._trackers: list[Buffered] = []
        self._used: dict[str, float] = {}
        self._lock: IO[str] | None = None
        track = parse(description.get("Environment", {}).get(VARIABLE))
        if track is None or track.by != "client" or not (track.mlflow or track.wandb):
            return
        folder = home() / "tracking"
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock_file(folder / f"{job.target.name}-{job.name}.lock")
        if self._lock is None:
            say(f"{job.name} is tracked by another process of this machine")
            return
        self._began = int(description["CreationTime"].timestamp() * 1000) - 60_000
        self._trackers = open_trackers(
            track, tracked_of(job, description), folder, say, self._secret
        )
        if not is_whole_log:
            self._catch_up()

    def take(self, line: Line) -> None:
        """Send the numbers of a step's line, together with the hosts' reports since the last
        one.
        """
        if not self._trackers:
            return
        if used := machine_record(line.text):
            self._used |= {f"system/{line.host}/{name}": value for name, value in used.items()}
        elif record := step_record(line.text):
            numbers = dict(record)
            if "loss" in record:
                numbers, self._used = {**record, **self._used}, {}
            for tracker in self._trackers:
                tracker.log(TrackedStep(int(record["step"]), line.timestamp, numbers))

    def close(self, status: str | None) -> None:
        """Send the steps that the view filtered out, and those still buffered; report what could
        not be sent.
        """
        if self._trackers and status in FINAL_STATUSES:
            with contextlib.suppress(
                Exception
            ):  # the next follow reads the log again and sends them
                self._catch_up()
        for tracker in self._trackers:
            has_ended = status in FINAL_STATUSES
            if unsent_steps := tracker.close(
                status if has_ended else None, FLUSH if has_ended else FLUSH / 10
            ):
                name = self._job.name
                self._say(
                    f"{unsent_steps} steps could not be tracked; `smtrain logs {name} --follow`"
                    " sends them later"
                )
        if self._lock is not None:
            self._lock.close()

    def _catch_up(self) -> None:
        for page in pages(self._job.target, self._job.name, None, self._began, STEP_PATTERN):
            for line in page:
                self.take(line)

    def _secret(self, secret: Secret) -> str:
        return read_secret(self._job, secret)


@contextlib.contextmanager
def open_feed(
    job: Job, description: dict[str, Any], say: Say, *, is_whole_log: bool
) -> Iterator[TrackerFeed]:
    """The trackers of a follow; `description` is the job's description."""
    fed = TrackerFeed(job, description, say, is_whole_log)
    try:
        yield fed
    finally:
        fed.close(job.known_status)


def tracked_of(job: Job, description: dict[str, Any]) -> TrackedRun:
    """A job in the form that trackers need: its run, its config and its origin."""
    run_uri = description["OutputDataConfig"]["S3OutputPath"].removesuffix("/jobs")
    tags = {"smtrain.job": job.name, "smtrain.target": job.target.name}
    # A job that was started from Python may lack the tag; the follower's folder is the best guess
    # then.
    if commit := commit_of(job.target.tags(description)) or describe_commit():
        tags["mlflow.source.git.commit"] = commit.partition(" ")[
            0
        ]  # MLflow has no field for uncommitted changes
    channels = {
        c["ChannelName"]: c["DataSource"].get("S3DataSource", {})
        for c in description.get("InputDataConfig", [])
    }
    run_parameters = parameters(_config(job, channels.get("config", {}).get("S3Uri")))
    # A prefix of ours is named after its content, or after the job that made it.
    run_parameters |= {
        f"input.{name}": source["S3Uri"]
        for name, source in channels.items()
        if source and name != "config"
    }
    run_parameters["machines"] = json.dumps(
        "groups"
        if description["ResourceConfig"].get("InstanceGroups")
        else groups_of(description)[0][0]
    ).strip('"')
    stamp = f"{description['CreationTime']:%Y%m%dT%H%M%S}"
    return TrackedRun(
        run_uri.rstrip("/").rpartition("/")[2],
        job.name,
        id_of(run_uri),
        stamp,
        run_parameters,
        tags,
    )


def _config(job: Job, uri: str | None) -> dict[str, Any]:
    if uri is None:
        return {}
    try:
        config = parse_json(job.target.read(f"{uri}config.json"))
    except Exception:  # a tracker without parameters is better than none
        return {}
    return config if isinstance(config, dict) else {}


def read_secret(job: Job, secret: Secret) -> str:
    """The value of a secret, read with the caller's own rights.

    Raises `JobError` if it cannot be read.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    name, place = secret.secret or secret.ssm or "", sagemaker(job.target)
    try:
        if secret.secret:
            text = place.client("secretsmanager").get_secret_value(SecretId=name)["SecretString"]
        else:
            text = place.client("ssm").get_parameter(Name=name, WithDecryption=True)["Parameter"][
                "Value"
            ]
        return str(parse_json(text)[secret.key] if secret.key else text).strip()
    except (ClientError, BotoCoreError, KeyError, ValueError, TypeError) as error:
        raise JobError(f"the secret {name} could not be read ({type(error).__name__})") from None


def _lock_file(path: Path) -> IO[str] | None:
    """Lock a file for as long as it is open; None if another process has it locked."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    file.write(str(os.getpid()))
    return file
