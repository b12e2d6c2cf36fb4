"""The blocks of a page that can be run: ```console and ```python, in the order of the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = ("console", "python")
SHOWN = ("text", "yaml", "json", "toml", "")  # any other tag would be code that no test runs
_FENCE = re.compile(r"^( *)```(\S*)$")
_EXITS = re.compile(r"  # exits (\d+)$")


@dataclass(frozen=True)
class Block:
    """A fenced block: its tag, its first line's number in the page, its text."""

    tag: str
    line: int
    text: str


@dataclass(frozen=True)
class Command:
    """A line after `$ `, and the exit status that the page states."""

    line: int
    text: str
    status: int


def pages() -> list[Path]:
    return sorted((ROOT / "docs").rglob("*.md"))


def blocks(page: Path) -> Iterator[Block]:
    tag, start, indent = None, 0, ""
    held: list[str] = []
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if tag is None and fence:
            indent, tag, start, held = (
                fence[1],
                fence[2],
                number + 1,
                [],
            )  # a block of a tab is indented
        elif tag is not None and line == f"{indent}```":
            yield Block(tag, start, "\n".join(held))
            tag = None
        elif tag is not None:
            held.append(line.removeprefix(indent))
    assert tag is None, f"{page.name}: the block of line {start} has no end"


def commands(block: Block) -> Iterator[Command]:
    """The commands of a console block; a backslash at the end of a line continues it."""
    lines = iter(enumerate(block.text.splitlines(), block.line))
    for number, line in lines:
        if not line.startswith("$ "):
            continue
        text = line.removeprefix("$ ")
        while text.endswith("\\"):
            text = f"{text[:-1].rstrip()} {next(lines)[1].lstrip()}"
        promised = _EXITS.search(text)
        yield Command(number, _EXITS.sub("", text), int(promised[1]) if promised else 0)
