"""Mixtures of experts: the router and this rank's experts of a layer, in place of transformers' module.

A token's hidden state goes to the `chosen` experts of largest probability, and their outputs are added with the
router's weights. Rows are sorted by expert, so that each expert multiplies one block; the sort is stable. With expert
parallelism the rows travel to the ranks that hold their experts and back by all-to-all, and each sender applies the
weights, so that the router's gradient stays on its rank. Every rank takes part in every message, also without rows.

With tensor parallelism each rank has a part of every expert's intermediate units. Its outputs are then shares of a sum,
and so are the gradients of the router, which the optimizer adds up over the ranks.

transformers keeps other modules in each major version; this one takes the same parameters and computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from smtrain.core.model.hf_config import HFConfig
from smtrain.core.model.layout import Layout
from smtrain.core.model.lora import A, B, Lora
from smtrain.worker.engine.native.balance import Balance
from smtrain.worker.engine.native.comm import ProcessMesh
from smtrain.worker.engine.native.gradients import Trained
from smtrain.worker.engine.native.lora import Dropout
from smtrain.worker.engine.parts import part

_ALPHA, _LIMIT = 1.702, 7.0  # gpt-oss: swiglu_alpha and swiglu_limit, which no published model changes


class Mixture(nn.Module):
    """The experts of a layer that this rank holds, and its router; without values until `take`."""

    router: nn.Parameter
    router_bias: nn.Parameter
    gate_up: nn.Parameter
    gate_up_bias: nn.Parameter
    down: nn.Parameter
    down_bias: nn.Parameter

    def __init__(
        self, layer: int, layout: Layout, mesh: ProcessMesh, described: HFConfig, balance: Balance | None,
        capacity: float | None, pair: bool,
    ) -> None:  # fmt: skip
        """`capacity` as `ParallelOptions.expert_capacity`. `pair`: transformers' block takes a tuple from its MLP."""
        super().__init__()
        sizes, names, routing = described.shape.experts, described.shape.rules.experts, described.routing
        assert sizes is not None
        assert names is not None
        assert routing is not None
        self._prefix = f"{described.shape.rules.prefix}.{described.shape.rules.layers}.{layer}."
        self._layer, self._layout, self._mesh, self._balance, self._pair = layer, layout, mesh, balance, pair
        self._capacity = capacity
        self._sizes, self._names, self._normalised = sizes, names, routing.normalised
        self._activation: Callable[[torch.Tensor], torch.Tensor] = ACT2FN[described.activation]
        self._exit: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
        self._factors: dict[str, ExpertFactors] = {}
        self._dropout: Dropout | None = None
        # Its shapes change with each step, so a compiler would make a graph for each of them.
        self.forward = torch.compiler.disable(self.forward)  # type: ignore[no-untyped-call, method-assign]

    @property
    def router_names(self) -> list[str]:
        """The names in files of the router's parameters."""
        return [f"{self._prefix}{self._names.router}.{kind}" for kind in ("weight", "bias")[: 1 + self._names.stacked]]

    def leaves(self) -> dict[str, list[str]]:
        """This rank's parameters of all its experts, and the names in files of which each consists, in its order."""
        at, own = f"{self._prefix}{self._names.path}.", self._layout.experts(self._mesh.ep_rank)
        gate, up, down = self._names.parts
        if self._names.stacked:
            named = {"gate_up": up, "gate_up_bias": f"{up}_bias", "down": down, "down_bias": f"{down}_bias"}
            return {leaf: [f"{at}{name}"] for leaf, name in named.items()}
        return {
            "gate_up": [f"{at}{j}.{name}.weight" for j in own for name in (gate, up)],
            "down": [f"{at}{j}.{down}.weight" for j in own],
        }

    def take(self, dense: Trained, experts: Trained) -> None:
        """Set the parameters: the router's from `dense`, and the experts' from `experts`."""
        for name, leaf in zip(self.router_names, ("router", "router_bias"), strict=False):
            setattr(self, leaf, dense.parameters[name])
        for leaf, names in self.leaves().items():
            first, per = experts.parameters[names[0]], len(self._layout.experts(0))
            if not self._names.stacked:
                first = experts.join(names, (per, first.shape[0] * len(names) // per, first.shape[1]))
            setattr(self, leaf, first)

    def adapt(self, held: Mapping[str, nn.Parameter], lora: Lora, dropout: Dropout | None) -> None:
        """Add the factors of the experts that `lora` adapts; `held` has them by name."""
        self._dropout = dropout if lora.of_experts else None
        for leaf in (target.rpartition(".")[2] for target in lora.of_experts):
            at = f"{self._prefix}{self._names.path}.{leaf}"
            a, down = held[at + A], leaf in ("down_proj", self._names.parts[2])
            start = self._mesh.tp_rank * a.shape[2] if down else 0
            self._factors[leaf] = ExpertFactors(at, a, held[at + B], lora.scale, start, dropout)

    def leave_by(self, leave: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Set the function that sums the outputs of the tensor-parallel ranks."""
        self._exit = leave

    def forward(self, hidden_states: torch.Tensor) -> Any:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        with part("router"):
            weights, chosen = self._route(x)
        order = torch.argsort(chosen.flatten(), stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self._sizes.count)
        choices = None
        if self._dropout is not None:
            choices = self._dropout.choices(chosen, len(hidden_states), self._sizes.count)
        if self._capacity is None:
            inverse = _inverse(order)
            numbers = None if choices is None else choices.flatten()[order]
            out = self._inside(_moved(x, order, inverse, self._sizes.chosen), counts, numbers)
            back = _moved(out, inverse, order, 1).view(*chosen.shape, -1)
        else:
            back = self._bounded(x, order, counts, self._capacity, choices).view(*chosen.shape, -1)
        y = (back * weights[..., None]).sum(1).to(x.dtype).view(hidden_states.shape)
        y = self._exit(y)
        return (y, weights) if self._pair else y

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights [T, k] and the numbers [T, k] of each token's experts."""
        logits = F.linear(x, self.router, self.router_bias if self._names.stacked else None)
        if self._balance is not None:
            logits = self._balance.balanced(self._layer, logits)
        if self._names.stacked:  # of the chosen logits only, which equals the probabilities over their sum
            top, chosen = torch.topk(logits, self._sizes.chosen, dim=-1)
            weights = torch.softmax(top, -1, dtype=top.dtype)
        else:
            weights, chosen = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), self._sizes.chosen, dim=-1)
            if self._normalised:
                weights = weights / weights.sum(-1, keepdim=True)
            weights = weights.to(logits.dtype)
        if self._balance is not None:
            self._balance.count(self._layer, logits, chosen)
        return weights, chosen

    def _inside(self, rows: torch.Tensor, counts: torch.Tensor, choices: torch.Tensor | None) -> torch.Tensor:
        """The experts' outputs for rows that are sorted by expert; `counts` [E] rows for each.

        `choices` are the rows' numbers of `Dropout.choices`, if numbers are dropped.
        """
        mesh = self._mesh
        if mesh.ep == 1:
            return self._computed(rows, counts.tolist(), choices)
        per = len(counts) // mesh.ep
        theirs = torch.empty_like(counts)
        with part("expert parallel"):
            dist.all_to_all_single(theirs, counts, group=mesh.ep_group)
        send, receive = (each.view(mesh.ep, per) for each in (counts, theirs))
        # All sizes at once: the host waits for the device, once a layer.
        sizes = torch.cat([send.sum(1), receive.sum(1), receive.sum(0)]).tolist()
        sent, got, own = sizes[: mesh.ep], sizes[mesh.ep : 2 * mesh.ep], sizes[2 * mesh.ep :]
        arrived = _swapped(rows, sent, got, mesh.ep_group)
        # They arrive by sender, and each sender's by expert.
        expert = torch.arange(per, device=rows.device).repeat(mesh.ep)
        order = torch.argsort(expert.repeat_interleave(receive.flatten(), output_size=len(arrived)), stable=True)
        inverse = _inverse(order)
        if choices is not None:
            choices = _all_to_all(choices, sent, got, mesh.ep_group)[order]
        out = self._computed(_moved(arrived, order, inverse, 1), own, choices)
        return _swapped(_moved(out, inverse, order, 1), got, sent, mesh.ep_group)

    def _bounded(
        self, x: torch.Tensor, order: torch.Tensor, counts: torch.Tensor, factor: float, choices: torch.Tensor | None
    ) -> torch.Tensor:
        """The experts' outputs for each choice, zero if it is beyond the capacity of its expert; static shapes.

        A buffer has so many rows for each expert; choices without a place read and write an additional row of zeros.
        """
        mesh, (experts, k) = self._mesh, (self._sizes.count, self._sizes.chosen)
        room = math.ceil(k * len(x) / experts * factor)
        expert = torch.repeat_interleave(torch.arange(experts, device=x.device), counts, output_size=len(order))
        place = torch.arange(len(order), device=x.device) - (counts.cumsum(0) - counts)[expert]
        row = torch.where(place < room, expert * room + place, experts * room)
        choice = torch.full((experts * room + 1,), len(x) * k, device=x.device).scatter(0, row, order)
        choice = choice[:-1]
        rows = torch.cat([x, x.new_zeros(1, x.shape[1])])[choice // k]
        numbers = None if choices is None else torch.cat([choices.flatten(), choices.new_zeros(1)])[choice]
        per = experts // mesh.ep
        if mesh.ep > 1:
            even = [per * room] * mesh.ep
            rows = _swapped(rows, even, even, mesh.ep_group).view(mesh.ep, per, room, -1).transpose(0, 1).flatten(0, 2)
            if numbers is not None:
                numbers = _all_to_all(numbers, even, even, mesh.ep_group)
                numbers = numbers.view(mesh.ep, per, room).transpose(0, 1).flatten()
        out = self._computed(rows, [mesh.ep * room] * per, numbers)
        if mesh.ep > 1:
            out = out.view(per, mesh.ep, room, -1).transpose(0, 1).flatten(0, 2)
            out = _swapped(out, even, even, mesh.ep_group)
        if self._balance is not None:
            self._balance.drop((counts - room).clamp(min=0).sum())
        back = torch.empty_like(row).scatter(0, order, row)
        return torch.cat([out, out.new_zeros(1, out.shape[1])])[back]

    def _computed(self, rows: torch.Tensor, sizes: list[int], choices: torch.Tensor | None) -> torch.Tensor:
        """The outputs of this rank's experts for its blocks of rows; `choices` as in `_inside`."""

        def adapted(leaf: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self._factors[leaf](x, y, sizes, choices) if leaf in self._factors else y

        if self._names.stacked:
            number = torch.arange(len(sizes), device=rows.device).repeat_interleave(
                torch.tensor(sizes, device=rows.device), output_size=len(rows)
            )
            both = _grouped(rows, self.gate_up, sizes, False) + self.gate_up_bias[number]
            both = adapted("gate_up_proj", rows, both)
            gate, up = both[..., ::2].clamp(max=_LIMIT), both[..., 1::2].clamp(-_LIMIT, _LIMIT)
            inner = (up + 1) * (gate * torch.sigmoid(gate * _ALPHA))
            out = adapted("down_proj", inner, _grouped(inner, self.down, sizes, False))
            # Outputs are summed over the tensor-parallel ranks: one of them adds the bias.
            return out + self.down_bias[number] if self._mesh.tp_rank == 0 else out
        both = adapted("gate_up_proj", rows, _grouped(rows, self.gate_up, sizes, True))
        halves = zip(self._names.parts, both.chunk(2, -1), strict=False)
        gate, up = (adapted(part, rows, half) for part, half in halves)
        inner = self._activation(gate) * up
        out = _grouped(inner, self.down, sizes, True)
        return adapted("down_proj" if "down_proj" in self._factors else self._names.parts[2], inner, out)


class ExpertFactors:
    """A [e, rank, in] and B [e, out, rank] of one matrix of this rank's experts, or this rank's parts of them."""

    def __init__(
        self, name: str, a: nn.Parameter, b: nn.Parameter, scale: float, start: int, dropout: Dropout | None
    ) -> None:
        """`start` is the first column of the input that this rank sees."""
        self._name, self._a, self._b, self._scale = name, a, b, scale
        self._start, self._dropout = start, dropout

    def __call__(
        self, x: torch.Tensor, y: torch.Tensor, sizes: list[int], choices: torch.Tensor | None
    ) -> torch.Tensor:
        """`y`, the experts' products with their blocks of rows `x`, plus the products of the factors."""
        if self._dropout is not None and choices is not None:
            x = self._dropout.rows(self._name, x, choices, self._start)
        a, b = self._a.to(x.dtype), self._b.to(x.dtype)
        return y + _grouped(_grouped(x, a, sizes, True), b, sizes, True) * self._scale


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes `order`; sorting again would take as long as the first sort."""
    return torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))


class _Moved(torch.autograd.Function):
    """Rows [T, H] in another order, each `k` times: row i of the result is row `order[i] // k`.

    The backward pass gathers too, which is faster than adding to indices, and the same each time.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        with part("sorting rows"):
            return x[order if k == 1 else order // k]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        with part("sorting rows"):
            back = grad[inverse]
            return (back if ctx.k == 1 else back.view(-1, ctx.k, back.shape[-1]).sum(1)), None, None, None


class _Swapped(torch.autograd.Function):
    """Rows sent to the ranks of a group, `send` to each, for `receive` from each; gradients go back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
        ctx.way = send, receive, group
        return _all_to_all(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        send, receive, group = ctx.way
        return _all_to_all(grad, receive, send, group), None, None, None


def _all_to_all(x: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    with part("expert parallel"):
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


class _Grouped(torch.autograd.Function):
    """Blocks of rows, one after another, each times its matrix of `weight` [E, ...]; `sizes` are the blocks' rows.

    `turned`: a matrix is [out, in], otherwise [in, out].
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, sizes: list[int], turned: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes, ctx.turned = sizes, turned
        out = x.new_empty(len(x), weight.shape[1 if turned else 2])
        with part("experts"):
            for matrix, rows, made in zip(weight, _split(x, sizes), _split(out, sizes), strict=True):
                torch.mm(rows, matrix.t() if turned else matrix, out=made)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        grads, rows = _split(grad, ctx.sizes), _split(x, ctx.sizes)
        of_x = of_weight = None
        with part("experts"):
            if ctx.needs_input_grad[0]:
                of_x = torch.empty_like(x)
                for matrix, g, made in zip(weight, grads, _split(of_x, ctx.sizes), strict=True):
                    torch.mm(g, matrix if ctx.turned else matrix.t(), out=made)
            if ctx.needs_input_grad[1]:
                of_weight = torch.empty_like(weight)
                for made, g, r in zip(of_weight, grads, rows, strict=True):
                    torch.mm(g.t(), r, out=made) if ctx.turned else torch.mm(r.t(), g, out=made)
        return of_x, of_weight, None, None


def _split(x: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    return torch.split_with_sizes(x, sizes)


_moved: Callable[..., torch.Tensor] = _Moved.apply
_swapped: Callable[..., torch.Tensor] = _Swapped.apply
_grouped: Callable[..., torch.Tensor] = _Grouped.apply
