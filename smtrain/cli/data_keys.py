"""Options --json-keys and --map-keys: columns under the names of Megatron and MindSpeed."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from smtrain.core.errors import ConfigError
from smtrain.core.files import parse_json

_MINDSPEED_NAMES = {"prompt": "instruction", "query": "input", "response": "output"}
"""MindSpeed's names of our columns."""
_TAGS = {
    "role_tag": ("role", "from"),
    "content_tag": ("content", "value"),
    "user_tag": ("user", "human"),
    "assistant_tag": ("assistant", "gpt", "chatgpt", "model"),
    "system_tag": ("system",),
    "observation_tag": ("observation", "tool", "function"),
    "function_tag": ("function_call",),
}
"""Names of a turn's fields and roles that MindSpeed's `tags` may choose; all of them are read."""

JsonKeys = Annotated[
    list[str] | None, typer.Option("--json-keys", help="As Megatron calls --text-column.")
]
MapKeys = Annotated[
    str | None,
    typer.Option(
        "--map-keys",
        help=(
            'sft, dpo: columns by other names, as \'{"prompt": "question", "response": "answer"}\'.'
        ),
    ),
]


def one_key(keys: list[str] | None, text_column: str) -> str:
    """The field of the text.

    Raises `ConfigError` for several fields, or for one that two options name.
    """
    if not keys:
        return text_column
    if len(keys) > 1:
        raise ConfigError(
            f"--json-keys {' '.join(keys)}: Megatron makes a data set of each; prepare them one by"
            " one, or put them into one text with --text-column '{title} {text}'",
            code="config.wrong_value",
        )
    if text_column != "text":
        raise ConfigError(
            f"--json-keys {keys[0]}, --text-column {text_column}: both name the text; leave"
            " one out",
            code="config.combination",
        )
    return keys[0]


def read_column_map(map_keys: str | None, objective: str) -> dict[str, str]:
    """The data set's columns by ours, {ours: theirs}. Raises `ConfigError` for other JSON."""
    if map_keys is None:
        return {}
    if objective == "pretrain":
        raise ConfigError(
            "--map-keys: is for --objective sft; name the field of the text with --text-column",
            code="config.combination",
        )
    try:
        mapping = parse_json(map_keys)
    except ValueError:
        mapping = None
    tags = mapping.pop("tags", {}) if isinstance(mapping, dict) else {}
    _refuse_tags(tags)
    if not isinstance(mapping, dict) or not all(
        isinstance(value, str) for value in mapping.values()
    ):
        raise ConfigError(
            f"--map-keys {map_keys}: is no JSON object of names; write such as "
            '\'{"prompt": "question", "response": "answer"}\'',
            code="config.wrong_value",
        )
    from smtrain.core.config.data import ANSWER_COLUMNS, PAIR_COLUMNS, Column

    foreign = PAIR_COLUMNS if objective == "sft" else ANSWER_COLUMNS
    ours_all = [name for name in get_args(Column) if name not in foreign]
    our_names: dict[str, str] = _MINDSPEED_NAMES if objective == "sft" else {}
    columns: dict[str, str] = {}
    for name, column in mapping.items():
        our_column = our_names.get(str(name), str(name))
        if our_column not in ours_all:
            raise ConfigError(
                f"--map-keys: {name!r} is no column; use {', '.join((*our_names, *ours_all))}",
                code="config.wrong_value",
            )
        if our_column in columns:
            raise ConfigError(
                f"--map-keys: {name!r} is {our_column}, which is named twice; leave one of"
                " them out",
                code="config.wrong_value",
            )
        columns[our_column] = column
    return {our_column: column for our_column, column in columns.items() if column}


def _refuse_tags(tags: object) -> None:
    """Raise `ConfigError` for an unread field or role of a turn."""
    for name, value in tags.items() if isinstance(tags, dict) else [("tags", tags)]:
        if value not in _TAGS.get(name, ()):
            remedy = (
                f"write {' or '.join(_TAGS[name])}" if name in _TAGS else f"use {', '.join(_TAGS)}"
            )
            raise ConfigError(
                f"--map-keys: tags: {name} {value!r} is not read; {remedy} in the records, and"
                " here",
                code="config.wrong_value",
            )
