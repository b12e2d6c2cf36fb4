"""What can leave the disk: jobs of finished runs with what they alone use, and what is made again when it is needed.

What a running job or an unfinished run needs is never among it. A run is finished once the newest job of each of its
stages is Completed and it has exported its model; a job that `smtrain run` has not named is finished when it has ended.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smtrain.aws.local_plane import Endpoint, running, state_folder
from smtrain.config import STAGES
from smtrain.contract.uris import split_uri
from smtrain.errors import LocalError
from smtrain.facts.sagemaker import ENDED
from smtrain.local import files
from smtrain.local.usage import aside, usage

NAME = re.compile(rf"(?P<run>.+)-(?P<stage>{'|'.join(STAGES)})-[0-9a-f]{{8}}(-\d+)?")


STRAY_SECONDS = 60.0
"""A folder without a record is no job's after so long: a job's record is its first file."""


@dataclass(frozen=True)
class Record:
    """A job as it matters here."""

    name: str
    run: str
    stage: str
    status: str
    created: float
    ended: float
    pool: bool
    """Its machines are kept warm."""
    reads: frozenset[str]
    writes: frozenset[str]
    """s3:// prefixes: inputs; checkpoints and output."""


@dataclass
class Removal:
    """What would go."""

    jobs: list[Record] = field(default_factory=list)
    objects: dict[str, int] = field(default_factory=dict)
    """s3:// URI -> bytes."""
    folders: list[Path] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    """Run -> why it stays."""

    @property
    def empty(self) -> bool:
        return not (self.jobs or self.objects or self.folders)


def end_crashed(home: Path) -> str:
    """Remove from this machine what containers of jobs that do not run have left, which nothing needs any more.

    Gives what that was: `1 container, 1 network`; empty for nothing. Raises `LocalError` where Docker does not answer.
    """
    from smtrain.local.containers import leftovers, settings
    from smtrain.local.containers.daemon import connect, plainly

    state = state_folder(home)
    if not settings.used(state):
        return ""
    client = connect("")
    with plainly("removing what a crash left"):
        boxes, nets = leftovers.remove_stray(client, home, lambda: _running(home))
    folders = [folder for folder in (state / "jobs").glob("*/hosts") if folder.parent.name not in _running(home)]
    counts = {"container": boxes, "network": nets, "mount": sum(leftovers.unmount(folder) for folder in folders)}
    return ", ".join(f"{count} {what}{'s' if count > 1 else ''}" for what, count in counts.items() if count)


def plan(
    endpoint: Endpoint, *, jobs: bool = False, older_than: float | None = None, everything: bool = False,
    run: str | None = None,
) -> Removal:  # fmt: skip
    """Find what may go.

    `jobs`: those of finished runs, with what they alone read and wrote, exported models left out; `older_than` (s since
    their end) restricts them. `everything`: exported models, objects that no job names, demo inputs, fetched models,
    caches and logs as well. `run`: this run alone, finished or not. Raises `LocalError` for a run that is not known or
    has a running job.
    """
    records = list(_records(endpoint))
    by_run: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_run[record.run].append(record)
    if run is not None and run not in by_run:
        raise LocalError(f"no run or job is called {run!r}; there are {', '.join(sorted(by_run)) or 'none'}")
    found, models = Removal(), list[Record]()
    for name, members in by_run.items():
        reason = _stays(members, older_than, named=run == name)
        if run == name and reason:
            raise LocalError(f"{name} cannot be removed: {reason}")
        if run not in (None, name):
            reason = "not asked for"
        if reason is None and (jobs or everything or run):
            # A model that was exported stays with the job by whose name it is downloaded.
            found.jobs += [r for r in members if everything or run or r.stage != "export"]
            models += [r for r in members if not (everything or run) and r.stage == "export"]
        else:
            found.kept[name] = reason or "not asked for"
    going = {record.name for record in [*found.jobs, *models]}
    needed = {uri for record in records if record.name not in going for uri in record.reads | record.writes}
    needed |= {uri for record in models for uri in record.writes}
    theirs = {uri for record in found.jobs for uri in record.writes}
    theirs |= {uri for record in [*found.jobs, *models] for uri in record.reads if _made_again(uri)}
    for uri, size in _objects(endpoint):
        if not _below(uri, needed) and (everything or _below(uri, theirs)):
            found.objects[uri] = size
    if everything:
        also = (
            *(endpoint.home / name for name in ("demo", "models", "follow")),
            *aside(endpoint.home),
            *_strays(endpoint),
        )
        found.folders = [path for path in also if path.exists()]
    return found


def _strays(endpoint: Endpoint) -> Iterable[Path]:
    """Folders of jobs without a record: it was set aside, or a removal was cut off."""
    for folder in (state_folder(endpoint.home) / "jobs").iterdir():
        with suppress(OSError):
            if not (folder / "job.json").exists() and time.time() - folder.lstat().st_mtime > STRAY_SECONDS:
                yield folder


def remove(endpoint: Endpoint, found: Removal, *, everything: bool = False) -> int:
    """Remove it; gives the bytes that the home folder takes less than before."""
    before = usage(endpoint.home).total
    s3, sagemaker = (endpoint.session().client(name) for name in ("s3", "sagemaker"))
    by_bucket: dict[str, list[str]] = defaultdict(list)
    for uri in found.objects:
        bucket, key = split_uri(uri)
        by_bucket[bucket].append(key)
    for bucket, keys in by_bucket.items():
        # Several are deleted by a request in XML, in which some characters cannot be.
        for key in [key for key in keys if not key.isprintable()]:
            s3.delete_object(Bucket=bucket, Key=key)
            keys.remove(key)
        for i in range(0, len(keys), 1000):
            s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key} for key in keys[i : i + 1000]]})
    # Records last: what is interrupted in between is found again by the next call.
    for record in found.jobs:
        sagemaker.delete_training_job(TrainingJobName=record.name)
        for cursor in (endpoint.home / "follow").glob(f"*/{record.name}*.json"):
            cursor.unlink(missing_ok=True)
    for path in found.folders:
        files.remove(path)
    if everything:
        with suppress(OSError), open(state_folder(endpoint.home) / "server.log", "r+b") as log:
            log.truncate()  # the server appends to it
    return before - usage(endpoint.home).total


def _running(home: Path) -> set[str]:
    """Names of jobs that run; none where no control plane does."""
    endpoint = running(home)
    return {record.name for record in _records(endpoint) if record.status not in ENDED} if endpoint else set()


def _stays(members: list[Record], older_than: float | None, *, named: bool) -> str | None:
    """Why a run's jobs stay; None where they may go."""
    if running := next((r.name for r in members if r.status not in ENDED), None):
        return f"{running} runs"
    if pool := next((r.name for r in members if r.pool), None):
        return f"{pool} keeps a warm pool (`smtrain pool release {pool}`)"
    if named:
        return None
    newest = {r.stage: r for r in sorted(members, key=lambda r: r.created)}
    if "" not in newest:
        for stage, record in newest.items():
            if record.status != "Completed":
                return f"unfinished: its stage {stage} is {record.status}"
        if "export" not in newest:
            return "unfinished: it has not exported its model"
    if older_than is not None and time.time() - max(r.ended for r in members) < older_than:
        return "too young"
    return None


def _records(endpoint: Endpoint) -> Iterable[Record]:
    client = endpoint.session().client("sagemaker")
    for page in client.get_paginator("list_training_jobs").paginate(PaginationConfig={"PageSize": 100}):
        for row in page["TrainingJobSummaries"]:
            told: dict[str, Any] = dict(client.describe_training_job(TrainingJobName=row["TrainingJobName"]))
            name = told["TrainingJobName"]
            named = NAME.fullmatch(name)
            writes = {f"{told['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{name}/"}
            if checkpoints := told.get("CheckpointConfig"):
                writes.add(checkpoints["S3Uri"].rstrip("/") + "/")
            yield Record(
                name, named["run"] if named else name, named["stage"] if named else "", told["TrainingJobStatus"],
                told["CreationTime"].timestamp(), told.get("TrainingEndTime", told["LastModifiedTime"]).timestamp(),
                (told.get("WarmPoolStatus") or {}).get("Status") == "Available",
                frozenset(
                    source["S3Uri"]
                    for channel in told.get("InputDataConfig") or []
                    if (source := channel["DataSource"].get("S3DataSource"))
                ),
                frozenset(writes),
            )  # fmt: skip


def _objects(endpoint: Endpoint) -> Iterable[tuple[str, int]]:
    client = endpoint.session().client("s3")
    for bucket in client.list_buckets()["Buckets"]:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket["Name"]):
            for item in page.get("Contents", []):
                yield f"s3://{bucket['Name']}/{item['Key']}", item["Size"]


def _below(uri: str, prefixes: Iterable[str]) -> bool:
    return any(uri.startswith(prefix) for prefix in prefixes)


def _made_again(uri: str) -> bool:
    """Whether a launch uploads this again by itself: inputs, code and configs by their content's hash."""
    return re.search(r"/(inputs/\w+|code|configs)/[0-9a-f]{16}/$", uri) is not None
