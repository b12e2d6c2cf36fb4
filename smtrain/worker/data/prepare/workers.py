"""Pools of worker processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def spawned_pool(count: int, start: Callable[..., None], *arguments: Any) -> ProcessPoolExecutor:
    """A pool of `count` processes, each of which calls `start(*arguments)` first and ends when this process ends.

    They are spawned because a forked copy of a process with threads may hang.
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, context, initializer=_start, initargs=(start, arguments))


def _start(start: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    # a killed parent cannot tell its workers to end, and they would wait for work for ever
    threading.Thread(target=_end_with_parent, daemon=True).start()
    start(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
