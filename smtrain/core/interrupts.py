"""Ctrl-C while a job is followed: at once where nothing can be lost by it, else as soon as the line in hand is shown.

Python's own handler raises between any two instructions: a line that was taken and not yet shown would be gone, also
from the follow that resumes this one. So the handler raises only within `interruptible()`, which stands around calls
to AWS and pauses; everywhere else it leaves a mark, which is looked at between two events.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, TypeVar

_Answer = TypeVar("_Answer")

_STUCK_SECONDS = 2.0
"""A Ctrl-C so long after one that had no effect raises wherever it comes: what is shown to does not take it."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, by which nothing was lost. A notebook shows its sentence in place of a traceback."""

    def _render_traceback_(self) -> list[str]:
        """IPython's own hook."""
        return [str(self)]


@contextmanager
def gently(sentence: str) -> Iterator[None]:
    """Within, and in a function that has this as its decorator, Ctrl-C ends in `Interrupted` with the sentence."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise Interrupted(sentence) from None


class Interrupts:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.came = False
        self._heeded = self._free = False
        self._first = 0.0

    def heed(self) -> None:
        """Raises `KeyboardInterrupt` where one came and has had no effect yet."""
        if self.came and not self._heeded:
            self._heeded = True
            raise KeyboardInterrupt

    @contextmanager
    def free(self) -> Iterator[None]:
        """Within, Ctrl-C raises at once."""
        self.heed()
        before, self._free = self._free, True
        try:
            yield
        finally:
            self._free = before

    def _take(self, *_: Any) -> None:
        now = time.monotonic()
        if not self.came:
            self.came, self._first = True, now
        elif self._heeded or now - self._first < _STUCK_SECONDS:
            return  # a second one must not cut short how the first is dealt with
        if self._free or now - self._first >= _STUCK_SECONDS:
            # Not heeded yet: Python drops what is raised in a finalizer.
            raise KeyboardInterrupt


_current: Interrupts | None = None


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Within, Ctrl-C raises `KeyboardInterrupt` in `interruptible()` and from `heed`, once.

    Only the main thread has signals.
    """
    global _current
    found = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    before: Any = signal.signal(signal.SIGINT, found._take)
    outer, _current = _current, found
    try:
        yield found
    finally:
        _current = outer
        signal.signal(signal.SIGINT, before)


@contextmanager
def interruptible() -> Iterator[None]:
    """Around what may take long and of which nothing is kept if it is cut short."""
    if _current is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    with _current.free():
        yield


def pause(seconds: float) -> None:
    """Sleep so long, or until Ctrl-C."""
    with interruptible():
        time.sleep(seconds)


def poll(until: Callable[[], _Answer], every: float, limit: float = inf) -> _Answer:
    """Call `until` every so many seconds until its answer is true, or until `limit` seconds have passed.

    Returns the last answer: a false one if the time was over. The last pause ends with the time.
    """
    deadline = time.monotonic() + limit
    while not (answer := until()) and (left := deadline - time.monotonic()) > 0:
        pause(min(every, left))
    return answer
