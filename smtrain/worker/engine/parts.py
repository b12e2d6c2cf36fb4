"""Which part of a step takes how long: ranges in the engine's code, nothing unless a step is profiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

Part = Literal["data", "forward and backward", "tensor parallel", "pipeline", "data parallel", "optimizer"]
PARTS: tuple[Part, ...] = ("data", "forward and backward", "tensor parallel", "pipeline", "data parallel", "optimizer")
Mark = Callable[[Part], AbstractContextManager[object]]
_NOTHING = nullcontext()
_mark: Mark | None = None


def part(name: Part) -> AbstractContextManager[object]:
    """Around what belongs to a part; of two, one within the other, the inner one has the time."""
    return _NOTHING if _mark is None else _mark(name)


@contextmanager
def marked(mark: Mark) -> Iterator[None]:
    """Have every part of what is done within pass through `mark`."""
    global _mark
    _mark = mark
    try:
        yield
    finally:
        _mark = None


class PartsClock:
    """Seconds of each part; what comes of a collective includes waiting for those who come later."""

    def __init__(self, settle: Callable[[], None] = lambda: None) -> None:
        """`settle` waits for the device, so that what it was given counts where it was given."""
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._settle, self._within, self._since = settle, list[Part](), 0.0

    @contextmanager
    def __call__(self, name: Part) -> Iterator[None]:
        self._turn()
        self._within.append(name)
        try:
            yield
        finally:
            self._turn()
            self._within.pop()

    def _turn(self) -> None:
        """Book what has passed since the last turn on the innermost part."""
        if self._within:
            self._settle()
        now = time.perf_counter()
        if self._within:
            self.seconds[self._within[-1]] += now - self._since
        self._since = now
