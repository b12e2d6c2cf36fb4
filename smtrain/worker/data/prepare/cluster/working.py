"""The work of a machine: take shares, keep all cores busy across share boundaries, pass pieces on in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from smtrain.core.errors import DataError
from smtrain.worker.data.prepare.cluster.shares import Share
from smtrain.worker.data.read.blocks import BLOCK_BYTES
from smtrain.worker.data.tokenize.encoder import MismatchError


class ShareSource(Protocol):
    """The source of shares and the target of pieces: the dealer of this process, or the connection to it."""

    def take(self, wait: bool) -> Share | None: ...
    def add(self, number: int, piece: Any) -> None: ...
    def done(self, number: int) -> None: ...
    def fault(self, number: int, error: DataError | MismatchError) -> None: ...


@dataclass(frozen=True)
class ShareWork:
    """Turns shares into pieces: `tasks` cuts a share, `start` starts a task; `ahead` tasks run at a time."""

    tasks: Callable[[Share], Iterator[Any]]
    start: Callable[[Any], Future[list[Any]]]
    ahead: int

    @property
    def shares(self) -> int:
        """The number of shares that may be in progress."""
        return 2 + self.ahead * BLOCK_BYTES // (64 << 20)


@dataclass
class _InProgress:
    number: int
    future: Future[list[Any]] | None = None
    fault: DataError | MismatchError | None = None


def do_shares(source: ShareSource, work: ShareWork) -> int:
    """Take and do shares to the end; return their number."""
    waiting: deque[_InProgress] = deque()
    share: Share | None = None
    tasks: Iterator[Any] = iter(())
    bad: set[int] = set()
    count, ended = 0, False
    try:
        while True:
            while not ended and len(waiting) < work.ahead:
                if share is None:
                    share = source.take(wait=not waiting)
                    if share is None:
                        ended = not waiting
                        break
                    tasks = work.tasks(share)
                try:
                    task = next(tasks, None)
                except (DataError, MismatchError) as error:
                    waiting.append(_InProgress(share.number, fault=error))
                    share = None
                    continue
                if task is None:
                    waiting.append(_InProgress(share.number))
                    share = None
                else:
                    waiting.append(_InProgress(share.number, work.start(task)))
            if not waiting:
                return count
            oldest = waiting.popleft()
            count += _pass_on(source, oldest, bad)
    finally:
        for left in waiting:
            if left.future is not None:
                left.future.cancel()


def _pass_on(source: ShareSource, oldest: _InProgress, bad: set[int]) -> int:
    """Pass finished work to the source; 1 if it completes a share."""
    try:
        if oldest.fault:
            raise oldest.fault
        if oldest.future is not None:
            for piece in oldest.future.result():
                if oldest.number not in bad:
                    source.add(oldest.number, piece)
            return 0
    except (DataError, MismatchError) as error:
        if oldest.number not in bad:
            source.fault(oldest.number, error)
        bad.add(oldest.number)
        return 0
    if oldest.number in bad:
        bad.discard(oldest.number)
        return 0
    source.done(oldest.number)
    return 1
