"""Deals shares to machines, and keeps finished ones on the first machine's disk until their turn comes.

Shares are dealt in order, at most a window ahead of the one whose turn it is, which bounds the disk space. The share of
a lost machine is dealt again. A share that takes much longer than the others is also dealt to an idle machine, and the
first result counts. A result depends only on the text, so any machine may produce it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from smtrain.worker.checkpoint.checksum import crc32
from smtrain.worker.data.prepare.cluster import wire
from smtrain.worker.data.prepare.cluster.shares import Share

STRAGGLES_S = 60.0
_NAME = "share-{:06}"


@dataclass
class _Open:
    """A share in progress: its start, its unfinished file per machine, and whether it was reported as slow."""

    since: float
    files: dict[str, BinaryIO] = field(default_factory=dict)
    reported: bool = False


class Dealer:
    """Deals `shares` from number `first`; finished ones are kept in `folder`, also from an earlier run of the same key.

    `key` decides the content of shares; `straggles_s` is the minimum time after which a share is dealt twice. All
    methods may be called from any thread.
    """

    def __init__(
        self, shares: list[Share], first: int, folder: Path, key: str, straggles_s: float = STRAGGLES_S
    ) -> None:
        self.shares, self.folder, self.key = shares, folder, f"{crc32(key.encode()):08x}"
        self._straggles_s = straggles_s
        self._turn, self._next = first, first
        self._changed = threading.Condition()
        self._open: dict[int, _Open] = {}
        self._again: list[int] = []
        self._ahead: dict[str, int] = {}
        self._took: list[float] = []
        self._faults: dict[int, BaseException] = {}
        self._broken: BaseException | None = None
        self.ended = False
        self._done = set(self._left_over())

    def _left_over(self) -> Iterator[int]:
        """Complete shares of an earlier run; its other files are deleted."""
        for path in sorted(self.folder.glob("share-*")):
            number = path.name[6:12]
            good = path.suffix == f".{self.key}" and number.isdigit() and self._turn <= int(number) < len(self.shares)
            if good and wire.whole(path):
                yield int(number)
            else:
                path.unlink()

    def join(self, machine: str, ahead: int) -> None:
        """Add a machine that has up to `ahead` shares in progress."""
        with self._changed:
            self._ahead[machine] = ahead
            self._changed.notify_all()

    def take(self, machine: str, wait: bool) -> Share | None:
        """The next share for a machine. None means: without `wait`, no share now; with it, no share any more."""
        with self._changed:
            while not self.ended:
                number = self._free()
                if number is None and wait:
                    number = self._straggler(machine)
                if number is not None:
                    file = self._path(number, f"{machine}.partial").open("wb")
                    self._open.setdefault(number, _Open(time.monotonic())).files[machine] = file
                    return self.shares[number]
                if not wait:
                    return None
                self._changed.wait(1.0)
            return None

    def _free(self) -> int | None:
        if self._again:
            return self._again.pop(0)
        while self._next < min(len(self.shares), self._turn + 8 + 4 * sum(self._ahead.values())):
            self._next += 1
            if self._next - 1 not in self._done:
                return self._next - 1
        return None

    def _straggler(self, machine: str) -> int | None:
        """The oldest share that another machine has had for much longer than usual."""
        late = self._late()
        now = time.monotonic()
        return next(
            (n for n, o in sorted(self._open.items()) if machine not in o.files and len(o.files) < 2
             and now - o.since > late), None,
        )  # fmt: skip

    def slowest(self) -> tuple[Share, float] | None:
        """The share whose turn it is and the seconds it has taken, if that is long; only once per share."""
        with self._changed:
            held = self._open.get(self._turn)
            if held is None or held.reported or time.monotonic() - held.since < self._late():
                return None
            held.reported = True
            return self.shares[self._turn], time.monotonic() - held.since

    def _late(self) -> float:
        """Seconds after which a share takes much longer than usual."""
        return max(self._straggles_s, 3 * sum(self._took) / max(len(self._took), 1))

    def _path(self, number: int, end: str) -> Path:
        return self.folder / f"{_NAME.format(number)}.{end}"

    def add(self, machine: str, number: int, piece: bytes) -> None:
        """Append a packed piece of a share that the machine was dealt."""
        with self._changed:
            held = self._open.get(number)
            file = held.files.get(machine) if held else None
        if file is not None:
            with suppress(ValueError):  # another machine was faster, so the file is closed
                file.write(piece)

    def done(self, machine: str, number: int) -> None:
        """Mark a share as complete."""
        with self._changed:
            held = self._open.get(number)
            if held is None or machine not in held.files:
                return
            for file in held.files.values():
                file.close()
            self._path(number, f"{machine}.partial").replace(self._path(number, self.key))
            self._discard(number, held)
            self._took = [*self._took[-31:], time.monotonic() - held.since]
            self._done.add(number)
            self._changed.notify_all()

    def _discard(self, number: int, held: _Open) -> None:
        for machine, file in held.files.items():
            file.close()
            self._path(number, f"{machine}.partial").unlink(missing_ok=True)
        self._open.pop(number, None)

    def fault(self, machine: str, number: int, error: BaseException) -> None:
        """Record an error in the share's text, to be raised when its turn comes."""
        with self._changed:
            held = self._open.get(number)
            if held is not None and machine in held.files:
                self._discard(number, held)
                self._faults[number] = error
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Record an error that ends everything, to be raised at once."""
        with self._changed:
            self._broken = self._broken or error
            self._changed.notify_all()

    def lost(self, machine: str) -> None:
        """Remove a machine; its shares are dealt again."""
        with self._changed:
            self._ahead.pop(machine, None)
            for number, held in list(self._open.items()):
                if machine in held.files:
                    held.files.pop(machine).close()
                    self._path(number, f"{machine}.partial").unlink(missing_ok=True)
                    if not held.files:
                        del self._open[number]
                        self._again = sorted([*self._again, number])
            self._changed.notify_all()

    def in_order(self, waiting: Callable[[], None]) -> Iterator[tuple[Share, Path]]:
        """Each share when its turn comes, with the file of its pieces, which is deleted afterwards.

        `waiting` is called now and then until the next share is there. Raises the errors of `fault` and `fail`.
        """
        for share in self.shares[self._turn :]:
            while not self._ready(share.number):
                waiting()
            path = self._path(share.number, self.key)
            yield share, path
            os.unlink(path)
            with self._changed:
                self._done.discard(share.number)
                self._turn = share.number + 1
                self._changed.notify_all()

    def _ready(self, number: int) -> bool:
        with self._changed:
            if self._broken is not None:
                raise self._broken
            if number in self._faults:
                raise self._faults[number]
            return number in self._done or (self._changed.wait(0.5) and number in self._done)

    def end(self) -> None:
        """Release all that wait for a share."""
        with self._changed:
            self.ended = True
            for number, held in list(self._open.items()):
                self._discard(number, held)
            self._changed.notify_all()
