"""The plan of models with latent attention: activations as torch saves them, chats' caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smtrain.client.planner.machines import Mesh, Work
from smtrain.client.planner.memory import saved_per_token
from smtrain.core.model.footprint import CONTEXT, Precision, cache_of
from smtrain.core.model.shape import ModelShape

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "q_lora_rank": 96,
    "kv_lora_rank": 80,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "first_k_dense_replace": 1,
}
TOKENS = 256


@pytest.mark.parametrize(
    ("precision", "value_dim", "q_rank"),
    [("bf16", 40, 96), ("fp32", 64, 96), ("fp32", 40, None)],
)
def test_a_layer_saves_what_the_plan_counts(
    precision: Precision, value_dim: int, q_rank: int | None
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from smtrain.worker.engine.native import attention_function

    config = {**CONFIG, "v_head_dim": value_dim, "q_lora_rank": q_rank}
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config),
        attn_implementation=attention_function.register(is_compiled=False),
        dtype=dtype,
    )
    hidden_states = torch.randn(1, TOKENS, 256, dtype=dtype).requires_grad_()
    rotary = model.model.rotary_emb(hidden_states, torch.arange(TOKENS)[None])
    layer, sizes = model.model.layers[0], dict[int, int]()
    ignored = {x.untyped_storage().data_ptr() for x in (*layer.parameters(), *rotary)}

    def pack(x: torch.Tensor) -> torch.Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = layer(hidden_states, position_embeddings=rotary, attention_mask=None)
    saved = sum(size for at, size in sizes.items() if at not in ignored) / TOKENS
    assert out.requires_grad
    work = Work(ModelShape.from_config(config), TOKENS, 1, precision=precision)
    assert saved_per_token(work, Mesh(1, 1, 1)) == pytest.approx(saved, rel=0.01)


def test_a_chat_keeps_latents_not_heads() -> None:
    assert cache_of({**CONFIG, "num_hidden_layers": 3}) == 3 * 2 * CONTEXT * (80 + 16)
