"""Build configs of both generations with one generation of transformers: run by test_generations.py
in a separate process.

`python -m tests.core.model.generations OUT FOLDER`: logits, losses and text, each under a name,
with torch.save; FOLDER holds models in folders, as `test_generations.py` wrote them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

POSITIONS, LENGTH, VOCABULARY = 32, 48, 64
SIZES = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 4, "head_dim": 16},
    "mistral": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 20},
    "gpt_neox": {},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# As (base, share of a head that turns, the rest).
ROPES: dict[str, tuple[float, float, dict[str, Any]]] = {
    "default": (10000.0, 1.0, {}),
    "theta": (500000.0, 1.0, {}),
    "linear": (10000.0, 1.0, {"rope_type": "linear", "factor": 2.0}),
    "dynamic": (10000.0, 1.0, {"rope_type": "dynamic", "factor": 2.0}),
    "llama3": (
        500000.0,
        1.0,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "yarn": (1000000.0, 1.0, YARN),
    "yarn-more": (
        10000.0,
        1.0,
        {**YARN, "attention_factor": 1.5, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    ),
    "partial": (25000.0, 0.5, {}),
    "partial-linear": (10000.0, 0.25, {"rope_type": "linear", "factor": 2.0}),
}
CASES = [(f, r) for f in FAMILIES for r in ROPES if f == "gpt_neox" or not r.startswith("partial")]


def spelled(family: str, rope: str, generation: int) -> dict[str, Any]:
    """A case's config.json, written by hand as transformers 4 or 5 writes it."""
    theta, share, rest = ROPES[rope]
    config: dict[str, Any] = {"model_type": family, **SIZES, **FAMILIES[family]}
    if generation == 5:
        parameters = {"rope_theta": theta, "rope_type": "default", **rest}
        if family == "gpt_neox":
            parameters["partial_rotary_factor"] = share
        return {
            **config,
            "rope_parameters": parameters,
            "transformers_version": "5.23.0",
            "dtype": "float32",
        }
    config |= {
        "rope_scaling": dict(rest) or None,
        "transformers_version": "4.57.6",
        "torch_dtype": "float32",
    }
    if family == "gpt_neox":
        return {**config, "rotary_emb_base": theta, "rotary_pct": share, "rope_theta": theta}
    return {**config, "rope_theta": theta}


def logits(made: Any, values: dict[str, torch.Tensor], family: str) -> torch.Tensor:
    """Logits of a fixed row of ids, by a model that transformers builds of its config object with
    these weights.
    """
    from transformers import AutoModelForCausalLM

    from smtrain.core.model.families import FAMILIES as TABLE

    model = AutoModelForCausalLM.from_config(
        made, attn_implementation="sdpa", dtype=torch.float32
    ).eval()
    renamed = TABLE[family].module_names
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[renamed.get(name, name)])
        return model(input_ids=ids(), use_cache=False).logits


def ids() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def main(out: Path, folder: Path) -> None:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from smtrain.core.model.hf_config import for_everyone
    from smtrain.core.model.transformers_build import transformers_config
    from smtrain.worker.engine.native import init_distributed
    from smtrain.worker.generation.stage import generate
    from tests.worker.engine import cases

    torch.set_num_threads(1)
    init_distributed()
    generation = int(transformers.__version__.split(".")[0])
    results: dict[str, Any] = {"version": transformers.__version__}
    for family, rope in CASES:
        written = {g: spelled(family, rope, g) for g in (4, 5)}
        values = cases.weights(written[4])
        made: dict[str, Any] = {
            "own": AutoConfig.for_model(**spelled(family, rope, min(generation, 5)))
        }
        for g, config in written.items():
            made[f"ours-{g}"] = transformers_config(config)
            made[f"exported-{g}"] = AutoConfig.for_model(**for_everyone(config))
        for how, built in made.items():
            results[f"{family} {rope} {how}"] = logits(built, values, family)
        if rope in ("llama3", "yarn", "partial"):
            for g, config in written.items():
                results[f"{family} {rope} losses-{g}"] = cases.train(
                    0, config, cases.mesh("111"), 3
                )
    for model in sorted(path for path in folder.iterdir() if path.is_dir()):
        kind, name = model.name.split("-", 1)
        if kind == "exported":  # what any reader does with it
            loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
            with torch.no_grad():
                results[f"{name} logits"] = loaded(input_ids=ids(), use_cache=False).logits
            tokenizer = AutoTokenizer.from_pretrained(model)
            results[f"{name} tokens"] = (
                tokenizer("a<|mark|>b")["input_ids"],
                sorted(tokenizer.all_special_tokens),
            )
        results[f"{name} {kind} text"] = generate(model, ["ab"], max_new_tokens=8)
    torch.save(results, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
