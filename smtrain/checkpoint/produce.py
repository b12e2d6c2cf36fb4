"""Carry out a conversion: run its jobs on threads, finish each file, write the manifest last.

To a folder of this machine the jobs write in parallel at offsets known beforehand; to an object store each file goes
out front to back in parts, and nothing is committed before everything is up.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from smtrain.checkpoint.layout import Layout
from smtrain.checkpoint.places import filesystem, is_uri
from smtrain.checkpoint.sources import WeightSource
from smtrain.checkpoint.staging import Staging, staged
from smtrain.checkpoint.writing import Container, Job, run
from smtrain.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "smtrain-weights"
VERSION = 1
_PART = 8 << 20  # bytes of one part of a multipart upload


@dataclass(frozen=True)
class Plan:
    """Everything about an output but the numbers."""

    layout: Layout
    groups: list[list[Job]]
    """Jobs that write the same files, in the order of those; no two groups share a file."""
    containers: list[Container]
    extras: dict[str, bytes]
    """Small files that go along."""
    about: dict[str, Any]
    """What the manifest says besides files and hashes."""
    replaces: tuple[str, ...]
    """Patterns of files that an earlier output in the same folder may have left."""


@dataclass
class _Progress:
    """Which files are finished: those whose every tensor is written."""

    plan: Plan
    crcs: dict[str, dict[str, int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, job: Job, crcs: Iterable[int]) -> list[Container]:
        """Those that this job was the last one of."""
        finished = []
        with self.lock:
            written = [(write.name, container) for write in job for container in write.targets]
            for (name, container), crc in zip(written, crcs, strict=True):
                held = self.crcs.setdefault(container.file, {})
                held[name] = crc
                if len(held) == len(container.offsets):
                    finished.append(container)
        return finished


def produce(source: WeightSource, target: Path | str, plan: Plan) -> None:
    """Write `plan` into a folder or under an s3:// URI, which has all of it afterwards, or stays as it was.

    Raises CheckpointError where the source turns out broken or the target cannot be written.
    """
    if is_uri(target):
        _produce_remote(source, str(target), plan)
        return
    told = [
        FORMAT,
        VERSION,
        plan.about,
        source.config,
        source.stamp(),
        [[c.file, c.end, c.offsets] for c in plan.containers],
    ]
    fingerprint = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
    try:
        with staged(Path(target), fingerprint, MANIFEST, durable=False) as stage:  # as cp
            if not stage.complete:
                _fill(source, stage, plan)
            stage.publish((*plan.replaces, *plan.extras))
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written ({error}); see to the disk and run it again.") from None


def _fill(source: WeightSource, stage: Staging, plan: Plan) -> None:
    progress = _Progress(plan)
    # The kernel lets one writer into a file at a time and has the others spin; ours sleep, or hash meanwhile.
    turns = {container.file: threading.Lock() for container in plan.containers}

    def put(handles: dict[str, int], file: str, at: int, data: bytes | memoryview) -> None:
        with turns[file]:
            _write(handles[file], at, data)

    for folder in {(stage.folder / c.file).parent for c in plan.containers}:
        folder.mkdir(parents=True, exist_ok=True)

    def one(key: str, job: Job) -> None:
        if key in stage.done:
            crcs = stage.done[key]
        else:
            files = {container.file for write in job for container in write.targets}
            handles = {file: os.open(stage.folder / file, os.O_WRONLY | os.O_CREAT, 0o666) for file in files}
            try:
                crcs = run(job, source, plan.layout, partial(put, handles))
            finally:
                for handle in handles.values():
                    os.close(handle)
            stage.note(key, crcs)
        for container in progress.add(job, crcs):
            _finish(stage.folder, container, progress.crcs[container.file])

    for container in plan.containers:
        if not container.offsets:
            _finish(stage.folder, container, {})
    keyed = [(f"{g} {job[0].name}", job) for g, group in enumerate(plan.groups) for job in group]
    _on_threads([lambda key=key, job=job: one(key, job) for key, job in keyed])  # type: ignore[misc]
    for file, data in {**plan.extras, MANIFEST: manifest(plan, progress.crcs)}.items():
        (stage.folder / file).write_bytes(data)


def _finish(folder: Path, container: Container, crcs: dict[str, int]) -> None:
    """What stands around the tensors."""
    handle = os.open(folder / container.file, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        for at, data in container.fixed:
            _write(handle, at, data)
        if container.tail is not None:
            _write(handle, container.end, container.tail(crcs))
    finally:
        os.close(handle)


def _write(handle: int, at: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        n = os.pwrite(handle, view, at)
        view, at = view[n:], at + n


def _on_threads(calls: list[Callable[[], None]]) -> None:
    """All of them, on a few threads; the first error ends the rest."""
    workers = max(1, min(8, os.cpu_count() or 1, len(calls)))
    with ThreadPoolExecutor(workers, thread_name_prefix="convert") as pool:
        futures: list[Future[None]] = [pool.submit(call) for call in calls]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            for future in futures:
                future.cancel()
    for future in futures:
        if not future.cancelled():
            future.result()


def manifest(plan: Plan, crcs: dict[str, dict[str, int]]) -> bytes:
    """Sizes of all files, a crc32 of every tensor, a sha256 of every small file."""
    files: dict[str, Any] = {}
    for container in plan.containers:
        held = crcs.get(container.file, {})
        tail = b"" if container.tail is None else container.tail(held)
        size = container.end + len(tail)
        files[container.file] = {"size": size, "crc32": {name: f"{held[name]:08x}" for name in container.offsets}}
    for file, data in plan.extras.items():
        files[file] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    content = {"format": FORMAT, "version": VERSION, **plan.about, "files": files}
    return (json.dumps(content, indent=1) + "\n").encode()


class _Upload:
    """A file of an object store, written front to back in parts and not there until `commit`."""

    def __init__(self, fs: Any, path: str, container: Container) -> None:
        self._file = fs.open(path, "wb", block_size=_PART, autocommit=False)
        self._fixed = list(container.fixed)
        self._at = 0

    def put(self, at: int, data: bytes | memoryview) -> None:
        while self._fixed and self._fixed[0][0] == self._at:
            self._append(self._fixed.pop(0)[1])
        assert at == self._at, f"{at} is written after {self._at}"
        self._append(data)

    def _append(self, data: bytes | memoryview) -> None:
        self._file.write(bytes(data))
        self._at += len(data)

    def end(self, container: Container, crcs: dict[str, int]) -> None:
        self.put(container.end, b"" if container.tail is None else container.tail(crcs))
        self._file.close()

    def commit(self) -> None:
        self._file.commit()

    def discard(self) -> None:
        self._file.discard()


def _produce_remote(source: WeightSource, target: str, plan: Plan) -> None:
    fs, prefix = filesystem(target)
    progress = _Progress(plan)
    uploads: list[_Upload] = []

    def start(container: Container) -> _Upload:
        upload = _Upload(fs, f"{prefix}/{container.file}", container)
        with progress.lock:
            uploads.append(upload)
        return upload

    def group(jobs: list[Job]) -> None:
        opened: dict[str, _Upload] = {}
        for job in jobs:
            for container in (container for write in job for container in write.targets):
                if container.file not in opened:
                    opened[container.file] = start(container)
            crcs = run(job, source, plan.layout, lambda file, at, data: opened[file].put(at, data))
            for container in progress.add(job, crcs):
                upload = opened.pop(container.file)
                upload.end(container, progress.crcs[container.file])
                if ".tensors/" in container.file:  # nothing without the .pt that refers to it
                    upload.commit()
                    with progress.lock:
                        uploads.remove(upload)

    try:
        _on_threads([lambda jobs=jobs: group(jobs) for jobs in plan.groups])  # type: ignore[misc]
        for container in plan.containers:
            if not container.offsets:
                start(container).end(container, {})
        if fs.exists(f"{prefix}/{MANIFEST}"):
            fs.rm_file(f"{prefix}/{MANIFEST}")
        while uploads:
            uploads[0].commit()
            uploads.pop(0)
        for file, data in {**plan.extras, MANIFEST: manifest(plan, progress.crcs)}.items():
            fs.pipe_file(f"{prefix}/{file}", data)
    except CheckpointError:
        raise
    except Exception as error:  # each client has kinds of its own
        raise CheckpointError(f"{target} cannot be written ({error}); see to the access and run it again.") from None
    finally:
        for upload in uploads:
            upload.discard()
