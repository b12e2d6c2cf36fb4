"""Names in torchtitan's checkpoints, the order of rows in its q, k and v, and its tensors of all
experts.

Facts: torchtitan 0.3.0, models/llama3, qwen3 and deepseek_v3 `state_dict_adapter.py` (names, rotary
order), models/common/attention.py `FusedQKVLinear` (fused rows), models/common/moe.py (experts and
the bias of choices), components/optimizer (keys of state). 0.2.0: the older names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.core.model.shape import ModelShape
from smtrain.core.text import with_article
from smtrain.worker.checkpoint.dtypes import Bits

_ANY_BLOCK = {
    "self_attn.o_proj.weight": "attention.wo.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
_HEADS = {
    "self_attn.q_proj.weight": "attention.qkv_linear.wq.weight",
    "self_attn.k_proj.weight": "attention.qkv_linear.wk.weight",
    "self_attn.v_proj.weight": "attention.qkv_linear.wv.weight",
    "self_attn.q_norm.weight": "attention.q_norm.weight",
    "self_attn.k_norm.weight": "attention.k_norm.weight",
}
_LATENTS = {
    "self_attn.q_proj.weight": "attention.wq.weight",
    "self_attn.q_a_proj.weight": "attention.wq_a.weight",
    "self_attn.q_a_layernorm.weight": "attention.q_norm.weight",
    "self_attn.q_b_proj.weight": "attention.wq_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attention.wkv_a.weight",
    "self_attn.kv_a_layernorm.weight": "attention.kv_norm.weight",
    "self_attn.kv_b_proj.weight": "attention.wkv_b.weight",
}
_ROUTER = {"mlp.gate.weight": "moe.router.gate.weight"}
_EXPERTS = {
    "gate_proj": "moe.routed_experts.inner_experts.w1_EFD",
    "up_proj": "moe.routed_experts.inner_experts.w3_EFD",
    "down_proj": "moe.routed_experts.inner_experts.w2_EDF",
}
"""The tensor [experts, rows, columns] with a matrix of all experts of a layer."""
_BIAS = "moe.expert_bias_E"
"""The bias of choices. Qwen3's models in torchtitan may have one too; Hugging Face's have none, and
torchtitan leaves it out when it exports them.
"""
_DEEPSEEK = {
    **_LATENTS,
    **_ROUTER,
    "mlp.gate.e_score_correction_bias": _BIAS,
    **{
        f"mlp.shared_experts.{hf}.weight": f"moe.shared_experts.{titan}.weight"
        for hf, titan in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
    },
}
_BLOCKS = {
    "llama": _ANY_BLOCK | _HEADS,
    "qwen3": _ANY_BLOCK | _HEADS,
    "qwen3_moe": _ANY_BLOCK | _HEADS | _ROUTER,
    "deepseek_v3": _ANY_BLOCK | _DEEPSEEK,
}
"""torchtitan's model families, with the names in a layer by Hugging Face's."""
_TOP = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "lm_head",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.\d+\.(\w+)\.weight")
_TITAN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_TURNED_PARTS = {"llama": ("wq", "wk")}
"""The linears whose rows torchtitan turns for its complex rotary embeddings; those of other families
are in Hugging Face's order.
"""
_QKV_NAME = "attention.qkv_linear.wqkv"
_OLDER = (
    # Releases before 0.3.
    (re.compile(r"^output\."), "lm_head."),
    (re.compile(r"\.moe\.experts\.(w[13])$"), r".moe.routed_experts.inner_experts.\1_EFD"),
    (re.compile(r"\.moe\.experts\.w2$"), r".moe.routed_experts.inner_experts.w2_EDF"),
    (re.compile(r"\.moe\.expert_bias$"), f".{_BIAS}"),
)
_OLDER_HEADS = re.compile(r"\.attention\.(w[qkv])\."), r".attention.qkv_linear.\1."
"""Only in families that have these linears; DeepSeek-V3 has another `attention.wq`."""


def is_titan(keys: Iterable[str]) -> bool:
    """Whether the keys of a model are torchtitan's."""
    return any(key.removeprefix("model.") == "tok_embeddings.weight" for key in keys)


def refuse_unknown_to_titan(shape: ModelShape) -> None:
    """Raise `CheckpointError` for a family that has no names of torchtitan here."""
    if shape.family not in _BLOCKS:
        *families, last = _BLOCKS
        raise CheckpointError(
            f"{shape.family} models are not converted from or to torchtitan's names, which are"
            f" known for {', '.join(families)} and {last}; take --format accelerate (form=), which"
            " has Hugging Face's.",
            code="checkpoint.other_model",
        )


def titan_name(name: str, location: object, shape: ModelShape) -> str:
    """torchtitan's name of the tensor with a Hugging Face parameter; one has those of all
    experts.
    """
    if match := _LAYER.fullmatch(name):
        inner = _BLOCKS[shape.family].get(match[2])
        if shape.experts is not None and (expert := _EXPERT.fullmatch(match[2])):
            inner = _EXPERTS.get(expert[1])
        if inner is not None:
            return f"layers.{match[1]}.{inner}"
    elif (stem := name.removesuffix(".weight")) in _TOP:
        return f"{_TOP[stem]}.weight"
    raise CheckpointError(
        f"{location} holds {name[:200]}, which torchtitan's {shape.family} models do not have;"
        " take --format accelerate (form=).",
        code="checkpoint.other_model",
    )


def hf_name(name: str, shape: ModelShape) -> str | None:
    """The Hugging Face name of one of torchtitan's parameters; None for an unknown one."""
    name = _newer_name(name, shape)
    if match := _TITAN_LAYER.fullmatch(name):
        block = _BLOCKS[shape.family]
        inner = next((hf for hf, titan in block.items() if titan == match[2]), None)
        return None if inner is None else f"model.layers.{match[1]}.{inner}"
    stem = next((hf for hf, titan in _TOP.items() if f"{titan}.weight" == name), None)
    return None if stem is None else f"{stem}.weight"


def experts_of(name: str, shape: ModelShape) -> list[str]:
    """The Hugging Face names of the matrices in a tensor of all experts, in its order; empty for
    another tensor.
    """
    match = _TITAN_LAYER.fullmatch(_newer_name(name, shape))
    part = next((hf for hf, titan in _EXPERTS.items() if match and titan == match[2]), None)
    if match is None or part is None or shape.experts is None:
        return []
    at = f"model.layers.{match[1]}.mlp.experts"
    return [f"{at}.{number}.{part}.weight" for number in range(shape.experts.count)]


def is_left_out(name: str, shape: ModelShape) -> bool:
    """Whether Hugging Face's model has no such tensor, and torchtitan's export leaves it out."""
    return _newer_name(name, shape).endswith(f".{_BIAS}") and _BIAS not in (
        _BLOCKS[shape.family].values()
    )


def _newer_name(name: str, shape: ModelShape) -> str:
    for pattern, new in (*_OLDER, *([] if shape.latent is not None else [_OLDER_HEADS])):
        name = pattern.sub(new, name)
    return name


def parts_of(name: str) -> tuple[str, ...]:
    """The parameters in a tensor of torchtitan: q, k and v of a fused one, else itself."""
    stem = name.removesuffix(".weight")
    if not stem.endswith(_QKV_NAME):
        return (name,)
    return tuple(f"{stem.removesuffix('wqkv')}{part}.weight" for part in ("wq", "wk", "wv"))


def fused_name(name: str) -> str:
    """The parameter that holds a tensor of the state dict: the fused one of q, k and v."""
    return re.sub(r"\.qkv_linear\.w[qkv]\.", ".qkv_linear.wqkv.", name)


def unknown_to_titan(name: str, location: object, shape: ModelShape) -> CheckpointError:
    """The error for a tensor of torchtitan without a Hugging Face name."""
    return CheckpointError(
        f"{location} holds {name[:200]}, which is not read of {with_article(shape.family)} model"
        " of torchtitan; export it in torchtitan with checkpoint.last_save_in_hf.",
        code="checkpoint.other_model",
    )


@dataclass(frozen=True)
class RowOrder:
    """The place of a parameter's rows in a stored tensor, head by head."""

    heads: tuple[int, ...]
    """For each head of the parameter, the head of the stored tensor that holds it."""
    head_dim: int
    interleaved: bool
    """Whether the two halves of a head, which rotate together, alternate in the stored tensor."""

    def rows(self, start: int, stop: int) -> Bits:
        """The stored rows of the parameter's rows `start:stop`."""
        heads, head_rows = np.divmod(np.arange(start, stop), self.head_dim)
        if self.interleaved:
            half = self.head_dim // 2
            head_rows = head_rows % half * 2 + head_rows // half
        return np.asarray(self.heads)[heads] * self.head_dim + head_rows


def row_order(name: str, shape: ModelShape, fused: bool) -> RowOrder | None:
    """The order of a parameter's rows, by torchtitan's name, in its own tensor or in the `fused`
    one; None if it is Hugging Face's.
    """
    part = name.removesuffix(".weight").rsplit(".", 1)[-1]
    is_interleaved = part in _TURNED_PARTS.get(shape.family, ())
    if not fused and not is_interleaved:
        return None
    count = shape.heads if part == "wq" else shape.kv_heads
    if not fused:
        return RowOrder(tuple(range(count)), shape.head_dim, is_interleaved)
    # A group of the fused tensor: the queries of a key/value head, its key, its value.
    queries = shape.heads // shape.kv_heads
    group = queries + 2
    heads = (
        tuple(h // queries * group + h % queries for h in range(count))
        if part == "wq"
        else tuple(h * group + queries + (part == "wv") for h in range(count))
    )
    return RowOrder(heads, shape.head_dim, is_interleaved)
