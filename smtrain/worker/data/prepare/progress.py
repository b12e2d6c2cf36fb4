"""Progress of a preparation: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LINE_SECONDS = 5.0


@dataclass(frozen=True)
class DataProgress:
    """Bytes of the input files (on the disk) and tokens so far, after `seconds` of work.

    `before_bytes` were done by an earlier run and do not count for the rate.
    """

    done_bytes: int
    total_bytes: int
    documents: int
    tokens: int
    seconds: float
    before_bytes: int = 0

    def __str__(self) -> str:
        rate = (self.done_bytes - self.before_bytes) / max(self.seconds, 1e-9)
        remaining_seconds = (self.total_bytes - self.done_bytes) / max(rate, 1e-9)
        return (
            f"prepare: {self.done_bytes / 1e6:,.1f} of {self.total_bytes / 1e6:,.1f} MB,"
            f" {rate / 1e6:.1f} MB/s, {self.documents:,} documents, {self.tokens:,} tokens,"
            f" {remaining_seconds:.0f} s left"
        )


class _Lines:
    """Prints a line every few seconds, and always the last one."""

    def __init__(self) -> None:
        self._said = time.monotonic()
        self._unsaid: DataProgress | None = None

    def __call__(self, progress: DataProgress) -> None:
        self._unsaid = progress
        if time.monotonic() - self._said >= LINE_SECONDS:
            self.say()

    def say(self) -> None:
        if self._unsaid is not None:
            print(self._unsaid, file=sys.stderr, flush=True)
            self._said, self._unsaid = time.monotonic(), None


@contextmanager
def console() -> Iterator[Callable[[DataProgress], None]]:
    """A reporter on stderr."""
    if not sys.stderr.isatty():
        lines = _Lines()
        yield lines
        lines.say()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("prepare"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("prepare", total=None, tokens=0)
        yield lambda progress: bar.update(
            task, total=progress.total_bytes, completed=progress.done_bytes, tokens=progress.tokens
        )
