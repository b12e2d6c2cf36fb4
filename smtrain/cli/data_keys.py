"""The columns of a data set as Megatron's and MindSpeed's tools name them: --json-keys, --map-keys."""

from __future__ import annotations

import json
from typing import Annotated, Optional

import typer

from smtrain.errors import ConfigError

OURS = ("messages", "conversations", "instruction", "input", "output", "system", "tools")
_THEIRS = {"prompt": "instruction", "query": "input", "response": "output"}
"""MindSpeed's words for ours."""

JsonKeys = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--json-keys", help="As Megatron calls --text-column.", show_default=False),
]
MapKeys = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--map-keys",
        help='sft: columns by other names, as \'{"prompt": "question", "response": "answer"}\'.',
        show_default=False,
    ),
]


def one_key(keys: list[str] | None, text_column: str) -> str:
    """The field of the text. Raises `ConfigError` where several are named, or one in two ways."""
    if not keys:
        return text_column
    if len(keys) > 1:
        raise ConfigError(
            [f"--json-keys {' '.join(keys)}: Megatron makes a data set of each; prepare them one by one, or put them "
             "into one text with --text-column '{title} {text}'"]
        )  # fmt: skip
    if text_column != "text":
        raise ConfigError([f"--json-keys {keys[0]}, --text-column {text_column}: both name the text; leave one out"])
    return keys[0]


def renamed(map_keys: str | None, objective: str) -> dict[str, str]:
    """Our columns by those of the data set, {ours: theirs}. Raises `ConfigError` where it is not that."""
    if map_keys is None:
        return {}
    if objective != "sft":
        raise ConfigError(["--map-keys: is for --objective sft; name the field of the text with --text-column"])
    try:
        given = json.loads(map_keys)
    except ValueError:
        given = None
    if not isinstance(given, dict) or not all(isinstance(value, str) and value for value in given.values()):
        raise ConfigError(
            [f"--map-keys {map_keys}: is no JSON object of names; write such as "
             '\'{"prompt": "question", "response": "answer"}\'']
        )  # fmt: skip
    columns: dict[str, str] = {}
    for name, theirs in given.items():
        ours = _THEIRS.get(name, name)
        if ours not in OURS:
            raise ConfigError([f"--map-keys: {name!r} is no column; use {', '.join((*_THEIRS, *OURS))}"])
        if ours in columns:
            raise ConfigError([f"--map-keys: {name!r} is {ours}, which is named twice; leave one of them out"])
        columns[ours] = theirs
    return columns
