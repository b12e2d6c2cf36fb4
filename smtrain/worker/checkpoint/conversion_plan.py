"""The plan of a conversion, and the steps common to writing it to a folder and to an object
store.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.files import parse_json
from smtrain.core.machine import cores_here
from smtrain.core.model.layout import Sharding
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.checkpoint.tensor_files import Job, TensorFile

MANIFEST = "manifest.json"
FORMAT = "smtrain-weights"
VERSION = 1


@dataclass(frozen=True)
class ConversionPlan:
    """Everything about an output except the numbers."""

    layout: Sharding
    groups: list[list[Job]]
    """Each group's jobs write the same files, front to back; no two groups share a file."""
    containers: list[TensorFile]
    extras: dict[str, bytes]
    """Small files to write too, by name."""
    metadata: dict[str, Any]
    """Entries of the manifest besides files and hashes."""
    replaces: tuple[str, ...]
    """Patterns of files that an earlier output in the same folder may have left."""


@dataclass
class ConversionProgress:
    """Tracks which tensors are written, and so which files are finished."""

    plan: ConversionPlan
    crcs: dict[str, dict[str, int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, job: Job, crcs: Iterable[int]) -> list[TensorFile]:
        """Record a finished job; returns the files that it completed."""
        complete_files = []
        with self.lock:
            tensors = [(write.name, container) for write in job for container in write.targets]
            for (name, container), crc in zip(tensors, crcs, strict=True):
                file_crcs = self.crcs.setdefault(container.file, {})
                # Threads finish the tensors of a file in any order, so only their number tells that
                # it is whole.
                file_crcs[name] = crc
                if len(file_crcs) == len(container.offsets):
                    complete_files.append(container)
        return complete_files


def fingerprint(source: WeightSource, plan: ConversionPlan) -> str:
    """A digest, equal for two runs that write the same from the same files."""
    files = [[c.file, c.end, c.offsets] for c in plan.containers]
    # The source's times and sizes are in it, so that a changed source is never mixed with finished
    # files of the old one.
    content = [FORMAT, VERSION, plan.metadata, source.config, source.stamp(), files]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def manifest(
    plan: ConversionPlan, crcs: dict[str, dict[str, int]], work: str | None = None
) -> bytes:
    """JSON with the size of every file, a crc32 of every tensor, a sha256 of every small file and
    the `work` digest.
    """
    files: dict[str, Any] = {}
    for container in plan.containers:
        file_crcs = crcs.get(container.file, {})
        tail = b"" if container.tail is None else container.tail(file_crcs)
        size = container.end + len(tail)
        files[container.file] = {
            "size": size,
            "crc32": {name: f"{file_crcs[name]:08x}" for name in container.offsets},
        }
    for file, data in plan.extras.items():
        files[file] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    content = {
        "format": FORMAT,
        "version": VERSION,
        **plan.metadata,
        **({"work": work} if work else {}),
        "files": files,
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def is_done(
    plan: ConversionPlan, work: str, present: dict[str, int], manifest: bytes | None, target: object
) -> bool:
    """Whether the target already holds this work, by its manifest and the sizes of its files
    (`present`).

    Raises CheckpointError if other files would be replaced.
    """
    planned_files = {*(container.file for container in plan.containers), *plan.extras, MANIFEST}
    old = sorted(file for file in present if file in planned_files or matches(file, plan.replaces))
    if not old:
        return False
    try:
        old_manifest = parse_json(manifest or b"{}")
        sizes = (
            {file: entry["size"] for file, entry in old_manifest["files"].items()}
            if old_manifest["work"] == work
            else None
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        sizes = None
    # Only sizes: hashes would need every byte of a finished output read again.
    if sizes and all(present.get(file) == size for file, size in sizes.items()):
        return True
    raise other_files_error(target, old)


def written_by(manifest: bytes | None) -> list[str]:
    """The files that an earlier conversion wrote, by its manifest; empty if another tool wrote the
    manifest.
    """
    try:
        content = parse_json(manifest or b"{}")
        files = (
            [file for file in content["files"] if isinstance(file, str)]
            if content["format"] == FORMAT
            else []
        )
    except (ValueError, KeyError, TypeError):
        return []
    # The caller deletes these files: a name that leads out of the folder must not get there.
    return [file for file in files if not file.startswith("/") and ".." not in file.split("/")]


def other_files_error(target: object, old: list[str]) -> CheckpointError:
    """The error for files that a conversion would replace."""
    remainder = f" and {len(old) - 3} more" if len(old) > 3 else ""
    return CheckpointError(
        f"{target} holds other files of the same names ({', '.join(old[:3])}{remainder}); name"
        " another folder, or replace them with --overwrite (overwrite=True)"
    )


def matches(file: str, patterns: tuple[str, ...]) -> bool:
    """Whether a file, or a folder that contains it, matches one of the patterns."""
    parts = file.split("/")
    return any(
        fnmatchcase("/".join(parts[: pattern.count("/") + 1]), pattern) for pattern in patterns
    )


def on_threads(groups: Iterable[Sequence[Callable[[], None]]]) -> None:
    """Run all calls on a few threads, each thread in its own group as long as possible; the first
    error stops them.

    Calls of different groups write different files, and the kernel lets one writer into a file at a
    time.
    """
    queues = [deque(calls) for calls in groups if calls]
    unstarted_queues = iter(queues)
    lock, stop_event = threading.Lock(), threading.Event()

    def work() -> None:
        queue: deque[Callable[[], None]] = deque()
        while not stop_event.is_set():
            with lock:
                # A started group first, then a group that no thread has; only at the end threads
                # share one, since two writers of the same file wait for each other.
                queue = (
                    queue or next(unstarted_queues, queue) or max(queues, key=len, default=queue)
                )
                if not queue:
                    return
                call = queue.popleft()
            try:
                call()
            except BaseException:
                stop_event.set()
                raise

    workers = max(1, min(8, cores_here(), sum(map(len, queues))))
    with ThreadPoolExecutor(workers, thread_name_prefix="convert") as pool:
        futures = [pool.submit(work) for _ in range(workers)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop_event.set()
    for future in futures:
        future.result()
