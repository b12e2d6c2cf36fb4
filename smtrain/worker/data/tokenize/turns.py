"""Turns of a conversation in one form: `role`, `content` and other fields that a template may
read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from smtrain.core.files import parse_json
from smtrain.worker.data.read.ignored_fields import IgnoredText
from smtrain.worker.data.read.record_fields import turn_fields

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Every role name that the forms document."""
_NATIVE = ("observation",)
"""Roles of OpenAI's form that some templates know by this name."""
AFTER_LAST_ANSWER = "turns after the last answer"
_KEYS = {
    "messages": (("role", "from"), ("content", "value")),
    "conversations": (("from", "role"), ("value", "content")),
}
_HEADINGS = re.compile(
    r"^\s*(?:Human|User|Observation)\s*:\s|^\s*#{2,}\s*(?:Human|User|Instruction|Input)\s*:?\s*$|\[INST\]"
    r"|<\|im_start\|>\s*(?:user|tool)|<\|start_header_id\|>\s*(?:user|ipython)|<start_of_turn>\s*user"
    r"|<\|turn>\s*user|<\|start\|>\s*(?:user|functions)|<\|(?:user|tool|observation)\|>|<｜User｜>"
    r"|<\|USER_TOKEN\|>|<tool_response>|\[TOOL_RESULTS\]|<｜tool▁outputs▁begin｜>",
    re.MULTILINE,
)
"""Headings of a user's turn or of a tool's result in published templates and data sets."""
_SWITCHES, _REFUSED_FIELDS = turn_fields("decides"), turn_fields("refused")


class RecordFault(Exception):  # noqa: N818 - a property of the data, reported with its line
    """A reason why a record cannot be learned from."""


@dataclass(frozen=True)
class Turns:
    """Messages up to the last answer, the indices of skipped answers, and counts of what is not
    read.
    """

    messages: list[dict[str, Any]]
    skipped_turns: frozenset[int]
    ignored_text: IgnoredText


def read_turns(turns: Any, column: str) -> Turns:
    """The turns in `column` (messages or conversations). Raises RecordFault."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise RecordFault(f"{column!r} is not a list of objects")
    ignored_text, skipped_turns = IgnoredText(), set()
    messages: list[dict[str, Any]] = []
    idle: set[str] = set()  # switches that are on in turns that are no answers
    for number, turn in enumerate(turns, start=1):
        message = read_message(turn, number, column)
        switches = _switches(turn, number)
        if message["role"] != "assistant":
            idle |= {f"{column}[].{name}" for name, on in switches.items() if on}
        elif not all(switches.values()):
            skipped_turns.add(len(messages))
        messages.append(message)
    first_question = next(
        (i for i, message in enumerate(messages) if message["role"] == "user"), len(messages)
    )
    last = max(
        (i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1
    )
    if last < first_question:
        raise RecordFault("no answer of the assistant to a user")
    ignored_text.count(sorted(idle))
    if trailing_turns := len(messages) - last - 1:
        ignored_text.count({AFTER_LAST_ANSWER: trailing_turns})
    return Turns(messages[: last + 1], frozenset(skipped_turns), ignored_text)


def read_message(turn: dict[str, Any], number: int, column: str) -> dict[str, Any]:
    """Turn `number` of `column` (messages or conversations), in the form of templates.

    Raises RecordFault.
    """
    role_key, content_key = (
        next((k for k in keys if turn.get(k) is not None), keys[0]) for keys in _KEYS[column]
    )
    name = turn.get(role_key)
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if isinstance(name, str) and role_key == "role" and (role is None or name in _NATIVE):
        role = name  # the template may know it
    if role is None:
        raise RecordFault(f"turn {number} has {role_key} {name!r}, which is no known role")
    for field in _REFUSED_FIELDS:
        if turn.get(field):
            raise RecordFault(
                f"turn {number} has {field}, which is not read: say train of the whole turn"
            )
    left_out = (role_key, content_key, *_SWITCHES, *_REFUSED_FIELDS, "function_call")
    other_fields = {k: v for k, v in turn.items() if k not in left_out and v is not None}
    for field, value in other_fields.items():
        refuse_no_json(value, f"turn {number}: {field}")
    content = _content(turn.get(content_key))
    if isinstance(name, str) and name.lower() == "function_call":
        other_fields["tool_calls"], content = (
            _calls(read_json(content, f"turn {number}"), number),
            None,
        )
    elif turn.get("function_call"):
        other_fields["tool_calls"] = _calls(turn["function_call"], number)
    elif other_fields.get("tool_calls"):
        other_fields["tool_calls"] = _calls(
            read_json(other_fields["tool_calls"], f"turn {number}: tool_calls"), number
        )
    if content is None and not other_fields.get("tool_calls"):
        raise RecordFault(f"turn {number} has no text in {content_key!r}")
    return {
        "role": role,
        **({} if content is None else {"content": clean(content)}),
        **other_fields,
    }


def holds_other_turns(answer: str) -> bool:
    """Whether a text answer holds the heading of a turn of a user or of a tool, after its
    beginning.
    """
    return _HEADINGS.search(answer) is not None


def _switches(turn: dict[str, Any], number: int) -> dict[str, bool]:
    """The switches of a turn that decide whether it is learned, by the field's name."""
    switches = {}
    for name in _SWITCHES:
        value = turn.get(name)
        if value is None:
            continue
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise RecordFault(
                f"turn {number} has {name} {value!r}; it must be 0 or 1 (false or true)"
            )
        switches[name] = bool(value)
    return switches


def _calls(calls: Any, number: int) -> list[Any]:
    """Calls of functions in the form of templates, from OpenAI's and LLaMA-Factory's; arguments are
    objects.
    """
    call_list = [
        read_json(call, f"turn {number}: a call")
        for call in (calls if isinstance(calls, list) else [calls])
    ]
    if not all(isinstance(call, dict) for call in call_list):
        raise RecordFault(
            f"turn {number} calls a function and is no object with name and arguments"
        )
    return [_call(call) for call in call_list]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    if "function" not in call and "name" in call:
        call = {"type": "function", "function": call}
    return _with_object(call, "arguments")


def _with_object(outer: dict[str, Any], key: str) -> dict[str, Any]:
    """A call or tool whose `function` has an object under `key`, also if it is written as JSON
    within JSON.
    """
    inner = outer.get("function")
    if not isinstance(inner, dict) or not isinstance(inner.get(key), str):
        return outer
    try:
        value = parse_json(inner[key])
        value = parse_json(value) if isinstance(value, str) else value
    except ValueError:
        return outer
    return {**outer, "function": {**inner, key: value}} if isinstance(value, dict) else outer


def call_forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages in each form of calls that templates are written for, the usual one first.

    A call without text has no content, null, or an empty one. Arguments are objects, or JSON in a
    string as OpenAI sends them.
    """
    contents: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}]
    for content, as_text in product(contents, (False, True)):
        yield [_with_call(m, content, as_text) for m in messages]


def _with_call(message: dict[str, Any], content: dict[str, Any], as_text: bool) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [_as_text(call) if as_text else call for call in message["tool_calls"]]
    return {
        **({} if message.get("content") is not None else content),
        **message,
        "tool_calls": calls,
    }


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    inner = call.get("function")
    if not isinstance(inner, dict) or not isinstance(inner.get("arguments"), dict):
        return call
    return {
        **call,
        "function": {**inner, "arguments": json.dumps(inner["arguments"], ensure_ascii=False)},
    }


def read_tools(value: Any, name: str) -> list[Any] | None:
    """Functions in the form of templates, or None. Raises RecordFault."""
    tool_list = read_json(value, repr(name)) if value else None
    if not tool_list:
        return None
    tool_list = [
        read_json(tool, repr(name))
        for tool in (tool_list if isinstance(tool_list, list) else [tool_list])
    ]
    if not all(isinstance(tool, dict) for tool in tool_list):
        raise RecordFault(f"{name!r} is not a list of objects")
    refuse_no_json(tool_list, repr(name))
    tools = [
        {"type": "function", "function": t} if "name" in t and "function" not in t else t
        for t in tool_list
    ]
    return [_with_object(tool, "parameters") for tool in tools]


def read_json(value: Any, label: str) -> Any:
    """A value, or what JSON in a string says; None for an empty string. Raises RecordFault."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except ValueError:
        raise RecordFault(f"{label} is text and not JSON") from None


def refuse_no_json(value: Any, label: str) -> None:
    """Refuse times, decimals and bytes of tables, of which a template would write the type's name.

    Raises RecordFault.
    """
    if isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            refuse_no_json(inner, label)
    elif not isinstance(value, (str, int, float, type(None))):
        raise RecordFault(
            f"{label} has a value of type {type(value).__name__}, which JSON does not have; save it"
            " as text"
        )


def _content(value: Any) -> str | None:
    if isinstance(value, list) and all(
        isinstance(p, dict) and isinstance(p.get("text"), str) for p in value
    ):
        return "".join(part["text"] for part in value)  # OpenAI's text parts
    return value if isinstance(value, str) else None


def clean(text: str) -> str:
    """Return the text unchanged. Raises RecordFault if it is not valid."""
    try:
        text.encode()  # JSON can contain half a surrogate pair, which no tokenizer accepts
    except UnicodeEncodeError:
        raise RecordFault("half a surrogate pair, which is not text") from None
    return text
