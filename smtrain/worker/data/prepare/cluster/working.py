"""What a machine does: takes shares, keeps its cores busy across their borders, hands pieces on in order."""

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


class Table(Protocol):
    """Where shares come from and pieces go: the dealer of this process, or the line to it."""

    def take(self, wait: bool) -> Share | None: ...
    def add(self, number: int, piece: Any) -> None: ...
    def done(self, number: int) -> None: ...
    def fault(self, number: int, error: DataError | MismatchError) -> None: ...


@dataclass(frozen=True)
class ShareWork:
    """How shares become pieces: `tasks` cuts one, `start` begins with a task; `ahead` tasks are under way at a time."""

    tasks: Callable[[Share], Iterator[Any]]
    start: Callable[[Any], Future[list[Any]]]
    ahead: int

    @property
    def shares(self) -> int:
        """How many shares that may be at once."""
        return 2 + self.ahead * BLOCK_BYTES // (64 << 20)


@dataclass
class _UnderWay:
    number: int
    future: Future[list[Any]] | None = None
    fault: DataError | MismatchError | None = None


def do_shares(table: Table, work: ShareWork) -> int:
    """Take shares until there are none; how many were done."""
    waiting: deque[_UnderWay] = deque()
    share: Share | None = None
    tasks: Iterator[Any] = iter(())
    bad: set[int] = set()
    count, ended = 0, False
    try:
        while True:
            while not ended and len(waiting) < work.ahead:
                if share is None:
                    share = table.take(wait=not waiting)
                    if share is None:
                        ended = not waiting
                        break
                    tasks = work.tasks(share)
                try:
                    task = next(tasks, None)
                except (DataError, MismatchError) as error:
                    waiting.append(_UnderWay(share.number, fault=error))
                    share = None
                    continue
                if task is None:
                    waiting.append(_UnderWay(share.number))
                    share = None
                else:
                    waiting.append(_UnderWay(share.number, work.start(task)))
            if not waiting:
                return count
            oldest = waiting.popleft()
            count += _hand_on(table, oldest, bad)
    finally:
        for left in waiting:
            if left.future is not None:
                left.future.cancel()


def _hand_on(table: Table, oldest: _UnderWay, bad: set[int]) -> int:
    """Give the table what is done; 1 where a share is complete with it."""
    try:
        if oldest.fault:
            raise oldest.fault
        if oldest.future is not None:
            for piece in oldest.future.result():
                if oldest.number not in bad:
                    table.add(oldest.number, piece)
            return 0
    except (DataError, MismatchError) as error:
        if oldest.number not in bad:
            table.fault(oldest.number, error)
        bad.add(oldest.number)
        return 0
    if oldest.number in bad:
        bad.discard(oldest.number)
        return 0
    table.done(oldest.number)
    return 1
