"""Carry out a conversion: run its jobs on threads, finish each file, write the manifest last.

To a folder of this machine the jobs write in parallel at offsets known beforehand; for object
stores see uploading.py.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from glob import escape
from pathlib import Path

from smtrain.core.errors import CheckpointError
from smtrain.core.spinner import spinner
from smtrain.worker.checkpoint.conversion_plan import (
    MANIFEST,
    ConversionPlan,
    ConversionProgress,
    fingerprint,
    is_done,
    manifest,
    on_threads,
)
from smtrain.worker.checkpoint.reserving import reserve
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.checkpoint.staging import (
    JOURNAL,
    PARTIAL,
    Staging,
    is_unfinished,
    not_written,
    present,
    staging_folder,
)
from smtrain.worker.checkpoint.storage import is_uri, refuse_changed
from smtrain.worker.checkpoint.tensor_files import Job, TensorFile, run


def execute(
    source: WeightSource, target: Path | str, plan: ConversionPlan, overwrite: bool = True
) -> None:
    """Write `plan` into a folder or under an s3:// URI, which has all of it afterwards, or stays as
    it was.

    Without `overwrite`, the finished output of the same call is left. Raises CheckpointError if the
    source turns out broken, the target cannot be written or, without `overwrite`, other files would
    be replaced.
    """
    # Stamped before the first read, compared before publishing: what changes in between is noticed.
    work, read = fingerprint(source, plan), source.location.stamp()
    recorded_work = None if overwrite else work
    if is_uri(target):
        from smtrain.worker.checkpoint.uploading import upload

        upload(source, str(target), plan, work, overwrite)
        return
    try:
        is_complete = (
            not overwrite
            and not is_unfinished(Path(target), MANIFEST)
            and _is_complete(Path(target), plan, work)
        )
        if is_complete and not any(
            Path(target, leftover).exists() for leftover in (PARTIAL, JOURNAL)
        ):
            return
        with staging_folder(
            Path(target), work, MANIFEST, durable=False
        ) as stage:  # like cp, no fsync
            # The block only removes what a killed run left next to the finished output.
            if is_complete:
                return
            if not stage.complete:
                _fill(source, stage, plan, recorded_work)
                refuse_changed(source.location, read, [stage.folder, stage.target])
            stage.publish((*plan.replaces, *map(escape, plan.extras)))
    except OSError as error:
        raise CheckpointError(not_written(target, error)) from None


def _is_complete(target: Path, plan: ConversionPlan, work: str) -> bool:
    file = target / MANIFEST
    return is_done(
        plan, work, present(target), file.read_bytes() if file.is_file() else None, target
    )


def _fill(
    source: WeightSource, stage: Staging, plan: ConversionPlan, recorded_work: str | None
) -> None:
    progress = ConversionProgress(plan)
    # The kernel lets one writer into a file at a time and has every other writer spin; ours sleep,
    # or hash meanwhile.
    turns = {container.file: threading.Lock() for container in plan.containers}

    def put(handles: dict[str, int], file: str, at: int, data: bytes | memoryview) -> None:
        with turns[file]:
            _write(handles[file], at, data)

    for container in plan.containers:
        path = stage.folder / container.file
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            reserve(handle, container.end)
        finally:
            os.close(handle)

    def write_job(key: str, job: Job) -> None:
        if key in stage.done:
            # The bytes are in the file already; the checksums are needed for its end and the
            # manifest.
            crcs = stage.done[key]
        else:
            files = {container.file for write in job for container in write.targets}
            handles = {
                file: os.open(stage.folder / file, os.O_WRONLY | os.O_CREAT, 0o666)
                for file in files
            }
            try:
                crcs = run(job, source, plan.layout, partial(put, handles))
            finally:
                for handle in handles.values():
                    os.close(handle)
            # After the last byte is written: a resume never writes a noted job again.
            stage.note(key, crcs)
        for container in progress.add(job, crcs):
            _finish(stage.folder, container, progress.crcs[container.file])

    for container in plan.containers:
        # No job completes a file without tensors.
        if not container.offsets:
            _finish(stage.folder, container, {})
    with spinner(partial(_progress_line, progress, plan)):
        on_threads(
            [partial(write_job, f"{g} {job[0].name}", job) for job in group]
            for g, group in enumerate(plan.groups)
        )
    for file, data in {
        **plan.extras,
        MANIFEST: manifest(plan, progress.crcs, recorded_work),
    }.items():
        (stage.folder / file).parent.mkdir(parents=True, exist_ok=True)
        (stage.folder / file).write_bytes(data)


def _progress_line(progress: ConversionProgress, plan: ConversionPlan) -> str:
    """The progress line for a person at a terminal."""
    with progress.lock:  # threads add to it
        tensor_count = sum(map(len, progress.crcs.values()))
    return (
        f"writing tensors, {tensor_count:,} of"
        f" {sum(len(container.offsets) for container in plan.containers):,}"
    )


def _finish(folder: Path, container: TensorFile, crcs: dict[str, int]) -> None:
    """Write the parts around the tensors: headers and the end of the file."""
    handle = os.open(folder / container.file, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        for at, data in container.fixed_blocks:
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
