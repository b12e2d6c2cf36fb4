"""Merge the lines of many hosts in the order of time, holding them back a little for late ones."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from smtrain.core.protocol.log_lines import Line


@dataclass(order=True, frozen=True)
class _Held:
    timestamp: int
    host: int
    number: int
    """Order of reading: keeps lines of a host with equal timestamps as they were written."""
    line: Line = field(compare=False)
    key: int = field(compare=False)
    since: float = field(compare=False)


MOST_HELD = 100_000
"""Lines; with Python's objects around them some 50 MB.

A job that writes more in `hold_s` is shown less in order.
"""


class ReorderBuffer:
    """Holds a line until one younger by `hold_s` has arrived, or for so long; then releases it,
    oldest first.

    Releases the oldest lines earlier if it holds more than `MOST_HELD`.
    """

    def __init__(self) -> None:
        self._heap: list[_Held] = []
        self.taken = 0
        """Number of lines received."""
        self.newest = 0
        """Latest timestamp so far, ms."""

    def take(self, line: Line, key: int, now: float) -> None:
        self.taken += 1
        host = int(line.host.rpartition("-")[2]) if line.host.rpartition("-")[2].isdigit() else 0
        heapq.heappush(self._heap, _Held(line.timestamp, host, self.taken, line, key, now))
        self.newest = max(self.newest, line.timestamp)

    def free(self, hold_s: float, now: float) -> Iterator[Line]:
        """The lines that need not wait any longer; each is removed before it is yielded."""
        release_ms = self.newest - hold_s * 1000
        release_ms = max(
            (
                h.timestamp
                for h in self._heap
                if h.timestamp <= release_ms or now - h.since >= hold_s
            ),
            default=0,
        )
        while self._heap and (self._heap[0].timestamp <= release_ms or len(self._heap) > MOST_HELD):
            yield heapq.heappop(self._heap).line

    def keep_last(self, count: int) -> None:
        """Drop all but the last `count` lines."""
        self._heap = sorted(self._heap)[-count:] if count else []  # a sorted list is a heap

    def keys(self) -> set[int]:
        """Keys of the held lines."""
        return {item.key for item in self._heap}

    @property
    def oldest(self) -> int | None:
        """Timestamp of the oldest line held."""
        return self._heap[0].timestamp if self._heap else None

    def __len__(self) -> int:
        return len(self._heap)
