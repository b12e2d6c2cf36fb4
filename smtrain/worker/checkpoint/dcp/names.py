"""Names in torchtitan's checkpoints, and the order of rows in its q, k and v.

Facts: torchtitan 0.3.0, models/llama3 and qwen3 `state_dict_adapter.py` (names, rotary order),
models/common/attention.py `FusedQKVLinear` (fused rows), components/optimizer (keys of state).
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

_BLOCK = {
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "lm_head",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_TITAN_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_TURNED_PARTS = {"llama": ("wq", "wk"), "qwen3": ()}
"""torchtitan's model families, with the linears whose rows it turns for its complex rotary
embeddings; those of qwen3 are in Hugging Face's order.
"""
_QKV_NAME = "attention.qkv_linear.wqkv"
_OLDER = (
    # Releases before 0.3.
    (re.compile(r"\.attention\.(w[qkv])\."), r".attention.qkv_linear.\1."),
    (re.compile(r"^output\."), "lm_head."),
)


def is_titan(keys: Iterable[str]) -> bool:
    """Whether the keys of a model are torchtitan's."""
    return any(key.removeprefix("model.") == "tok_embeddings.weight" for key in keys)


def refuse_unknown_to_titan(shape: ModelShape) -> None:
    """Raise `CheckpointError` for a family that has no names of torchtitan here."""
    if shape.family not in _TURNED_PARTS:
        raise CheckpointError(
            f"{shape.family} models are not converted from or to torchtitan's names, which are"
            f" known for {' and '.join(_TURNED_PARTS)}; take --format accelerate (form=), which"
            " has Hugging Face's.",
            code="checkpoint.other_model",
        )


def titan_name(name: str, location: object, shape: ModelShape) -> str:
    """torchtitan's name of a Hugging Face parameter."""
    if match := _LAYER.fullmatch(name):
        if match[2] in _BLOCK:
            return f"layers.{match[1]}.{_BLOCK[match[2]]}.weight"
    elif (stem := name.removesuffix(".weight")) in _TOP:
        return f"{_TOP[stem]}.weight"
    raise CheckpointError(
        f"{location} holds {name[:200]}, which torchtitan's {shape.family} models do not have;"
        " take --format accelerate (form=).",
        code="checkpoint.other_model",
    )


def hf_name(name: str) -> str | None:
    """The Hugging Face name of one of torchtitan's; None for an unknown one."""
    for pattern, new in _OLDER:
        name = pattern.sub(new, name)
    if match := _TITAN_LAYER.fullmatch(name):
        inner = next((hf for hf, titan in _BLOCK.items() if titan == match[2]), None)
        return None if inner is None else f"model.layers.{match[1]}.{inner}.weight"
    stem = next((hf for hf, titan in _TOP.items() if f"{titan}.weight" == name), None)
    return None if stem is None else f"{stem}.weight"


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
    is_interleaved = part in _TURNED_PARTS[shape.family]
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
