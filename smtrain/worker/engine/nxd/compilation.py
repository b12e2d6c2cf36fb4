"""Read the output and the cache of neuron_parallel_compile. Needs no library.

The program runs a command to see its graphs, compiles each into the cache, logs three totals and
ends with the number of failures, or at once if no graph is new. In the cache every graph has a
folder `neuronxcc-VERSION/MODULE_HASH+FLAGS` with `model.neff`; a failed one has `model.log`
instead, which later runs would take as the answer. Source: torch-neuronx's neuron_parallel_compile,
its guide, and public caches of neuronx-cc 2.12 to 2.15.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PROGRAM = "neuron_parallel_compile"
_TOTALS = {
    "total": re.compile(r"Total graphs: (\d+)"),
    "successful": re.compile(r"Total successful compilations: (\d+)"),
    "failed": re.compile(r"Total failed compilations: (\d+)"),
}
_NOTHING_NEW = "No todo hlos found"


@dataclass(frozen=True)
class Totals:
    """Graphs that one run of the program compiled."""

    total: int
    successful: int
    failed: int


class Listener:
    """Reads the program's lines and finds its totals."""

    def __init__(self) -> None:
        self._totals: dict[str, int] = {}

    def hear(self, line: str) -> None:
        for name, pattern in _TOTALS.items():
            if match := pattern.search(line):
                self._totals[name] = int(match[1])
        # The program then ends before it prints totals.
        if _NOTHING_NEW in line:
            self._totals.update(total=0, successful=0, failed=0)

    @property
    def totals(self) -> Totals | None:
        """The totals; None if the program did not print them, for example because the command
        failed.
        """
        return Totals(**self._totals) if len(self._totals) == len(_TOTALS) else None


@dataclass(frozen=True)
class Cache:
    """The graphs of a cache folder."""

    complete_entries: tuple[Path, ...]
    failed_entries: tuple[Path, ...]

    @classmethod
    def read(cls, folder: Path) -> Cache:
        entries = sorted(path for path in folder.glob("*/MODULE_*") if path.is_dir())
        complete_entries = tuple(path for path in entries if (path / "model.neff").is_file())
        return cls(
            complete_entries, tuple(path for path in entries if path not in complete_entries)
        )

    def files(self) -> list[Path]:
        """The files of whole graphs, without locks."""
        return [
            p
            for entry in self.complete_entries
            for p in sorted(entry.rglob("*"))
            if p.is_file() and p.suffix != ".lock"
        ]


def reason(entry: Path) -> str:
    """The compiler's error for a graph that failed, in one line."""
    try:
        lines = (entry / "model.log").read_text("utf-8", errors="replace").split()
    except OSError:
        return "it left no log"
    return " ".join(lines)[-300:] or "its log is empty"
