"""Conversations from records of instruction data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from smtrain.core.config.data import Column
from smtrain.core.errors import DataError
from smtrain.worker.data.read.ignored_fields import IgnoredText, ignored_fields
from smtrain.worker.data.read.record_fields import (
    ANSWER_LABELS,
    MEDIA_FIELDS,
    PAIRS,
    objective_remedy,
    record_fields,
)
from smtrain.worker.data.tokenize.template_options import option_fields, read_options
from smtrain.worker.data.tokenize.turns import RecordFault, clean, read_tools, read_turns

Shape = Literal["auto", "alpaca", "messages"]
COLUMNS = tuple(
    name
    for name in record_fields("prompt", "learned", "refused", "counted", "option")
    if not any(name in pair for pair in PAIRS)  # a table with both columns is refused
)
"""Every column of a table to read, refuse or count."""
MAPPABLE_COLUMNS: tuple[str, ...] = tuple(name for name in get_args(Column) if name in COLUMNS)
"""The columns of a conversation that `data.columns` may name."""
_COUNTED_FIELDS = record_fields("counted", "option")
_LISTS = ("messages", "conversations")


@dataclass(frozen=True)
class Dialogue:
    """Messages {role, content} that end in an answer, and the tools that a template may list.

    `options` are further values for the template, each with its field of the record.
    `skipped_turns` are indices of turns that are not learned. `read` names the fields of the record
    that are used, `column` the field of the turns; `ignored_text` counts unused text of the turns.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    skipped_turns: frozenset[int] = frozenset()
    read: frozenset[str] = field(default=frozenset(), compare=False)
    column: str = field(default="messages", compare=False)
    ignored_text: IgnoredText = field(default_factory=IgnoredText, compare=False)
    options: Mapping[str, tuple[str, Any]] = field(default_factory=dict)


def map_columns(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A record as `rename_columns` returns it.

    Raises DataError for a pair of preferences if no answer is named: as a conversation it would
    teach the wrong text.
    """
    if not columns and not any(row.get(worse) is not None for _, worse in PAIRS):
        return row
    refuse_pairs([name for name, value in row.items() if value is not None], columns)
    return rename_columns(row, columns)


def rename_columns(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A record with the columns of `columns` {our name: its name} under our names."""
    mapped_values = {target: row.get(column) for target, column in columns.items()}
    return {
        name: value for name, value in row.items() if name not in columns.values()
    } | mapped_values


def refuse_pairs(names: Collection[str], columns: Mapping[str, str]) -> None:
    """Refuse pairs of preferences, unless `columns` names the answer to learn. Raises DataError."""
    for pair in PAIRS:
        if all(name in names for name in pair) and not any(
            name in columns.values() for name in pair
        ):
            raise DataError(
                f"its records are pairs of preferences ({', '.join(pair)}), which train.objective:"
                f" dpo learns from; to learn only the {pair[0]} answers, name them in data.columns:"
                f" {{messages: {pair[0]}}} if they are lists of messages, {{instruction: prompt,"
                f" output: {pair[0]}}} if they are text."
            )


def conversation(row: dict[str, Any], shape: Shape = "auto") -> Dialogue:
    """The conversation of a record: `messages` {role, content}, `conversations` {from, value}, or
    alpaca's fields.

    Turns after the last answer are left out, and counted. Raises RecordFault.
    """
    flags = _refuse(row)
    name = next((n for n in ("tools", "functions") if row.get(n)), "")
    tools = read_tools(row[name], name) if name else None
    options = read_options(row)
    read = {*flags, *option_fields(options), *([name] if name else [])}
    column = next((c for c in _LISTS if row.get(c) is not None), "") if shape != "alpaca" else ""
    system = _text(row, "system")
    if column:
        turns = read_turns(row[column], column)
        first, skipped_turns = turns.messages[0], turns.skipped_turns
        messages = turns.messages
        if first["role"] not in ("system", "developer") and system:
            messages = [{"role": "system", "content": system}, *messages]
            skipped_turns = frozenset(i + 1 for i in skipped_turns)
            read.add("system")
        elif first.get("content") == system:
            read.add("system")
        return Dialogue(
            messages,
            tools,
            skipped_turns,
            frozenset({column, *read}),
            column,
            turns.ignored_text,
            options,
        )
    if shape != "messages" and row.get("instruction") is not None:
        question = "\n\n".join(
            part for part in (_text(row, "instruction"), _text(row, "input")) if part
        )
        answer = _text(row, "output")
        if not question or not answer:
            raise RecordFault(f"an empty {'output' if question else 'instruction'}")
        texts = [*_history(row.get("history")), question, answer]
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
        ]
        system_turns = [{"role": "system", "content": system}] if system else []
        fields = {"instruction", "input", "output", "system", "history", *read}
        return Dialogue([*system_turns, *messages], tools, read=frozenset(fields), options=options)
    expected_columns = {"alpaca": "instruction", "messages": "messages or conversations"}.get(
        shape, "messages, conversations or instruction"
    )
    raise RecordFault(
        f"no column {expected_columns}, only {', '.join(map(repr, row)) or 'nothing'}"
        f"{objective_remedy(row, 'sft')}"
    )


def ignored_fields_of(
    row: Mapping[str, Any], dialogue: Dialogue, columns: Mapping[str, str]
) -> list[str]:
    """The fields of a record that its conversation does not use: those with text, and those that a
    form documents.
    """
    read = {columns.get(name, name) for name in dialogue.read}
    counted_fields = [
        name
        for name in _COUNTED_FIELDS
        if name not in read and row.get(name) not in (None, "", [], {})
    ]
    return list(dict.fromkeys([*ignored_fields(row, read), *counted_fields]))


def _refuse(row: Mapping[str, Any]) -> list[str]:
    """The fields that mark the answer as wanted.

    Raises RecordFault for an unwanted answer, or for images and sound.
    """
    for name in MEDIA_FIELDS:
        if row.get(name):
            raise RecordFault(
                f"{name!r} is not read, as the model reads text only; leave out records with it"
            )
    flags = []
    for name in ANSWER_LABELS:
        value = row.get(name)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"
        if value is False:
            raise RecordFault(
                f"{name!r} is false, which marks an unwanted answer; leave such records out"
            )
        flags += [name] if value is True else []
    return flags


def _history(value: Any) -> list[str]:
    """Earlier questions and answers, alternating. Raises RecordFault."""
    if not value:
        return []
    pairs: list[Any] = value if isinstance(value, list) else [None]
    if not all(
        isinstance(p, list) and len(p) == 2 and all(isinstance(t, str) and t for t in p)
        for p in pairs
    ):
        raise RecordFault("'history' is not a list of pairs [question, answer]")
    return [clean(text) for pair in pairs for text in pair]


def _text(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise RecordFault(f"{column!r} is {type(value).__name__}, not a string")
    return clean(value or "")
