"""Sizes that decide about memory, for the planner, the engines, and a chat on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.shape import ModelShape
from smtrain.core.model.text_part import text_part

GIB = 2**30
PROCESS = 0.6 * GIB
"""Memory of Python with torch and transformers, before anything is loaded."""
CONTEXT = 4096
"""Tokens of prompt and answer for which memory is counted."""


def cache_bytes(
    layers: int, kv_heads: int, head_dim: int, width: int = 2, tokens: int = CONTEXT
) -> float:
    """Bytes of keys and values of one text; `width` is the bytes of a number."""
    return 2.0 * layers * kv_heads * head_dim * width * tokens


def cache_of_shape(shape: ModelShape, width: int = 2) -> float:
    """Bytes of keys, values and states of one text."""

    def layer(kind: ModelShape) -> float:
        net = kind.delta
        if kind.latent is not None:  # transformers 5.24 keeps the latents
            return float(width * CONTEXT * (kind.latent.kv_rank + kind.latent.rope_dim))
        if net is None:
            return cache_bytes(1, kind.kv_heads, kind.head_dim, width)
        return 4.0 * net.values * net.key_dim + float(
            width * net.taps * (2 * net.keys + net.values)
        )

    return sum(count * layer(kind) for kind, count in shape.kinds.items())


def cache_of(config: Mapping[str, Any]) -> float:
    """`cache_bytes` of the model with this config.json in bf16; 0 if the sizes are missing."""
    config = text_part(config)
    try:
        if config.get("model_type") in FAMILIES:
            return cache_of_shape(ModelShape.from_config(config))
        heads, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
        kv = int(config.get("num_key_value_heads") or heads)
        size = int(config.get("head_dim") or hidden_size // heads)
        return cache_bytes(int(config["num_hidden_layers"]), kv, size)
    except (CheckpointError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return 0.0


QUERIES = {"cpu": 512, "neuron": 256, "cuda": 1024}
"""Queries of a chunk of attention over rows that are cut over ranks, by torch's name of the device.
A chunk has a mask of 4 bytes, or 2 in half precision, per key; on GPUs it has scores, and only if
FlashAttention cannot compute them.
"""
FLASH_HEAD = 256
"""The widest head of FlashAttention 2."""
CHUNK_SCORES = 1 << 26
"""Scores that attention by documents computes at a time on a GPU if FlashAttention cannot."""
SINK_QUERIES = 1024
"""Queries whose scores attention with sinks keeps at a time; those of longer rows are computed
again.
"""
LOSS_ROWS = {"cpu": 1024, "neuron": 1024, "cuda": 2048}
"""The fewest rows of a piece of the loss, by torch's name of the device. The product for the
weight's gradient takes 2 operations a row and weight; it adds to fp32 numbers, 8 bytes to move.
With 1,024 rows on an H200 it ran at 534 TFLOP/s; products without the sums ran at 693
(`scripts/bench gpu --only device,dense`, 2026-11-27).
"""


def loss_rows(tokens: int, hidden_size: int, columns: int, device: str) -> int:
    """Rows of a piece of the loss of so many tokens, whose logits have `columns` on a rank.

    The rule of Liger and of torch.nn.LinearCrossEntropyOptions: logits of a piece take about the
    memory of all hidden states, rounded up to a power of two. `LOSS_ROWS` bounds it from below,
    because each piece moves the whole weight.
    """
    share = -(-tokens // -(-columns // hidden_size))
    return max(LOSS_ROWS.get(device, LOSS_ROWS["cuda"]), 1 << (share - 1).bit_length())


Precision = Literal["bf16", "fp32", "fp16"]
"""Format of weights, activations and their gradients. bf16 and fp16 are half precision, with fp32
master weights.
"""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


def width(precision: Precision) -> int:
    """Bytes of a weight or an activation."""
    return 4 if precision == "fp32" else 2


def is_loss_scale(value: Any) -> bool:
    """Whether this is the loss scale in a checkpoint of an fp16 run."""
    if not isinstance(value, dict) or value.keys() != {"scale", "good_steps", "skipped"}:
        return False
    scale, counts = value["scale"], (value["good_steps"], value["skipped"])
    right = type(scale) in (int, float) and 0 < scale < float("inf")
    return right and all(type(n) is int and n >= 0 for n in counts)


IGNORED_LABEL = -100
"""The label of a position without loss, as in torch and transformers (torch.nn.CrossEntropyLoss).
"""
