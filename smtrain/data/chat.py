"""Conversations out of records, and their text as a chat template writes it, with the places of the answers.

Loss falls on the assistant's answers. Where the template marks them (`{% generation %}`), its marks hold. Elsewhere an
answer is what the conversation up to and including its turn has more than the prompt for that turn, up to its end
token.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from smtrain.errors import DataError, first_line

Shape = Literal["auto", "alpaca", "messages"]
COLUMNS = ("messages", "conversations", "instruction", "input", "output", "system", "tools")
PAIR = ("chosen", "rejected")
"""What preference data calls the better answer and the worse one."""
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RecordFault(Exception):  # noqa: N818 - a record's, told with its line
    """What makes a record no conversation that can be learned from."""


@dataclass(frozen=True)
class Dialogue:
    """Messages {role, content} that end in an answer, and the tools that a template may list."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Rendered:
    """A text, and (start, end) in characters of the answers to learn."""

    text: str
    answers: list[tuple[int, int]]


def named(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A record with the columns of `columns` {ours: theirs} under our names.

    Raises DataError for a pair of preferences none of whose answers is named: read as a conversation it would teach
    neither answer, or another one.
    """
    if not columns and (row.get("chosen") is None or row.get("rejected") is None):
        return row
    refuse_pairs([name for name, value in row.items() if value is not None], columns)
    taken = {ours: row.get(theirs) for ours, theirs in columns.items()}
    return {name: value for name, value in row.items() if name not in columns.values()} | taken


def refuse_pairs(names: Collection[str], columns: Mapping[str, str]) -> None:
    """Raises DataError where a record or table with these columns is of preferences whose reading nobody has named."""
    if all(name in names for name in PAIR) and not any(name in columns.values() for name in PAIR):
        raise DataError(
            "its records are pairs of preferences (chosen, rejected), which no training here learns from as pairs; "
            "to learn the chosen answers, name them in data.columns: {messages: chosen} where they are lists of "
            "messages, {instruction: prompt, output: chosen} where they are text."
        )


def conversation(row: dict[str, Any], shape: Shape = "auto") -> Dialogue:
    """The conversation of a record: `messages` {role, content}, `conversations` {from, value}, or alpaca's fields.

    What follows the last answer is left out. Raises RecordFault.
    """
    if shape != "alpaca":
        for column, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
            if row.get(column) is not None:
                return Dialogue(_messages(row[column], column, role, content), row.get("tools") or None)
    if shape != "messages" and row.get("instruction") is not None:
        asked = "\n\n".join(part for part in (_text(row, "instruction"), _text(row, "input")) if part)
        answer, system = _text(row, "output"), _text(row, "system")
        if not asked or not answer:
            raise RecordFault(f"an empty {'output' if asked else 'instruction'}")
        before = [{"role": "system", "content": system}] if system else []
        return Dialogue([*before, {"role": "user", "content": asked}, {"role": "assistant", "content": answer}])
    wanted = {"alpaca": "instruction", "messages": "messages or conversations"}.get(
        shape, "messages, conversations or instruction"
    )
    raise RecordFault(f"no column {wanted}, only {', '.join(map(repr, row)) or 'nothing'}")


def _messages(turns: Any, column: str, role_key: str, content_key: str) -> list[dict[str, Any]]:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise RecordFault(f"{column!r} is not a list of objects")
    found = []
    for number, turn in enumerate(turns, start=1):
        # what OpenAI's format knows beside role and content (tool_calls, name) is the template's business
        role, content = turn.get(role_key), _content(turn.get(content_key))
        rest = {k: v for k, v in turn.items() if k not in (role_key, content_key) and v is not None}
        if role_key == "from":
            rest, role = {}, _ROLES.get(str(role).lower(), role if role in _ROLES.values() else None)
        if not isinstance(role, str):
            raise RecordFault(f"turn {number} has {role_key} {turn.get(role_key)!r}, which is no known role")
        if content is None and not rest.get("tool_calls"):
            raise RecordFault(f"turn {number} has no text in {content_key!r}")
        found.append({"role": role, **({} if content is None else {"content": _clean(content)}), **rest})
    asked = next((i for i, message in enumerate(found) if message["role"] == "user"), len(found))
    last = max((i for i, message in enumerate(found) if message["role"] == "assistant"), default=-1)
    if last < asked:
        raise RecordFault("no answer of the assistant to a user")
    return found[: last + 1]


def _content(value: Any) -> str | None:
    if isinstance(value, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in value):
        return "".join(part["text"] for part in value)  # OpenAI's text parts
    return value if isinstance(value, str) else None


def _text(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise RecordFault(f"{column!r} is {type(value).__name__}, not a string")
    return _clean(value or "")


def _clean(text: str) -> str:
    try:
        text.encode()  # JSON may spell half a surrogate pair, which no tokenizer takes
    except UnicodeEncodeError:
        raise RecordFault("half a surrogate pair, which is not text") from None
    return text


class ChatTemplate:
    """The chat template of a tokenizer folder; `source` is its text, `about` says how answers are found."""

    def __init__(self, folder: Path) -> None:
        """Raises DataError for a tokenizer that does not load, or that has no template."""
        from smtrain.model import hf_tokenizer

        try:
            self._tokenizer: Any = hf_tokenizer.load(folder)
            template = self._tokenizer.get_chat_template() if self._tokenizer.chat_template else None
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{folder} holds no tokenizer that transformers loads ({first_line(error)}).") from None
        if template is None:
            raise DataError(
                f"the tokenizer of model.path ({folder}) has no chat template, which train.objective: sft needs for "
                "conversations; put a chat_template.jinja beside its tokenizer.json (docs/sft.md has one)."
            )
        self.source: str = template
        self._ends = tuple(self._tokenizer.get_added_vocab())
        self._marked = bool(_MARKS.search(template))
        how = "its generation marks" if self._marked else "what each turn adds to its prompt"
        self.about = f"conversations in the tokenizer's chat template, answers found by {how}"
        if "strftime_now" in template:
            self.about += "; it may write today's date, so another day's run may give other bytes"

    def render(self, conversation: Dialogue) -> list[Rendered]:
        """The text of the whole conversation.

        Where the template writes earlier turns differently later on, a text for each answer instead, up to it, with
        this one to learn: what the model is to see when it gives it. Raises RecordFault.
        """
        from jinja2 import TemplateError

        try:
            return self._by_marks(conversation) if self._marked else self._by_prefix(conversation)
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RecordFault(f"the chat template refuses it ({first_line(error)})") from None

    def _by_marks(self, c: Dialogue) -> list[Rendered]:
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template
        texts, places = render(
            [c.messages],
            tools=c.tools,
            chat_template=self._tokenizer.get_chat_template(tools=c.tools),
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        answers = [(start, end) for start, end in places[0] if start < end]
        if not answers:
            raise RecordFault("the chat template marks no answer in it")
        return [Rendered(texts[0], answers)]

    def _by_prefix(self, c: Dialogue) -> list[Rendered]:
        asked = next(i for i, message in enumerate(c.messages) if message["role"] == "user")
        turns = [i for i in range(asked + 1, len(c.messages)) if c.messages[i]["role"] == "assistant"]
        texts = [self._text(c, i + 1) for i in turns]
        found = [self._ended(text, self._start(c, i, text)) for i, text in zip(turns, texts, strict=True)]
        whole = found[-1].text
        if all(whole.startswith(rendered.text) for rendered in found):
            return [Rendered(whole, [rendered.answers[0] for rendered in found])]
        return found

    def _start(self, c: Dialogue, turn: int, text: str) -> int:
        """Where the answer begins in `text`, the conversation up to it."""
        prompt = self._text(c, turn, add_generation_prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        # a prompt that opens a thought, say, which the answer does not have
        before = self._text(c, turn)
        if not text.startswith(before):
            raise RecordFault("the chat template does not keep the turns before an answer as they were")
        return next((i for i, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), len(text))

    def _text(self, c: Dialogue, turns: int, **options: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(c.messages[:turns], tools=c.tools, tokenize=False, **options)
        return text

    def _ended(self, text: str, start: int) -> Rendered:
        """An answer up to its end token, or with the end of text where it has none: or the model would never stop."""
        kept = text.rstrip()
        if self._ends and len(kept) > start and kept.endswith(self._ends):
            return Rendered(text, [(start, len(kept))])
        text = kept + (self._tokenizer.eos_token or "")
        return Rendered(text, [(start, len(text))])
