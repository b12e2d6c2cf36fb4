"""Tiny models, data and training runs of engine tests; what a world runs must be importable, so it
is here.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from smtrain.core.errors import SmtrainError
from smtrain.core.model.blocks import Role
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.hf_config import for_everyone
from smtrain.core.model.layout import cuts_of
from smtrain.core.model.shape import ModelShape
from smtrain.core.protocol.lineage import Lineage
from smtrain.worker.checkpoint import manifest
from smtrain.worker.checkpoint.dtypes import BY_PRECISION
from smtrain.worker.checkpoint.native.reader import NativeSource
from smtrain.worker.checkpoint.training_state import KINDS
from smtrain.worker.engine import host_copies, saving
from smtrain.worker.engine.base import OptimizerOptions, ParallelOptions, StepResult
from smtrain.worker.engine.native import NativeEngine
from smtrain.worker.engine.native.loss_scaling import GOOD_STEPS
from smtrain.worker.engine.native.zero1 import OptimizerShard
from tests.worker.checkpoint.models import newest_complete

BATCH, SEQ_LEN, STEPS = 8, 32, 20
OPTIMIZER = OptimizerOptions(eps=1e-6)
"""torch's eps of 1e-8 makes rounding decide a run if a gradient all but cancels out. Token
24 of llama-kv4 is first met at step 6 with 6e-8 in one number of its gradient, which fp32 makes
0.7e-8 to 3.6e-8; phi3 has one number of 2e-8 in its first step, or -8e-8 from weights that one
rounding parts. AdamW moves such a number by the learning rate in either direction: norms of torch
alone then differ by 7e-5, and by 2e-6 with this eps.
"""


def config(family: str, **changes: Any) -> dict[str, Any]:
    """A config.json of 4 layers; empty if the installed transformers lacks the family.

    5.0.0 builds another OLMo 3 than its files describe (tests/core/model/test_published.py).
    """
    if family not in CONFIG_MAPPING or (family, transformers.__version__) == ("olmo3", "5.0.0"):
        return {}
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family in FAMILIES and FAMILIES[family].latent:
        sizes |= {"num_key_value_heads": 4}
    elif family not in ("gpt_neox", "gpt2"):
        sizes |= {"num_key_value_heads": 2, "head_dim": 16}
    keys = {"model_type": family, **sizes, **changes}
    if "rope_parameters" in changes and transformers.__version__ < "5":  # which does not read them
        keys = for_everyone(keys)
    return AutoConfig.for_model(**keys).to_dict()


def longrope(original: int) -> dict[str, Any]:
    """A Phi-3 whose rows take the long factors if they are longer than `original`."""
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.0, 1.7, 4.0, 9.0]}
    return {
        **config("phi3", pad_token_id=0, tie_word_embeddings=True),
        "original_max_position_embeddings": original,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "longrope", **factors},
        "rope_parameters": None,
    }


NO_DROPOUT_OF_SEED = {"attention_dropout": 0.0, "residual_dropout": 0.0}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
AUX = {"router_aux_loss_coef": 0.02}
OSS = {
    "sliding_window": 8,
    "num_hidden_layers": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
LATENT = {
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
}
NET = {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "initializer_range": 0.03}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, **AUX}
SHARED = {
    **EXPERTS,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_ALL: dict[str, dict[str, Any]] = {
    "llama": config("llama"),
    "llama-kv4": config("llama", num_key_value_heads=4, attention_bias=True, mlp_bias=True),
    "llama-kv1": config("llama", num_key_value_heads=1),
    "llama-tied-509": config("llama", tie_word_embeddings=True, vocab_size=509, pad_token_id=0),
    "qwen2": config("qwen2", tie_word_embeddings=True, num_key_value_heads=1),
    "qwen2-window": config("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "qwen3": config("qwen3", head_dim=32),
    "mistral-window": config("mistral", sliding_window=12, vocab_size=509),
    "smollm3": config("smollm3", tie_word_embeddings=True, pad_token_id=0),
    "smollm3-window": config(
        "smollm3",
        pad_token_id=0,
        use_sliding_window=True,
        sliding_window=8,
        attention_bias=True,
        mlp_bias=True,
    ),
    "phi3": config("phi3", sliding_window=12, pad_token_id=0),
    "phi3-partial": config(
        "phi3",
        pad_token_id=0,
        tie_word_embeddings=True,
        vocab_size=509,
        num_key_value_heads=4,
        partial_rotary_factor=0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "ministral": config(
        "ministral",
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    ),
    "seed_oss": config("seed_oss", mlp_bias=True, attention_out_bias=True, **NO_DROPOUT_OF_SEED),
    "phi3-long": longrope(original=16),
    "phi3-short": longrope(original=64),
    "granite": config(
        "granite",
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        residual_multiplier=0.22,
        attention_multiplier=0.03,
        tie_word_embeddings=True,
        vocab_size=509,
        attention_bias=True,
        mlp_bias=True,
    ),
    "olmo2": config("olmo2", attention_bias=True),
    "olmo2-kv1": config("olmo2", num_key_value_heads=1, vocab_size=509),
    "olmo3": config(
        "olmo3",
        sliding_window=8,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "gemma3": config(
        "gemma3_text",
        sliding_window=8,
        num_hidden_layers=4,
        query_pre_attn_scalar=24,
        vocab_size=509,
        tie_word_embeddings=True,
        final_logit_softcapping=5.0,
        pad_token_id=0,
        layer_types=[
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gemma4": config(
        "gemma4_text",
        sliding_window=8,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=5.0,
        layer_types=["sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=True,
        vocab_size=509,
        pad_token_id=0,
        num_experts=None,
    ),
    "gemma4-values": config(
        "gemma4_text",
        sliding_window=8,
        global_head_dim=8,
        num_key_value_heads=1,
        hidden_size_per_layer_input=0,
        attention_bias=True,
        pad_token_id=0,
    ),
    "gemma4_moe": config(
        "gemma4_text",
        sliding_window=8,
        num_hidden_layers=2,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=True,
        vocab_size=509,
        pad_token_id=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=24,
    ),
    "qwen3_5": config("qwen3_5_text", linear_num_key_heads=4, linear_num_value_heads=8, **NET),
    "qwen3_5-tied": config(
        "qwen3_5_text",
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        num_key_value_heads=1,
        vocab_size=509,
        tie_word_embeddings=True,
        attention_bias=True,
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
        partial_rotary_factor=0.5,  # releases up to 5.17 write their own next to that of the ropes
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        **NET,
    ),
    "ministral3": config(
        "ministral3",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    ),
    "qwen3_moe": config(
        "qwen3_moe",
        num_hidden_layers=3,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        router_aux_loss_coef=0.02,
    ),
    "qwen3_5_moe": config(
        "qwen3_5_moe_text",
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        num_key_value_heads=1,
        vocab_size=509,
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
        **SHARED,
        **NET,
    ),
    "qwen3_next": config(
        "qwen3_next",
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        mlp_only_layers=[1],
        decoder_sparse_step=1,
        **SHARED,
        **NET,
    ),
    "qwen2_moe": config(
        "qwen2_moe", num_hidden_layers=2, norm_topk_prob=False, tie_word_embeddings=True, **SHARED
    ),
    "olmoe": config("olmoe", num_hidden_layers=2, pad_token_id=0, **EXPERTS),
    "flex_olmo": config(
        "flex_olmo",
        num_key_value_heads=1,
        vocab_size=509,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        norm_topk_prob=True,
        **EXPERTS,
    ),
    "mixtral": config(
        "mixtral", num_local_experts=4, num_hidden_layers=2, intermediate_size=32, **AUX
    ),
    "minimax_m2": config(
        "minimax_m2",
        num_key_value_heads=1,
        num_local_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        intermediate_size=24,
        vocab_size=509,
        router_aux_loss_coef=0.0,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    ),
    "gpt_oss": config(
        "gpt_oss", num_local_experts=4, num_experts_per_tok=2, intermediate_size=32, **AUX, **OSS
    ),
    "deepseek_v3": config(
        "deepseek_v3",
        q_lora_rank=24,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        attention_bias=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
        **LATENT,
    ),
    "deepseek_v3-sparse": config(
        "deepseek_v3",
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        n_shared_experts=2,
        norm_topk_prob=False,
        vocab_size=509,
        tie_word_embeddings=True,
        **{**LATENT, "v_head_dim": 28},
    ),
    "glm4_moe_lite": config(
        "glm4_moe_lite",
        q_lora_rank=24,
        rope_interleave=False,
        mlp_layer_types=["dense", "dense", "sparse"],
        **LATENT,
    ),
    "glm4_moe": config(
        "glm4_moe",
        num_key_value_heads=1,
        use_qk_norm=True,
        vocab_size=509,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        attention_bias=True,
    ),
    "gpt_neox": config("gpt_neox"),
    "gpt2": config("gpt2", n_inner=128, tie_word_embeddings=True, **NO_DROPOUT),
    "gpt2-509": config("gpt2", vocab_size=509, **NO_DROPOUT),
    "gpt_neox-sequential": config("gpt_neox", use_parallel_residual=False, vocab_size=509),
}
CONFIGS = {name: described for name, described in _ALL.items() if described}


def mesh(text: str) -> ParallelOptions:
    """`221 sp full bf16 m2 l1-3`: tp, pp, dp, then options such as cp2, ep2, u0.1 and norms;
    micro-batches are of 4 samples unless m says otherwise, and stages are even unless l names their
    layers.
    """
    sizes, *more = text.split()
    tp, pp, dp = map(int, sizes)
    options = ParallelOptions(tp, pp, dp, sequence_parallel="sp" in more)
    options = replace(options, cp=next((int(c[2:]) for c in more if c[:2] == "cp"), 1))
    if "full" in more:
        options = replace(options, activation_checkpointing="full")
    options = replace(options, shard="full" if "shards" in more else "optimizer")
    if "selective" in more:
        options = replace(options, activation_checkpointing="selective")
    options = replace(
        options,
        ep=next((int(c[2:]) for c in more if c[:2] == "ep"), 1),
        aux_by_layer="by-layer" in more,
        router_bias_update_rate=next((float(c[1:]) for c in more if c[0] == "u"), 0.0),
    )
    options = replace(
        options,
        expert_capacity=next((float(c[1:]) for c in more if c[0] == "c" and c[1] != "p"), None),
    )
    for half in BY_PRECISION.keys() & more:
        options = replace(options, precision=half)
    options = replace(options, param_norm="layers" if "norms" in more else "none")
    layers = next((map(int, m[1:].split("-")) for m in more if m[0] == "l"), ())
    options = replace(options, pipeline_cuts=cuts_of([*layers]))
    return replace(options, micro_batch_size=next((int(m[1:]) for m in more if m[0] == "m"), 4))


def weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Values under file names, biases and norms far from trivial so that a wrong cut shows.

    Norms multiply by about 1: if a residual stream grows, five steps of two right programs part by
    1e-4.
    """
    generator = torch.Generator().manual_seed(seed)
    out = {}
    shape = ModelShape.from_config(config)
    for spec in shape.specs:
        noise = torch.randn(spec.shape, generator=generator) * config.get("initializer_range", 0.1)
        unit = shape.rules.unit_norms or ".linear_attn.norm." in spec.name
        out[spec.name] = (
            noise + unit
            if len(spec.shape) == 1 and spec.name.endswith(("weight", "scalar", "scale"))
            else noise
        )
        if (
            spec.role is Role.HEAD_NORM and shape.rules.score_scale == 1
        ):  # or scores reach the head size
            out[spec.name] *= 0.4
    return out


class Memory:
    """A weight source over tensors in memory."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.config, self.tensors = config, tensors

    def names(self) -> list[str]:
        return sorted(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(
        self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        whole = self.tensors[name]
        return (
            whole if dim is None else whole.narrow(dim, start, (stop or whole.shape[dim]) - start)
        )


def batch(config: dict[str, Any], step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step; some labels are ignored, more of them in the later samples."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, config["vocab_size"], (BATCH, SEQ_LEN + 1), generator=generator)
    labels = ids[:, 1:].clone()
    ignored = torch.rand(labels.shape, generator=generator) < torch.linspace(0, 0.4, BATCH)[:, None]
    return ids[:, :-1].contiguous(), labels.masked_fill(ignored, -100)


def lr(step: int) -> float:
    """Warm-up, then a cosine."""
    return 3e-3 * min((step + 1) / 5, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))


def engine(
    config: dict[str, Any], options: ParallelOptions, seed: int | None = None
) -> NativeEngine:
    source: Any = Memory(config, weights(config)) if seed is None else None
    return NativeEngine(config, options, OPTIMIZER, source, seed or 0)


def own(e: NativeEngine, pair: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    each = BATCH // e.dp_size
    part = slice(e.dp_rank * each, (e.dp_rank + 1) * each)
    return pair[0][part], pair[1][part]


def steps(e: NativeEngine, first: int, last: int) -> list[tuple[float, float]]:
    out = []
    for step in range(first, last):
        result = e.step(*own(e, batch(e.config, step)), lr(step))
        out.append((result.loss, result.grad_norm))
    return out


def scaled_steps(
    e: NativeEngine, first: int, last: int, overflow: int | None = None
) -> list[StepResult]:
    """`steps`, with their whole results; in step `overflow`, one number of one rank's gradient is
    infinite.
    """
    out = []
    for step in range(first, last):
        with overflowing(e) if step == overflow and e.rank == e.world_size - 1 else nullcontext():
            out.append(e.step(*own(e, batch(e.config, step)), lr(step)))
    return out


@contextmanager
def overflowing(e: NativeEngine) -> Iterator[None]:
    """One number of this rank's gradients is infinite meanwhile."""

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        spoilt = grad.clone()
        spoilt.view(-1)[0] = math.inf
        return spoilt

    accumulated = next(
        p for name, p in e.stage.trained.parameters.items() if name not in e.stage.writing
    )
    hook = accumulated.register_hook(spoil)
    try:
        yield
    finally:
        hook.remove()


def zero1(e: NativeEngine) -> OptimizerShard:
    """The optimizer's shard of an engine with ZeRO-1."""
    shard = e.optimizer.dense
    assert isinstance(shard, OptimizerShard)
    return shard


def held(e: NativeEngine) -> dict[str, bytes]:
    """The bits of this rank's weights and optimizer state."""
    zero1(e).shares.settle()
    tensors = {kind: getattr(zero1(e), kind) for kind in KINDS} | {
        "weights": e.stage.trained.flat.view(torch.int16)
    }
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def refusal(action: Callable[[], object], otherwise: str) -> str:
    """The sentence of the error that an action raises, or `otherwise`."""
    try:
        action()
    except SmtrainError as error:
        return str(error)
    return otherwise


# What worlds run; the first argument is the rank.


def train(
    rank: int, config: dict[str, Any], options: ParallelOptions, count: int = STEPS
) -> list[tuple[float, float]]:
    return steps(engine(config, options), 0, count)


def parameter_norms(
    rank: int, config: dict[str, Any], options: ParallelOptions
) -> tuple[Any, dict[str, float]]:
    """The norms that a step tells, and those of the parameters that transformers' module holds
    after it, on rank 0.
    """
    e = engine(config, options)
    result = e.step(*own(e, batch(config, 0)), lr(0))
    whole: dict[str, float] = {}
    for name, parameter in e.stage.named_own_parameters() if e.world_size == 1 else ():
        if parameter.requires_grad:
            whole[name] = float(parameter.detach().double().norm())
    return result.param_norms, whole


def fit_one_batch(
    rank: int, config: dict[str, Any], options: ParallelOptions, count: int
) -> list[float]:
    e = engine(config, options)
    return [e.step(*own(e, batch(config, 0)), 1e-3).loss for _ in range(count)]


def plain(
    rank: int,
    config: dict[str, Any],
    count: int = STEPS,
    options: OptimizerOptions = OPTIMIZER,
    noise: int | None = None,
) -> list[tuple[float, float]]:
    """transformers and torch alone; with `noise`, a seed, from weights that are off by about one
    rounding.
    """
    model = transformers_model(config).train()
    if noise is not None:
        generator = torch.Generator().manual_seed(noise)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 6e-8 * torch.randn(p.shape, generator=generator))

    def backward(step: int) -> float:
        ids, labels = batch(config, step)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        return float(loss.detach())

    return adamw_steps(list(model.parameters()), backward, count, options)


def adamw_steps(
    parameters: list[torch.nn.Parameter],
    backward: Callable[[int], float],
    count: int,
    options: OptimizerOptions = OPTIMIZER,
    rate: float = 1.0,
) -> list[tuple[float, float]]:
    """Steps of torch's AdamW; `backward` computes the gradients of a step and returns its loss."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        [g for g in groups if g["params"]], betas=options.betas, eps=options.eps
    )
    out = []
    for step in range(count):
        loss = backward(step)
        # Older transformers keep the matrices of experts apart: one without a token has no
        # gradient, and AdamW would leave it as it is.
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.clip_grad_norm_(parameters, options.grad_clip)
        for group in adamw.param_groups:
            group["lr"] = rate * lr(step)
        adamw.step()
        adamw.zero_grad()
        out.append((loss, float(norm)))
    return out


def transformers_model(config: dict[str, Any]) -> Any:
    shape, values = ModelShape.from_config(config), weights(config)
    built, attention = AutoConfig.for_model(**config), "eager" if shape.rules.sinks else "sdpa"
    model = AutoModelForCausalLM.from_config(
        built, attn_implementation=attention, dtype=torch.float32
    )
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            parts = [
                values[part]
                for part in shape.file_parts(name, tuple(tensor.shape))
                if part in values
            ]
            if parts:
                tensor.copy_(torch.cat(parts).view(tensor.shape))
    return model


def plain_logits(rank: int, config: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return transformers_model(config)(
            input_ids=batch(config, 0)[0], use_cache=False
        ).logits.numpy()


def look(rank: int, config: dict[str, Any], options: ParallelOptions) -> tuple[float, Any]:
    """Evaluation loss and logits of step 0's batch, before any training."""
    e = engine(config, options)
    logits = e.logits(batch(config, 0)[0])
    return e.evaluate(*own(e, batch(config, 0))).loss, None if logits is None else logits.numpy()


def save_start(
    rank: int, config: dict[str, Any], text: str, folder: Path, seed: int | None = None
) -> None:
    engine(config, mesh(text), seed).save(folder, 0, {})


def train_and_save(
    rank: int, config: dict[str, Any], options: ParallelOptions, folder: Path, at: int, last: int
) -> list[tuple[float, float]]:
    e = engine(config, options)
    steps(e, 0, at)
    e.save(folder, at, {"consumed": at * BATCH})
    return steps(e, at, last)


def resume(
    rank: int,
    config: dict[str, Any],
    options: ParallelOptions,
    checkpoint: Path,
    at: int,
    last: int,
) -> tuple[dict[str, Any], list[tuple[float, float]]]:
    e = engine(
        config, options, seed=7
    )  # random, so that nothing but the checkpoint can explain the numbers
    return e.load(checkpoint), steps(e, at, last)


def save_again(
    rank: int, config: dict[str, Any], options: ParallelOptions, old: Path, folder: Path, step: int
) -> None:
    e = engine(config, options, seed=7)
    e.load(old)
    e.save(folder, step, {})


def die_saving(
    rank: int, config: dict[str, Any], folder: Path, step: int, moment: int, behind: bool = False
) -> None:
    """Save, and be killed at the `moment`-th rename or flush to disk; `behind`, during the next
    steps.
    """
    e = engine(config, mesh("111"), seed=step)
    left = [moment]
    for name in ("replace", "fsync"):
        real = getattr(os, name)

        def counted(*args: Any, real: Any = real) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        setattr(os, name, counted)
    if behind:
        e.begin_save(folder, step, {"moment": moment})
        while e.end_save(wait=False) is None:
            steps(e, 0, 1)
    else:
        e.save(folder, step, {"moment": moment})


def train_saving_behind(
    rank: int, config: dict[str, Any], options: ParallelOptions, folder: Path, at: int, last: int
) -> list[tuple[float, float]]:
    """Like `train_and_save`, but rank 0's disk is so slow that all further steps are done before
    the save is, and every rank copies only when the first of them waits for it or has updated.
    """
    e = engine(config, options)
    steps(e, 0, at)
    held, real = threading.Event(), vars(saving)["write_safetensors"]
    updating, copy = threading.Event(), vars(host_copies)["_copy"]
    finish, update = e._saver.finish_before_change, e.optimizer.step

    def finish_late() -> None:
        updating.set()
        finish()

    def update_and_copy(lr: float) -> torch.Tensor:
        norm = update(lr)
        updating.set()
        return norm

    def copy_late(*args: Any) -> None:
        updating.wait()
        copy(*args)

    e._saver.finish_before_change, e.optimizer.step = finish_late, update_and_copy  # type: ignore[method-assign]
    vars(host_copies)["_copy"] = copy_late

    def slow(*args: Any) -> Any:
        if rank == 0:
            held.wait()
        return real(*args)

    vars(saving)["write_safetensors"] = slow
    try:
        e.begin_save(folder, at, {"consumed": at * BATCH})
        losses = []
        for step in range(at, last):
            losses += steps(e, step, step + 1)
            assert e.end_save(wait=False) is None, (
                "no checkpoint is whole before every rank has written"
            )
        held.set()
        e.begin_save(folder, last, {})  # waits for the save before it
        assert manifest.fault(manifest.step_folder(folder, at)) is None
        assert e.end_save() == last
        assert e.end_save() is None
    finally:
        held.set()
        vars(saving)["write_safetensors"] = real
        vars(host_copies)["_copy"] = copy
    return losses


def save_and_abandon(
    rank: int, config: dict[str, Any], options: ParallelOptions, folder: Path, step: int
) -> None:
    e = engine(config, options)
    e.begin_save(folder, step, {})
    steps(e, 0, 1)
    e.abandon_save()
    assert e.end_save() is None


def save_what_is_no_number(
    rank: int, config: dict[str, Any], options: ParallelOptions, folder: Path
) -> str:
    e = engine(config, options)
    if rank == 1:
        zero1(e).master[3] = math.inf
    return refusal(lambda: e.begin_save(folder, 1, {}), "begun")


def train_until_killed(
    rank: int, config: dict[str, Any], options: ParallelOptions, folder: Path, at: int
) -> None:
    """Like a job: continue from the newest whole checkpoint, save every 2 steps; rank 1 is killed
    after step `at`.
    """
    e, newest = engine(config, options), newest_complete(folder)
    first = e.load(newest)["next"] if newest else 0
    for step in range(first, STEPS):
        result = steps(e, step, step + 1)[0]
        if rank == 0:
            with open(folder / "losses", "a") as file:
                file.write(f"{step} {result!r}\n")
        if step % 2:
            e.save(folder, step + 1, {"next": step + 1})
        if step == at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 7:
            return


def host_of(rank: int, folders: list[Path]) -> Path:
    """Two hosts with two ranks and a disk each."""
    os.environ["LOCAL_RANK"] = str(rank % 2)
    return folders[rank // 2]


def save_on_hosts(
    rank: int, config: dict[str, Any], options: ParallelOptions, folders: list[Path]
) -> None:
    folder = host_of(rank, folders)
    e = engine(config, options)
    for step in range(3):
        steps(e, step, step + 1)
        e.save(folder, step + 1, {})


def prune_on_hosts(
    rank: int, config: dict[str, Any], options: ParallelOptions, folders: list[Path], keep: int
) -> None:
    folder = host_of(rank, folders)
    engine(config, options).prune(Lineage.of(folder, ""), keep)


def try_build(
    rank: int, config: dict[str, Any], options: ParallelOptions, tensors: dict[str, Any] | None
) -> str:
    """The sentence of the error that a build raises."""
    source: Any = (
        None
        if tensors is None
        else Memory(config, {k: torch.from_numpy(v) for k, v in tensors.items()})
    )
    return refusal(lambda: NativeEngine(config, options, OPTIMIZER, source, 0), "built")


def train_and_count_graphs(
    rank: int, config: dict[str, Any], options: ParallelOptions, count: int
) -> tuple[list[tuple[float, float]], int]:
    """Steps, and the number of graphs that torch compiled meanwhile."""
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    numbers = train(rank, config, options, count)
    return numbers, counters["stats"]["unique_graphs"] - before


def train_without_compiler(
    rank: int, config: dict[str, Any], options: ParallelOptions
) -> tuple[list[tuple[float, float]], list[str]]:
    """One step on a machine whose compiler is gone, and what the log says."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("smtrain.worker.engine.native.layers")
    before = os.environ.get("CXX")
    os.environ["CXX"] = "no-compiler"
    log.addHandler(handler)
    try:
        return train(rank, config, options, 1), said
    finally:
        log.removeHandler(handler)
        os.environ.pop("CXX")
        if before is not None:
            os.environ["CXX"] = before


def try_load(rank: int, config: dict[str, Any], options: ParallelOptions, checkpoint: Path) -> str:
    return refusal(lambda: engine(config, options).load(checkpoint), "loaded")


def try_step(rank: int, config: dict[str, Any], options: ParallelOptions, length: int) -> str:
    e, ids = engine(config, options), torch.zeros(1, length, dtype=torch.int64)
    return refusal(lambda: e.step(ids, ids, 1e-3), "stepped")


def read_all(checkpoint: Path) -> dict[str, torch.Tensor]:
    source = NativeSource(checkpoint)
    return {name: source.read(name) for name in source.names()}


def save_on_full_disk(
    rank: int,
    config: dict[str, Any],
    options: ParallelOptions,
    folder: Path,
    full: int,
    behind: bool = False,
) -> str:
    """Save twice; the second time rank `full` cannot write a shard of 400 KB.

    It can still write torch's file of ranks and addresses (3 KB), without which a late rank would
    die.
    """
    e = engine(config, options)
    e.save(folder, 1, {})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        if behind:
            e.begin_save(folder, 2, {})
            steps(e, 0, 1)
            e.end_save()
        else:
            e.save(folder, 2, {})
    except SmtrainError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "saved"


def step_without_labels(
    rank: int, config: dict[str, Any], options: ParallelOptions
) -> tuple[StepResult, StepResult]:
    e = engine(config, options)
    ids, labels = own(e, batch(config, 0))
    return e.step(ids, torch.full_like(labels, -100), 1e-3), e.step(ids, labels, 1e-3)


def masters(
    rank: int, config: dict[str, Any], options: ParallelOptions, rounded: bool
) -> tuple[Any, Any, Any]:
    """This rank's part of the fp32 weights and the parameters in bf16, and the weights of an fp32
    engine.
    """
    values = weights(config)
    if rounded:
        values = {name: tensor.to(torch.bfloat16) for name, tensor in values.items()}
    source: Any = Memory(config, values)
    e = NativeEngine(config, replace(options, precision="bf16"), OPTIMIZER, source, 0)
    exact = NativeEngine(config, options, OPTIMIZER, source, 0)
    return (
        zero1(e).master.numpy(),
        zero1(e).part(e.stage.trained.flat).float().numpy(),
        zero1(exact).master.numpy(),
    )


def overflow(rank: int, config: dict[str, Any], options: ParallelOptions) -> dict[str, Any]:
    """A step that overflows between two that do not, and the two without it."""
    e, plain = engine(config, options), engine(config, options)
    scale = e.optimizer.loss_scale
    assert scale is not None
    scaled_steps(e, 0, 1)
    before = held(e)
    (skipped,) = scaled_steps(e, 7, 8, overflow=7)
    result = {
        "skipped": skipped,
        "kept": held(e) == before,
        "updates": e.optimizer.updates,
        "state": scale.state(),
    }
    scaled_steps(plain, 0, 1)
    assert plain.optimizer.loss_scale is not None
    plain.optimizer.loss_scale.restore({"scale": float(scale.scale), "good_steps": 0, "skipped": 0})
    result["same"] = scaled_steps(e, 1, 3) == scaled_steps(plain, 1, 3)
    scale.restore({"scale": 2.0**60, "good_steps": 0, "skipped": 0})
    before = held(e)
    (result["enormous"],) = scaled_steps(e, 3, 4)
    return {**result, "kept": result["kept"] and held(e) == before}


def train_and_save_fp16(
    rank: int, config: dict[str, Any], options: ParallelOptions, folder: Path
) -> list[StepResult]:
    """Saves after two steps, of which the second is skipped; the next step but one doubles the
    scale.
    """
    e = engine(config, options)
    scale = e.optimizer.loss_scale
    assert scale is not None
    scaled_steps(e, 0, 2, overflow=1)
    scale.restore({**scale.state(), "good_steps": GOOD_STEPS - 2})
    e.save(folder, 2, {})
    return scaled_steps(e, 2, 6, overflow=4)


def resume_fp16(
    rank: int, config: dict[str, Any], options: ParallelOptions, checkpoint: Path
) -> list[StepResult]:
    e = engine(config, options, seed=7)
    e.load(checkpoint)
    return scaled_steps(e, 2, 6, overflow=4)


def first_use_of_the_pipelines_group(
    rank: int, config: dict[str, Any], options: ParallelOptions
) -> list[str]:
    """Calls to torch with this rank's pipeline group up to the first messages, in order."""
    import torch.distributed as dist

    used: list[tuple[str, Any]] = []
    kept: tuple[Any, Any] = dist.all_reduce, dist.batch_isend_irecv

    def all_reduce(tensor: Any, *args: Any, group: Any = None, **rest: Any) -> Any:
        used.append(("all_reduce", group))
        return kept[0](tensor, *args, group=group, **rest)

    def messages(ops: Any) -> Any:
        used.append(("messages", ops[0].group))
        return kept[1](ops)

    vars(dist).update(all_reduce=all_reduce, batch_isend_irecv=messages)
    try:
        e = engine(config, options)
        steps(e, 0, 1)
    finally:
        dist.all_reduce, dist.batch_isend_irecv = kept
    return [what for what, group in used if group is e.mesh.pp_group]
