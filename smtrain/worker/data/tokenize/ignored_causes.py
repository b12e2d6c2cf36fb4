"""Causes of text that records have and samples do not, by the names under which it is counted; and
the remedies.
"""

from __future__ import annotations

from dataclasses import dataclass

from smtrain.worker.data.tokenize.template_losses import GREETING, SEEN_ONLY, SPACE
from smtrain.worker.data.tokenize.template_options import KWARGS, OPTIONS
from smtrain.worker.data.tokenize.turns import AFTER_LAST_ANSWER

_TEMPLATE_REMEDY = "put a chat_template.jinja that writes it next to tokenizer.json in model.path (`smtrain help sft`)"
_OF_CONVERSATIONS = ("system", "tools", "functions", KWARGS, *OPTIONS)


@dataclass(frozen=True)
class UnreadCause:
    """`fate` continues "records have NAME"; `by_template`: the chat template decides it."""

    fate: str
    remedy: str
    by_template: bool = False


def cause_of(name: str, *, text: bool = False) -> UnreadCause:
    """The cause of a count of unread text; `text`: the records are pairs of text, without a chat
    template.
    """
    top = name.partition(".")[0]
    if name == GREETING:
        return UnreadCause(
            "",
            "put a question before them, or a template with generation marks in"
            " chat_template.jinja",
        )
    if name == AFTER_LAST_ANSWER:
        return UnreadCause(", which nothing learns", "leave them out")
    if (
        name in (SPACE, SEEN_ONLY)
        or name.startswith(("parts of ", "turns of the role "))
        or "[]." in name
    ):
        return UnreadCause(
            ", which the chat template leaves out or changes",
            f"{_TEMPLATE_REMEDY}, or leave it out of the data",
            True,
        )
    if name == "tools" and not text:
        return UnreadCause(
            ", which the chat template does not write",
            f"{_TEMPLATE_REMEDY}, or leave them out of the data",
            True,
        )
    if top in OPTIONS or top == KWARGS or name in _OF_CONVERSATIONS:
        if text:
            return UnreadCause(
                ", which text has no place for",
                "write prompt, chosen and rejected as lists of messages, or leave it out of the"
                " data",
            )
        if name == "system":
            return UnreadCause(
                ", and another system prompt in the turns", "leave one of the two out"
            )
        return UnreadCause(
            ", which the chat template does not read",
            "leave it out, or put a template that reads it in chat_template.jinja next to"
            " tokenizer.json",
        )
    return UnreadCause(
        " with unread text",
        "name it in data.columns if it is part of the prompt or the answer, or leave it out of the"
        " data",
    )
