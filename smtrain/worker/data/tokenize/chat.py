"""Conversations from records, and their text by a chat template, with the places of the answers.

Loss falls on the assistant's answers. If the template marks them (`{% generation %}`), its marks are used. Otherwise an
answer is the difference between the conversation including its turn and the prompt for that turn, up to its end token.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from smtrain.core.config.data import Column
from smtrain.core.errors import DataError, first_line
from smtrain.worker.data.read.object_store import is_of_machine, unread
from smtrain.worker.data.read.record_fields import PAIRS, SEEN, UNWANTED, record_fields
from smtrain.worker.data.read.unread import UnreadText, holds_text, unread_fields
from smtrain.worker.data.tokenize.turns import RecordFault, clean, read_tools, read_turns

__all__ = ["ChatTemplate", "Dialogue", "RecordFault", "Rendered", "conversation", "named", "refuse_pairs", "renamed"]

Shape = Literal["auto", "alpaca", "messages"]
COLUMNS = tuple(
    name
    for name in record_fields("prompt", "learned", "refused", "counted")
    if not any(name in pair for pair in PAIRS)  # a table with both columns is refused
)
"""Every column of a table that is read, refused or counted."""
NAMED: tuple[str, ...] = tuple(name for name in get_args(Column) if name in COLUMNS)
"""The columns of a conversation that `data.columns` may name."""
_COUNTED = record_fields("counted")
GREETING = "answers before the first question (not learned)"
_LISTS = ("messages", "conversations")
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Dialogue:
    """Messages {role, content} that end in an answer, and the tools that a template may list.

    `options` are further values for the template. `skipped` are indices of answers that are not learned. `read` names
    the fields of the record that are used, `column` the field of the turns; `unread` counts text of the turns that is
    not used.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    skipped: frozenset[int] = frozenset()
    read: frozenset[str] = field(default=frozenset(), compare=False)
    column: str = field(default="messages", compare=False)
    unread: UnreadText = field(default_factory=UnreadText, compare=False)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rendered:
    """A text, and (start, end) in characters of each answer to learn."""

    text: str
    answers: list[tuple[int, int]]


def named(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A record as `renamed` returns it.

    Raises DataError for a pair of preferences if no answer is named: as a conversation it would teach the wrong text.
    """
    if not columns and not any(row.get(worse) is not None for _, worse in PAIRS):
        return row
    refuse_pairs([name for name, value in row.items() if value is not None], columns)
    return renamed(row, columns)


def renamed(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A record with the columns of `columns` {ours: theirs} under our names."""
    taken = {ours: row.get(theirs) for ours, theirs in columns.items()}
    return {name: value for name, value in row.items() if name not in columns.values()} | taken


def refuse_pairs(names: Collection[str], columns: Mapping[str, str]) -> None:
    """Refuse pairs of preferences, unless `columns` names the answer to learn. Raises DataError."""
    for pair in PAIRS:
        if all(name in names for name in pair) and not any(name in columns.values() for name in pair):
            raise DataError(
                f"its records are pairs of preferences ({', '.join(pair)}), which train.objective: dpo learns from; to "
                f"learn only the {pair[0]} answers, name them in data.columns: {{messages: {pair[0]}}} if they are "
                f"lists of messages, {{instruction: prompt, output: {pair[0]}}} if they are text."
            )


def conversation(row: dict[str, Any], shape: Shape = "auto") -> Dialogue:
    """The conversation of a record: `messages` {role, content}, `conversations` {from, value}, or alpaca's fields.

    Turns after the last answer are left out, and counted. Raises RecordFault.
    """
    flags = _refuse(row)
    name = next((n for n in ("tools", "functions") if row.get(n)), "")
    tools = read_tools(row[name], name) if name else None
    read = {*flags, *([name] if name else [])}
    column = next((c for c in _LISTS if row.get(c) is not None), "") if shape != "alpaca" else ""
    system = _text(row, "system")
    if column:
        turns = read_turns(row[column], column)
        first, skipped = turns.messages[0], turns.skipped
        messages = turns.messages
        if first["role"] not in ("system", "developer") and system:
            messages = [{"role": "system", "content": system}, *messages]
            skipped = frozenset(i + 1 for i in skipped)
            read.add("system")
        elif first.get("content") == system:
            read.add("system")
        return Dialogue(messages, tools, skipped, frozenset({column, *read}), column, turns.unread)
    if shape != "messages" and row.get("instruction") is not None:
        question = "\n\n".join(part for part in (_text(row, "instruction"), _text(row, "input")) if part)
        answer = _text(row, "output")
        if not question or not answer:
            raise RecordFault(f"an empty {'output' if question else 'instruction'}")
        texts = [*_history(row.get("history")), question, answer]
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        before = [{"role": "system", "content": system}] if system else []
        fields = {"instruction", "input", "output", "system", "history", *read}
        return Dialogue([*before, *messages], tools, read=frozenset(fields))
    wanted = {"alpaca": "instruction", "messages": "messages or conversations"}.get(
        shape, "messages, conversations or instruction"
    )
    raise RecordFault(f"no column {wanted}, only {', '.join(map(repr, row)) or 'nothing'}")


def unread_of(row: Mapping[str, Any], dialogue: Dialogue, columns: Mapping[str, str]) -> list[str]:
    """The fields of a record that its conversation does not use: those with text, and those that a form documents."""
    read = {columns.get(name, name) for name in dialogue.read}
    known = [name for name in _COUNTED if name not in read and row.get(name) not in (None, "", [], {})]
    return list(dict.fromkeys([*unread_fields(row, read), *known]))


def _refuse(row: Mapping[str, Any]) -> list[str]:
    """The fields that mark the answer as wanted. Raises RecordFault for an unwanted answer, or for images and sound."""
    for name in SEEN:
        if row.get(name):
            raise RecordFault(f"{name!r} is not read, as the model reads text only; leave out records with it")
    flags = []
    for name in UNWANTED:
        value = row.get(name)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"
        if value is False:
            raise RecordFault(f"{name!r} is false, which marks an answer that is not wanted; leave such records out")
        flags += [name] if value is True else []
    return flags


def _history(value: Any) -> list[str]:
    """Earlier questions and answers, alternating. Raises RecordFault."""
    if not value:
        return []
    pairs: list[Any] = value if isinstance(value, list) else [None]
    if not all(isinstance(p, list) and len(p) == 2 and all(isinstance(t, str) and t for t in p) for p in pairs):
        raise RecordFault("'history' is not a list of pairs [question, answer]")
    return [clean(text) for pair in pairs for text in pair]


def _text(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise RecordFault(f"{column!r} is {type(value).__name__}, not a string")
    return clean(value or "")


class ChatTemplate:
    """The chat template of a tokenizer folder; `source` is its text, `about` a sentence on how answers are found.

    Raises DataError for a tokenizer that does not load, or that has no template.
    """

    def __init__(self, folder: Path) -> None:
        from smtrain.core.model import hf_tokenizer

        try:
            self._tokenizer: Any = hf_tokenizer.load(folder, lambda _: None)
            template = self._tokenizer.get_chat_template() if self._tokenizer.chat_template else None
        except (OSError, ValueError, KeyError) as error:
            if is_of_machine(error):
                raise unread(folder, error, "") from None
            raise DataError(f"{folder} holds no tokenizer that transformers loads ({first_line(error)}).") from None
        if template is None:
            raise DataError(
                f"the tokenizer of model.path ({folder}) has no chat template, which conversations need; "
                "put a chat_template.jinja next to its tokenizer.json (docs/sft.md has one)."
            )
        self.source: str = template
        self.tokens = self._written_tokens()
        self._ends = tuple(self._tokenizer.get_added_vocab())
        self._marked = bool(_MARKS.search(template))
        how = "its generation marks" if self._marked else "what each turn adds to its prompt"
        self.about = f"conversations in the tokenizer's chat template, answers found by {how}"
        if "strftime_now" in template:
            self.about += "; it may write today's date, so another day's run may give other bytes"

    def _written_tokens(self) -> dict[str, int]:
        """Ids of the added tokens that the template or the end of an answer writes."""
        eos, bos = self._tokenizer.eos_token, self._tokenizer.bos_token if "bos_token" in self.source else None
        added: dict[str, int] = self._tokenizer.get_added_vocab()
        return {token: i for token, i in added.items() if token in self.source or token in (eos, bos)}

    def render(self, conversation: Dialogue) -> list[Rendered]:
        """The text of the whole conversation, with the answers to learn.

        If the template writes earlier turns differently later on, return one text per answer instead, up to and with
        that answer: what the model sees when it gives it. Raises RecordFault.
        """
        c = self._known_roles(conversation)
        try:
            texts = self._by_marks(c) if self._marked else self._by_prefix(c)
        except _refusals() as error:
            raise RecordFault(f"the chat template refuses it ({first_line(error)})") from None
        return [rendered for rendered in texts if rendered.answers]

    def text(self, conversation: Dialogue, turns: int, **options: bool) -> str:
        """The text of the first `turns`, with options of `apply_chat_template`. Raises RecordFault."""
        try:
            return self._text(self._known_roles(conversation), turns, **options)
        except _refusals() as error:
            raise RecordFault(f"the chat template refuses it ({first_line(error)})") from None

    def unread(self, conversation: Dialogue, rendered: list[Rendered]) -> list[str]:
        """The fields of a conversation that the template did not write into `rendered`.

        Found by rendering again without each field that holds text. Raises RecordFault if an answer is only a call of a
        function and the template writes no calls.
        """
        c = self._known_roles(conversation)
        names = ["tools"] if c.tools and not self._writes(c, replace(c, tools=None)) else []
        texts = ((key, m[key]) for m in c.messages for key in m if key not in ("role", "content"))
        for key in dict.fromkeys(key for key, value in texts if holds_text(value)):
            without = [{k: v for k, v in m.items() if k != key} for m in c.messages]
            if self._writes(c, replace(c, messages=without)):
                continue
            if key == "tool_calls" and any(key in m and not m.get("content") for m in c.messages):
                raise RecordFault("an answer is a call of a function, and the chat template does not write tool_calls")
            names.append(f"{c.column}[].{key}")
        for i, message in enumerate(c.messages):
            content = message.get("content")
            if content and not any(content.strip() in r.text for r in rendered):
                other = [*c.messages[:i], {**message, "content": f"{content}x"}, *c.messages[i + 1 :]]
                if not self._writes(c, replace(c, messages=other)):
                    names.append(f"turns of the role {message['role']}")
        first = next(message["role"] for message in c.messages if message["role"] in ("user", "assistant"))
        if first == "assistant" and not self._marked:
            names.append(GREETING)
        return names

    def _writes(self, c: Dialogue, other: Dialogue) -> bool:
        """Whether the template writes a different text for the other conversation, or refuses it."""
        try:
            return self._text(c, len(c.messages)) != self._text(other, len(other.messages))
        except _refusals():
            return True

    def _known_roles(self, c: Dialogue) -> Dialogue:
        """The conversation in roles that the template knows: OpenAI's developer is the former system."""
        if "developer" in self.source or all(m["role"] != "developer" for m in c.messages):
            return c
        return replace(c, messages=[{**m, "role": "system"} if m["role"] == "developer" else m for m in c.messages])

    def _by_marks(self, c: Dialogue) -> list[Rendered]:
        text, answers = self._marked_in(c, len(c.messages))
        if not answers:
            raise RecordFault("the chat template marks no answer in it")
        if not c.skipped:
            return [Rendered(text, answers)]
        learned: list[tuple[int, int]] = []
        before = 0
        for i in (i for i, message in enumerate(c.messages) if message["role"] == "assistant"):
            until = len(self._marked_in(c, i + 1)[1])
            learned += [] if i in c.skipped else answers[before:until]
            before = until
        if before != len(answers):
            raise RecordFault("the chat template does not mark one place for each answer")
        return [Rendered(text, learned)]

    def _marked_in(self, c: Dialogue, turns: int) -> tuple[str, list[tuple[int, int]]]:
        """The text of the first `turns`, and the places that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template
        texts, places = render(
            [c.messages[:turns]],
            tools=c.tools,
            chat_template=self._tokenizer.get_chat_template(tools=c.tools),
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        return texts[0], [(start, end) for start, end in places[0] if start < end]

    def _by_prefix(self, c: Dialogue) -> list[Rendered]:
        question = next(i for i, message in enumerate(c.messages) if message["role"] == "user")
        turns = [i for i in range(question + 1, len(c.messages)) if c.messages[i]["role"] == "assistant"]
        texts = [self._text(c, i + 1) for i in turns]
        answers = [self._ended(text, self._start(c, i, text)) for i, text in zip(turns, texts, strict=True)]
        whole = answers[-1].text
        learned = [rendered for i, rendered in zip(turns, answers, strict=True) if i not in c.skipped]
        if all(whole.startswith(rendered.text) for rendered in answers):
            return [Rendered(whole, [rendered.answers[0] for rendered in learned])]
        return learned

    def _start(self, c: Dialogue, turn: int, text: str) -> int:
        """The start of the last answer in `text`."""
        prompt = self._text(c, turn, add_generation_prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        # for example a prompt that opens a thought, which the answer does not have
        before = self._text(c, turn)
        if not text.startswith(before):
            raise RecordFault("the chat template does not keep the turns before an answer as they were")
        return next((i for i, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), len(text))

    def _text(self, c: Dialogue, turns: int, **options: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            c.messages[:turns], tools=c.tools, tokenize=False, **c.options, **options
        )
        return text

    def _ended(self, text: str, start: int) -> Rendered:
        """An answer up to its end token; without one the end of text is added, or the model would never stop."""
        kept = text.rstrip()
        if self._ends and len(kept) > start and kept.endswith(self._ends):
            return Rendered(text, [(start, len(kept))])
        text = kept + (self._tokenizer.eos_token or "")
        return Rendered(text, [(start, len(text))])


def _refusals() -> tuple[type[Exception], ...]:
    """Exceptions of a template that refuses a conversation."""
    from jinja2 import TemplateError

    return (TemplateError, ValueError, TypeError, KeyError, AttributeError)
