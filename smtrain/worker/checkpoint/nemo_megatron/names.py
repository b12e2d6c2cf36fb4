"""neuronx-nemo-megatron's names for files and tensors, in the terms of `megatron.names`; pure data.

It is NeMo's older Megatron: names of a rank's own layers below `model.language_model.`, gate and up
as two tensors or one, and the attention inputs as one tensor or, with grouped queries in earlier
releases, as two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.megatron.names import EMBEDDING, HEAD, LAYER, FusedTensor
from smtrain.worker.checkpoint.targets import Release

PREFIX = "model.language_model."

_LEAVES = {
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
# Leaves of releases up to 2.15 that hold a part of one tensor of Megatron-core.
_HALVES = {"self_attention.query", "self_attention.key_value", "mlp.dense_h_to_4h_2"}
# No folder for one rank, mp_rank_TT if pp = 1, else tp_rank_TT_pp_rank_PPP.
_FILE = re.compile(r"(?:mp_rank_(\d{2})/|tp_rank_(\d{2})_pp_rank_(\d{3})/)?([^/]+\.ckpt)")
_STEP = re.compile(r"step=(\d+)")

Ranges = list[tuple[int, int]]


def rank_files(files: Iterable[str]) -> dict[tuple[int, int], str]:
    """(tp rank, pipeline stage) -> file of the latest step, maybe empty."""
    by_name: dict[str, dict[tuple[int, int], str]] = {}
    for file in files:
        if match := _FILE.fullmatch(file):
            rank = int(match[1] or match[2] or 0), int(match[3] or 0)
            by_name.setdefault(match[4], {})[rank] = file

    def age(name: str) -> tuple[int, int, str]:
        # The number of ranks comes first: a later step that not all ranks have must lose.
        step = _STEP.search(name)
        return len(by_name[name]), int(step[1]) if step else 0, name

    return by_name[max(by_name, key=age)] if by_name else {}


def rank_folder(tp: int, pp: int, t: int, p: int) -> str:
    """A rank's folder with a trailing /; empty if the only rank's file is in the folder itself."""
    if pp > 1:
        return f"tp_rank_{t:02d}_pp_rank_{p:03d}/"
    return f"mp_rank_{t:02d}/" if tp > 1 else ""


def canonical(key: str) -> str:
    """Megatron-core's name of a tensor; tensors that are only a part of one keep their own leaf."""
    key = key.removeprefix("model.").removeprefix("language_model.")
    # Directly below `model.` word_embeddings is the head, of the 70B converter and of tied
    # models with pp > 1; the embedding itself is embedding.word_embeddings.
    if key in ("word_embeddings.weight", "output_layer.weight"):
        return HEAD
    key = re.sub(r"^(?:encoder|transformer)\.", "decoder.", key)
    if match := LAYER.match(key):
        leaf, _, kind = match[2].rpartition(".")
        return f"decoder.layers.{match[1]}.{_LEAVES.get(leaf, leaf)}.{kind}"
    return key


def file_key(key: str) -> str:
    """The name of a tensor in a rank's file; + and ++ at its end mean its two parts."""
    parts, key = key.count("+"), key.rstrip("+")
    key = key.replace("decoder.", "encoder.", 1)
    for megatron_leaf, nemo_leaf in _LEAVES.items():
        key = key.replace(f".{nemo_leaf}.", f".{megatron_leaf}.")
    # Order: the leaf is already NeMo's here, as _LEAVES was applied above.
    if parts and ".query_key_value." in key:
        key = key.replace("query_key_value", "query" if parts == 1 else "key_value")
    elif parts == 2:
        key = key.replace("dense_h_to_4h", "dense_h_to_4h_2")
    return PREFIX + key


def part(shape: ModelShape, key: str, rows: int, tp: int, t: int) -> tuple[str, Ranges] | None:
    """(tensor of the model, rows) of a rank's tensor that holds only a part of it; None if it holds
    all of it.
    """
    match = LAYER.match(key)
    if match is None:
        return None
    leaf, _, kind = match[2].rpartition(".")
    stem, rows_per_rank = f"decoder.layers.{match[1]}.", shape.intermediate // tp
    if leaf == "mlp.dense_h_to_4h_2":
        return f"{stem}mlp.linear_fc1.{kind}", halves(shape, 2, tp, t)
    # 2.15 and later releases use one name for gate and for [gate; up]: only the rows differ.
    if leaf == "mlp.linear_fc1" and not shape.plain and rows == rows_per_rank:
        return key, halves(shape, 1, tp, t)
    if leaf in _HALVES:
        return f"{stem}self_attention.linear_qkv.{kind}", queries(
            shape, 1 if leaf.endswith("query") else 2, tp, t
        )
    return None


def halves(shape: ModelShape, number: int, tp: int, t: int) -> Ranges:
    """Rows of [gate; up] in a rank's gate (1) or up (2)."""
    rows_per_rank, first = shape.intermediate // tp, (number - 1) * shape.intermediate
    return [(first + t * rows_per_rank, first + (t + 1) * rows_per_rank)]


def queries(shape: ModelShape, number: int, tp: int, t: int) -> Ranges:
    """Rows of the attention input in a rank's queries (1), or keys and values (2)."""
    d, group, kv_per_rank = shape.head_dim, shape.heads // shape.kv_heads, shape.kv_heads // tp
    # linear_qkv has queries, key, value of each group; key_value takes the last two at once.
    start, size = (0, group * d) if number == 1 else (group * d, 2 * d)
    unit = (group + 2) * d
    return [
        (g * unit + start, g * unit + start + size)
        for g in range(t * kv_per_rank, (t + 1) * kv_per_rank)
    ]


def forms(shape: ModelShape, release: Release, fused_tensor: FusedTensor) -> tuple[str, ...]:
    """The tensors that a release stores for one of the model; those that are parts end in + and
    ++.
    """
    if release == "2.15" and fused_tensor.key not in (EMBEDDING, HEAD):
        is_gated = ".mlp.linear_fc1." in fused_tensor.key and len(fused_tensor.parts) == 2
        # Without grouped queries 2.15 too has a single query_key_value.
        is_grouped = ".linear_qkv." in fused_tensor.key and shape.heads != shape.kv_heads
        if is_gated or is_grouped:
            return f"{fused_tensor.key}+", f"{fused_tensor.key}++"
    return (fused_tensor.key,)
