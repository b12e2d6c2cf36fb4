"""Pairs of preferences from records, in every usual form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from smtrain.worker.data.read.record_fields import MEDIA_FIELDS, PAIRS, objective_remedy
from smtrain.worker.data.tokenize.template_options import (
    KWARGS,
    OPTIONS,
    option_fields,
    read_options,
)
from smtrain.worker.data.tokenize.turns import RecordFault, clean, read_message, read_tools

Turns = list[dict[str, Any]]
PROMPTS = ("prompt", "instruction", "messages", "conversations", "input")
"""Fields of the prompt, in the order in which they are looked for; `input` is OpenAI's, or a part
of an instruction.
"""
COLUMNS = (
    *PROMPTS,
    "system",
    "tools",
    "functions",
    KWARGS,
    *OPTIONS,
    *PAIRS[0],
    *PAIRS[1],
    *MEDIA_FIELDS,
)
"""Every column of a table to read or refuse."""


@dataclass(frozen=True)
class Preference:
    """A prompt with a better and a worse answer: three texts, or three lists of messages."""

    prompt: str | Turns
    chosen: str | Turns
    rejected: str | Turns
    tools: list[Any] | None = None
    options: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Values for the chat template, each with its field."""
    read: frozenset[str] = frozenset()
    """The fields of the record that are used."""


def preference(row: dict[str, Any]) -> Preference:
    """The pair of a record. Raises RecordFault."""
    for name in MEDIA_FIELDS:
        if row.get(name):
            raise RecordFault(
                f"{name!r} is not read, as the model reads text only; leave out records with it"
            )
    names = next((pair for pair in PAIRS if all(row.get(name) is not None for name in pair)), None)
    if names is None:
        present_columns = [repr(name) for name, value in row.items() if value is not None]
        raise RecordFault(
            f"no columns chosen and rejected, only {', '.join(present_columns) or 'nothing'}"
            f"{objective_remedy(row, 'dpo')}"
        )
    chosen, rejected = (_answer(row[name], name) for name in names)
    prompt, read = _prompt(row)
    if isinstance(prompt, str) and isinstance(
        chosen, list
    ):  # the text of a conversation's first question
        prompt = [{"role": "user", "content": prompt}] if chosen[0]["role"] == "assistant" else None
    elif (
        isinstance(prompt, list) and prompt and chosen[: len(prompt)] == prompt
    ):  # the answers repeat the prompt
        prompt = None
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise RecordFault(f"{names[0]!r} and {names[1]!r} are not both text or both messages")
    if isinstance(prompt, list) and isinstance(chosen, str) and isinstance(rejected, str):
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
    if prompt is None:
        prompt, chosen, rejected = _split_prompt(chosen, rejected)
    if _is_repeated(row, prompt, chosen):
        read = {*read, "messages"}
    if isinstance(prompt, str):
        return Preference(prompt, chosen, rejected, read=frozenset({*names, *read}))
    return _conversation(row, prompt, chosen, rejected, {*names, *read})


def _is_repeated(row: dict[str, Any], prompt: Any, chosen: Any) -> bool:
    """Whether `messages` is the chosen conversation a second time, as UltraFeedback has it."""
    if not isinstance(prompt, list) or not isinstance(row.get("messages"), list):
        return False
    try:
        return bool(_turns(row["messages"], "messages") == [*prompt, *chosen])
    except RecordFault:  # it is not needed
        return False


def _conversation(
    row: dict[str, Any], prompt: Turns, chosen: Any, rejected: Any, read: set[str]
) -> Preference:
    """A pair of messages, with what the record has for the template."""
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not any(turn["role"] == "assistant" for turn in answer):
            raise RecordFault(f"{name!r} has no answer of the assistant")
    system = row.get("system")
    if (
        isinstance(system, str)
        and system
        and (not prompt or prompt[0]["role"] not in ("system", "developer"))
    ):
        prompt = [{"role": "system", "content": clean(system)}, *prompt]
        read.add("system")
    if not prompt:
        raise RecordFault(
            "the two conversations have no common beginning, which would be the prompt"
        )
    tools, options = None, read_options(row)
    if name := next((n for n in ("tools", "functions") if row.get(n)), ""):
        tools = read_tools(row[name], name)
        read.add(name)
    elif isinstance(row.get("input"), dict) and row["input"].get("tools"):
        tools = read_tools(row["input"]["tools"], "input.tools")
    return Preference(
        prompt, chosen, rejected, tools, options, frozenset({*read, *option_fields(options)})
    )


def _answer(value: Any, name: str) -> str | Turns:
    if isinstance(value, str):
        return clean(value)
    turns = _turns([value] if isinstance(value, dict) else value, name)
    if not turns:
        raise RecordFault(f"{name!r} is an empty list")
    return turns


def _turns(value: Any, name: str) -> Turns:
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise RecordFault(f"{name!r} is {type(value).__name__}, not text or a list of messages")
    try:
        return [
            read_message(turn, number, "messages") for number, turn in enumerate(value, start=1)
        ]
    except RecordFault as fault:
        raise RecordFault(f"{name!r}: {fault}") from None


def _prompt(row: dict[str, Any]) -> tuple[str | Turns | None, set[str]]:
    """The prompt and its fields; None if the answers contain it."""
    value = row.get("prompt")
    if isinstance(value, str):
        return clean(value), {"prompt"}
    if value is not None and value != []:
        return _turns(value, "prompt"), {"prompt"}
    if isinstance(row.get("instruction"), str):
        extra_input = row.get("input")
        parts = [row["instruction"], extra_input if isinstance(extra_input, str) else ""]
        return [{"role": "user", "content": clean("\n\n".join(filter(None, parts)))}], {
            "instruction",
            "input",
        }
    if isinstance(row.get("input"), dict) and row["input"].get("messages"):
        return _turns(row["input"]["messages"], "input.messages"), {"input"}
    for name in ("conversations", "messages"):
        if row.get(name) and not isinstance(row.get("chosen"), list):
            return _turns(row[name], name), {name}
        if row.get(name):  # UltraFeedback has the chosen conversation a second time
            turns = _turns(row[name], name)
            return (None, set()) if turns[-1]["role"] == "assistant" else (turns, {name})
    return None, set()


def _split_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """The common beginning of two texts or lists of messages, and what follows it in each, as TRL
    parts them.

    If one begins with the other, the last common part still belongs to the answers; so does a space
    before the first difference.
    """
    shorter = min(len(chosen), len(rejected))
    at = next((i for i in range(shorter) if chosen[i] != rejected[i]), max(0, shorter - 1))
    if at and chosen[at] != rejected[at] and chosen[at - 1] == " ":
        at -= 1
    return chosen[:at], chosen[at:], rejected[at:]
