"""The auxiliary loss that evens out the loads of experts, and the loads themselves.

Of a micro-batch of T tokens and L layers, transformers computes E * sum over experts e of f_e *
P_e: f_e is the share of the L * T tokens that chose e, P_e the mean of e's probability. It is one
product of sums over all layers, so a stage of a pipeline needs the counts of all stages before its
backward pass: they travel with the hidden states, and back with their gradients. f has no gradient.
The loss of a step is the mean over its micro-batches and data-parallel ranks.

Megatron-core's form (`layers`) has a product for each layer, divides f by the experts of a token,
and adds the layers.

The gradient enters at the router's logits: the loss of the step itself stays one number of the last
stage. Each tensor-parallel rank adds its share of it, because the ranks' gradients there are added
up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from smtrain.core.model.shape import ModelShape
from smtrain.worker.engine.base import RoutingMetrics
from smtrain.worker.engine.native.comm import ProcessMesh


@dataclass
class LayerChoices:
    """The choices of one micro-batch in one layer."""

    counts: torch.Tensor
    """Integers [E]: the tokens that chose each expert."""
    sums: torch.Tensor
    """fp32 [E]: the sums of the experts' probabilities."""
    entropy: torch.Tensor
    """fp32 []: the sum of the entropies of the tokens' probabilities."""


@dataclass
class Routed:
    """The choices of one micro-batch on a stage; the tensors are set by `Balance.join`."""

    tokens: int
    """Tokens of the micro-batch, also on a stage without experts."""
    choices: dict[int, LayerChoices] = field(default_factory=dict)
    """By layer; filled during the forward pass."""
    drops: list[torch.Tensor] = field(default_factory=list)
    """Choices beyond the capacity of an expert, of each layer."""
    counts: torch.Tensor = field(init=False)
    """fp32 [layers with experts of this stage, E]: the tokens that chose each expert."""
    sums: torch.Tensor = field(init=False)
    """fp32, as `counts`: the sums of the experts' probabilities."""
    entropy: torch.Tensor = field(init=False)
    """fp32 []: the sum of the entropies of the tokens' probabilities, over the layers."""
    dropped: torch.Tensor = field(init=False)
    """fp32 []: choices beyond the capacity of an expert, over the layers."""
    totals: torch.Tensor | None = None
    """[2, E]: `counts` and `sums` of all layers up to this stage, and before the backward pass of
    all stages.
    """
    slope: torch.Tensor | None = None
    """The gradient of the step's loss for each token's probabilities, as `counts`, if there is one.
    """
    counting: bool = True
    """False once its forward pass is over: a layer computed again does not count."""


class Balance:
    """The auxiliary loss of a stage's layers with experts; `begin` each micro-batch."""

    def __init__(
        self,
        shape: ModelShape,
        layers: range,
        mesh: ProcessMesh,
        coefficient: float,
        by_layer: bool,
    ) -> None:
        """`layers` are the stage's."""
        assert shape.experts is not None
        self.sizes, self.coefficient, self._mesh = shape.experts, coefficient, mesh
        sparse = [i for i, kind in enumerate(shape.by_layer) if kind.experts is not None]
        self._layers = len(sparse)
        own = [i for i in sparse if i in layers]
        self._row = {layer: row for row, layer in enumerate(own)}
        self._first = sparse.index(own[0]) if own else 0
        self._now: Routed | None = None
        self.together = not by_layer
        """The layers of all stages count together."""

    def begin(self, tokens: int) -> Routed:
        """Count for a new micro-batch of `tokens` tokens from now on."""
        self._now = Routed(tokens)
        return self._now

    def end(self) -> None:
        """Count nothing any more, and balance nothing: evaluation and generation."""
        self._now = None

    def kept(self, block: Callable[..., Any]) -> Callable[..., Any]:
        """`block` that belongs to the micro-batch of now, whenever it is called."""
        now = self._now

        def again(*args: Any, **kwargs: Any) -> Any:
            # A recomputed block runs during the backward pass of another micro-batch than the one
            # that counts now.
            before, self._now = self._now, now
            try:
                return block(*args, **kwargs)
            finally:
                self._now = before

        return again

    @property
    def watching(self) -> bool:
        """Whether choices are counted or balanced now."""
        return self._now is not None

    def balance(self, layer: int, probabilities: torch.Tensor) -> torch.Tensor:
        """The probabilities [T, E] of a layer's router, fp32, whose gradient gets that of the
        auxiliary loss.
        """
        if self._now is None or not self.coefficient or not probabilities.requires_grad:
            return probabilities
        apply: Any = _Balanced.apply
        out: torch.Tensor = apply(probabilities, self._now, self._row[layer])
        return out

    def balance_logits(
        self, layer: int, logits: torch.Tensor, probabilities: torch.Tensor
    ) -> torch.Tensor:
        """Logits [T, E] of a layer's router, as `balance`; `probabilities` are their softmax,
        without a gradient.
        """
        if self._now is None or not self.coefficient or not logits.requires_grad:
            return logits
        apply: Any = _BalancedLogits.apply
        out: torch.Tensor = apply(logits, probabilities, self._now, self._row[layer])
        return out

    @torch.no_grad()
    def count(self, layer: int, probabilities: torch.Tensor, counts: torch.Tensor) -> None:
        """Add a layer's choices: the tokens [E] that chose each expert, and the probabilities [T,
        E].
        """
        if self._now is not None and self._now.counting:
            # Not torch.special.entr or xlogy, which Neuron may lack; an expert of probability 0
            # adds 0.
            logs = probabilities.clamp(min=torch.finfo(torch.float32).tiny).log()
            entropy = -(probabilities * logs).sum()
            self._now.choices[layer] = LayerChoices(counts, probabilities.sum(0), entropy)

    @torch.no_grad()
    def drop(self, number: torch.Tensor) -> None:
        """Add choices of a layer that found no place."""
        if self._now is not None and self._now.counting:
            self._now.drops.append(number)

    @torch.no_grad()
    def join(self, routed: Routed) -> None:
        """Put the layers together once the forward pass is over, and add the other ranks that share
        the rows.
        """
        layers = [routed.choices[layer] for layer in self._row]
        none = torch.zeros(0, self.sizes.count, device=self._mesh.device)
        routed.counts = torch.stack([each.counts for each in layers]).float() if layers else none
        routed.sums = torch.stack([each.sums for each in layers]) if layers else none
        routed.entropy = self._total([each.entropy for each in layers])
        routed.dropped = self._total(routed.drops)
        routed.choices, routed.drops = {}, []
        if self._mesh.cp_group is None:
            return
        numbers = [routed.counts, routed.sums, routed.entropy, routed.dropped]
        joined = torch.cat([number.reshape(-1) for number in numbers])
        dist.all_reduce(joined, group=self._mesh.cp_group)
        counts, sums, *rest = torch.split(joined, [number.numel() for number in numbers])
        routed.counts, routed.sums = counts.view_as(routed.counts), sums.view_as(routed.sums)
        routed.entropy, routed.dropped = (number.view(()) for number in rest)
        routed.tokens *= self._mesh.cp

    def _total(self, numbers: list[torch.Tensor]) -> torch.Tensor:
        """The fp32 sum of the layers' numbers."""
        return (
            torch.stack(numbers).sum().float()
            if numbers
            else torch.zeros((), device=self._mesh.device)
        )

    def totals(self, routed: Routed, before: torch.Tensor | None) -> torch.Tensor:
        """[2, E]: the counts and the sums of all layers up to this stage; `before` are those of the
        stages before.
        """
        own = torch.stack([routed.counts.sum(0), routed.sums.sum(0)])
        return own if before is None else own + before

    def finish(self, routed: Routed, scale: torch.Tensor) -> None:
        """End the counting of a micro-batch and set the gradient for probabilities, before its
        backward pass.

        `scale` is the weight of a micro-batch's auxiliary loss in the step's loss.
        """
        routed.counting = False
        if self.coefficient:
            counts = routed.counts
            if self.together and routed.totals is not None:
                counts = routed.totals[0].expand_as(counts)
            routed.slope = counts * (
                self._factor(routed.tokens) * self.coefficient * scale / self._mesh.tp
            )

    def loss(self, routed: Routed) -> torch.Tensor:
        """The auxiliary loss of a micro-batch: of all layers if they count together, else of this
        stage's.
        """
        if self.together and routed.totals is not None:
            counts, sums = routed.totals.unbind()
        else:
            counts, sums = routed.counts, routed.sums
        return (counts * sums).sum() * self._factor(routed.tokens)

    def _factor(self, tokens: int) -> float:
        if self.together:
            return float(self.sizes.count) / (self._layers * tokens) ** 2
        return float(self.sizes.count) / (self.sizes.chosen * tokens**2)

    # Numbers of a step

    def numbers(self, loss: torch.Tensor, routed: list[Routed]) -> torch.Tensor:
        """This rank's part of the numbers of a step, to be summed over the micro-batches' ranks and
        the stages.

        [3 + layers * E]: losses, entropies, dropped choices, and counts of each layer with experts.
        """
        counts = torch.zeros(self._layers, self.sizes.count, device=loss.device)
        for one in routed:
            counts[self._first : self._first + len(one.counts)] += one.counts
        sums = [
            torch.stack([one.entropy for one in routed]).sum(),
            torch.stack([one.dropped for one in routed]).sum(),
        ]
        return torch.cat([torch.stack([loss, *sums]), counts.flatten()])

    def metrics(self, numbers: list[float], batches: int) -> RoutingMetrics:
        """The metrics of a step from the sum of `numbers`; `batches` micro-batches of all
        data-parallel ranks.
        """
        (loss, entropy, dropped), counts = numbers[:3], numbers[3:]
        rows = [
            counts[at : at + self.sizes.count] for at in range(0, len(counts), self.sizes.count)
        ]
        assigned = sum(counts)
        mean = assigned / len(counts)
        tokens = assigned / self.sizes.chosen
        return RoutingMetrics(
            aux_loss=loss / batches,
            entropy=entropy / max(1.0, tokens) / math.log(max(2, self.sizes.count)),
            chosen=self.sizes.chosen,
            dropped=dropped / max(1.0, assigned),
            loads=tuple(tuple(n / mean for n in row) for row in rows),
        )


class _Balanced(torch.autograd.Function):
    """Probabilities; the backward pass adds the gradient of the auxiliary loss."""

    @staticmethod
    def forward(ctx: Any, probabilities: torch.Tensor, routed: Routed, row: int) -> torch.Tensor:
        ctx.routed, ctx.row = routed, row
        return probabilities.view_as(probabilities)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        slope = ctx.routed.slope
        return (grad if slope is None else grad + slope[ctx.row]), None, None


class _BalancedLogits(torch.autograd.Function):
    """Logits; the backward pass adds the gradient of the auxiliary loss, through their softmax in
    fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, probabilities: torch.Tensor, routed: Routed, row: int
    ) -> torch.Tensor:
        ctx.save_for_backward(probabilities)
        ctx.routed, ctx.row = routed, row
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (probabilities,) = ctx.saved_tensors
        slope = ctx.routed.slope
        if slope is None:
            return grad, None, None, None
        each = slope[ctx.row]
        added = probabilities * (each - (probabilities @ each)[:, None])
        return grad + added.to(grad.dtype), None, None, None
