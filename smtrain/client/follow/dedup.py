"""Remember which log events were handed on: eight bytes each, for as far back as readings go."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from hashlib import blake2b

MINUTE = 60_000
_YOUNG = 3


class SeenEvents:
    """A set of event keys by the minute of their timestamp (ms). Old minutes are packed; `forget` drops them."""

    def __init__(self) -> None:
        self._young: dict[int, set[int]] = {}
        self._old: dict[int, array[int]] = {}

    def add(self, timestamp: int, key: int) -> bool:
        """True if the key is new; it is remembered."""
        minute = timestamp // MINUTE
        if (packed := self._old.get(minute)) is not None:
            place = bisect_left(packed, key)
            if place < len(packed) and packed[place] == key:
                return False
            packed.insert(place, key)
            return True
        if minute not in self._young:
            self._young[minute] = {key}
            self._pack()
            return True
        if key in self._young[minute]:
            return False
        self._young[minute].add(key)
        return True

    def forget(self, before: int) -> None:
        """Drop the minutes that end before a timestamp."""
        for minutes in (self._young, self._old):
            for minute in [minute for minute in minutes if minute < before // MINUTE]:
                del minutes[minute]

    def since(self, timestamp: int) -> dict[int, set[int]]:
        """The keys from the minute of a timestamp on."""
        first = timestamp // MINUTE
        every = [*self._young.items(), *self._old.items()]
        return {minute: set(keys) for minute, keys in every if minute >= first}

    def restore(self, minutes: Mapping[int, Iterable[int]]) -> None:
        """Restore the answer of `since`."""
        self._old = {minute: array("Q", sorted(keys)) for minute, keys in minutes.items()}

    def __len__(self) -> int:
        return sum(map(len, self._young.values())) + sum(map(len, self._old.values()))

    def _pack(self) -> None:
        newest = max(self._young)
        for minute in [minute for minute in self._young if minute <= newest - _YOUNG]:
            self._old[minute] = array("Q", sorted(self._young.pop(minute)))


def key_of(stream: str, timestamp: int, text: str, ordinal: int) -> int:
    """An event's identity: its stream, time and text, and its number among equal events.

    CloudWatch's event id does not serve: GetLogEvents has none, and another reading must find the same events.
    """
    digest = blake2b(digest_size=8)
    digest.update(f"{stream}\0{timestamp}\0{ordinal}\0".encode())
    digest.update(text.encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "big")


class Ordinals:
    """Number equal events within one reading; the events of a stream come in the order of time."""

    def __init__(self) -> None:
        self._at: dict[str, tuple[int, dict[str, int]]] = {}

    def next(self, stream: str, timestamp: int, text: str) -> int:
        stamp, counts = self._at.get(stream, (None, {}))
        if stamp != timestamp:
            counts = {}
            self._at[stream] = (timestamp, counts)
        counts[text] = counts.get(text, -1) + 1
        return counts[text]
