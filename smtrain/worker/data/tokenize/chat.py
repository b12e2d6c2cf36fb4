"""The text of a conversation by a chat template, with the places of the answers.

Loss falls on the assistant's answers. If the template marks them (`{% generation %}`), its marks
are used. Otherwise an answer is the difference between the conversation including its turn and the
prompt for that turn, up to its end token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from smtrain.core.errors import DataError, first_line
from smtrain.worker.data.tokenize.dialogue import Dialogue
from smtrain.worker.data.tokenize.template_losses import (
    GREETING,
    SEEN_ONLY,
    SPACE,
    Fate,
    Rendering,
    TurnText,
    fates,
    turn_texts,
    unwritten_in,
)
from smtrain.worker.data.tokenize.template_options import (
    ignored_options,
    template_fault,
    template_variables,
    values_of,
)
from smtrain.worker.data.tokenize.turns import RecordFault, call_forms
from smtrain.worker.object_store import is_of_machine, unreadable_error

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """The chat template of a tokenizer folder; `source` is its text, `about` a sentence on how
    answers are found.

    `options` are values for the template in all conversations; those of a record win.

    Raises DataError for a tokenizer that does not load, or that has no template.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any] | None = None) -> None:
        from smtrain.core.model import hf_tokenizer

        self.options = dict(options or {})

        try:
            self._tokenizer: Any = hf_tokenizer.load(folder, lambda _: None)
            template = (
                self._tokenizer.get_chat_template() if self._tokenizer.chat_template else None
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if is_of_machine(error):
                raise unreadable_error(folder, error, "") from None
            raise DataError(
                f"{folder} holds no tokenizer that transformers loads ({first_line(error)})."
            ) from None
        if template is None:
            raise DataError(
                f"the tokenizer of model.path ({folder}) has no chat template, which conversations"
                " need; put a chat_template.jinja next to its tokenizer.json (`smtrain help sft` has"
                " one)."
            )
        if fault := template_fault(template):
            raise DataError(
                f"the chat template of model.path ({folder}) cannot be used: {fault}; put a whole"
                " chat_template.jinja next to its tokenizer.json (`smtrain help sft` has one)."
            )
        self.source: str = template
        self.tokens = self._written_tokens()
        self._ends = tuple(self._tokenizer.get_added_vocab())
        answer_method = (
            "its generation marks" if has_marks(template) else "what each turn adds to its prompt"
        )
        self.about = (
            f"conversations in the tokenizer's chat template, answers found by {answer_method}"
        )
        if self.options and (ignored_clause := ignored_options(self.options, self.variables)):
            self.about += f"; {ignored_clause}"
        if "strftime_now" in template:
            self.about += "; it may write today's date, so another day's run may give other bytes"

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads."""
        templates = self._tokenizer.chat_template
        return frozenset().union(
            *map(
                template_variables,
                templates.values() if isinstance(templates, dict) else [templates],
            )
        )

    def _written_tokens(self) -> dict[str, int]:
        """Ids of the added tokens that the template or the end of an answer writes."""
        eos, bos = (
            self._tokenizer.eos_token,
            (self._tokenizer.bos_token if "bos_token" in self.source else None),
        )
        added_tokens: dict[str, int] = self._tokenizer.get_added_vocab()
        return {
            token: i
            for token, i in added_tokens.items()
            if token in self.source or token in (eos, bos)
        }

    def render(self, conversation: Dialogue) -> list[Rendering]:
        """The text of the whole conversation, with the answers to learn.

        If the template writes earlier turns differently later on, return one text per answer
        instead, up to and with that answer: what the model sees when it gives it. Raises
        RecordFault.
        """
        c = self._fit_to_template(conversation)
        try:
            texts = self._by_marks(c) if self._is_marked(c) else self._by_prefix(c)
        except _refusals() as error:
            raise _record_fault(error) from None
        return [rendering for rendering in texts if rendering.answers]

    def text(self, conversation: Dialogue, turns: int, **options: bool) -> str:
        """The text of the first `turns`, with options of `apply_chat_template`.

        Raises RecordFault.
        """
        try:
            return self._text(self._fit_to_template(conversation), turns, **options)
        except _refusals() as error:
            raise _record_fault(error) from None

    def unwritten_names(self, conversation: Dialogue, renderings: list[Rendering]) -> list[str]:
        """Names of what `renderings` do not have of a conversation as it is, and of options that
        the template ignores.

        Raises RecordFault if an answer is only a call of a function and the template writes no
        calls.
        """
        c = self._fit_to_template(conversation)
        texts = [r.text for r in renderings]
        names = [field for name, (field, _) in c.options.items() if name not in self.variables]
        if c.tools and not self._writes(c, replace(c, tools=None)):
            names.append("tools")
        elif c.tools and unwritten_in(c.tools, texts):
            names.append("parts of tools")
        field, documents = c.options.get("documents", ("", None))
        if documents and field not in names and unwritten_in(documents, texts):
            names.append(f"parts of {field}")
        conversation_texts = turn_texts(c.messages, self._to_learn(c))
        names += self._lost_names(
            c, list(zip(conversation_texts, fates(conversation_texts, renderings), strict=True))
        )
        first = next(
            (message["role"] for message in c.messages if message["role"] in ("user", "assistant")),
            "",
        )
        if first == "assistant" and not self._is_marked(c):
            names.append(GREETING)
        return list(dict.fromkeys(names))

    def _to_learn(self, c: Dialogue) -> set[int]:
        """The indices of the answers to learn."""
        roles = [message["role"] for message in c.messages]
        first = 0 if self._is_marked(c) or "user" not in roles else roles.index("user")
        return {
            i
            for i in range(first, len(roles))
            if roles[i] == "assistant" and i not in c.skipped_turns
        }

    def _lost_names(self, c: Dialogue, text_fates: list[tuple[TurnText, Fate]]) -> Iterator[str]:
        """Names of the texts of turns that are not written as they are. Raises RecordFault."""
        if any(text.is_learned and fate == "respaced" for text, fate in text_fates):
            yield SPACE
        if any(fate == "seen" for _, fate in text_fates):
            yield SEEN_ONLY
        for text, fate in text_fates:
            if text.field == "content" and fate == "lost":
                role = c.messages[text.turn]["role"]
                changed_messages = [
                    {**m, "content": f"{m['content']}x"} if i == text.turn else m
                    for i, m in enumerate(c.messages)
                ]
                yield (
                    f"{'parts of ' if self._writes(c, replace(c, messages=changed_messages)) else ''}turns"
                    f" of the role {role}"
                )
        for name in dict.fromkeys(text.field for text, _ in text_fates if text.field != "content"):
            extent = self._lost_field(
                c, name, [(text, fate) for text, fate in text_fates if text.field == name]
            )
            yield from [f"{extent}{c.column}[].{name}"] if extent is not None else []

    def _lost_field(
        self, c: Dialogue, name: str, text_fates: list[tuple[TurnText, Fate]]
    ) -> Literal["", "parts of "] | None:
        """Find out if the template leaves out a field of turns: all of it, "parts of " it, or no
        part (None).

        Raises RecordFault for an answer with only a call of a function.
        """
        lost_texts = [text for text, fate in text_fates if fate == "lost"]
        if not lost_texts and any(text.is_learned for text, _ in text_fates):
            return None
        if name == "tool_calls[].id":
            return "" if lost_texts else None
        # A short word, such as a name, may stand in the text for another reason.
        other_messages = [{k: v for k, v in m.items() if k != name} for m in c.messages]
        if self._writes(c, replace(c, messages=other_messages)):
            return "parts of " if lost_texts else None
        if name == "tool_calls" and any(name in m and not m.get("content") for m in c.messages):
            raise RecordFault(
                "an answer is a call of a function, and the chat template does not write"
                " tool_calls; leave such records out, or put a chat_template.jinja that writes them"
                " next to tokenizer.json"
            )
        return ""

    def _writes(self, c: Dialogue, variant: Dialogue) -> bool:
        """Whether the template writes a different text for the other conversation, or refuses
        it.
        """
        try:
            return self._text(c, len(c.messages)) != self._text(variant, len(variant.messages))
        except _refusals():
            return True

    def _fit_to_template(self, c: Dialogue) -> Dialogue:
        """The conversation in roles that the template knows, and with calls in a form that it
        takes.

        OpenAI's developer is the former system.
        """
        if "developer" not in self.source and any(m["role"] == "developer" for m in c.messages):
            roles = [{**m, "role": "system"} if m["role"] == "developer" else m for m in c.messages]
            c = replace(c, messages=roles)
        if not any(m.get("tool_calls") for m in c.messages):
            return c
        for messages in call_forms(c.messages):
            form = replace(c, messages=messages)
            try:
                self._text(form, len(messages))
            except _refusals():
                continue
            return form
        return c

    def _by_marks(self, c: Dialogue) -> list[Rendering]:
        text, answers = self._marked_in(c, len(c.messages))
        if not answers:
            raise RecordFault("the chat template marks no answer in it")
        if not c.skipped_turns:
            return [Rendering(text, answers)]
        answers_to_learn: list[tuple[int, int]] = []
        first_mark = 0
        for i in (i for i, message in enumerate(c.messages) if message["role"] == "assistant"):
            last_mark = len(self._marked_in(c, i + 1)[1])
            answers_to_learn += [] if i in c.skipped_turns else answers[first_mark:last_mark]
            first_mark = last_mark
        if first_mark != len(answers):
            raise RecordFault("the chat template does not mark one place for each answer")
        return [Rendering(text, answers_to_learn)]

    def _marked_in(self, c: Dialogue, turns: int) -> tuple[str, list[tuple[int, int]]]:
        """The text of the first `turns`, and the places that the template marks."""
        text, places = self._render_turns(c, turns, return_assistant_tokens_mask=True)
        return text, [(start, end) for start, end in places if start < end]

    def _by_prefix(self, c: Dialogue) -> list[Rendering]:
        question = next(i for i, message in enumerate(c.messages) if message["role"] == "user")
        turns = [
            i for i in range(question + 1, len(c.messages)) if c.messages[i]["role"] == "assistant"
        ]
        texts = [self._text(c, i + 1) for i in turns]
        answers = [
            self._end_answer(text, self._start(c, i, text))
            for i, text in zip(turns, texts, strict=True)
        ]
        full_text = answers[-1].text
        answers_to_learn = [
            rendering
            for i, rendering in zip(turns, answers, strict=True)
            if i not in c.skipped_turns
        ]
        if all(full_text.startswith(rendering.text) for rendering in answers):
            return [Rendering(full_text, [rendering.answers[0] for rendering in answers_to_learn])]
        return answers_to_learn

    def _start(self, c: Dialogue, turn: int, text: str) -> int:
        """The start of the last answer in `text`."""
        prompt = self._text(c, turn, add_generation_prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        # for example a prompt that opens a thought, which the answer does not have
        earlier_text = self._text(c, turn)
        if not text.startswith(earlier_text):
            raise RecordFault(
                "the chat template does not keep the turns before an answer as they were"
            )
        return next(
            (i for i, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), len(text)
        )

    def _text(self, c: Dialogue, turns: int, **options: bool) -> str:
        return self._render_turns(c, turns, **options)[0]

    def _render_turns(
        self, c: Dialogue, turns: int, **options: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of the first `turns`, and the marked places if they are asked for.

        `apply_chat_template` does the same, except that it leaves out a content of null, which
        templates ask for.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template
        texts, places = render(
            [c.messages[:turns]],
            tools=c.tools,
            chat_template=self._tokenizer.get_chat_template(tools=c.tools),
            **{**self._tokenizer.special_tokens_map, **self.options, **values_of(c.options)},
            **options,
        )
        return texts[0], places[0] if places else []

    def _is_marked(self, c: Dialogue) -> bool:
        """Whether the template of this conversation marks answers; one for tools may differ from
        the default one.
        """
        return has_marks(self._tokenizer.get_chat_template(tools=c.tools))

    def _end_answer(self, text: str, start: int) -> Rendering:
        """An answer up to its end token; without one the end of text is added, or the model would
        never stop.
        """
        body = text.rstrip()
        if self._ends and len(body) > start and body.endswith(self._ends):
            return Rendering(text, [(start, len(body))])
        text = body + (self._tokenizer.eos_token or "")
        return Rendering(text, [(start, len(text))])


@cache
def has_marks(template: str) -> bool:
    """Whether a template marks answers."""
    return _MARKS.search(template) is not None


def _refusals() -> tuple[type[Exception], ...]:
    """Exceptions of a template that refuses a conversation."""
    from jinja2 import TemplateError

    return (TemplateError, ValueError, TypeError, KeyError, AttributeError)


def _record_fault(error: Exception) -> RecordFault:
    """The fault of a record that the template refuses in its own words, or fails to write."""
    from jinja2 import TemplateError

    if type(error) is TemplateError:  # raise_exception in the template
        return RecordFault(f"the chat template refuses it ({first_line(error)})")
    return RecordFault(
        "the chat template cannot write it, as it expects other fields or types in a turn"
        f" ({first_line(error)})"
    )
