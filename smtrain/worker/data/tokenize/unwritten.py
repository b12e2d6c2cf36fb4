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

from smtrain.worker.data.read.unread import holds_text

Fate = Literal["written", "respaced", "seen", "lost"]
"""Found as it is, found with other white space, found outside the answers only, or not found as a
whole.
"""
LABELS = ("id", "name", "tool_call_id")
"""Fields of a turn that name it or a call; nothing in them is learned."""
GREETING = "answers before the first question (not learned)"
SPACE = "white space of answers"
SEEN_ONLY = "text of answers that is seen and not learned"
_OPENED = 200
"""The most characters of an answer that its prompt may have written already, such as an opened
<think>.
"""
_USED = "\0"
"""Stands for a place that a text was found in; no tokenizer's text has it."""


@dataclass(frozen=True)
class Rendered:
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
    learned: bool
    """Whether it must be part of an answer to learn."""


def turn_texts(messages: Sequence[Mapping[str, Any]], learned: Collection[int]) -> list[TurnText]:
    """The texts of all turns; `learned` has the indices of the answers to learn."""
    texts = []
    for i, message in enumerate(messages):
        for name, value in message.items():
            if name == "role" or not holds_text(value):
                continue
            must = i in learned and name not in LABELS
            for field, text in _within(name, value):
                texts.append(TurnText(i, field, text, must and field == name))
    return texts


def _within(name: str, value: Any, inner: bool = False) -> Iterator[tuple[str, str]]:
    """(field, text) of every string in a value, and of the numbers and keys of a call's
    arguments.
    """
    if isinstance(value, str):
        yield from [(name, value)] if value else []
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _within(name, item, inner)
    elif isinstance(value, dict):
        for key, item in value.items():
            if name == "tool_calls" and not inner and key == "type":
                continue  # "function", as all are
            if name == "tool_calls" and not inner and key == "id":
                yield from ((f"{name}[].id", text) for _, text in _within(name, item))
                continue
            if inner:
                yield name, key
            yield from _within(name, item, inner or (name == "tool_calls" and key == "arguments"))
    elif inner and isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, json.dumps(value)


class Places:
    """The rendered texts of a conversation, as places in which texts are found; each place is found
    once.
    """

    def __init__(self, rendered: Sequence[Rendered], change: Callable[[str], str] = str) -> None:
        self._change = change
        self._answers: list[tuple[str, str]] = []
        """The text before an answer, and the answer."""
        self._rest: list[str] = []
        for one in reversed(rendered):  # the last text has most turns
            at = 0
            for start, end in one.answers:
                self._rest.append(change(one.text[at:start]))
                at = end
            self._rest.append(change(one.text[at:]))
        for one in rendered:
            answers = ((one.text[max(0, a - _OPENED) : a], one.text[a:b]) for a, b in one.answers)
            self._answers += ((change(before), change(answer)) for before, answer in answers)

    def take(self, text: TurnText) -> Literal["answer", "rest"] | None:
        """Find one of the spellings of a text, and use up its place."""
        for one in map(self._change, _spelled(text.text)):
            if text.learned and self._take_answer(one, text.field == "content"):
                return "answer"
            if not text.learned and (self._take_rest(one) or self._take_answer(one, False)):
                return "rest"
        if text.learned and any(map(self._take_rest, map(self._change, _spelled(text.text)))):
            return "rest"
        return None

    def _take_answer(self, text: str, opened: bool) -> bool:
        """Find a text in an answer; `opened`: its beginning may stand in the prompt, such as an
        opened <think>.
        """
        for i, (before, answer) in enumerate(self._answers):
            at = answer.find(text)
            if at >= 0:
                self._answers[i] = before, f"{answer[:at]}{_USED}{answer[at + len(text) :]}"
                return True
        for i, (before, answer) in enumerate(self._answers if opened else ()):
            head = before[-len(text) :]
            at = f"{head}{answer}".find(text)
            if at >= 0 and (past := at + len(text) - len(head)) > 0:
                self._answers[i] = before, f"{_USED}{answer[past:]}"
                return True
        return False

    def _take_rest(self, text: str) -> bool:
        for i, piece in enumerate(self._rest):
            at = piece.find(text)
            if at >= 0:
                self._rest[i] = f"{piece[:at]}{_USED}{piece[at + len(text) :]}"
                return True
        return False


def fates(texts: Sequence[TurnText], rendered: Sequence[Rendered]) -> list[Fate]:
    """The fate of each text in what a template wrote."""
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i].text))
    places = Places(rendered)
    exact = {i: places.take(texts[i]) for i in order}
    if all(place == ("answer" if texts[i].learned else "rest") for i, place in exact.items()):
        return ["written"] * len(texts)
    # Again from the start: a short text may have been found within a long one that has other white
    # space.
    places = Places(rendered, _squeezed)
    found: list[Fate] = ["lost"] * len(texts)
    for i in order:
        place = places.take(replace(texts[i], text=texts[i].text.strip()))
        if place == "rest" and texts[i].learned:
            found[i] = "seen"
        elif place:
            found[i] = "written" if exact[i] == place else "respaced"
    return found


def _spelled(text: str) -> Iterator[str]:
    """A text as a template may write it without loss: as it is, or as JSON, also as JSON in
    JSON.
    """
    yield text
    once = json.dumps(text, ensure_ascii=False)[1:-1]
    if once != text:
        yield once
        yield json.dumps(once, ensure_ascii=False)[1:-1]
    if not text.isascii():
        yield json.dumps(text)[1:-1]


def _squeezed(text: str) -> str:
    return "".join(text.split())


def unwritten_in(value: Any, texts: Sequence[str]) -> bool:
    """Whether a name, a description or another string of functions or documents is missing in all
    texts.
    """
    items = value if isinstance(value, list) else [value]
    for item in items:
        whole = json.dumps(item, ensure_ascii=False)
        if any(whole in text for text in texts):
            continue
        squeezed = [_squeezed(text) for text in texts]
        for text in _strings(item):
            spelled = [_squeezed(one) for one in _spelled(text)]
            if not any(one in text for one in spelled for text in squeezed):
                return True
    return False


def _strings(value: Any, named: bool = False) -> Iterator[str]:
    """The strings of JSON schemas and documents, except types and formats; `named`: the keys are
    names too.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if named:
                yield key
            if key not in ("type", "format") or named:
                yield from _strings(item, key == "properties" and not named)
