"""Pools of worker processes, and results in the order of the tasks."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from itertools import repeat
from typing import Any, TypeVar

from smtrain.core.errors import DataError

T = TypeVar("T")


def in_order(futures: Iterator[Future[T]], ahead: int) -> Iterator[T]:
    """The results of tasks in their order; takes at most `ahead` tasks before it waits for the
    first of them.
    """
    pending_futures: deque[Future[T]] = deque()
    try:
        for future in futures:
            pending_futures.append(future)
            if len(pending_futures) >= ahead:
                yield pending_futures.popleft().result()
        while pending_futures:
            yield pending_futures.popleft().result()
    finally:
        for future in pending_futures:
            future.cancel()


def read_ahead(items: Iterator[T], count: int) -> Iterator[T]:
    """The same items, taken by another thread, at most `count` before they are asked for."""
    end: Any = object()
    with ThreadPoolExecutor(1, thread_name_prefix="read") as reader:
        for item in in_order((reader.submit(next, items, end) for _ in repeat(None)), count):
            if item is end:
                return
            yield item


def spawned_pool(count: int, start: Callable[..., None], *arguments: Any) -> ProcessPoolExecutor:
    """A pool of `count` processes, each of which calls `start(*arguments)` first and ends when this
    process ends.

    They are spawned because a forked copy of a process with threads may hang.
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, context, initializer=_start, initargs=(start, arguments))


def dead_worker(count: int) -> DataError:
    """The error for a process of a pool of `count` that ended."""
    return DataError(
        f"a process of prepare ended unexpectedly: for lack of memory (use fewer than {count}"
        " workers, data.workers), or because the script that calls prepare lacks `if __name__ =="
        ' "__main__":`.'
    )


def _start(start: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    # a killed parent cannot tell its workers to end, and they would wait for work for ever
    threading.Thread(target=_end_with_parent, daemon=True).start()
    start(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
