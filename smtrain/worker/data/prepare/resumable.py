"""Resumable preparation, of text or instruction data: files that survive a kill, marks, and a final rename."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

from smtrain.core.errors import DataError
from smtrain.worker.data.manifest import NAME, PREFIX, DatasetManifest
from smtrain.worker.data.prepare.journal import Journal
from smtrain.worker.data.prepare.part_uploads import Parts, StoppedError
from smtrain.worker.data.prepare.progress import DataProgress

MARK_BYTES = 64 << 20


class Markable(Protocol):
    """Files that are appended to, with their counts."""

    done_bytes: int

    def begin(self) -> None: ...
    def mark(self) -> dict[str, Any]: ...
    def sizes(self, mark: dict[str, Any]) -> dict[str, int]: ...
    def restore(self, mark: dict[str, Any]) -> bool: ...
    def close(self) -> None: ...


T = TypeVar("T", bound=Markable)


@contextmanager
def unfinished(output: Path, parts: Parts | None) -> Iterator[Journal]:
    """The journal of unfinished files in `output`; a kill or a fault of the machine leaves it for the next run.

    It is removed when the run succeeds, or fails because of the input, which would fail again. Raises DataError if
    `output` is a file or is being written.
    """
    if output.exists() and not output.is_dir():
        raise DataError(f"{output} is a file; give a folder for the prepared tokens.")
    created = not output.exists()
    journal = Journal(output / f".{PREFIX}.partial")
    keep, stopped = True, False
    try:
        yield journal
        keep = False
    except DataError:
        keep = False
        raise
    except StoppedError:
        stopped = True
        raise
    finally:
        if parts is not None and not keep:
            parts.clear()
        journal.close(remove=not keep or stopped)  # a job's output folder goes to S3
        if created and output.is_dir() and not any(output.iterdir()):
            output.rmdir()


def publish(journal: Journal, manifest: DatasetManifest, output: Path) -> DatasetManifest:
    """Move the finished files into `output`, the manifest last: without it the folder is no dataset."""
    (output / NAME).unlink(missing_ok=True)
    for name in manifest.files:
        (journal.folder / name).replace(output / name)
    manifest.save(output)
    return manifest


def restored(make: Callable[[], T], settings: str, journal: Journal, parts: Parts | None) -> T:
    """The work at its newest mark with the same settings and undamaged files, here or in the parts; else empty."""
    marked = journal.read(settings)
    marks = parts.marks(settings, journal.folder) if parts else ()
    for mark in chain([marked] if marked else [], marks):
        work = make()
        if work.restore(mark):
            return work
        work.close()
    forget(journal, parts)
    work = make()
    work.begin()
    return work


def forget(journal: Journal, parts: Parts | None) -> None:
    """Discard all unfinished work."""
    journal.clear()
    if parts:
        parts.clear()


class Marker:
    """Reports progress after every piece, and marks it every so many bytes of input and at a stop."""

    def __init__(
        self, work: Markable, total: int, settings: str, journal: Journal, parts: Parts | None,
        report: Callable[[DataProgress], None], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._work, self._total, self._settings = work, total, settings
        self._journal, self._parts, self._report = journal, parts, report
        self._before = self._marked = work.done_bytes
        self._every = min(MARK_BYTES, parts.every) if parts else MARK_BYTES
        self._began = time.monotonic()
        if work.done_bytes:
            say(f"prepare: continuing after {work.done_bytes / 1e6:,.1f} MB that are done")

    def piece_done(self, documents: int, tokens: int) -> None:
        """Report and mark after a piece. Raises StoppedError if the machine was asked to end."""
        done, seconds = self._work.done_bytes, time.monotonic() - self._began
        self._report(DataProgress(done, self._total, documents, tokens, seconds, self._before))
        stop = self._parts is not None and self._parts.stop.is_set()
        if done - self._marked >= self._every or stop:
            self._marked = done
            mark = {"settings": self._settings, **self._work.mark()}
            self._journal.mark(mark)
            if self._parts:
                self._parts.add(mark, self._work.sizes(mark), self._journal.folder)
        if stop:
            raise StoppedError(f"stopped after {done / 1e6:,.1f} MB; run the same command again to resume")

    def stopped(self, documents: int, tokens: int) -> None:
        """Check for a stop while there is no piece. Raises StoppedError if the machine was asked to end."""
        if self._parts is not None and self._parts.stop.is_set():
            self.piece_done(documents, tokens)


def to_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
