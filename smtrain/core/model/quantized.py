"""The weights of a base that QLoRA keeps in NF4 (Dettmers et al. 2023, arXiv 2305.14314), and their
size. Pure data.

A weight is 4 bits; a block of 64 has its largest absolute value in 8 bits; 256 of these have a
scale in fp32. Blocks run along the rows of a matrix, as in bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from smtrain.core.model.blocks import Role, Spec
from smtrain.core.model.layout import Layout
from smtrain.core.model.shape import LAYER, ModelShape

BLOCK = 64
"""Weights that share a scale (bitsandbytes' default)."""
NESTED_BLOCK = 256
"""Number of blocks whose scales share one scale."""


def is_quantized(spec: Spec) -> bool:
    """Whether a parameter is one of the decoder layers' linears, adapted or not.

    Embedding, output matrix, norms, routers and experts keep the training's precision, as with
    bitsandbytes in transformers, which replaces modules of type Linear other than the head.
    """
    linear = (
        len(spec.shape) == 2
        and not spec.of_experts
        and not spec.is_transposed
        and spec.role is not Role.EXPERTS_SUM
    )
    return linear and LAYER.search(spec.name) is not None


def quantized_bytes(numbers: float) -> float:
    """Bytes of so many quantised weights."""
    return numbers * (0.5 + 1 / BLOCK + 4 / BLOCK / NESTED_BLOCK)


def cut_faults(shape: ModelShape, tp: int) -> Iterator[str]:
    """The linears of which tensor parallelism would cut a block in two."""
    layout, seen_linears = Layout(shape, tp, 1), set[tuple[str, tuple[int, ...]]]()
    for spec in shape.specs if tp > 1 else ():
        leaf = spec.name.removesuffix(".weight").rpartition(".")[2]
        # By size too: an MLP and a shared expert have linears of one name.
        if (leaf, spec.shape) in seen_linears or not is_quantized(spec):
            continue
        seen_linears.add((leaf, spec.shape))
        cuts = [cut for rank in range(tp) for cut in layout.shard(spec.name, rank).ranges]
        dim = layout.shard(spec.name, 0).dim
        width = spec.shape[1]
        if dim is not None and any(
            at * (width if dim == 0 else 1) % BLOCK for cut in cuts for at in cut
        ):
            yield (
                f"train.adapter.quantize: parallel.tp = {tp} would cut a block of {BLOCK} weights"
                f" of {leaf} ({spec.shape[0]} x {width}) in two; take a smaller parallel.tp"
            )
        elif dim == 1 and width % BLOCK:
            yield (
                f"train.adapter.quantize: a row of {leaf} has {width} weights, which blocks of"
                f" {BLOCK} do not divide, and parallel.tp = {tp} cuts rows; take parallel.tp: 1"
            )
