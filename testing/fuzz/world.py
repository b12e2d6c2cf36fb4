"""The folder of all fuzzed configs: models, text for each objective, prepared tokens, an adapter
and a task.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}
_WORDS = (
    "the",
    "model",
    "reads",
    "text",
    "and",
    "learns",
    "to",
    "say",
    "more",
    "of",
    "it",
    "again",
)


def sentences(count: int) -> list[str]:
    """Sentences that differ from each other."""
    rows = (
        [_WORDS[(n * 7 + i * (n % 5 + 1)) % len(_WORDS)] for i in range(12)] for n in range(count)
    )
    return [" ".join([*words, str(n)]) for n, words in enumerate(rows)]


def lines(rows: list[dict[str, Any]]) -> str:
    """JSON Lines."""
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def rows_of(objective: str, count: int = 12) -> list[dict[str, Any]]:
    """Records for an objective of `train.objective`."""
    texts = sentences(count)
    if objective == "pretrain":
        return [{"text": text} for text in texts]
    if objective == "sft":
        return [{"instruction": text, "output": text[:20]} for text in texts]
    return [{"prompt": text, "chosen": text[:20], "rejected": text[20:40]} for text in texts]


def model(folder: Path) -> Path:
    """A small Llama with a tokenizer and a chat template, and weights of zeros."""
    import numpy as np
    from safetensors.numpy import save_file

    from smtrain.core.demo.inputs import CHAT_TEMPLATE
    from smtrain.core.model.shape import ModelShape

    folder.mkdir()
    tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 0, "temperature": 0.7})
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    specs = ModelShape.from_config(LLAMA).specs
    save_file(
        {spec.name: np.zeros(spec.shape, np.float32) for spec in specs},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def tokenizer(folder: Path) -> None:
    """A byte-level BPE, as transformers saves it but without importing it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from smtrain.core.demo.inputs import END

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        sentences(200),
        trainers.BpeTrainer(
            vocab_size=512, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    bpe.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make(folder: Path) -> Path:
    """Write everything that the sample configs name."""
    folder.mkdir(parents=True, exist_ok=True)
    model(folder / "model")
    for objective in ("pretrain", "sft", "dpo"):
        (folder / objective).mkdir()
        (folder / objective / "a.jsonl").write_text(lines(rows_of(objective)))
    (folder / "held-out.jsonl").write_text(lines([{"text": text} for text in sentences(4)]))
    (folder / "task").mkdir()
    (folder / "task/own.yaml").write_text(
        "task: own\ndataset_path: json\ndataset_kwargs: {data_files: {test:"
        " questions.jsonl}}\ntest_split: test\noutput_type: loglikelihood\ndoc_to_text:"
        " '{{q}}'\ndoc_to_target: '{{a}}'\n"
    )
    (folder / "task/questions.jsonl").write_text(
        lines([{"q": text, "a": "yes"} for text in sentences(3)])
    )
    return folder
