"""Resumable preparation of text or instruction data: files that survive a kill, marks, and a final
rename.

Files grow by appending. A mark has their sizes and hashes: bytes after the last mark are cut off,
and a journal whose file differs from its mark (after a power cut) is not used. So nothing has to be
synced to the disk on the way.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from smtrain.core.digests import verify_record, with_digest
from smtrain.core.errors import DataError
from smtrain.core.files import hold, read_object, write_atomically
from smtrain.worker.data.checksums import Rolling
from smtrain.worker.data.manifest import NAME, PREFIX, DatasetManifest, files_of
from smtrain.worker.data.part_uploads import PartUploads, StoppedError

MARK_BYTES = 64 << 20
_JOURNAL = "journal.json"


class Appender:
    """A file that only grows, with its SHA-256 and the checksums of its blocks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("wb", buffering=0)
        self._hash = hashlib.sha256()
        self.sums = Rolling()
        self.bytes = 0

    @classmethod
    def restore(cls, path: Path, mark: dict[str, Any]) -> Appender | None:
        """The file cut to its state at `mark`; None if it differs."""
        file = cls.__new__(cls)
        file.path, file._hash, file.sums, file.bytes = (
            path,
            hashlib.sha256(),
            Rolling(),
            mark["bytes"],
        )
        try:
            file._file = path.open("r+b", buffering=0)
        except OSError:
            return None
        remaining_bytes = file.bytes
        while remaining_bytes and (part := file._file.read(min(remaining_bytes, 1 << 20))):
            file._hash.update(part)
            file.sums.add(part)
            remaining_bytes -= len(part)
        if remaining_bytes or file._hash.hexdigest() != mark["sha256"]:
            file._file.close()
            return None
        file._file.truncate(file.bytes)
        return file

    def write(self, data: memoryview | bytes) -> None:
        """Append all of it."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self.sums.add(view)
        self.bytes += len(view)
        while view:
            view = view[self._file.write(view) :]

    def mark(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "sha256": self._hash.hexdigest()}

    def close(self, *, flush: bool = False) -> None:
        if flush and not self._file.closed:
            os.fsync(self._file.fileno())
        self._file.close()


class Journal:
    """The folder of unfinished files, held by one process at a time, with copies in `parts` if
    there are any.

    Raises DataError if another process holds it.
    """

    def __init__(self, folder: Path, parts: PartUploads | None = None) -> None:
        self.folder, self.parts = folder, parts
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # another process has ended and removed the folder
                lock = hold(folder / "lock")
                break
        if lock is None:
            raise DataError(
                f"{folder.parent} is being written by another process; wait for it to end."
            )
        self._lock = lock

    def marks(self, settings: str) -> Iterator[dict[str, Any]]:
        """The marks of runs with the same settings, the last one here and then those in the parts,
        newest first.
        """
        with suppress(OSError, ValueError):
            record: dict[str, Any] = verify_record(read_object(self.folder / _JOURNAL))
            if record.get("settings") == settings:
                yield record
        if self.parts:
            yield from self.parts.marks(settings, self.folder)

    def mark(self, record: dict[str, Any], sizes: dict[str, int]) -> None:
        """Let the next run resume from `record`, with files of these sizes."""
        # The files are not synced either.
        write_atomically(self.folder / _JOURNAL, json.dumps(with_digest(record)), sync=False)
        if self.parts:
            self.parts.add(record, sizes, self.folder)

    @property
    def stops(self) -> bool:
        """Whether the machine was asked to end."""
        return self.parts is not None and self.parts.stop.is_set()

    def clear(self) -> None:
        """Forget everything but the lock."""
        if self.parts:
            self.parts.clear()
        self._empty()

    def _empty(self) -> None:
        for path in self.folder.iterdir():
            if path.is_dir():  # of a machine that died
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != "lock":
                path.unlink(missing_ok=True)

    def close(self, *, remove: bool) -> None:
        """Release the folder; with `remove` delete it, so that the next run begins again."""
        if remove:
            self._empty()
            (self.folder / "lock").unlink()
            with suppress(OSError):  # another process has it already
                self.folder.rmdir()
        os.close(self._lock)


@contextmanager
def open_journal(output: Path, parts: PartUploads | None) -> Iterator[Journal]:
    """The journal of unfinished files in `output`; a kill or a fault of the machine leaves it for
    the next run.

    It is removed when the run succeeds, or fails because of the input, which would fail again.
    Raises DataError if `output` is a file or is being written.
    """
    if output.exists() and not output.is_dir():
        raise DataError(f"{output} is a file; give a folder for the prepared tokens.")
    is_new_folder = not output.exists()
    journal = Journal(output / f".{PREFIX}.partial", parts)
    keep, is_stopped = True, False
    try:
        yield journal
        keep = False
    except DataError:
        keep = False
        raise
    except StoppedError:
        is_stopped = True
        raise
    finally:
        if parts is not None and not keep:
            parts.clear()
        journal.close(remove=not keep or is_stopped)  # a job's output folder goes to S3
        if is_new_folder and output.is_dir() and not any(output.iterdir()):
            output.rmdir()


def publish(
    journal: Journal, manifest: DatasetManifest, output: Path, shared_folder: str | None = None
) -> DatasetManifest:
    """Move the finished files into `output`, the manifest last: without it the folder is no
    dataset.

    If the files are in a `shared_folder`, only the manifest is written.
    """
    for old in files_of(output):  # without its manifest, which goes first, the folder is no dataset
        if shared_folder is None or old.name not in manifest.files or old.name == NAME:
            old.unlink(missing_ok=True)
    for name in manifest.files if shared_folder is None else ():
        (journal.folder / name).replace(output / name)
    manifest.save(output)
    return manifest


def to_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
