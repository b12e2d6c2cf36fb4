"""Peak of a pipeline stage whose weights and gradients FSDP2 cuts over the ranks that share them.

FSDP2 gathers a layer for its forward pass, and for its backward pass, in which the next layer
already arrives. The gradients of a layer exist in full until its backward pass ends. They are then
copied to an fp32 buffer, whose sums go to the ranks' rows; the buffer lives until the layer before
ends. Embedding, final norm and output matrix are the root group: gathered from the forward pass to
the end of the backward pass, which sums their gradients last. A step begins without gradients, so a
step of few micro-batches has its peak before all of them exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

SUM = 4.0
"""Bytes of a number of the buffer in which gradients are summed, and of a rank's gradient."""

Moment = tuple[float, float, float]
"""Bytes of activations, of logits and of temporary buffers at one moment of a micro-batch."""


class Peak(NamedTuple):
    """Bytes at the moment of a micro-batch that needs the most."""

    activations: float
    logits: float
    buffers: float
    missing_gradients: float = 0.0
    """Bytes of gradients that no backward pass has made yet, as a negative number."""


class Moments(NamedTuple):
    """Moments of a micro-batch that can be the peak of a step."""

    last_layer: list[Moment]
    """In the backward pass of the stage's last layer."""
    embedding: list[Moment]
    """At the end of the backward pass, when the embedding gets its gradient."""
    loss: list[Moment]


@dataclass(frozen=True)
class ShardedLayer:
    """A layer of a stage, on one rank."""

    numbers: int
    """Parameters."""
    saved_bytes: float
    """Bytes kept for a micro-batch between its forward and its backward pass."""


@dataclass(frozen=True)
class ShardedStage:
    """A pipeline stage whose weights are cut."""

    layers: tuple[ShardedLayer, ...]
    ends: int
    """Parameters of embedding, final norm and output matrix, as far as the stage has them."""
    head: int
    """Parameters of the output matrix, if the stage has it."""
    width: int
    """Bytes of a gathered weight."""
    shards: int
    has_gloo: bool
    """Whether gloo moves the sums, on CPUs."""
    is_frozen: bool
    """Whether the weights have no gradients."""
    hidden_bytes: float
    """Hidden states of a micro-batch."""
    entry_bytes: float
    """Activations and their gradients when a layer's first linear has its backward pass, which makes
    the last of the layer's gradients.
    """
    recomputed_bytes: float
    """Activations that come back for a layer's backward pass."""
    micro_batches: int
    in_flight: int
    """Micro-batches whose activations the stage holds at most."""


def peak_of_moments(stage: ShardedStage, moments_of: Callable[[int], Moments]) -> Peak:
    """The peak of a step; `moments_of` gives the moments of a stage with whole weights, with so
    many micro-batches in flight.
    """
    peaks = [*_moments_of_pass(stage, moments_of(stage.in_flight), stage.is_frozen)]
    # The next backward pass finds all gradients. If no other micro-batch has begun before it, one
    # less is in flight, and FSDP2 has forgotten the order of layers: no layer arrives early.
    has_more = stage.micro_batches > stage.in_flight
    later = stage.in_flight if has_more else stage.in_flight - 1
    if later and not stage.is_frozen:
        peaks += _moments_of_pass(stage, moments_of(later), has_gradients=True, prefetches=has_more)
    return max(peaks, key=sum)


def _moments_of_pass(
    stage: ShardedStage, moments: Moments, has_gradients: bool, prefetches: bool = True
) -> Iterator[Peak]:
    """The moments of a micro-batch from its loss to the end of its backward pass."""
    w, layers = stage.width, stage.layers
    ends = float(w * stage.ends)
    missing_numbers = 0.0 if has_gradients else stage.ends + sum(n.numbers for n in layers)
    for saved_bytes, logits, buffers in moments.loss:
        yield Peak(saved_bytes, logits, buffers + ends, -SUM * missing_numbers / stage.shards)
    ends += 0 if stage.is_frozen else w * stage.head  # the gradient of the output matrix
    freed_bytes = passing_sums = saved_bytes = 0.0
    for number in reversed(range(len(layers))):
        layer = layers[number]
        weights = float(w * layer.numbers)
        arriving = float(w * layers[number - 1].numbers) if number and prefetches else 0.0
        missing_bytes = -SUM * missing_numbers / stage.shards
        for saved_bytes, logits, buffers in moments.last_layer:
            gathered_bytes = ends + weights + arriving + passing_sums
            yield Peak(saved_bytes - freed_bytes, logits, buffers + gathered_bytes, missing_bytes)
        freed_bytes += layer.saved_bytes
        saved_bytes = max(
            (a - stage.recomputed_bytes - freed_bytes for a, _, _ in moments.last_layer),
            default=0.0,
        )
        if stage.is_frozen:
            continue
        # All gradients of the layer, which are as wide as its weights.
        gathered_bytes = ends + 2 * weights + arriving + passing_sums
        yield Peak(saved_bytes, 0.0, gathered_bytes + stage.entry_bytes, missing_bytes)
        # Weights are dropped and the sums before freed; then the gradients are copied, and freed.
        passing_sums = SUM * layer.numbers
        buffers = ends + arriving + stage.hidden_bytes
        for sums in _sum_buffers(stage, layer.numbers):
            yield Peak(saved_bytes, 0.0, buffers + sums, missing_bytes)
        missing_numbers -= 0 if has_gradients else layer.numbers
    if stage.is_frozen:
        return
    missing_bytes = -SUM * missing_numbers / stage.shards
    for _, logits, buffers in moments.embedding:
        yield Peak(saved_bytes, logits, buffers + ends + passing_sums, missing_bytes)
    for sums in _sum_buffers(stage, stage.ends):
        yield Peak(saved_bytes, 0.0, sums, missing_bytes)


def _sum_buffers(stage: ShardedStage, numbers: int) -> tuple[float, float]:
    """Bytes of the gradients of so many parameters and their sums, as they are copied, and as they
    are summed.
    """
    buffer = SUM * numbers
    copies = 2 if stage.has_gloo else 1  # gloo sums a copy of the buffer
    return stage.width * numbers + buffer, buffer * (copies + 1 / stage.shards)
