"""Prompts out of files: a line each of text, or a record each of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smtrain.core.errors import DataError, first_line
from smtrain.core.near import near_path

FIELDS = ("prompt", "messages", "instruction", "question", "text")
"""Where a record's prompt is looked for, in this order."""


@dataclass(frozen=True)
class Prompt:
    """What to continue, or a conversation to answer; `record` is what its file said beside."""

    text: str = ""
    messages: tuple[dict[str, str], ...] = ()
    record: dict[str, Any] = field(default_factory=dict)

    def shown(self, chat: bool) -> str:
        """What to show before what follows: on the same line where text is continued, else above it."""
        said = self.messages[-1]["content"] if self.messages else self.text
        return f"{said}\n" if chat or self.messages else said


def read_prompts(sources: Sequence[str | Path], texts: Iterable[str] = ()) -> list[Prompt]:
    """The prompts of .txt files (a line each, empty ones left out) and .jsonl files, after those given as text.

    Raises `DataError` for a file that cannot be read, a record without a prompt, and where there are none at all.
    """
    found = [Prompt(text=text) for text in texts]
    for source in sources:
        path = Path(source).expanduser()
        if path.is_dir():
            raise DataError(f"{source} is a folder; name a .txt or .jsonl file of prompts")
        try:
            content = path.read_text("utf-8")
        except OSError as error:
            near = near_path(source) if isinstance(error, FileNotFoundError) else ""
            raise DataError(f"{source} cannot be read ({error.strerror}); {near}name a .txt or .jsonl file") from None
        except UnicodeDecodeError:
            raise DataError(f"{source} is not UTF-8 text; name a .txt or .jsonl file of prompts") from None
        lines = [(number, line) for number, line in enumerate(content.split("\n"), start=1) if line.strip()]
        if path.suffix in (".jsonl", ".json"):
            found += [_of_record(line, f"{source}:{number}") for number, line in lines]
        else:
            found += [Prompt(text=line.rstrip("\r")) for _, line in lines]
    if not found:
        what = f"{', '.join(map(str, sources))} holds no prompts" if sources else "there are no prompts"
        raise DataError(f"{what}; name a .txt or .jsonl file with some, or give --prompt TEXT (prompts=)")
    if any(not prompt.text and not prompt.messages for prompt in found):
        raise DataError("a prompt is empty; give at least one character")
    return found


def _of_record(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is not JSON ({first_line(error)}); correct the line, or take it out") from None
    if isinstance(record, str):
        return Prompt(text=record)
    name = next((name for name in FIELDS if record.get(name)), None) if isinstance(record, dict) else None
    if name is None:
        raise DataError(f"{where}: has no prompt; a record has one of the fields {', '.join(FIELDS)}")
    value = record[name]
    if name == "messages":
        if not isinstance(value, list) or not all(
            isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
            for one in value
        ):
            raise DataError(f"{where}: messages is not a list of objects with role and content")
        return Prompt(messages=tuple(value), record=record)
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is not a string")
    return Prompt(text=value, record=record)
