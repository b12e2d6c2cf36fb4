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
_HOST_ERROR = re.compile(r"^(algo-\d+)(?:, rank (\d+))?: (.+)$")
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
    is_complete: bool = False

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
        rank_match = _RANK.match(line.text)
        rank = (
            next((int(n) for n in rank_match.groups()[:3] if n is not None), None)
            if rank_match
            else None
        )
        body = rank_match[4] if rank_match else line.text
        if rank is None and self._of_torchrun(line, body):
            return
        block = self._open.get(rank)
        if block and self._extends_block(block, body):
            return
        if _BEGIN in body:
            self._begin(line, rank, body)
        elif host_error := _HOST_ERROR.match(body):
            self._own_words(line, host_error)
        elif _BAREST.match(body):
            self._begin(line, rank, body).is_complete = True

    def _begin(self, line: Line, rank: int | None, body: str) -> ErrorBlock:
        block = ErrorBlock(self.host, line.timestamp, [body], rank)
        self._open[rank] = block
        self.blocks.append(block)
        return block

    def _extends_block(self, block: ErrorBlock, body: str) -> bool:
        """True if the line belongs to this traceback; lines of other ranks may be in between."""
        is_chained = block.lines[-1].startswith(_CHAIN)
        if body.startswith(_CHAIN):
            block.is_complete = False
        elif block.is_complete:
            return False
        elif _ERROR.match(body) and not is_chained:
            block.is_complete = True
        elif not (body.startswith(_BEGIN) and is_chained) and (
            body[:1] not in (" ", "\t") or _BEGIN in body
        ):
            return False
        if body.strip():
            block.lines.append(body)
        return True

    def _own_words(self, line: Line, host_error: re.Match[str]) -> None:
        """`algo-2, rank 5: ValueError: ...` names the rank of that traceback; else it is a separate
        error.
        """
        rank = int(host_error[2]) if host_error[2] else None
        for block in reversed(self.blocks):
            if block.lines[-1].strip() == host_error[3].strip() and block.rank in (None, rank):
                block.rank = rank
                return
        self.blocks.append(
            ErrorBlock(host_error[1], line.timestamp, [host_error[3]], rank, is_complete=True)
        )

    def _of_torchrun(self, line: Line, body: str) -> bool:
        if _ROOT.match(body):
            self._root = ErrorBlock(self.host, line.timestamp, [], summary=True, is_complete=True)
            self.blocks.append(self._root)
            return True
        if self._root is None:
            return False
        if body.startswith("====="):
            self._root = None
            return True
        if field_match := _FIELD.match(body):
            if field_match[1] == "rank":
                self._root.rank = int(field_match[2])
            else:
                self._root.exit_code = int(field_match[2])
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
