"""Measure the time of each part of a step; costs nothing unless a step is profiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, get_args

Part = Literal[
    "data",
    "forward and backward",
    "router",
    "sorting rows",
    "experts",
    "expert parallel",
    "tensor parallel",
    "context parallel",
    "pipeline",
    "data parallel",
    "optimizer",
]
PARTS: tuple[Part, ...] = get_args(Part)
Mark = Callable[[Part], AbstractContextManager[object]]
_NO_MARK = nullcontext()
_mark: Mark | None = None


def part(name: Part) -> AbstractContextManager[object]:
    """Wrap code that belongs to a part; if parts are nested, the time counts for the inner one."""
    return _NO_MARK if _mark is None else _mark(name)


@contextmanager
def mark_parts(mark: Mark) -> Iterator[None]:
    """Pass every part within the block through `mark`."""
    global _mark
    _mark = mark
    try:
        yield
    finally:
        _mark = None


class StepTimer:
    """Seconds of each part; a collective includes waiting for ranks that come later."""

    def __init__(self, settle: Callable[[], None] = lambda: None) -> None:
        """`settle` waits for the device, so that its work counts for the part that queued it."""
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._settle, self._open_parts, self._since = settle, list[Part](), 0.0

    @contextmanager
    def __call__(self, name: Part) -> Iterator[None]:
        # Parts nest: the outer part's time ends here and begins again when this one closes.
        self._count_elapsed()
        self._open_parts.append(name)
        try:
            yield
        finally:
            self._count_elapsed()
            self._open_parts.pop()

    def _count_elapsed(self) -> None:
        """Add the time since the last turn to the innermost part."""
        # Time outside every part counts for nothing, so the device need not be waited for.
        if self._open_parts:
            self._settle()
        current_time = time.perf_counter()
        if self._open_parts:
            self.seconds[self._open_parts[-1]] += current_time - self._since
        self._since = current_time
