"""Number formats and label values that every engine and every checkpoint agree on."""

from __future__ import annotations

from typing import Any, Literal, get_args

Precision = Literal["bf16", "fp32", "fp16"]
"""Format of weights, activations and their gradients. bf16 and fp16 are half precision, with fp32 master weights."""
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


IGNORED = -100
"""The label of a position without loss, as in torch and transformers (torch.nn.CrossEntropyLoss)."""
