"""megatron-core loads our checkpoints, computes transformers' logits, and its files are read bit
for bit.

`pip install --no-deps --target DIR megatron-core`, then run this with DIR on PYTHONPATH; no extra
of ours installs it. Transformer Engine needs a GPU: for its spec, plain torch stands in for its
modules (te_stand_in.py), below Megatron-core's own classes of that spec.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.targets import Megatron
from tests.ports import free_port
from tests.worker.checkpoint.folders import hf_folder, random_weights, same, weights_of

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
pytestmark = pytest.mark.slow

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS = {
    "llama": {**BASE, "model_type": "llama", "num_key_value_heads": 2},
    "llama-tied": {
        **BASE,
        "model_type": "llama",
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "mistral": {**BASE, "model_type": "mistral", "num_key_value_heads": 4, "sliding_window": None},
    "qwen2": {**BASE, "model_type": "qwen2", "num_key_value_heads": 2, "rope_theta": 10000.0},
    "qwen2-tied": {
        **BASE,
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        **BASE,
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 10000.0,
    },
    "qwen3-yarn": (
        {**BASE, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16}
        | {"rope_parameters": {"rope_theta": 1e4, **YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}
    ),
    "smollm3": {
        **BASE,
        "model_type": "smollm3",
        "num_key_value_heads": 2,
        "no_rope_layers": [1, 0],
        "pad_token_id": 0,
    }
    | {"rope_theta": 10000.0},
    "smollm3-biased": (
        {**BASE, "model_type": "smollm3", "num_key_value_heads": 2, "attention_bias": True}
        | {
            "mlp_bias": True,
            "no_rope_layers": [0, 1],
            "use_sliding_window": True,
            "sliding_window": 4,
            "rope_theta": 1e4,
        }
        | {"layer_types": ["full_attention", "sliding_attention"], "pad_token_id": 0}
    ),
    "phi3": {
        **BASE,
        "model_type": "phi3",
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "pad_token_id": 0,
    },
    "phi3-window": {
        **BASE,
        "model_type": "phi3",
        "sliding_window": 4,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "ministral": {
        **BASE,
        "model_type": "ministral",
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 4,
    }
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "seed_oss": {
        **BASE,
        "model_type": "seed_oss",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pad_token_id": 0,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_inner": 48,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 101,
        "n_positions": 64,
    },
    "gpt2-untied": {},
    "gpt_neox": {
        **BASE,
        "model_type": "gpt_neox",
        "use_parallel_residual": False,
        "rotary_pct": 0.25,
    },
}
CONFIGS["gpt2-untied"] = {**CONFIGS["gpt2"], "tie_word_embeddings": False}
_MOE: dict[str, Any] = {
    **BASE,
    "model_type": "qwen3_moe",
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": _MOE,
    "qwen3_moe-shares": {
        **_MOE,
        "norm_topk_prob": False,
        "num_experts": 6,
        "num_experts_per_tok": 3,
    },
    "qwen3_moe-mixed": {**_MOE, "mlp_only_layers": [0], "tie_word_embeddings": True},
    "mixtral": {
        **BASE,
        "model_type": "mixtral",
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "rope_theta": 1e4,
    }
    | {"num_experts_per_tok": 2, "sliding_window": None},
    "gpt_oss": (
        {
            **BASE,
            "model_type": "gpt_oss",
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_local_experts": 4,
        }
        | {
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "router_aux_loss_coef": 0.001,
            "num_hidden_layers": 4,
        }
    ),
}
_LATENT: dict[str, Any] = {
    **BASE,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 8,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "rope_theta": 1e4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
}
EXPERTS |= {
    "deepseek_v3": (
        {**_LATENT, "num_hidden_layers": 4, "n_shared_experts": 2, "routed_scaling_factor": 1.7}
        | {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}
    ),
    "deepseek_v3-queries": {
        **_LATENT,
        "first_k_dense_replace": 0,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "tie_word_embeddings": True,
    },
    "glm4_moe_lite": {
        **_LATENT,
        "model_type": "glm4_moe_lite",
        "n_group": 1,
        "topk_group": 1,
    },
    "glm4_moe": (
        {**_LATENT, "model_type": "glm4_moe", "num_key_value_heads": 2, "head_dim": 16}
        | {"attention_bias": True, "use_qk_norm": True, "n_group": 1, "topk_group": 1}
    ),
    "qwen2_moe": (
        {**BASE, "model_type": "qwen2_moe", "num_key_value_heads": 2, "rope_theta": 1e4}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 20, "norm_topk_prob": False}
    ),
}
SPECS: Any = ["local", "te"]
IDS = [[1, 5, 9, 100, 7, 3, 2, 50, 51, 52]]


def weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights large enough for logits like those of trained models."""
    return {
        name: tensor * (0.2 if tensor.dim() > 1 else 1)
        for name, tensor in random_weights(config).items()
    }


def model_folder(folder: Path, config: dict[str, Any]) -> Path:
    hf_folder(folder, config)
    save_file(weights(config), folder / "model.safetensors", {"format": "pt"})
    return folder


def mcore(
    cases: list[dict[str, Any]], tp: int, pp: int, at: Path, ep: int = 1, etp: int | None = None
) -> None:
    etp, world = etp or tp, max(tp, ep * (etp or tp)) * pp
    at.write_text(json.dumps(cases))
    port = free_port()
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.worker.checkpoint.mcore",
                str(at),
                *map(str, (tp, pp, ep, etp)),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "RANK": str(r),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
        )
        for r in range(world)
    ]
    errors = [rank.communicate(timeout=900)[1] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "\n".join(errors)[-3000:]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_logits_are_those_of_transformers(tmp_path: Path, tp: int, pp: int, spec: Any) -> None:
    cases = []
    for name, config in CONFIGS.items():
        folder = model_folder(tmp_path / name, config)
        for form in ("torch", "torch_dist"):
            at = tmp_path / f"{name}-{form}"
            options: Any = (
                {"form": form, "spec": spec, "tp": tp, "pp": pp} if form == "torch" else {"tp": tp}
            )
            convert(folder, at, to=Megatron(**options))
            cases.append(
                {
                    "config": config,
                    "form": form,
                    "spec": spec,
                    "load": str(at / "iter_0000001"),
                    "padded": 128 * tp,
                    "ids": IDS,
                    "logits": str(tmp_path / f"{name}-{form}.logits"),
                }
            )
    mcore(cases, tp, pp, tmp_path / "cases.json")
    for name, config in CONFIGS.items():
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / name, attn_implementation="eager", dtype=torch.float32
        )
        with torch.no_grad():
            ours = model.eval()(torch.tensor(IDS)).logits
        for form in ("torch", "torch_dist"):
            theirs = torch.load(tmp_path / f"{name}-{form}.logits")[..., : config["vocab_size"]]
            largest = float((theirs - ours).abs().max())
            options = f"largest difference {largest:.2e}, logits to {float(ours.abs().max()):.1f}"
            print(f"{name} {form} {spec} tp {tp} pp {pp}: {options}")
            assert largest <= 1e-5


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_what_megatron_writes_is_read_bit_for_bit(
    tmp_path: Path, tp: int, pp: int, spec: Any
) -> None:
    cases = []
    for name, config in CONFIGS.items():
        form: Any = "torch" if pp > 1 else "torch_dist"
        at = tmp_path / f"{name}-mg"
        options: Any = {"spec": spec} if form == "torch" else {}
        convert(
            hf_folder(tmp_path / name, config), at, to=Megatron(form=form, tp=tp, pp=pp, **options)
        )
        cases.append(
            {
                "config": config,
                "form": form,
                "spec": spec,
                "load": str(at / "iter_0000001"),
                "padded": 128 * tp,
                "save": str(tmp_path / f"{name}-saved"),
            }
        )
    mcore(cases, tp, pp, tmp_path / "cases.json")
    for name, config in CONFIGS.items():
        doubled = {key: value * 2 for key, value in random_weights(config).items()}
        for saved in (f"{name}-saved", f"{name}-saved-torch"):
            weights = weights_of(open_weights(tmp_path / saved, config))
            assert same(weights, doubled), saved


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "etp", "spec"),
    [
        (1, 1, 1, 1, "local"),
        (1, 2, 1, 1, "te"),
        (2, 1, 1, 1, "te"),
        (2, 1, 1, 2, "local"),
        (2, 1, 1, 2, "te"),
        (1, 2, 2, 1, "local"),
        (2, 1, 2, 1, "local"),
        (2, 1, 2, 2, "local"),
    ],
)
def test_experts_give_the_logits_of_transformers_and_come_back(
    tmp_path: Path, tp: int, pp: int, ep: int, etp: int, spec: Any
) -> None:
    cases, told = [], []
    for name, config in EXPERTS.items():
        stacked = config["model_type"] == "gpt_oss"  # Megatron-core cuts no experts with biases
        if stacked and etp > 1:
            continue
        model_folder(tmp_path / name, config)
        forms: dict[str, Megatron] = {"torch_dist": Megatron(vocab_divisor=8)}
        if ep == 1 and etp == (1 if stacked else tp):
            forms["torch"] = Megatron(form="torch", spec=spec, tp=tp, pp=pp, vocab_divisor=8)
        for form, to in forms.items():
            at = tmp_path / f"{name}-{form}"
            convert(tmp_path / name, at, to=to)
            padded = 112 if form == "torch" and tp == 2 else 104
            case = {
                "config": config,
                "form": form,
                "spec": spec,
                "load": str(at / "iter_0000001"),
                "padded": padded,
            }
            cases.append({**case, "ids": IDS, "logits": f"{at}.logits"})
            cases.append({**case, "save": f"{at}-saved"})
            told.append((name, at))
    mcore(cases, tp, pp, tmp_path / "cases.json", ep, etp)
    for name, at in told:
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / name,
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
        )
        with torch.no_grad():
            ours = model.eval()(torch.tensor(IDS)).logits
        theirs = torch.load(f"{at}.logits")[..., : EXPERTS[name]["vocab_size"]]
        print(
            at.name,
            tp,
            pp,
            ep,
            etp,
            spec,
            f"largest difference {float((theirs - ours).abs().max()):.2e}",
        )
        assert float((theirs - ours).abs().max()) <= 1e-5
        doubled = {key: value * 2 for key, value in weights(EXPERTS[name]).items()}
        for saved in (f"{at}-saved", f"{at}-saved-torch"):
            assert same(weights_of(open_weights(saved, EXPERTS[name])), doubled), saved


WAYS: dict[str, dict[str, Any]] = {
    "": {},
    "grouped": {"grouped": True},
    "singleton": {"metadata": {"singleton_local_shards": True}},
    "grouped-singleton": {"grouped": True, "metadata": {"singleton_local_shards": True}},
    "bf16": {"dtype": "bfloat16", "fully_parallel": True},
    "bf16-fp32-router": {"dtype": "bfloat16", "router": "float32", "args": False},
    "layer-keys": {"metadata": {"non_homogeneous_layers": True}},
    "optimizer": {"optimizer": "plain"},
    "distributed": {
        "optimizer": "distributed",
        "metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
    },
    "bf16-distributed": (
        {"optimizer": "distributed", "dtype": "bfloat16"}
        | {"metadata": {"distrib_optim_sharding_type": "dp_reshardable"}}
    ),
}
"""Ways of Megatron-core to compute and save models with experts, as keys of a case of mcore.py."""


MESHES = {
    (1, 1, 1, 1): (1, "local"),
    (1, 1, 2, 1): (1, "te"),
    (2, 1, 1, 1): (1, "te"),
    (2, 1, 2, 1): (1, "local"),
    (2, 1, 2, 2): (1, "te"),
    (1, 2, 2, 1): (2, "te"),
    (1, 1, 4, 1): (1, "local"),
}
"""Virtual stages and Megatron-core's layers, by sizes of tp, pp, ep, and tp of experts."""


def ways_of(number: int) -> Iterator[tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]]:
    """A third of the models and ways for the mesh of that number.

    Three meshes that follow each other save each model in each way.
    """
    for (i, model), (j, way) in product(enumerate(EXPERTS.items()), enumerate(WAYS.items())):
        if (i + j) % 3 == number % 3:
            yield model, way


@pytest.mark.parametrize(
    ("mesh", "vpp", "spec"),
    [(mesh, *rest) for mesh, rest in MESHES.items()],
    ids=str,
)
def test_every_way_to_save_experts_is_read_bit_for_bit(
    tmp_path: Path, mesh: tuple[int, int, int, int], vpp: int, spec: str
) -> None:
    (tp, pp, ep, etp), cases, wanted = mesh, [], {}
    for (name, config), (way, options) in ways_of([*MESHES].index(mesh)):
        if pp > 1 and name == "deepseek_v3-queries" and way == "bf16-distributed":
            # Megatron-core writes a chunk outside its buffer, which torch refuses to save.
            continue
        if config["num_hidden_layers"] % (pp * vpp):
            config = {**config, "num_hidden_layers": pp * vpp}
        if config["model_type"] == "gpt_oss" and (
            etp > 1 or (options.get("grouped") and spec == "local")
        ):
            # Megatron-core cuts no experts with biases, and its local spec's GroupedMLP has none
            continue
        if config.get("num_experts", 4) % ep:
            continue
        dtype = getattr(torch, options.get("dtype", "float32"))
        held = {key: one.to(dtype) for key, one in weights(config).items()}
        folder, at, saved = (tmp_path / f"{name}-{dtype}{end}" for end in ("", "-mg", f"-{way}"))
        if not folder.exists():
            hf_folder(folder, config, dtype)
            save_file(held, folder / "model.safetensors", {"format": "pt"})
            convert(folder, at, to=Megatron(vocab_divisor=8))
        cases.append(
            {
                "config": config,
                "form": "torch_dist",
                "spec": spec,
                "load": str(at / "iter_0000001"),
                "padded": 104,
                "save": str(saved),
                "vpp": vpp,
                **options,
            }
        )
        wide = torch.float32 if "router" in options else dtype
        # Megatron-core keeps biases of a router in fp32, whatever the type of the rest.
        wider = {".gate.weight": wide, ".router.weight": wide}
        wider[".e_score_correction_bias"] = torch.float32
        wanted[saved] = (
            config,
            {
                key: 2 * weight.to(next((wider[e] for e in wider if key.endswith(e)), dtype))
                for key, weight in held.items()
            },
        )
    mcore(cases, tp, pp, tmp_path / "cases.json", ep, etp)
    for saved, (config, doubled) in wanted.items():
        for folder in (saved, saved.with_name(f"{saved.name}-torch")):
            assert same(weights_of(open_weights(folder, config)), doubled), folder.name
