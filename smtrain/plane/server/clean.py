"""Disk use of a home folder, and its cleaning: finished runs with their files, and files that can
be made again.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smtrain.core.config.units import spell_bytes
from smtrain.core.errors import JobError, LocalError
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.protocol.removable_jobs import Record, select_removal
from smtrain.core.protocol.uris import objects_at, split_uri
from smtrain.plane.client import Endpoint, running_endpoint, state_folder
from smtrain.plane.files import remove as remove_tree

STRAY_SECONDS = 60.0
"""Age from which a job folder without a record is garbage: a job's record is its first file."""


@dataclass
class Removal:
    """Everything that would be removed."""

    jobs: list[Record] = field(default_factory=list)
    objects: dict[str, int] = field(default_factory=dict)
    """s3:// URI -> bytes."""
    folders: list[Path] = field(default_factory=list)
    keep_reasons: dict[str, str] = field(default_factory=dict)
    """Run -> reason why it stays."""

    @property
    def empty(self) -> bool:
        return not (self.jobs or self.objects or self.folders)


def end_crashed(home: Path) -> str:
    """Remove what containers of ended jobs have left behind on this machine.

    Returns a list such as `1 container, 1 network`, or "". Raises `LocalError` if Docker does not
    answer.
    """
    from smtrain.plane.docker import connect, explain_docker_errors
    from smtrain.plane.server.containers import leftovers

    state = state_folder(home)
    if not leftovers.has_used_containers(state):
        return ""
    client = connect("")
    with explain_docker_errors("removing what a crash left"):
        boxes, nets = leftovers.remove_stray(client, home, lambda: _running_jobs(home))
    folders = [
        folder
        for folder in (state / "jobs").glob("*/hosts")
        if folder.parent.name not in _running_jobs(home)
    ]
    counts = {
        "container": boxes,
        "network": nets,
        "mount": sum(leftovers.unmount(folder) for folder in folders),
    }
    return ", ".join(
        f"{count} {noun}{'s' if count > 1 else ''}" for noun, count in counts.items() if count
    )


def plan(
    endpoint: Endpoint,
    *,
    jobs: bool = False,
    older_than: float | None = None,
    everything: bool = False,
    run: str | None = None,
) -> Removal:
    """Find what can be removed. Raises `LocalError` for an unknown run or one with a running job.

    Args:
        endpoint: The control plane.
        jobs: Jobs of finished runs with the objects that only they read and wrote, without exported
            models.
        older_than: Only those that ended so many seconds ago.
        everything: Also exported models, objects that no job names, demo inputs, fetched models,
            caches and logs.
        run: Only this run, finished or not.
    """
    records = list(_records(endpoint))
    try:
        job_removal = select_removal(
            records, jobs=jobs, older_than=older_than, all_stages=everything, run=run
        )
    except JobError as error:
        raise LocalError(str(error)) from None
    removal = Removal(job_removal.jobs, keep_reasons=job_removal.retained_runs)
    needed_uris, removable_uris = (
        job_removal.prefixes_to_retain(records),
        job_removal.prefixes_to_remove(),
    )
    for uri, size in _objects(endpoint):
        if not _is_below(uri, needed_uris) and (everything or _is_below(uri, removable_uris)):
            removal.objects[uri] = size
    if everything:
        extra_paths = (
            *(endpoint.home / name for name in ("demo", "models", "follow")),
            *set_aside_files(endpoint.home),
            *_strays(endpoint),
        )
        removal.folders = [path for path in extra_paths if path.exists()]
    return removal


def _strays(endpoint: Endpoint) -> Iterable[Path]:
    """Job folders without a record: it was set aside, or a removal was interrupted."""
    for folder in (state_folder(endpoint.home) / "jobs").iterdir():
        with suppress(OSError):
            if (
                not (folder / "job.json").exists()
                and time.time() - folder.lstat().st_mtime > STRAY_SECONDS
            ):
                yield folder


def remove(endpoint: Endpoint, removal: Removal, *, everything: bool = False) -> int:
    """Remove it; return the bytes freed."""
    used_bytes = usage(endpoint.home).total
    s3, sagemaker = (endpoint.session().client(name) for name in ("s3", "sagemaker"))
    by_bucket: dict[str, list[str]] = defaultdict(list)
    for uri in removal.objects:
        bucket, key = split_uri(uri)
        by_bucket[bucket].append(key)
    for bucket, keys in by_bucket.items():
        # DeleteObjects is XML, which cannot contain some characters.
        for key in [key for key in keys if not key.isprintable()]:
            s3.delete_object(Bucket=bucket, Key=key)
            keys.remove(key)
        for i in range(0, len(keys), 1000):
            s3.delete_objects(
                Bucket=bucket, Delete={"Objects": [{"Key": key} for key in keys[i : i + 1000]]}
            )
    # Records last: the next call finds the rest of an interrupted removal by them.
    for record in removal.jobs:
        sagemaker.delete_training_job(TrainingJobName=record.name)
        for cursor in (endpoint.home / "follow").glob(f"*/{record.name}*.json"):
            cursor.unlink(missing_ok=True)
    for path in removal.folders:
        remove_tree(path)
    if everything:
        with suppress(OSError), open(state_folder(endpoint.home) / "server.log", "r+b") as log:
            log.truncate()  # the server appends to it
    return used_bytes - usage(endpoint.home).total


def _running_jobs(home: Path) -> set[str]:
    """Names of the running jobs."""
    endpoint = running_endpoint(home)
    return (
        {record.name for record in _records(endpoint) if record.status not in FINAL_STATUSES}
        if endpoint
        else set()
    )


def _records(endpoint: Endpoint) -> Iterable[Record]:
    client = endpoint.session().client("sagemaker")
    for page in client.get_paginator("list_training_jobs").paginate(
        PaginationConfig={"PageSize": 100}
    ):
        for row in page["TrainingJobSummaries"]:
            job: dict[str, Any] = dict(
                client.describe_training_job(TrainingJobName=row["TrainingJobName"])
            )
            name = job["TrainingJobName"]
            writes = {f"{job['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{name}/"}
            if checkpoints := job.get("CheckpointConfig"):
                writes.add(checkpoints["S3Uri"].rstrip("/") + "/")
            yield Record(
                name,
                job["TrainingJobStatus"],
                job["CreationTime"].timestamp(),
                job.get("TrainingEndTime", job["LastModifiedTime"]).timestamp(),
                frozenset(
                    source["S3Uri"]
                    for channel in job.get("InputDataConfig") or []
                    if (source := channel["DataSource"].get("S3DataSource"))
                ),
                frozenset(writes),
                pool=(job.get("WarmPoolStatus") or {}).get("Status") == "Available",
            )


def _objects(endpoint: Endpoint) -> Iterable[tuple[str, int]]:
    client = endpoint.session().client("s3")
    for bucket in client.list_buckets()["Buckets"]:
        uri = f"s3://{bucket['Name']}/"
        for item in objects_at(client.list_objects_v2, uri):
            yield uri + item["Key"], item["Size"]


def _is_below(uri: str, prefixes: Iterable[str]) -> bool:
    return any(uri.startswith(prefix) for prefix in prefixes)


KINDS = {
    "S3 objects": "inputs, checkpoints, outputs of jobs",
    "jobs that run": "the hosts' /opt/ml",
    "job records and logs": "what `smtrain status` and `smtrain logs` show",
    "warm pools": "caches of machines kept warm",
    "server log": "",
    "set aside": "damaged files that a start has moved out of the way",
    "demo": "text and model of demo://, made again when they are used",
    "models": (
        "what chat, generate and evaluate fetched from S3, fetched again when it is asked for"
    ),
    "caches": "positions of `smtrain logs --follow`, and other files",
}


@dataclass(frozen=True)
class Usage:
    """Bytes by kind, and bytes free on the disk."""

    home: Path
    kinds: dict[str, int]
    free: int

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    def line(self) -> str:
        """One line with the largest kinds."""
        largest = sorted(self.kinds.items(), key=lambda kind: -kind[1])[:3]
        parts = ", ".join(f"{kind} {spell_bytes(size)}" for kind, size in largest if size)
        return (
            f"disk use: {spell_bytes(self.total)}{f' ({parts})' if parts else ''},"
            f" {spell_bytes(self.free)} free"
        )


def usage(home: Path) -> Usage:
    """Measure a home folder without a control plane. A file with several names counts once."""
    kinds = Counter(dict.fromkeys(KINDS, 0))
    inodes: set[tuple[int, int]] = set()
    folders = [os.fspath(home)]  # a job's may lie deeper than os.walk recurses
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError:
            continue
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
                continue
            path = Path(entry.path)
            if status.st_nlink == 1 or (status.st_dev, status.st_ino) not in inodes:
                inodes.add((status.st_dev, status.st_ino))
                # Blocks, not the length: a file of one byte takes a block.
                kinds[_kind(path, home)] += status.st_blocks * 512
    return Usage(home, dict(kinds), shutil.disk_usage(home).free)


def set_aside_files(home: Path) -> list[Path]:
    """Damaged files that a start has set aside."""
    state = state_folder(home)
    return sorted(
        path
        for pattern in ("*", "s3/*", "jobs/*", "jobs/*/*")
        for path in state.glob(f"{pattern}.damaged*")
    )


def _kind(path: Path, home: Path) -> str:
    state = state_folder(home)
    if path.name.endswith(".damaged") or any(".damaged" in part for part in path.parts):
        return "set aside"
    if path.is_relative_to(state / "s3"):
        return "S3 objects"
    if path.is_relative_to(state / "jobs"):
        parts = path.relative_to(state / "jobs").parts
        kinds = {"hosts": "jobs that run", "pool": "warm pools"}
        return kinds.get(parts[1] if len(parts) > 1 else "", "job records and logs")
    if path == state / "server.log":
        return "server log"
    top = path.relative_to(home).parts[0]
    return top if top in ("demo", "models") else "caches"
