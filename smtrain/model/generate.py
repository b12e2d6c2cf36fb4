"""Text from a Hugging Face folder: a look at what a trained model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from smtrain.errors import CheckpointError
from smtrain.model import hf_tokenizer
from smtrain.model.hf_config import normalise
from smtrain.model.transformers_build import check_model, transformers_config


def generate(
    folder: Path,
    prompts: list[str],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = False,
) -> list[str]:
    """One completion per prompt, without the prompt; at temperature 0 the likeliest token each time.

    With `chat` a prompt is what a user says, spelled by the tokenizer's chat template, and the completion the answer.
    A prompt's completion depends on the prompt and the seed, not on the other prompts. Raises CheckpointError where the
    folder is not one that transformers loads or has no chat template, or a prompt is empty.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the Hugging Face folder that export wrote.")
    try:
        described = json.loads((folder / "config.json").read_text("utf-8"))
        normal = normalise(described)
        tokenizer = hf_tokenizer.load(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=transformers_config(described), local_files_only=True, dtype="auto"
        )
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{folder} is not a model that transformers loads ({reason}).") from error
    check_model(model, normal)
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    if chat and not tokenizer.chat_template:
        raise CheckpointError(f"{folder} has no chat template to ask in; put the model's chat_template.jinja there.")
    model.eval()
    known = model.generation_config
    stop = known.eos_token_id if known.eos_token_id is not None else tokenizer.eos_token_id
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        temperature=temperature if temperature > 0 else None,
        bos_token_id=known.bos_token_id,
        eos_token_id=stop,
        pad_token_id=stop[0] if isinstance(stop, list) else stop,
    )
    completions = []
    for prompt in prompts:
        if chat:
            said = [{"role": "user", "content": prompt}]
            spelled = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
            asked = tokenizer(
                spelled, return_tensors="pt", return_token_type_ids=False, add_special_tokens=False
            ).to(model.device)  # fmt: skip
        else:
            asked = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
        if not prompt or asked["input_ids"].shape[1] == 0:
            raise CheckpointError("generate.prompts has an empty prompt; give at least one character.")
        torch.manual_seed(seed)
        with torch.inference_mode():
            answer = model.generate(**asked, generation_config=config)[0]
        completions.append(_after(tokenizer, answer, asked["input_ids"].shape[1]))
    return completions


def _after(tokenizer: Any, ids: torch.Tensor, prompt_length: int) -> str:
    """The text after the prompt; decoded together with it, because some tokenizers drop a leading space."""
    whole: str = tokenizer.decode(ids, skip_special_tokens=True)
    prompt: str = tokenizer.decode(ids[:prompt_length], skip_special_tokens=True)
    if whole.startswith(prompt):
        return whole.removeprefix(prompt)
    return str(tokenizer.decode(ids[prompt_length:], skip_special_tokens=True))
