"""Find errors in the log of many ranks and hosts, each with its own traceback although their lines
are mixed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from smtrain.core.protocol.log_lines import Line

_RANK = re.compile(
    r"^(?:\[rank(\d+)\]:|\[default(\d+)\]:|\[1,(\d+)\]<std(?:err|out)>:) ?(.*)$", re.S
)
_BEGIN = "Traceback (most recent call last)"
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
# The last line of one of our entry scripts that fails (smtrain.worker.output).
_OURS = re.compile(r"^(algo-\d+)(?:, rank (\d+))?: (.+)$")
_ERROR = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Timeout|Iteration)|[a-z_][\w.]*\.[A-Z]\w+)\b(?::|$)"
)
# torchrun's report of the first of its processes that failed.
_ROOT = re.compile(r"^\s*Root Cause \(first observed failure\)")
_FIELD = re.compile(r"^\s*(rank|exitcode)\s*: (-?\d+)")
_BAREST = re.compile(
    r"^(Fatal Python error|Timeout \(\d+:\d\d:\d\d\)!|terminate called|Segmentation fault|.*\bcore"
    r" dumped\b|Killed$)"
)


@dataclass
class ErrorBlock:
    """One error: its lines, its host and rank, and its time (ms since 1970)."""

    host: str
    at: int
    lines: list[str] = field(default_factory=list)
    rank: int | None = None
    exit_code: int | None = None
    summary: bool = False
    """True for torchrun's report about one of its processes."""
    closed: bool = False

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


class _Reader:
    def __init__(self, host: str) -> None:
        self.host = host
        self.blocks: list[ErrorBlock] = []
        self._open: dict[int | None, ErrorBlock] = {}
        self._root: ErrorBlock | None = None

    def read(self, line: Line) -> None:
        ranked = _RANK.match(line.text)
        rank = (
            next((int(n) for n in ranked.groups()[:3] if n is not None), None) if ranked else None
        )
        body = ranked[4] if ranked else line.text
        if rank is None and self._of_torchrun(line, body):
            return
        block = self._open.get(rank)
        if block and self._goes_on(block, body):
            return
        if _BEGIN in body:
            self._begin(line, rank, body)
        elif ours := _OURS.match(body):
            self._own_words(line, ours)
        elif _BAREST.match(body):
            self._begin(line, rank, body).closed = True

    def _begin(self, line: Line, rank: int | None, body: str) -> ErrorBlock:
        block = ErrorBlock(self.host, line.timestamp, [body], rank)
        self._open[rank] = block
        self.blocks.append(block)
        return block

    def _goes_on(self, block: ErrorBlock, body: str) -> bool:
        """True if the line belongs to this traceback; lines of other ranks may be in between."""
        chained = block.lines[-1].startswith(_CHAIN)
        if body.startswith(_CHAIN):
            block.closed = False
        elif block.closed:
            return False
        elif _ERROR.match(body) and not chained:
            block.closed = True
        elif not (body.startswith(_BEGIN) and chained) and (
            body[:1] not in (" ", "\t") or _BEGIN in body
        ):
            return False
        if body.strip():
            block.lines.append(body)
        return True

    def _own_words(self, line: Line, ours: re.Match[str]) -> None:
        """`algo-2, rank 5: ValueError: ...` names the rank of that traceback; else it is a separate
        error.
        """
        rank = int(ours[2]) if ours[2] else None
        for block in reversed(self.blocks):
            if block.lines[-1].strip() == ours[3].strip() and block.rank in (None, rank):
                block.rank = rank
                return
        self.blocks.append(ErrorBlock(ours[1], line.timestamp, [ours[3]], rank, closed=True))

    def _of_torchrun(self, line: Line, body: str) -> bool:
        if _ROOT.match(body):
            self._root = ErrorBlock(self.host, line.timestamp, [], summary=True, closed=True)
            self.blocks.append(self._root)
            return True
        if self._root is None:
            return False
        if body.startswith("====="):
            self._root = None
            return True
        if named := _FIELD.match(body):
            if named[1] == "rank":
                self._root.rank = int(named[2])
            else:
                self._root.exit_code = int(named[2])
        self._root.lines.append(body.strip())
        return True


def blocks_of(lines: Iterable[Line]) -> list[ErrorBlock]:
    """Every error in the lines, by the time it began; the lines must be in the order of time."""
    readers: dict[str, _Reader] = {}
    for line in lines:
        for text in line.text.split("\n"):
            readers.setdefault(line.host, _Reader(line.host)).read(
                Line(line.host, line.timestamp, text)
            )
    blocks = [block for reader in readers.values() for block in reader.blocks]
    return sorted((block for block in blocks if block.lines), key=lambda block: block.at)
