"""Complete a list of prompts for stage generate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from smtrain.worker.generation.conversation import set_template, text_of
from smtrain.worker.generation.generating import complete, encode_prompt
from smtrain.worker.generation.load import load
from smtrain.worker.generation.memory_fit import described_in, need_of, refuse_too_large, weights_in
from smtrain.worker.generation.sampling import Sampling


def generate(
    folder: Path,
    prompts: list[str],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool | None = False,
    sampling: Sampling | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return one completion per prompt, without the prompt; temperature 0 takes the likeliest token
    each time.

    With `chat` a prompt is a user's message, written with the chat template, and the completion is
    the answer; None: if there is a template. `template_options` are values for it. A completion
    depends on its prompt and the seed, not on the other prompts. `sampling` has further settings.
    Raises `CheckpointError` if transformers does not load the folder, if it has no chat template,
    or if a prompt is empty.
    """
    settings = replace(
        sampling or Sampling(), max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
    )
    refuse_too_large([need_of("the model", weights_in(folder), described_in(folder))])
    loaded_model = load(folder)
    if chat is None:
        chat = bool(loaded_model.tokenizer.chat_template)
    if chat:
        set_template(loaded_model, None, template_options)
    completions = []
    for prompt in prompts:
        text = (
            text_of(loaded_model, [{"role": "user", "content": prompt}])
            if chat and prompt
            else prompt
        )
        completions += complete(
            loaded_model, [encode_prompt(loaded_model, text, special=not chat)], settings
        )
    return completions
