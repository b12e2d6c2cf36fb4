"""The lines, rows and texts that are no documents, counted over a whole corpus."""

from __future__ import annotations

from smtrain.core.errors import DataError
from smtrain.worker.data.read.reading import BadLine

_BAD_LINES_KEPT = 100


class Bad:
    """The bad lines so far: how many, and the first of them with their places."""

    def __init__(self, one: str = "line", of: str = "text") -> None:
        self._one, self._of = one, of
        self.count = 0
        self.kept: list[str] = []

    def add(self, found: list[BadLine], lines: int, most: int) -> None:
        """Take those of a block that has `lines` lines of its file before it. Raises DataError beyond `most`."""
        placed = [str(BadLine(bad.file, lines + bad.line, bad.reason)) for bad in found]
        self.count += len(placed)
        self.kept += placed[: _BAD_LINES_KEPT - len(self.kept)]
        if self.count > most:
            raise DataError(
                f"{self.kept[0]}; {self.count} bad {self._one}{'s' * (self.count > 1)} so far and max_bad is {most}, "
                f"so correct the {self._of} or raise data.max_bad."
            )

    def nothing_else(self, source: str) -> str:
        """A sentence for a source in which nothing is good."""
        which = f"all {self.count} {self._one}s are bad" if self.count > 1 else f"the only {self._one} is bad"
        return f"{source}: {which}, beginning with {self.kept[0]}; correct the {self._of}."
