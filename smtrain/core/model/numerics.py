"""Number formats and label values that every engine and every checkpoint agree on."""

from __future__ import annotations

from typing import Any, Literal, get_args

Precision = Literal["bf16", "fp32", "fp16"]
"""Of weights, activations and their gradients. bf16 and fp16 are halves: each is kept beside fp32 master weights."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


def width(precision: Precision) -> int:
    """Bytes of a weight or an activation."""
    return 4 if precision == "fp32" else 2


def is_loss_scale(told: Any) -> bool:
    """Whether this is what a checkpoint of a run in fp16 keeps of its loss scale."""
    if not isinstance(told, dict) or told.keys() != {"scale", "good_steps", "skipped"}:
        return False
    scale, counts = told["scale"], (told["good_steps"], told["skipped"])
    right = type(scale) in (int, float) and 0 < scale < float("inf")
    return right and all(type(n) is int and n >= 0 for n in counts)


IGNORED = -100
"""The label of a position that counts in no loss: torch's and transformers' own (torch.nn.CrossEntropyLoss)."""
