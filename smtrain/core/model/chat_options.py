"""A chat template's file and options: names that are reserved, and the JSON object that a person types."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from smtrain.core.errors import CheckpointError, ConfigError
from smtrain.core.files import parse_json, read_whole

RESERVED_NAMES = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Arguments of `apply_chat_template` that are no options of a template."""


def reserved_fault(names: Collection[str]) -> str | None:
    """A sentence about names that are no options of a template; None without any."""
    wrong = sorted(RESERVED_NAMES & set(names))
    if not wrong:
        return None
    return (
        f"{', '.join(wrong)}: not an option of a chat template; name variables that it reads, such"
        " as enable_thinking"
    )


def read_options(option: str, text: str | None) -> dict[str, Any]:
    """The options in a JSON object that was typed for `option`; {} for None.

    Raises `ConfigError`.
    """
    if text is None:
        return {}
    try:
        values = parse_json(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{option} {text}: is no JSON object; write it as '{{\"enable_thinking\": false}}'",
            code="config.wrong_value",
        )
    return checked_options(option, values)


def checked_options(option: str, values: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options as a dict. Raises `ConfigError` for names that are no options of a template."""
    if fault := reserved_fault(values or ()):
        raise ConfigError(f"{option}: {fault}", code="config.wrong_value")
    return dict(values or {})


def read_template(file: Path) -> str:
    """The chat template in a file. Raises `CheckpointError` if it cannot be read."""
    try:
        return read_whole(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CheckpointError(
            f"{file} cannot be read as a chat template ({reason}); name a file with one"
        ) from None
