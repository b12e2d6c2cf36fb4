"""Write a conversation with the model's chat template, cut to the turns and tokens that fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from smtrain.core.errors import CheckpointError, DataError, first_line
from smtrain.core.model.chat_options import read_template
from smtrain.worker.generation.generating import encode_prompt
from smtrain.worker.generation.load import LoadedModel

Message = dict[str, str]
"""The fields role and content."""
Options = Mapping[str, tuple[str, Any]]
"""Values for the template by name, each with its field of the record."""


def set_template(
    loaded_model: LoadedModel, file: Path | None, options: Mapping[str, Any] | None = None
) -> None:
    """Use the chat template of a file, and options for it in all conversations.

    Raises `CheckpointError` if the file cannot be read, or if no template is known.
    """
    loaded_model.template_options = dict(options or {})
    if file is not None:
        loaded_model.tokenizer.chat_template = read_template(file)
    if not loaded_model.tokenizer.chat_template:
        raise CheckpointError(
            f"{loaded_model.folder} has no chat template to ask in; name one with --template FILE"
            " (template=), put it there as chat_template.jinja, or let the model continue text:"
            " `smtrain generate`"
        )


def ignored_in(loaded_model: LoadedModel) -> str:
    """A clause about options of `set_template` that the template does not read; "" if it reads
    all.
    """
    if not loaded_model.template_options:
        return ""
    from smtrain.worker.data.tokenize.template_options import ignored_options, template_variables

    return ignored_options(
        loaded_model.template_options,
        template_variables(loaded_model.tokenizer.get_chat_template()),
    )


def encode_conversation(
    loaded_model: LoadedModel, messages: list[Message], room: int, options: Options | None = None
) -> tuple[torch.Tensor, int]:
    """Ids [1, length] of the conversation up to the answer, and the number of messages that were
    left out.

    `options` are those of `record_options`.

    Leaves out the oldest question with its answer until `room` tokens, or half of the model's
    positions if they are fewer, are free for the new answer; the system prompt stays. Raises
    `CheckpointError` if the last question alone is too long, or if the template refuses it.
    """
    left_out = 0
    room = room if loaded_model.positions is None else min(room, loaded_model.positions // 2)
    recent_messages = list(messages)
    while True:
        ids = encode_prompt(
            loaded_model, text_of(loaded_model, recent_messages, options), special=False
        )
        if loaded_model.positions is None or ids.shape[1] + room <= loaded_model.positions:
            return ids, left_out
        first = 1 if recent_messages[0]["role"] == "system" else 0
        if len(recent_messages) - first < 3:
            raise CheckpointError(
                f"the question is {ids.shape[1]:,} tokens long, and with {room:,} for the answer"
                f" it exceeds the model's {loaded_model.positions:,} positions; ask a shorter one,"
                " or lower --max-new-tokens (max_new_tokens=)"
            )
        del recent_messages[first : first + 2]
        left_out += 2


def record_options(record: Mapping[str, Any], number: int) -> Options:
    """The options of the template and the tools of record `number`. Raises `DataError`."""
    if not record:
        return {}
    from smtrain.worker.data.tokenize.template_options import read_options
    from smtrain.worker.data.tokenize.turns import RecordFault, read_tools

    name = next((name for name in ("tools", "functions") if record.get(name)), "")
    try:
        options = read_options(record)
        return {**options, "tools": (name, read_tools(record[name], name))} if name else options
    except RecordFault as fault:
        raise DataError(f"prompt {number}: {fault}; correct it, or leave it out") from None


def unwritten_parts(
    loaded_model: LoadedModel, messages: list[Message], options: Options
) -> list[str]:
    """Names of the turns, fields and options of a conversation that its text does not have."""
    from smtrain.worker.data.tokenize.template_losses import (
        Rendering,
        fates,
        turn_texts,
        unwritten_in,
    )
    from smtrain.worker.data.tokenize.template_options import template_variables

    rendering = Rendering(text_of(loaded_model, messages, options), [])
    tools = options.get("tools", ("", None))[1]
    variables = template_variables(loaded_model.tokenizer.get_chat_template(tools=tools))
    names = [field for name, (field, _) in options.items() if name not in variables]
    if tools and "tools" in variables and unwritten_in(tools, [rendering.text]):
        names.append("parts of tools")
    texts = turn_texts(messages, ())
    for text, fate in zip(texts, fates(texts, [rendering]), strict=True):
        if fate == "lost":
            turn = f"parts of turns of the role {messages[text.turn]['role']}"
            names.append(turn if text.field == "content" else f"messages[].{text.field}")
    return list(dict.fromkeys(names))


def text_of(
    loaded_model: LoadedModel, messages: list[Message], options: Options | None = None
) -> str:
    """The conversation as the template writes it, up to the answer; `options` win over those of
    `set_template`.
    """
    from jinja2 import TemplateError

    option_values = {name: value for name, (_, value) in (options or {}).items()}
    values: dict[str, Any] = {**loaded_model.template_options, **option_values}
    try:
        text: str = loaded_model.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **values
        )
    except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"the chat template refuses this conversation ({first_line(error)}); change its turns,"
            " or name another template with --template FILE (template=)"
        ) from None
    return text
