"""Megatron's names for the tensors of a model, and the Hugging Face parameters that each consists
of; pure data.

Names are those of Megatron-core's GPTModel with its local spec and the layer's number in the whole
model. The rows of an attention input are, for each key/value head, its query heads, the key, the
value; those of a gated MLP are gate, then up. Experts have their number in the model, as in
torch_dist with singleton_local_shards; `EXPERT` tells their names in other forms.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from smtrain.core.errors import CheckpointError, ConfigError
from smtrain.core.model.blocks import Role, Spec
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.layout import Shard
from smtrain.core.model.shape import ModelShape
from smtrain.core.text import with_article
from smtrain.worker.checkpoint.megatron.unfused_source import PARTS, upright_parts
from smtrain.worker.checkpoint.targets import Spelling

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
POSITIONS = "embedding.position_embeddings.weight"
MTP = "mtp."
"""Beginning of the names of layers that predict further tokens."""
log = logging.getLogger(__name__)
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"(.+\.mlp\.experts)\.experts\.(\d+)\.(linear_fc[12]\..+)")
"""Matches the tensor of one expert: what comes before, its number, and the linear."""

# One leaf for each fused tensor: k_proj, v_proj and up_proj are missing on purpose (_fuse_spec).
_LEAVES = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "self_attn.q_proj": "self_attention.linear_qkv",
    "self_attn.qkv_proj": "self_attention.linear_qkv",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "mlp.gate_proj": "mlp.linear_fc1",
    "mlp.gate_up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
    "mlp.shared_experts.gate_proj": "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
    "mlp.shared_expert.gate_proj": "mlp.shared_experts.linear_fc1",
    "mlp.shared_expert.down_proj": "mlp.shared_experts.linear_fc2",
    "mlp.gate": "mlp.router",
    "mlp.router": "mlp.router",
    "block_sparse_moe.gate": "mlp.router",
    "attention.query_key_value": "self_attention.linear_qkv",
    "attention.dense": "self_attention.linear_proj",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
    "ln_1": "input_layernorm",
    "ln_2": "pre_mlp_layernorm",
    "attn.c_attn": "self_attention.linear_qkv",
    "attn.c_proj": "self_attention.linear_proj",
    "mlp.c_fc": "mlp.linear_fc1",
    "mlp.c_proj": "mlp.linear_fc2",
}
_LATENT_LEAVES = {
    "self_attn.q_proj": "self_attention.linear_q_proj",
    "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_a_layernorm": "self_attention.q_layernorm",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_a_layernorm": "self_attention.kv_layernorm",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
}
"""Leaves of latent attention. Its rows need no other order: Megatron-core takes a head's numbers
that turn as neighbouring pairs, as DeepSeek's files have them (rope_utils.py).
"""
_BARE = {
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
}
"""Parameters of Megatron's modules that are in no linear or norm of theirs."""
_OF_OTHERS = {
    ".shared_experts.": "of shared experts",
    ".router.expert_bias": "a bias by which only the choice of experts moves (DeepSeek-V3)",
    "_latent_proj.": "of experts in a latent space",
}
"""Parts of names in mixtures of experts that only some families have -> the thing."""
_SINKS = "self_attention.core_attention.softmax_offset"
# TE's LayerNormLinear holds the norm in front of it, under the linear's name.
_TE = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
# With latent attention TE's spec holds the norm of a layer's input outside.
_TE_LATENT = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


@dataclass(frozen=True)
class FusedTensor:
    """One tensor of the whole model: rows of `parts`, in the order of `segments`."""

    key: str
    parts: tuple[str, ...]
    role: Role
    """The first part's role, which determines the tensor-parallel cut."""
    shape: tuple[int, ...]
    segments: tuple[tuple[str, int, int], ...]
    """(part, first row, row after the last), in order."""

    @property
    def layer(self) -> int | None:
        match = LAYER.match(self.key)
        return int(match[1]) if match else None

    @property
    def is_gated(self) -> bool:
        """Whether its rows are the gate's, then as many of the other input of an MLP."""
        return self.role is Role.GATE_UP or (
            self.role in (Role.COLUMN, Role.EXPERT_COLUMN, Role.SHARED_COLUMN)
            and len(self.parts) == 2
        )

    def starts(self) -> list[int]:
        """The row of the fused tensor at which each segment begins, and its end."""
        return list(accumulate((b - a for _, a, b in self.segments), initial=0))


def table(shape: ModelShape) -> tuple[FusedTensor, ...]:
    """All tensors of a model in the order of the forward pass; of a tied pair only the
    embedding.
    """
    specs = {name: part.spec for name, part in upright_parts(shape).items()}
    return tuple(
        fused_tensor
        for spec in specs.values()
        if (fused_tensor := _fuse_spec(shape, specs, spec)) is not None
    )


def head(shape: ModelShape) -> FusedTensor:
    """The output matrix under its own name; in a tied model it consists of the embedding."""
    return FusedTensor(
        HEAD,
        (shape.head_name,),
        Role.VOCAB,
        (shape.vocab, shape.hidden),
        ((shape.head_name, 0, shape.vocab),),
    )


def _fuse_spec(shape: ModelShape, specs: dict[str, Spec], spec: Spec) -> FusedTensor | None:
    family = FAMILIES[shape.family]
    all_rows = ((spec.name, 0, spec.shape[0]),)
    if spec.name == shape.embed_name:
        return FusedTensor(EMBEDDING, (spec.name,), spec.role, spec.shape, all_rows)
    if spec.name == shape.head_name:
        return head(shape)
    if spec.name == shape.positions_name:
        return FusedTensor(POSITIONS, (spec.name,), spec.role, spec.shape, all_rows)
    stem, kind = spec.name.rsplit(".", 1)
    if stem == f"{family.prefix}.{family.norm}":
        return FusedTensor(
            f"decoder.final_layernorm.{kind}", (spec.name,), spec.role, spec.shape, all_rows
        )
    number, _, leaf = stem.removeprefix(f"{family.prefix}.{family.layers}.").partition(".")
    if family.experts is not None and spec.expert is not None:
        path = f"decoder.layers.{number}.mlp.experts.experts.{spec.expert}"
        return _expert(spec, path, PARTS if family.experts.stacked else family.experts.parts)
    if spec.role is Role.SINK:
        return FusedTensor(
            f"decoder.layers.{number}.{_SINKS}", (spec.name,), spec.role, spec.shape, all_rows
        )
    if (bare := _BARE.get(f"{leaf}.{kind}")) is not None:
        return FusedTensor(
            f"decoder.layers.{number}.{bare}", (spec.name,), spec.role, spec.shape, all_rows
        )
    leaves = _LEAVES if shape.latent is None else _LEAVES | _LATENT_LEAVES
    if leaf not in leaves:
        return None  # k, v and up are stored with q and gate
    key, block = f"decoder.layers.{number}.{leaves[leaf]}.{kind}", spec.name.rsplit(".", 2)[0]
    if leaf == "self_attn.q_proj" and shape.latent is None:
        parts = tuple(f"{block}.{p}_proj.{kind}" for p in "qkv")
        # linear_qkv by query group: its queries, its key, its value, biases alike. No rotary
        # permutation, as Megatron turns halves like Hugging Face (rotary_interleaved false).
        d, group = shape.head_dim, shape.heads // shape.kv_heads
        widths = [(parts[0], group * d), (parts[1], d), (parts[2], d)]
        segments = tuple(
            (part, g * width, (g + 1) * width)
            for g in range(shape.kv_heads)
            for part, width in widths
        )
    elif spec.role is Role.QKV_BLOCKS:
        parts, d, group = (spec.name,), shape.head_dim, shape.heads // shape.kv_heads
        # Phi-3 has all q, then all k, then all v; linear_qkv has them by query group.
        blocks = (
            (0, group),
            (shape.heads, 1),
            (shape.heads + shape.kv_heads, 1),
        )  # first head, heads of each group
        segments = tuple(
            (spec.name, (first + g * heads) * d, (first + (g + 1) * heads) * d)
            for g in range(shape.kv_heads)
            for first, heads in blocks
        )
    elif spec.role is Role.THIRDS:
        # GPT-2's c_attn has all q, then all k, then all v; linear_qkv has them by head.
        parts, d, third = (spec.name,), shape.head_dim, spec.shape[0] // 3
        segments = tuple(
            (spec.name, i * third + h * d, i * third + (h + 1) * d)
            for h in range(shape.heads)
            for i in range(3)
        )
    elif leaf.endswith(".gate_proj"):
        parts = (spec.name, f"{block}.up_proj.{kind}")
        # [gate; up] of the whole model, as in torch_dist; `cut` makes [gate_r; up_r] of it.
        segments = tuple((part, 0, spec.shape[0]) for part in parts)
    else:
        # GPT-NeoX's query_key_value is by head already, as linear_qkv: no reordering.
        parts, segments = (spec.name,), all_rows
    rows = sum(specs[part].shape[0] for part in parts)
    return FusedTensor(key, parts, spec.role, (rows, *spec.shape[1:]), segments)


def _expert(spec: Spec, path: str, names: tuple[str, str, str]) -> FusedTensor | None:
    """A tensor of one expert: of its gate and up projections, or of the last one."""
    stem, part, kind = spec.name.rsplit(".", 2)
    if part == names[1]:
        return None  # stored with the gate
    parts = (
        tuple(f"{stem}.{name}.{kind}" for name in names[:2]) if part == names[0] else (spec.name,)
    )
    rows = spec.shape[0]
    key = f"{path}.linear_fc{1 if part == names[0] else 2}.{kind}"
    segments = tuple((name, 0, rows) for name in parts)
    return FusedTensor(key, parts, spec.role, (len(parts) * rows, *spec.shape[1:]), segments)


_UNCUT = (Role.WHOLE, Role.HEAD_NORM, Role.EXPERTS_SUM, Role.ROUTER_BIAS)


def cut(fused_tensor: FusedTensor, tp: int, t: int, vocab: int) -> Shard:
    """The rows or columns of a tensor on tensor-parallel rank `t`; a vocabulary is padded to
    `vocab`.
    """
    rows = fused_tensor.shape[0]
    if fused_tensor.role in _UNCUT or (
        fused_tensor.role is Role.LATENT and len(fused_tensor.shape) == 1
    ):
        return Shard()
    if fused_tensor.role in (Role.O, Role.ROW, Role.EXPERT_ROW, Role.SHARED_ROW):
        part_size = fused_tensor.shape[1] // tp
        return Shard(1, ((t * part_size, (t + 1) * part_size),), part_size)
    if fused_tensor.role is Role.VOCAB:
        part_size = vocab // tp
        # min: the last ranks may hold only padding, an empty range.
        return Shard(0, ((min(t * part_size, rows), min((t + 1) * part_size, rows)),), part_size)
    if fused_tensor.is_gated:
        # Both halves are cut: one cut of all rows would give the first ranks only gates.
        part_size = rows // 2 // tp
        return Shard(
            0,
            tuple((at + t * part_size, at + (t + 1) * part_size) for at in (0, rows // 2)),
            2 * part_size,
        )
    part_size = rows // tp
    return Shard(0, ((t * part_size, (t + 1) * part_size),), part_size)


def experts_cut(shape: ModelShape, tp: int) -> int:
    """The tensor-parallel degree inside experts: Megatron-core cuts none that have biases."""
    names = shape.rules.experts
    return 1 if names is not None and names.stacked else tp


def latents_cut(tp: int, spelling: Spelling) -> int:
    """The tensor-parallel degree of the linears that give latents: only the local spec cuts them,
    by rows.
    """
    return tp if spelling == "local" else 1


def mesh_faults(
    shape: ModelShape, tp: int, pp: int, etp: int = 1, latents_tp: int = 1
) -> list[str]:
    """All reasons why Megatron, which repeats no key/value heads, cannot cut a model so; `etp` is
    tp inside experts, `latents_tp` that of linears that give latents.
    """
    faults = []
    if shape.kv_heads % tp:
        faults.append(
            f"tp = {tp} does not divide the model's {shape.kv_heads} key/value heads (query"
            " groups), and Megatron does not repeat heads"
        )
    # intermediate_size is of dense layers; a model with only experts may have any.
    if any(kind.experts is None for kind in shape.kinds) and shape.intermediate % tp:
        faults.append(
            f"tp = {tp} does not divide the model's intermediate size {shape.intermediate}"
        )
    if shape.experts is not None and shape.experts.width % etp:
        faults.append(
            f"tp = {etp} does not divide the {shape.experts.width} units of the model's experts"
        )
    if shape.experts is not None and shape.experts.shared % tp:
        faults.append(
            f"tp = {tp} does not divide the {shape.experts.shared} units of the expert that all"
            " tokens share"
        )
    if (latent := shape.latent) is not None:
        for rows in (latent.q_rank or 0, latent.kv_rank + latent.rope_dim):
            if rows % latents_tp:
                faults.append(
                    f"tp = {latents_tp} does not divide the {rows} rows of a linear that gives"
                    " latents, which the local spec cuts; take --spec te"
                )
    if pp > shape.layers:
        faults.append(f"pp = {pp} is more than the model's {shape.layers} layers")
    return faults


def pad_vocab(vocab: int, tp: int, divisor: int) -> int:
    """The rows of Megatron's vocabulary: the next multiple of --make-vocab-size-divisible-by times
    tp.
    """
    # As Megatron-LM's _vocab_size_with_padding: loading fails on another size.
    unit = divisor * tp
    return -(-vocab // unit) * unit


Chunks = tuple[tuple[range, ...], ...]
"""[pipeline stage][virtual stage] -> its layers, numbered as in the whole model."""


def chunks(
    layers: int,
    pp: int,
    vpp: int = 1,
    first: int | None = None,
    last: int | None = None,
    stage_layers: Sequence[int] | None = None,
) -> Chunks:
    """Deal layers to pipeline stages as Megatron does.

    `first` and `last` are --decoder-first/last-pipeline-num-layers, `stage_layers` MindSpeed's
    --num-layer-list. Raises ConfigError if they do not add up to the model's layers.
    """
    if stage_layers is None:
        ends = [first] * (first is not None) + [last] * (last is not None)
        middle, remaining_layers = pp - len(ends), layers - sum(n for n in ends if n is not None)
        if (
            middle < 0
            or remaining_layers < 0
            or (remaining_layers % middle if middle else remaining_layers)
        ):
            raise ConfigError(
                f"{layers} layers cannot be dealt evenly to pp = {pp} stages; name them with"
                " --layers-per-stage",
                code="config.combination",
            )
        even = remaining_layers // middle if middle else 0
        stage_layers = [
            *([first] if first is not None else []),
            *[even] * middle,
            *([last] if last is not None else []),
        ]
    if len(stage_layers) != pp or sum(stage_layers) != layers or any(n < 1 for n in stage_layers):
        raise ConfigError(
            f"the stages {list(stage_layers)} must be {pp} (pp), of at least one layer each, and"
            f" have the model's {layers} layers together; correct them",
            code="config.combination",
        )
    if any(n % vpp for n in stage_layers):
        raise ConfigError(
            f"vpp = {vpp} does not divide the {max(stage_layers)} layers of a pipeline stage",
            code="config.combination",
        )
    starts = list(
        # v outside, p inside, as Megatron interleaves virtual stages.
        accumulate((stage_layers[p] // vpp for _ in range(vpp) for p in range(pp)), initial=0)
    )
    return tuple(
        tuple(range(starts[v * pp + p], starts[v * pp + p + 1]) for v in range(vpp))
        for p in range(pp)
    )


def is_before_experts(shape: ModelShape, key: str) -> bool:
    """Whether this is the norm before a layer's experts, which is a separate module with either
    spec.

    Megatron-core 0.16 saves it as torch_dist under the TE spec's name in a dense layer with its
    local spec, and as pre_mlp_layernorm with its TE spec.
    """
    match = LAYER.match(key)
    sparse = match is not None and shape.by_layer[int(match[1])].experts is not None
    return match is not None and sparse and match[2].startswith("pre_mlp_layernorm.")


def has_two_names(shape: ModelShape, key: str) -> bool:
    """Whether torch_dist needs this norm under the names of both specs.

    Only without latent attention the local spec saves as torch_dist under the names of TE's
    (sharded_state_dict_keys_map in gpt_layer_specs.py).
    """
    return is_before_experts(shape, key) or (
        shape.latent is not None and spell_key(shape, key, "te") != key
    )


def spell_key(shape: ModelShape, key: str, spelling: Spelling) -> str:
    """A local name in the spelling of a spec."""
    if spelling == "te" and (match := LAYER.match(key)):
        for local, te in (_TE if shape.latent is None else _TE_LATENT).items():
            if match[2].startswith(local):
                return key.replace(local, te)
    return key


def canonical(key: str) -> str:
    """The local spec's name for a name of either spec."""
    for local, te in (_TE | _TE_LATENT).items():
        key = key.replace(te, local)
    return key


def describe_unknown(key: str, shape: ModelShape) -> str:
    """Describe a tensor that the model in config.json does not have, and the remedy."""
    model = with_article(shape.family)
    if shape.experts is None and any(part in key for part in (".experts.", ".router.")):
        return (
            f"of a mixture of experts, and config.json is of {model} model, which has none; take"
            " this model's config.json"
        )
    if description := next((feature for part, feature in _OF_OTHERS.items() if part in key), None):
        return (
            f"{description}, which {model} model as config.json describes it does not have; take"
            " this model's config.json, or keep to the library that trained it"
        )
    return (
        f"no parameter of {model} model as config.json describes it; take this model's config.json"
    )


def unreadable(location: object, key: str, kind: str) -> CheckpointError:
    """The error for a weight stored as `kind`, which no weights can have."""
    return CheckpointError(
        f"{location}: {key[:200]} is stored as {kind}, and weights are read in bf16, fp32 or fp16;"
        " save the checkpoint again in one of these (of fp8 weights: without --fp8-param-gather)."
    )


def warn_of_mtp_layers(location: object, names: Iterable[str]) -> None:
    """Log the layers that predict further tokens, which the text model leaves out."""
    # Every rank opens the checkpoint, and one warning is enough.
    count = len({name for name in names if name.startswith(MTP) and not is_ignored(name)})
    if count and os.environ.get("RANK", "0") == "0":
        log.warning(
            "%s: ignoring layers that predict further tokens: %s* (%d)", location, MTP, count
        )


def is_ignored(key: str) -> bool:
    """Whether a name belongs to fp8 state or to a computed buffer, not to a weight."""
    return (
        key.endswith(("_extra_state", "inv_freq", ".rotary_pos_emb"))
        or "._extra_state/" in key
        # core_attention has only buffers, except gpt-oss's sinks, which are trained.
        or ("core_attention" in key and not key.endswith(_SINKS))
    )
