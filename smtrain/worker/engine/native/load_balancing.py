"""The auxiliary loss that evens out the loads of experts, and the loads themselves.

Of a micro-batch of T tokens and L layers, transformers computes E * sum over experts e of f_e *
P_e: f_e is the share of the L * T tokens that chose e, P_e the mean of e's probability. Padding is
no token, as under transformers' attention mask. It is one
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

from smtrain.core.model.footprint import IGNORED_LABEL
from smtrain.core.model.shape import ModelShape
from smtrain.worker.engine.base import RoutingMetrics
from smtrain.worker.engine.native.comm import ProcessMesh, to_device


def find_padding(labels: torch.Tensor, segments: torch.Tensor | None) -> torch.Tensor | None:
    """The positions [B, S] that fill up a row, of labels and segments on the host; None if there are
    none, or if rows have no segments: they are then one text.

    The loader makes them the row's last segment, and only they have no label at all.
    """
    if segments is None:
        return None
    in_last = (segments == segments[:, -1:]).flip(1).cumprod(1).flip(1).bool()
    has_label = (in_last & (labels != IGNORED_LABEL)).any(1, keepdim=True)
    padding = in_last & ~has_label
    return padding if bool(padding.any()) else None


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
class RoutingCounts:
    """The choices of one micro-batch on a stage; the tensors are set by `Balance.join`."""

    tokens: int
    """Tokens of the micro-batch on all ranks that share its rows, also on a stage without experts;
    padding is none.
    """
    is_token: torch.Tensor | None = None
    """fp32 [T, 1]: 1 for a token of this rank and 0 for padding; None: all are tokens."""
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
    dropped_choices: torch.Tensor = field(init=False)
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
        own_layers = [i for i in sparse if i in layers]
        self._row = {layer: row for row, layer in enumerate(own_layers)}
        self._first = sparse.index(own_layers[0]) if own_layers else 0
        self._current: RoutingCounts | None = None
        self.together = not by_layer
        """The layers of all stages count together."""

    def begin(self, tokens: int, padding: torch.Tensor | None = None) -> RoutingCounts:
        """Count for a new micro-batch from now on, whose rows have `tokens` positions on this rank;
        `padding` as in `find_padding`.
        """
        own_tokens, is_token = tokens * self._mesh.cp, None
        if padding is not None:
            own_tokens -= int(padding.sum())
            is_token = (~self._mesh.own_tokens(padding)).float().reshape(-1, 1)
            is_token = to_device(is_token, self._mesh.device)
        self._current = RoutingCounts(max(1, own_tokens), is_token)
        return self._current

    def end(self) -> None:
        """Count nothing any more, and balance nothing: evaluation and generation."""
        self._current = None

    def bind(self, block: Callable[..., Any]) -> Callable[..., Any]:
        """`block` that belongs to the micro-batch of now, whenever it is called."""
        micro_batch = self._current

        def run(*args: Any, **kwargs: Any) -> Any:
            # A recomputed block runs during the backward pass of another micro-batch than the one
            # that counts now.
            previous, self._current = self._current, micro_batch
            try:
                return block(*args, **kwargs)
            finally:
                self._current = previous

        return run

    @property
    def is_token(self) -> torch.Tensor | None:
        """`RoutingCounts.is_token` of the micro-batch that counts now."""
        return None if self._current is None else self._current.is_token

    @property
    def watching(self) -> bool:
        """Whether choices are counted or balanced now."""
        return self._current is not None

    def balance(self, layer: int, probabilities: torch.Tensor) -> torch.Tensor:
        """The probabilities [T, E] of a layer's router, fp32, whose gradient gets that of the
        auxiliary loss.
        """
        if self._current is None or not self.coefficient or not probabilities.requires_grad:
            return probabilities
        apply: Any = _BalanceProbabilities.apply
        out: torch.Tensor = apply(probabilities, self._current, self._row[layer])
        return out

    def balance_logits(
        self, layer: int, logits: torch.Tensor, probabilities: torch.Tensor
    ) -> torch.Tensor:
        """Logits [T, E] of a layer's router, as `balance`; `probabilities` are their softmax,
        without a gradient.
        """
        if self._current is None or not self.coefficient or not logits.requires_grad:
            return logits
        apply: Any = _BalanceLogits.apply
        out: torch.Tensor = apply(logits, probabilities, self._current, self._row[layer])
        return out

    @torch.no_grad()
    def count(self, layer: int, probabilities: torch.Tensor, counts: torch.Tensor) -> None:
        """Add a layer's choices: the tokens [E] that chose each expert, and the probabilities [T,
        E] of all positions.
        """
        if self._current is not None and self._current.counting:
            if self._current.is_token is not None:
                probabilities = probabilities * self._current.is_token
            # Not torch.special.entr or xlogy, which Neuron may lack; an expert of probability 0
            # adds 0.
            logs = probabilities.clamp(min=torch.finfo(torch.float32).tiny).log()
            entropy = -(probabilities * logs).sum()
            self._current.choices[layer] = LayerChoices(counts, probabilities.sum(0), entropy)

    @torch.no_grad()
    def drop(self, number: torch.Tensor) -> None:
        """Add choices of a layer that found no place."""
        if self._current is not None and self._current.counting:
            self._current.drops.append(number)

    @torch.no_grad()
    def join(self, routing: RoutingCounts) -> None:
        """Put the layers together once the forward pass is over, and add the other ranks that share
        the rows.
        """
        layers = [routing.choices[layer] for layer in self._row]
        empty = torch.zeros(0, self.sizes.count, device=self._mesh.device)
        routing.counts = (
            torch.stack([choices.counts for choices in layers]).float() if layers else empty
        )
        routing.sums = torch.stack([choices.sums for choices in layers]) if layers else empty
        routing.entropy = self._total([choices.entropy for choices in layers])
        routing.dropped_choices = self._total(routing.drops)
        routing.choices, routing.drops = {}, []
        if self._mesh.cp_group is None:
            return
        numbers = [routing.counts, routing.sums, routing.entropy, routing.dropped_choices]
        flat = torch.cat([number.reshape(-1) for number in numbers])
        dist.all_reduce(flat, group=self._mesh.cp_group)
        counts, sums, *scalars = torch.split(flat, [number.numel() for number in numbers])
        routing.counts, routing.sums = counts.view_as(routing.counts), sums.view_as(routing.sums)
        routing.entropy, routing.dropped_choices = (number.view(()) for number in scalars)

    def _total(self, numbers: list[torch.Tensor]) -> torch.Tensor:
        """The fp32 sum of the layers' numbers."""
        return (
            torch.stack(numbers).sum().float()
            if numbers
            else torch.zeros((), device=self._mesh.device)
        )

    def totals(self, routing: RoutingCounts, earlier_totals: torch.Tensor | None) -> torch.Tensor:
        """[2, E]: the counts and the sums of all layers up to this stage; `earlier_totals` are
        those of the stages before.
        """
        own_totals = torch.stack([routing.counts.sum(0), routing.sums.sum(0)])
        return own_totals if earlier_totals is None else own_totals + earlier_totals

    def finish(self, routing: RoutingCounts, scale: torch.Tensor) -> None:
        """End the counting of a micro-batch and set the gradient for probabilities, before its
        backward pass.

        `scale` is the weight of a micro-batch's auxiliary loss in the step's loss.
        """
        routing.counting = False
        if self.coefficient:
            counts = routing.counts
            if self.together and routing.totals is not None:
                counts = routing.totals[0].expand_as(counts)
            routing.slope = counts * (
                self._factor(routing.tokens) * self.coefficient * scale / self._mesh.tp
            )

    def loss(self, routing: RoutingCounts) -> torch.Tensor:
        """The auxiliary loss of a micro-batch: of all layers if they count together, else of this
        stage's.
        """
        if self.together and routing.totals is not None:
            counts, sums = routing.totals.unbind()
        else:
            counts, sums = routing.counts, routing.sums
        return (counts * sums).sum() * self._factor(routing.tokens)

    def _factor(self, tokens: int) -> float:
        if self.together:
            # f = counts / (L T), P = sums / (L T): transformers' load_balancing_loss_func.
            return float(self.sizes.count) / (self._layers * tokens) ** 2
        # Megatron-core also divides f by the experts that a token chooses.
        return float(self.sizes.count) / (self.sizes.chosen * tokens**2)

    # Numbers of a step

    def counts_by_layer(self, numbers: torch.Tensor) -> dict[int, torch.Tensor]:
        """The tokens [E] that chose each expert of this stage's layers, from the sum of
        `numbers`.
        """
        rows = numbers[3:].view(self._layers, self.sizes.count)
        return {layer: rows[self._first + row] for layer, row in self._row.items()}

    def numbers(self, loss: torch.Tensor, routings: list[RoutingCounts]) -> torch.Tensor:
        """This rank's part of the numbers of a step, to be summed over the micro-batches' ranks and
        the stages.

        [3 + layers * E]: losses, entropies, dropped choices, and counts of each layer with experts.
        """
        counts = torch.zeros(self._layers, self.sizes.count, device=loss.device)
        for routing in routings:
            counts[self._first : self._first + len(routing.counts)] += routing.counts
        sums = [
            torch.stack([routing.entropy for routing in routings]).sum(),
            torch.stack([routing.dropped_choices for routing in routings]).sum(),
        ]
        return torch.cat([torch.stack([loss, *sums]), counts.flatten()])

    def metrics(self, numbers: list[float], batches: int) -> RoutingMetrics:
        """The metrics of a step from the sum of `numbers`; `batches` micro-batches of all
        data-parallel ranks.
        """
        (loss, entropy, dropped_choices), counts = numbers[:3], numbers[3:]
        rows = [
            counts[at : at + self.sizes.count] for at in range(0, len(counts), self.sizes.count)
        ]
        choice_count = sum(counts)
        mean = choice_count / len(counts)
        tokens = choice_count / self.sizes.chosen
        return RoutingMetrics(
            aux_loss=loss / batches,
            entropy=entropy / max(1.0, tokens) / math.log(max(2, self.sizes.count)),
            experts_per_token=self.sizes.chosen,
            dropped_choices=dropped_choices / max(1.0, choice_count),
            loads=tuple(tuple(n / mean for n in row) for row in rows),
        )


class _BalanceProbabilities(torch.autograd.Function):
    """Probabilities; the backward pass adds the gradient of the auxiliary loss."""

    @staticmethod
    def forward(
        ctx: Any, probabilities: torch.Tensor, routing: RoutingCounts, row: int
    ) -> torch.Tensor:
        ctx.routed, ctx.row = routing, row
        return probabilities.view_as(probabilities)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        slope, is_token = ctx.routed.slope, ctx.routed.is_token
        if slope is None:
            return grad, None, None
        expert_slope = slope[ctx.row]
        return grad + (expert_slope if is_token is None else is_token * expert_slope), None, None


class _BalanceLogits(torch.autograd.Function):
    """Logits; the backward pass adds the gradient of the auxiliary loss, through their softmax in
    fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        probabilities: torch.Tensor,
        routing: RoutingCounts,
        row: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(probabilities)
        ctx.routed, ctx.row = routing, row
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (probabilities,) = ctx.saved_tensors
        slope = ctx.routed.slope
        if slope is None:
            return grad, None, None, None
        expert_slope = slope[ctx.row]
        # The gradient of a softmax p from that of its result, g: p (g - sum of p g).
        router_gradient = probabilities * (expert_slope - (probabilities @ expert_slope)[:, None])
        if ctx.routed.is_token is not None:
            router_gradient = router_gradient * ctx.routed.is_token
        return grad + router_gradient.to(grad.dtype), None, None, None
