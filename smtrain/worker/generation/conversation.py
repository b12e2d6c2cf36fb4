"""Write a conversation with the model's chat template, cut to the turns and tokens that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from smtrain.core.errors import CheckpointError, first_line
from smtrain.worker.generation.generating import encoded
from smtrain.worker.generation.load import Loaded

Message = dict[str, str]
"""The fields role and content."""


def set_template(loaded: Loaded, file: Path | None) -> None:
    """Use the chat template of a file. Raises `CheckpointError` if it cannot be read, or if no template is known."""
    if file is not None:
        try:
            loaded.tokenizer.chat_template = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise CheckpointError(f"{file} cannot be read as a chat template ({why}); name a file with one") from None
    if not loaded.tokenizer.chat_template:
        raise CheckpointError(
            f"{loaded.folder} has no chat template to ask in; name one with --template FILE (template=), put it there "
            "as chat_template.jinja, or let the model continue text: `smtrain generate`"
        )


def spelled(loaded: Loaded, messages: list[Message], room: int) -> tuple[torch.Tensor, int]:
    """Ids [1, length] of the conversation up to the answer, and the number of messages that were left out.

    Leaves out the oldest question with its answer until `room` tokens, or half of the model's positions if that is
    less, are free for the new answer; the system prompt stays. Raises `CheckpointError` if the last question alone is
    too long, or if the template refuses it.
    """
    left_out = 0
    room = room if loaded.positions is None else min(room, loaded.positions // 2)
    kept = list(messages)
    while True:
        ids = encoded(loaded, text_of(loaded, kept), special=False)
        if loaded.positions is None or ids.shape[1] + room <= loaded.positions:
            return ids, left_out
        first = 1 if kept[0]["role"] == "system" else 0
        if len(kept) - first < 3:
            raise CheckpointError(
                f"the question is {ids.shape[1]:,} tokens long, and with {room:,} for the answer that is more than "
                f"the model's {loaded.positions:,} positions; ask a shorter one, or lower --max-new-tokens "
                "(max_new_tokens=)"
            )
        del kept[first : first + 2]
        left_out += 2


def text_of(loaded: Loaded, messages: list[Message]) -> str:
    """The conversation as the template writes it, up to the answer."""
    from jinja2 import TemplateError

    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    try:
        text: str = loaded.tokenizer.apply_chat_template(messages, **options)
    except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"the chat template refuses this conversation ({first_line(error)})") from None
    return text
