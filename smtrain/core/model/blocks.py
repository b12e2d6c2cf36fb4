"""Name, role and shape of the parameters of a decoder layer, for each family; pure Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smtrain.core.model.family import ExpertNames
    from smtrain.core.model.shape import ModelShape
    from smtrain.core.model.sizes import DeltaSizes, ExpertSizes, LatentSizes


class Role(Enum):
    """Division of a parameter by tensor parallelism: the dimension and the unit."""

    VOCAB = "rows by vocabulary"
    Q = "rows by query head"
    Q_GATE = "rows by query head, each head's query and gate together (Qwen3.5)"
    KV = "rows by key/value head"
    QKV = "rows by head, each head's q, k and v together (GPT-NeoX)"
    THIRDS = "rows by head in each third: all of q, then k, then v (GPT-2)"
    QKV_BLOCKS = "rows by head in each block: all of q, then k, then v with their own heads (Phi-3)"
    GATE_UP = "rows by intermediate unit in each half: all of gate, then up (Phi-3)"
    O = "columns by query head"  # noqa: E741
    COLUMN = "rows by intermediate unit"
    ROW = "columns by intermediate unit"
    LATENT_KV = "rows by head, each head's key and value together (latent attention)"
    LATENT = "whole on every rank, which sees its own heads only: linears and norms of latents"
    HEAD_NORM = "whole on every rank, which sees its own heads only"
    Q_NORM = "numbers by query head"
    K_NORM = "numbers by key/value head"
    DELTA_QKV = (
        "rows by head in each block: q, k, then v, each by the heads of a gated delta net (Qwen3.5)"
    )
    DELTA_QKVZ = "rows by key head, its q, k, v and gates together (Qwen3-Next)"
    DELTA_BA = "rows by key head, its rates and decays together (Qwen3-Next)"
    DELTA_ROWS = "rows by value head of a gated delta net"
    DELTA_HEADS = "one row or number for each value head of a gated delta net"
    DELTA_COLUMNS = "columns by value head of a gated delta net"
    FACTOR = "whole on every rank, which sees its own part of the other factor only (LoRA)"
    SINK = "one number for each query head (gpt-oss)"
    EXPERT_COLUMN = "rows by intermediate unit of an expert"
    EXPERT_ROW = "columns by intermediate unit of an expert"
    SHARED_COLUMN = "rows by intermediate unit of the expert that all tokens share"
    SHARED_ROW = "columns by intermediate unit of the expert that all tokens share"
    EXPERTS_PAIRS = (
        "third dimension by intermediate unit, gate and up of each side by side, for all experts"
        " (gpt-oss)"
    )
    EXPERTS_PAIRS_BIAS = (
        "second dimension by intermediate unit, gate and up of each side by side (gpt-oss)"
    )
    EXPERTS_ROW = "second dimension by intermediate unit, for all experts (gpt-oss)"
    EXPERTS_COLUMNS = "third dimension by intermediate unit, for all experts (LoRA)"
    EXPERTS_GATE_UP = (
        "second dimension by intermediate unit in each half, gate, then up, for all experts (LoRA)"
    )
    EXPERTS_SUM = (
        "whole on every rank, which sees its own part of the experts only: routers, biases of their"
        " sums"
    )
    WHOLE = "whole on every rank"
    CONSTANT = "whole on every rank, stored and not trained (a buffer of transformers)"
    ROUTER_BIAS = "whole on every rank, in fp32, outside the optimizer (a buffer of transformers)"


@dataclass(frozen=True)
class Spec:
    """One parameter: its name in Hugging Face files, its role and its full shape."""

    name: str
    role: Role
    shape: tuple[int, ...]
    is_transposed: bool = False
    """Stored with its inputs first (GPT-2's Conv1D): rows in the role are columns here."""
    expert: int | None = None
    """The one expert of the layer that has this parameter; only its expert-parallel rank holds it.
    """
    is_stacked: bool = False
    """The first dimension counts the experts of the layer; expert parallelism cuts it (gpt-oss)."""

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it multiplies, and has weight decay: vectors of all experts in one table are no
        matrix.
        """
        return len(self.shape) - self.is_stacked > 1

    @property
    def is_parameter(self) -> bool:
        """Whether it counts as a parameter; transformers' buffers do not."""
        return self.role not in (Role.CONSTANT, Role.ROUTER_BIAS)

    @property
    def of_experts(self) -> bool:
        """Whether expert parallelism divides it."""
        return self.expert is not None or self.is_stacked


def keeps_fp32(name: str) -> bool:
    """Whether a parameter is fp32 in files of every precision: the bias of a router's choices."""
    return name.endswith(".e_score_correction_bias")


def block(shape: ModelShape) -> Iterator[Spec]:
    """The parameters of a layer, by their names within it, in the order of the forward pass."""
    return {"gpt_neox": _neox_block, "gpt2": _gpt2_block, "llama": _llama_block}[shape.rules.form](
        shape
    )


def norm(name: str, hidden_size: int, bias: bool = False) -> list[Spec]:
    """The one or two vectors of a norm."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return [Spec(f"{name}.{kind}", Role.WHOLE, (hidden_size,)) for kind in kinds]


def _linear(name: str, role: Role, out: int, into: int, bias: bool) -> Iterator[Spec]:
    yield Spec(f"{name}.weight", role, (out, into))
    if bias:
        # The bias of a row-parallel linear is added once, after the all-reduce, so every rank holds
        # all of it.
        yield Spec(f"{name}.bias", Role.WHOLE if role in (Role.O, Role.ROW) else role, (out,))


def _llama_block(s: ModelShape) -> Iterator[Spec]:
    def norms(*places: str) -> Iterator[Spec]:
        for name in (f"{place}_layernorm" for place in places):
            yield from norm(name, s.hidden) if name in s.rules.block_norms else ()

    yield from norms("input")
    if s.delta is not None:
        yield from _delta_net(s, s.delta)
    elif s.latent is not None:
        yield from _latent_attention(s, s.latent)
    else:
        yield from _attention(s)
    yield from norms("post_attention", "pre_feedforward")
    if s.experts is not None and s.rules.experts is not None:
        yield from _experts(s, s.experts, s.rules.experts)
    if not s.has_mlp:
        pass
    elif s.rules.fused:
        yield from _linear(
            "mlp.gate_up_proj", Role.GATE_UP, 2 * s.intermediate, s.hidden, s.mlp_bias
        )
    else:
        yield from _linear("mlp.gate_proj", Role.COLUMN, s.intermediate, s.hidden, s.mlp_bias)
        yield from _linear("mlp.up_proj", Role.COLUMN, s.intermediate, s.hidden, s.mlp_bias)
    if s.has_mlp:
        yield from _linear("mlp.down_proj", Role.ROW, s.hidden, s.intermediate, s.mlp_bias)
    yield from norms("post_feedforward")
    if s.rules.block_scale:
        yield Spec("layer_scalar", Role.CONSTANT, (1,))


def _attention(s: ModelShape) -> Iterator[Spec]:
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    if s.rules.fused:
        yield from _linear("self_attn.qkv_proj", Role.QKV_BLOCKS, q + 2 * kv, s.hidden, s.qkv_bias)
    else:
        role, width = (Role.Q_GATE, 2 * q) if s.rules.gated else (Role.Q, q)
        yield from _linear("self_attn.q_proj", role, width, s.hidden, s.qkv_bias)
        yield from _linear("self_attn.k_proj", Role.KV, kv, s.hidden, s.qkv_bias)
        if not s.values_are_keys:
            yield from _linear("self_attn.v_proj", Role.KV, kv, s.hidden, s.qkv_bias)
    if s.qk_norm == "head":
        yield Spec("self_attn.q_norm.weight", Role.HEAD_NORM, (s.head_dim,))
        yield Spec("self_attn.k_norm.weight", Role.HEAD_NORM, (s.head_dim,))
    elif s.qk_norm == "wide":
        yield Spec("self_attn.q_norm.weight", Role.Q_NORM, (q,))
        yield Spec("self_attn.k_norm.weight", Role.K_NORM, (kv,))
    yield from _linear("self_attn.o_proj", Role.O, s.hidden, q, s.o_bias)
    if s.rules.sinks:
        yield Spec("self_attn.sinks", Role.SINK, (s.heads,))


def _latent_attention(s: ModelShape, d: LatentSizes) -> Iterator[Spec]:
    q = s.heads * d.head_dim
    if d.q_rank is None:
        yield from _linear("self_attn.q_proj", Role.Q, q, s.hidden, False)
    else:
        yield from _linear("self_attn.q_a_proj", Role.LATENT, d.q_rank, s.hidden, s.qkv_bias)
        yield Spec("self_attn.q_a_layernorm.weight", Role.LATENT, (d.q_rank,))
        yield from _linear("self_attn.q_b_proj", Role.Q, q, d.q_rank, False)
    rows = d.kv_rank + d.rope_dim
    yield from _linear("self_attn.kv_a_proj_with_mqa", Role.LATENT, rows, s.hidden, s.qkv_bias)
    yield Spec("self_attn.kv_a_layernorm.weight", Role.LATENT, (d.kv_rank,))
    rows = s.heads * (d.nope_dim + d.value_dim)
    yield from _linear("self_attn.kv_b_proj", Role.LATENT_KV, rows, d.kv_rank, False)
    yield from _linear("self_attn.o_proj", Role.O, s.hidden, s.heads * d.value_dim, s.o_bias)


def _experts(s: ModelShape, sizes: ExpertSizes, names: ExpertNames) -> Iterator[Spec]:
    """A router and its experts. Gate and up of expert after expert, then all down: transformers 5
    has two tensors with this content, which views of a flat buffer in this order can be.
    """
    yield Spec(f"{names.router}.weight", Role.EXPERTS_SUM, (sizes.count, s.hidden))
    if names.bias is not None:
        yield Spec(names.bias, Role.ROUTER_BIAS, (sizes.count,))
    if names.next_to_mlp:
        at = names.router.rpartition(".")[0]
        yield Spec(f"{at}.scale", Role.EXPERTS_SUM, (s.hidden,))
        yield Spec(f"{at}.per_expert_scale", Role.EXPERTS_SUM, (sizes.count,))
        for place in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2"):
            yield from norm(place, s.hidden)
        yield from norm("post_feedforward_layernorm_2", s.hidden)
    if names.stacked == "halves":
        up, down = (f"{names.path}.{part}" for part in names.parts[1:])
        gate_up_shape = (sizes.count, 2 * sizes.width, s.hidden)
        down_shape = (sizes.count, s.hidden, sizes.width)
        yield Spec(up, Role.EXPERTS_GATE_UP, gate_up_shape, is_stacked=True)
        yield Spec(down, Role.EXPERTS_COLUMNS, down_shape, is_stacked=True)
        return
    if names.stacked == "pairs":
        yield Spec(f"{names.router}.bias", Role.EXPERTS_SUM, (sizes.count,))
        up, down, f = (
            f"{names.path}.{names.parts[1]}",
            f"{names.path}.{names.parts[2]}",
            sizes.width,
        )
        yield Spec(up, Role.EXPERTS_PAIRS, (sizes.count, s.hidden, 2 * f), is_stacked=True)
        yield Spec(f"{up}_bias", Role.EXPERTS_PAIRS_BIAS, (sizes.count, 2 * f), is_stacked=True)
        yield Spec(down, Role.EXPERTS_ROW, (sizes.count, f, s.hidden), is_stacked=True)
        yield Spec(f"{down}_bias", Role.EXPERTS_SUM, (sizes.count, s.hidden), is_stacked=True)
        return
    gate, up, down = names.parts
    for j in range(sizes.count):
        for part in (gate, up):
            yield Spec(
                f"{names.path}.{j}.{part}.weight",
                Role.EXPERT_COLUMN,
                (sizes.width, s.hidden),
                expert=j,
            )
    for j in range(sizes.count):
        yield Spec(
            f"{names.path}.{j}.{down}.weight", Role.EXPERT_ROW, (s.hidden, sizes.width), expert=j
        )
    if sizes.shared:
        into, inner = (sizes.shared, s.hidden), (s.hidden, sizes.shared)
        yield Spec(f"{names.shared}.{gate}.weight", Role.SHARED_COLUMN, into)
        yield Spec(f"{names.shared}.{up}.weight", Role.SHARED_COLUMN, into)
        yield Spec(f"{names.shared}.{down}.weight", Role.SHARED_ROW, inner)
        if names.shared_gate:
            yield Spec(f"{names.shared}_gate.weight", Role.EXPERTS_SUM, (1, s.hidden))


def _delta_net(s: ModelShape, d: DeltaSizes) -> Iterator[Spec]:
    at, qkv_width = s.rules.linear, 2 * d.keys + d.values
    if s.rules.fused_net:
        yield Spec(f"{at}.in_proj_qkvz.weight", Role.DELTA_QKVZ, (qkv_width + d.values, s.hidden))
        yield Spec(f"{at}.in_proj_ba.weight", Role.DELTA_BA, (2 * d.value_heads, s.hidden))
    else:
        yield Spec(f"{at}.in_proj_qkv.weight", Role.DELTA_QKV, (qkv_width, s.hidden))
        yield Spec(f"{at}.in_proj_z.weight", Role.DELTA_ROWS, (d.values, s.hidden))
        yield Spec(f"{at}.in_proj_b.weight", Role.DELTA_HEADS, (d.value_heads, s.hidden))
        yield Spec(f"{at}.in_proj_a.weight", Role.DELTA_HEADS, (d.value_heads, s.hidden))
    yield Spec(f"{at}.conv1d.weight", Role.DELTA_QKV, (qkv_width, 1, d.taps))
    yield Spec(f"{at}.A_log", Role.DELTA_HEADS, (d.value_heads,))
    yield Spec(f"{at}.dt_bias", Role.DELTA_HEADS, (d.value_heads,))
    yield Spec(f"{at}.norm.weight", Role.HEAD_NORM, (d.value_dim,))
    yield Spec(f"{at}.out_proj.weight", Role.DELTA_COLUMNS, (s.hidden, d.values))


def _neox_block(s: ModelShape) -> Iterator[Spec]:
    yield from norm("input_layernorm", s.hidden, bias=True)
    yield from _linear(
        "attention.query_key_value", Role.QKV, 3 * s.heads * s.head_dim, s.hidden, s.qkv_bias
    )
    yield from _linear("attention.dense", Role.O, s.hidden, s.heads * s.head_dim, s.o_bias)
    yield from norm("post_attention_layernorm", s.hidden, bias=True)
    yield from _linear("mlp.dense_h_to_4h", Role.COLUMN, s.intermediate, s.hidden, s.mlp_bias)
    yield from _linear("mlp.dense_4h_to_h", Role.ROW, s.hidden, s.intermediate, s.mlp_bias)


def _gpt2_block(s: ModelShape) -> Iterator[Spec]:
    def conv1d(name: str, role: Role, out: int, into: int) -> Iterator[Spec]:
        for spec in _linear(name, role, out, into, bias=True):
            yield Spec(spec.name, spec.role, spec.shape[::-1], is_transposed=len(spec.shape) == 2)

    yield from norm("ln_1", s.hidden, bias=True)
    yield from conv1d("attn.c_attn", Role.THIRDS, 3 * s.hidden, s.hidden)
    yield from conv1d("attn.c_proj", Role.O, s.hidden, s.hidden)
    yield from norm("ln_2", s.hidden, bias=True)
    yield from conv1d("mlp.c_fc", Role.COLUMN, s.intermediate, s.hidden)
    yield from conv1d("mlp.c_proj", Role.ROW, s.hidden, s.intermediate)
