"""Find text of a conversation that a chat template leaves out, changes, or writes outside what is
learned.

Templates cut thoughts (`content.split('</think>')[-1]`), strip, or skip fields. Each text of a turn
is looked for in the rendered text, longest first, and each place of the rendered text counts for
one of them. So a short thought is not mistaken for the same words in the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from smtrain.worker.data.read.ignored_fields import holds_text

Fate = Literal["written", "respaced", "seen", "lost"]
"""Found as it is, found with other white space, found outside the answers only, or not found as a
whole.
"""
LABELS = ("id", "name", "tool_call_id")
"""Fields of a turn that name it or a call; nothing in them is learned."""
GREETING = "answers before the first question (not learned)"
SPACE = "white space of answers"
SEEN_ONLY = "text of answers that is seen and not learned"
_PREFIX_CHARACTERS = 200
"""The most characters of an answer that its prompt may have written already, such as an opened
<think>.
"""
_USED = "\0"
"""Stands for a place that a text was found in; no tokenizer's text has it."""


@dataclass(frozen=True)
class Rendering:
    """A text, and (start, end) in characters of each answer to learn."""

    text: str
    answers: list[tuple[int, int]]


@dataclass(frozen=True)
class TurnText:
    """A text of turn `turn`: the whole content, or one string within another field."""

    turn: int
    field: str
    """The name of the field; of an id of a call `tool_calls[].id`."""
    text: str
    is_learned: bool
    """Whether it must be part of an answer to learn."""


def turn_texts(
    messages: Sequence[Mapping[str, Any]], learned_turns: Collection[int]
) -> list[TurnText]:
    """The texts of all turns; `learned_turns` has the indices of the answers to learn."""
    texts = []
    for i, message in enumerate(messages):
        for name, value in message.items():
            if name == "role" or not holds_text(value):
                continue
            must = i in learned_turns and name not in LABELS
            for field, text in _field_texts(name, value):
                texts.append(TurnText(i, field, text, must and field == name))
    return texts


def _field_texts(name: str, value: Any, inner: bool = False) -> Iterator[tuple[str, str]]:
    """(field, text) of every string in a value, and of the numbers and keys of a call's
    arguments.
    """
    if isinstance(value, str):
        yield from [(name, value)] if value else []
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _field_texts(name, item, inner)
    elif isinstance(value, dict):
        for key, item in value.items():
            if name == "tool_calls" and not inner and key == "type":
                continue  # "function", as all are
            if name == "tool_calls" and not inner and key == "id":
                yield from ((f"{name}[].id", text) for _, text in _field_texts(name, item))
                continue
            if inner:
                yield name, key
            yield from _field_texts(
                name, item, inner or (name == "tool_calls" and key == "arguments")
            )
    elif inner and isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, json.dumps(value)


class Places:
    """The rendered texts of a conversation, as places in which texts are found; each place is found
    once.
    """

    def __init__(self, renderings: Sequence[Rendering], change: Callable[[str], str] = str) -> None:
        self._change = change
        self._answers: list[tuple[str, str]] = []
        """The text before an answer, and the answer."""
        self._rest: list[str] = []
        for rendering in reversed(renderings):  # the last text has most turns
            at = 0
            for start, end in rendering.answers:
                self._rest.append(change(rendering.text[at:start]))
                at = end
            self._rest.append(change(rendering.text[at:]))
        for rendering in renderings:
            answers = (
                (rendering.text[max(0, a - _PREFIX_CHARACTERS) : a], rendering.text[a:b])
                for a, b in rendering.answers
            )
            self._answers += ((change(prefix), change(answer)) for prefix, answer in answers)

    def take(self, text: TurnText) -> Literal["answer", "rest"] | None:
        """Find one of the spellings of a text, and use up its place."""
        for spelling in map(self._change, _spellings(text.text)):
            if text.is_learned and self._take_answer(spelling, text.field == "content"):
                return "answer"
            if not text.is_learned and (
                self._take_rest(spelling) or self._take_answer(spelling, False)
            ):
                return "rest"
        if text.is_learned and any(map(self._take_rest, map(self._change, _spellings(text.text)))):
            return "rest"
        return None

    def _take_answer(self, text: str, can_start_in_prompt: bool) -> bool:
        """Find a text in an answer; `can_start_in_prompt`: its beginning may stand in the prompt,
        such as an opened <think>.
        """
        for i, (prefix, answer) in enumerate(self._answers):
            at = answer.find(text)
            if at >= 0:
                self._answers[i] = prefix, f"{answer[:at]}{_USED}{answer[at + len(text) :]}"
                return True
        for i, (prefix, answer) in enumerate(self._answers if can_start_in_prompt else ()):
            head = prefix[-len(text) :]
            at = f"{head}{answer}".find(text)
            if at >= 0 and (past := at + len(text) - len(head)) > 0:
                self._answers[i] = prefix, f"{_USED}{answer[past:]}"
                return True
        return False

    def _take_rest(self, text: str) -> bool:
        for i, piece in enumerate(self._rest):
            at = piece.find(text)
            if at >= 0:
                self._rest[i] = f"{piece[:at]}{_USED}{piece[at + len(text) :]}"
                return True
        return False


def fates(texts: Sequence[TurnText], renderings: Sequence[Rendering]) -> list[Fate]:
    """The fate of each text in what a template wrote."""
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i].text))
    places = Places(renderings)
    exact = {i: places.take(texts[i]) for i in order}
    if all(place == ("answer" if texts[i].is_learned else "rest") for i, place in exact.items()):
        return ["written"] * len(texts)
    # Again from the start: a short text may have been found within a long one that has other white
    # space.
    places = Places(renderings, _without_spaces)
    text_fates: list[Fate] = ["lost"] * len(texts)
    for i in order:
        place = places.take(replace(texts[i], text=texts[i].text.strip()))
        if place == "rest" and texts[i].is_learned:
            text_fates[i] = "seen"
        elif place:
            text_fates[i] = "written" if exact[i] == place else "respaced"
    return text_fates


def _spellings(text: str) -> Iterator[str]:
    """A text as a template may write it without loss: as it is, or as JSON, also as JSON in
    JSON.
    """
    yield text
    json_text = json.dumps(text, ensure_ascii=False)[1:-1]
    if json_text != text:
        yield json_text
        yield json.dumps(json_text, ensure_ascii=False)[1:-1]
    if not text.isascii():
        yield json.dumps(text)[1:-1]


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def unwritten_in(value: Any, texts: Sequence[str]) -> bool:
    """Whether a name, a description or another string of functions or documents is missing in all
    texts.
    """
    items = value if isinstance(value, list) else [value]
    for item in items:
        item_json = json.dumps(item, ensure_ascii=False)
        if any(item_json in text for text in texts):
            continue
        dense_texts = [_without_spaces(text) for text in texts]
        for text in _strings(item):
            spellings = [_without_spaces(spelling) for spelling in _spellings(text)]
            if not any(spelling in text for spelling in spellings for text in dense_texts):
                return True
    return False


def _strings(value: Any, has_named_keys: bool = False) -> Iterator[str]:
    """The strings of JSON schemas and documents, except types and formats; `has_named_keys`: the
    keys are names too.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if has_named_keys:
                yield key
            if key not in ("type", "format") or has_named_keys:
                yield from _strings(item, key == "properties" and not has_named_keys)
