"""Tokenizers with the usual kinds of chat templates, and conversations for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from smtrain.core.demo.inputs import CHAT_TEMPLATE, save_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "marked": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{%-"
        " generation -%}{{ m.content }}<|im_end|>{%- endgeneration -%}{% else %}{{ m.content"
        " }}<|im_end|>{% endif %}\n{% endfor %}{% if add_generation_prompt"
        " %}<|im_start|>assistant\n{% endif %}"
    ),
    # an empty thought before the last answer only, as in Qwen3's
    "thinking": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last"
        " %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if"
        " add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # a prompt that opens a thought, which rendered answers lack, as in DeepSeek-R1's
    "opened": CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"),
    # Llama 2's: no generation prompt; an answer ends with the end of text
    "inst": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif"
        " m.role == 'assistant' %} {{ m.content }} {{ eos_token }}{% else %}{{"
        " raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
    ),
    "alpaca": CHAT_TEMPLATE,
    "endless": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ),
}


def tokenizer(folder: Path, template: str | None) -> Path:
    """A byte-level BPE with ChatML's tokens and the named template (None: without one)."""
    save_tokenizer(
        ["what is the answer to this question user assistant\n" * 9],
        folder,
        vocabulary=300,
        end="<end>",
    )
    from transformers import PreTrainedTokenizerFast

    made: Any = PreTrainedTokenizerFast
    saved = made.from_pretrained(folder)
    saved.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    saved.chat_template = TEMPLATES[template] if template else None
    saved.save_pretrained(folder)
    return folder


def talk(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages: question, answer, question..."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system else turns


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
