"""Records of steps as columns: 9 bytes a number; a dict takes 100."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload


class StepColumns(Sequence[dict[str, float]]):
    """Records by step, each made when it is read. Append rows in any order, then `sort` once."""

    def __init__(self) -> None:
        self._numbers: dict[str, array[float]] = {}
        self._has: dict[str, bytearray] = {}
        self._length = 0

    def append(self, record: Mapping[str, float]) -> None:
        """Add a record; it must have a `step`."""
        for name, number in record.items():
            numbers = self._numbers.setdefault(name, array("d"))
            has = self._has.setdefault(name, bytearray())
            numbers.extend([0.0] * (self._length - len(numbers)))
            has.extend(bytes(self._length - len(has)))
            numbers.append(number)
            has.append(1)
        self._length += 1

    def sort(self) -> None:
        """Put the records in the order of their steps; of equal steps the last one stays."""
        steps = self._numbers.get("step", array("d"))
        if all(steps[i] < steps[i + 1] for i in range(len(steps) - 1)):
            return
        order = sorted(range(self._length), key=steps.__getitem__)  # stable
        last = [
            i for n, i in enumerate(order) if n + 1 == len(order) or steps[order[n + 1]] != steps[i]
        ]
        records = StepColumns()
        for i in last:
            records.append(self[i])
        self._numbers, self._has, self._length = records._numbers, records._has, records._length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, float]]:
        return (self[i] for i in range(self._length))

    @overload
    def __getitem__(self, at: int) -> dict[str, float]: ...
    @overload
    def __getitem__(self, at: slice) -> list[dict[str, float]]: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(self._length))]
        i = range(self._length)[at]
        return {
            name: int(numbers[i]) if name == "step" else numbers[i]
            for name, numbers in self._numbers.items()
            if i < len(numbers) and self._has[name][i]
        }
