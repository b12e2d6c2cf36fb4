"""Peak of a pipeline stage whose weights and gradients FSDP2 cuts over the ranks that share them.

FSDP2 gathers a layer for its forward pass, and for its backward pass, in which the next layer
already arrives. The gradients of a layer exist in full until its backward pass ends. They are then
copied to an fp32 buffer, whose sums go to the ranks' rows; the buffer lives until the layer before
ends. Embedding, final norm and output matrix are the root group: gathered from the forward pass to
the end of the backward pass, which sums their gradients last. A step begins without gradients, so a
step of few micro-batches has its peak before all of them exist.

With expert parallelism the experts of a layer are a separate group, cut over fewer ranks. Their
backward pass ends, and their gradients are summed, before those of the rest of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    experts: int = 0
    """Parameters of its experts, if they are a separate group."""
    last_matrix: int = 0
    """Parameters of the experts' last matrix, whose gradient FSDP2's loop over parameters keeps while
    all are summed.
    """
    shared_expert: int = 0
    """Parameters of the shared expert, whose gradients are there before those of the experts."""

    @property
    def around_experts(self) -> int:
        """Parameters of the layer's group."""
        return self.numbers - self.experts


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
    expert_shards: int
    """Ranks that divide the same experts."""
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
    missing_bytes = 0.0 if has_gradients else -_gradient_bytes(stage, layers, stage.ends)
    for saved_bytes, logits, buffers in moments.loss:
        yield Peak(saved_bytes, logits, buffers + ends, missing_bytes)
    ends += 0 if stage.is_frozen else w * stage.head  # the gradient of the output matrix
    freed_bytes = passing_sums = saved_bytes = 0.0
    for number in reversed(range(len(layers))):
        layer = layers[number]
        weights = float(w * layer.around_experts)
        arriving = float(w * layers[number - 1].around_experts) if number and prefetches else 0.0
        early_bytes = 0 if stage.is_frozen else w * layer.shared_expert
        for saved_bytes, logits, buffers in moments.last_layer:
            gathered_bytes = ends + weights + w * layer.experts + arriving + passing_sums
            gathered_bytes += early_bytes
            yield Peak(saved_bytes - freed_bytes, logits, buffers + gathered_bytes, missing_bytes)
        saved_bytes = min((a for a, _, _ in moments.last_layer), default=0.0) - freed_bytes
        freed_bytes += layer.saved_bytes
        if layer.experts and not stage.is_frozen:
            # In the middle of the layer's backward pass, whose other weights stay.
            buffers = ends + weights + arriving + stage.hidden_bytes + early_bytes
            buffers += w * layer.last_matrix if stage.expert_shards > 1 else 0
            for sums in _sum_buffers(stage, layer.experts, stage.expert_shards):
                yield Peak(saved_bytes, 0.0, buffers + sums, missing_bytes)
            passing_sums = SUM * layer.experts
            missing_bytes += 0 if has_gradients else SUM * layer.experts / stage.expert_shards
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
        passing_sums = SUM * layer.around_experts
        buffers = ends + arriving + stage.hidden_bytes
        for sums in _sum_buffers(stage, layer.around_experts, stage.shards):
            yield Peak(saved_bytes, 0.0, buffers + sums, missing_bytes)
        missing_bytes += 0 if has_gradients else SUM * layer.around_experts / stage.shards
    if stage.is_frozen:
        return
    for _, logits, buffers in moments.embedding:
        yield Peak(saved_bytes, logits, buffers + ends + passing_sums, missing_bytes)
    for sums in _sum_buffers(stage, stage.ends, stage.shards):
        yield Peak(saved_bytes, 0.0, sums, missing_bytes)


def _gradient_bytes(stage: ShardedStage, layers: Sequence[ShardedLayer], ends: int) -> float:
    """Bytes of a rank's gradients of layers, and of so many numbers of the root group."""
    around_experts = ends + sum(layer.around_experts for layer in layers)
    experts = sum(layer.experts for layer in layers)
    return SUM * (around_experts / stage.shards + experts / stage.expert_shards)


def _sum_buffers(stage: ShardedStage, numbers: int, shards: int) -> tuple[float, float]:
    """Bytes of the gradients of so many parameters and their sums, as they are copied, and as they
    are summed.
    """
    buffer = SUM * numbers
    # gloo sums a copy of the buffer; a single rank divides one by 1.
    copies = 2 if stage.has_gloo or shards == 1 else 1
    return stage.width * numbers + buffer, buffer * (copies + 1 / shards)
