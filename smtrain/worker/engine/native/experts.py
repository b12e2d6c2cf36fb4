"""Mixtures of experts: the router and this rank's experts of a layer, in place of transformers'
module.

A token's hidden state goes to the `chosen` experts of largest probability, and their outputs are
added with the router's weights. Rows are sorted by expert, so that each expert multiplies one
block; the sort is stable. With expert parallelism the rows travel to the ranks that hold their
experts and back by all-to-all, and each sender applies the weights, so that the router's gradient
stays on its rank. Every rank takes part in every message, also without rows.

With tensor parallelism each rank has a part of every expert's intermediate units. Its outputs are
then shares of a sum, and so are the gradients of the router, which the optimizer adds up over the
ranks.

transformers keeps other modules in each major version; this one takes the same parameters and
computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from smtrain.core.model.hf_config import HFConfig
from smtrain.core.model.layout import Layout
from smtrain.core.model.lora import A, B, Lora
from smtrain.worker.engine.native.comm import ProcessMesh
from smtrain.worker.engine.native.dispatch import all_to_all, invert, reorder, swap
from smtrain.worker.engine.native.gradients import FlatParameters
from smtrain.worker.engine.native.grouped_mm import RowBlocks
from smtrain.worker.engine.native.load_balancing import Balance
from smtrain.worker.engine.native.local_experts import ExpertFactors, LocalExperts, Matrices
from smtrain.worker.engine.native.lora import Dropout
from smtrain.worker.engine.native.router_bias import choose_experts
from smtrain.worker.engine.step_timing import part


class Mixture(nn.Module):
    """The experts of a layer that this rank holds, and its router; without values until `take`."""

    router: nn.Parameter
    router_bias: nn.Parameter
    choice_bias: torch.Tensor
    """fp32 [E], of `router_bias.py`."""

    def __init__(
        self,
        layer: int,
        layout: Layout,
        mesh: ProcessMesh,
        hf_config: HFConfig,
        balance: Balance | None,
        capacity: float | None,
        original: Any,
        pair: bool,
    ) -> None:
        """`capacity` as `ParallelOptions.expert_capacity`; `original` is transformers' module.

        `pair`: transformers' block takes a tuple from its MLP.
        """
        super().__init__()
        sizes, names, routing = (
            hf_config.shape.experts,
            hf_config.shape.rules.experts,
            hf_config.routing,
        )
        assert sizes is not None
        assert names is not None
        assert routing is not None
        self._prefix = f"{hf_config.shape.rules.prefix}.{hf_config.shape.rules.layers}.{layer}."
        self.layer, self._layout, self._mesh, self._balance, self._pair = (
            layer,
            layout,
            mesh,
            balance,
            pair,
        )
        self._capacity = capacity
        self._sizes, self._names, self._routing = sizes, names, routing
        self._in_pairs = names.stacked == "pairs"
        # Modules of transformers, under their names there.
        self._shared_name = (names.shared or "").rpartition(".")[2] if sizes.shared else ""
        for name in (self._shared_name, f"{self._shared_name}_gate")[: 1 + names.shared_gate]:
            if self._shared_name:
                setattr(self, name, getattr(original, name))
        self.local = LocalExperts(names, hf_config.activation, mesh.tp_rank)
        self._enter: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
        self._exit: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
        self._dropout: Dropout | None = None
        # Its shapes change with each step, so a compiler would make a graph for each of them.
        self.forward = torch.compiler.disable(self.forward)  # type: ignore[no-untyped-call, method-assign]

    @property
    def router_names(self) -> list[str]:
        """The names in files of the router's parameters."""
        return [
            f"{self._prefix}{self._names.router}.{kind}"
            for kind in ("weight", "bias")[: 1 + self._in_pairs]
        ]

    def leaves(self) -> dict[str, list[str]]:
        """This rank's parameters of all its experts, and the names in files of which each consists,
        in its order.
        """
        at, own_experts = (
            f"{self._prefix}{self._names.path}.",
            self._layout.experts(self._mesh.ep_rank),
        )
        gate, up, down = self._names.parts
        if self._names.stacked == "halves":
            return {"gate_up": [at + up], "down": [at + down]}
        if self._in_pairs:
            file_names = {
                "gate_up": up,
                "gate_up_bias": f"{up}_bias",
                "down": down,
                "down_bias": f"{down}_bias",
            }
            return {leaf: [f"{at}{name}"] for leaf, name in file_names.items()}
        return {
            "gate_up": [f"{at}{j}.{name}.weight" for j in own_experts for name in (gate, up)],
            "down": [f"{at}{j}.{down}.weight" for j in own_experts],
        }

    @property
    def writing(self) -> dict[str, Matrices]:
        """The matrices whose gradients can go to a sink, by the first of their names in files."""
        leaves = self.leaves()
        return {leaves[leaf][0]: matrices for leaf, matrices in self.local.writing.items()}

    def take(
        self, dense: FlatParameters, experts: FlatParameters, biases: Mapping[str, torch.Tensor]
    ) -> None:
        """Set the parameters: the router's from `dense`, and the experts' from `experts`; the bias
        of choices from `biases`.
        """
        if self._names.bias is not None:
            self.choice_bias = biases[self._prefix + self._names.bias]
        for name, leaf in zip(self.router_names, ("router", "router_bias"), strict=False):
            setattr(self, leaf, dense.parameters[name])
        for leaf, names in self.leaves().items():
            first, per = experts.parameters[names[0]], len(self._layout.experts(0))
            if self._names.stacked is None:
                first = experts.join(
                    names, (per, first.shape[0] * len(names) // per, first.shape[1])
                )
            setattr(self.local, leaf, first)

    def adapt(
        self, parameters: Mapping[str, nn.Parameter], lora: Lora, dropout: Dropout | None
    ) -> None:
        """Add the factors of the experts that `lora` adapts; `parameters` has them by name."""
        self._dropout = dropout if lora.of_experts else None
        for leaf in (target.rpartition(".")[2] for target in lora.of_experts):
            at = f"{self._prefix}{self._names.path}.{leaf}"
            # Only a down projection's input is cut over tensor-parallel ranks: dropout needs its
            # place.
            a, down = parameters[at + A], leaf in ("down_proj", self._names.parts[2])
            start = self._mesh.tp_rank * a.shape[2] if down else 0
            self.local.factors[leaf] = ExpertFactors(
                at, a, parameters[at + B], lora.scale, start, dropout
            )

    def divide(
        self,
        enter: Callable[[torch.Tensor], torch.Tensor],
        leave: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Set the functions that make inputs whole for, and sum the outputs of, the tensor-parallel
        ranks.
        """
        self._enter, self._exit = enter, leave

    def forward(self, hidden_states: torch.Tensor) -> Any:
        return self._run(hidden_states, hidden_states)

    def _run(self, hidden_states: torch.Tensor, router_input: torch.Tensor) -> Any:
        """The experts' outputs for [B, S, H], as the router chooses by its own input."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        with part("router"):
            weights, expert_ids, probabilities = self._route(router_input.reshape(x.shape))
            order, blocks = RowBlocks.sort(expert_ids, self._sizes.count)
            if self._balance is not None and probabilities is not None:
                counts = self._token_counts(order, blocks)
                self._balance.count(self.layer, probabilities, counts)
        choices = None
        if self._dropout is not None:
            choices = self._dropout.choices(expert_ids, len(hidden_states), self._sizes.count)
        if self._capacity is None:
            inverse = invert(order)
            numbers = None if choices is None else choices.flatten()[order]
            out = self._forward_experts(
                reorder(x, order, inverse, self._sizes.chosen), blocks, numbers
            )
            expert_out = reorder(out, inverse, order, 1).view(*expert_ids.shape, -1)
        else:
            # With a capacity every rank sends equally many rows, so shapes do not depend on the
            # router.
            expert_out = self._forward_with_capacity(
                x, order, blocks, self._capacity, choices
            ).view(*expert_ids.shape, -1)
        y = (expert_out * weights[..., None]).sum(1).to(x.dtype).view(hidden_states.shape)
        if self._shared_name:
            # Before the exit: the ranks' shares of both sums are added up in one message.
            y = y + self._forward_shared(hidden_states)
        y = self._exit(y)
        return (y, weights) if self._pair else y

    def _forward_shared(self, x: torch.Tensor) -> torch.Tensor:
        """The output for [B, S, H] of the expert that all tokens share, or this rank's share."""
        out: torch.Tensor = getattr(self, self._shared_name)(x)
        if self._names.shared_gate:
            out = torch.sigmoid(getattr(self, f"{self._shared_name}_gate")(x)) * out
        return out

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The weights [T, k] and numbers [T, k] of each token's experts, and all probabilities [T,
        E] if needed.
        """
        if self._names.scores == "sigmoid":
            return self._route_by_scores(x)
        logits = F.linear(x, self.router, self.router_bias if self._in_pairs else None)
        balance, layer = self._balance, self.layer
        if (
            self._in_pairs
        ):  # of the chosen logits only, which equals the probabilities over their sum
            probabilities = None
            if balance is not None and balance.watching:
                probabilities = torch.softmax(logits.detach(), -1, dtype=torch.float32)
                logits = balance.balance_logits(layer, logits, probabilities)
            top, expert_ids = torch.topk(logits, self._sizes.chosen, dim=-1)
            return torch.softmax(top, -1, dtype=top.dtype), expert_ids, probabilities
        weights, expert_ids, probabilities = self._choose(logits)
        return weights.to(logits.dtype), expert_ids, probabilities

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`_route` by the router's logits [T, E], with weights in fp32."""
        probabilities = torch.softmax(logits, -1, dtype=torch.float32)
        if self._balance is not None:
            probabilities = self._balance.balance(self.layer, probabilities)
        weights, expert_ids = torch.topk(probabilities, self._sizes.chosen, dim=-1)
        if self._routing.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, expert_ids, probabilities

    def _route_by_scores(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`_route` of DeepSeek-V3 and MiniMax-M2, in fp32; scores over their sum are the
        probabilities.
        """
        if self._names.fp32_router:
            logits = F.linear(x.float(), self.router.float())
        else:
            logits = F.linear(x, self.router).float()
        scores = logits.sigmoid()
        total = scores.sum(-1, keepdim=True)
        probabilities = scores / total
        if self._balance is not None and self._balance.coefficient:
            probabilities = self._balance.balance(self.layer, probabilities)
            scores = probabilities * total  # for the gradient of the auxiliary loss
        expert_ids = choose_experts(
            scores.detach(), self.choice_bias, self._sizes.chosen, self._routing
        )
        weights = scores.gather(1, expert_ids)
        if self._routing.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self._routing.scale, expert_ids, probabilities

    def _forward_experts(
        self, rows: torch.Tensor, blocks: RowBlocks, choices: torch.Tensor | None
    ) -> torch.Tensor:
        """The experts' outputs for rows that are sorted by expert.

        `choices` are the rows' numbers of `Dropout.choices`, if numbers are dropped.
        """
        mesh = self._mesh
        if mesh.ep == 1:
            own_out: torch.Tensor = self.local(rows, blocks, choices)
            return own_out
        counts = blocks.counts.long()
        per = len(counts) // mesh.ep
        # Receivers cannot know how many rows each expert gets: the counts travel before the rows.
        receive_counts = torch.empty_like(counts)
        with part("expert parallel"):
            dist.all_to_all_single(receive_counts, counts, group=mesh.ep_group)
        send, receive = (tensor.view(mesh.ep, per) for tensor in (counts, receive_counts))
        own_counts = receive.sum(0)
        # All sizes at once: the host waits for the device, once a layer.
        sizes = torch.cat([send.sum(1), receive.sum(1), own_counts]).tolist()
        send_sizes, receive_sizes, own_sizes = (
            sizes[: mesh.ep],
            sizes[mesh.ep : 2 * mesh.ep],
            sizes[2 * mesh.ep :],
        )
        received_rows = swap(rows, send_sizes, receive_sizes, mesh.ep_group)
        # They arrive by sender, and each sender's by expert.
        expert = torch.arange(per, device=rows.device).repeat(mesh.ep)
        expert, order = torch.sort(
            expert.repeat_interleave(receive.flatten(), output_size=len(received_rows)), stable=True
        )
        inverse = invert(order)
        if choices is not None:
            choices = all_to_all(choices, send_sizes, receive_sizes, mesh.ep_group)[order]
        own_blocks = RowBlocks(expert, own_counts, sizes=own_sizes)
        out = self.local(reorder(received_rows, order, inverse, 1), own_blocks, choices)
        return swap(reorder(out, inverse, order, 1), receive_sizes, send_sizes, mesh.ep_group)

    def _forward_with_capacity(
        self,
        x: torch.Tensor,
        order: torch.Tensor,
        blocks: RowBlocks,
        factor: float,
        choices: torch.Tensor | None,
    ) -> torch.Tensor:
        """The experts' outputs for each choice, zero if it is beyond the capacity of its expert;
        static shapes.

        A buffer has so many rows for each expert; choices without a place read and write an
        additional row of zeros.
        """
        mesh, (experts, k) = self._mesh, (self._sizes.count, self._sizes.chosen)
        # The mean number of choices per expert, times the capacity factor, rounded up.
        room = math.ceil(k * len(x) / experts * factor)
        counts, expert = blocks.counts, blocks.expert
        # The rank of a choice among those of its expert. The sort is stable, so the first tokens
        # keep their places and the last are dropped.
        place = torch.arange(len(order), device=x.device) - (blocks.ends - counts)[expert]
        row = torch.where(place < room, expert * room + place, experts * room)
        choice = torch.full((experts * room + 1,), len(x) * k, device=x.device).scatter_(
            0, row, order
        )
        # The last entry collected all choices without a place; which one it holds is undefined.
        choice = choice[:-1]
        rows = torch.cat([x, x.new_zeros(1, x.shape[1])])[choice // k]
        numbers = (
            None
            if choices is None
            else torch.cat([choices.flatten(), choices.new_zeros(1)])[choice]
        )
        per = experts // mesh.ep
        if mesh.ep > 1:
            even = [per * room] * mesh.ep
            rows = (
                swap(rows, even, even, mesh.ep_group)
                .view(mesh.ep, per, room, -1)
                .transpose(0, 1)
                .flatten(0, 2)
            )
            if numbers is not None:
                numbers = all_to_all(numbers, even, even, mesh.ep_group)
                numbers = numbers.view(mesh.ep, per, room).transpose(0, 1).flatten()
        out = self.local(rows, RowBlocks.evenly(per, mesh.ep * room, x.device), numbers)
        if mesh.ep > 1:
            out = out.view(per, mesh.ep, room, -1).transpose(0, 1).flatten(0, 2)
            out = swap(out, even, even, mesh.ep_group)
        if self._balance is not None:
            is_token = self._choices_of_tokens(order)
            is_dropped = place >= room
            self._balance.drop((is_dropped if is_token is None else is_dropped * is_token).sum())
        row_of_choice = torch.empty_like(row).scatter_(0, order, row)
        return torch.cat([out, out.new_zeros(1, out.shape[1])])[row_of_choice]

    def _choices_of_tokens(self, order: torch.Tensor) -> torch.Tensor | None:
        """Integers [T * k]: 1 for sorted choices of tokens and 0 for those of padding; None: all
        are of tokens.
        """
        is_token = None if self._balance is None else self._balance.is_token
        return None if is_token is None else is_token[order // self._sizes.chosen, 0].int()

    def _token_counts(self, order: torch.Tensor, blocks: RowBlocks) -> torch.Tensor:
        """Integers [E]: the tokens, without padding, that chose each expert."""
        is_token = self._choices_of_tokens(order)
        if is_token is None:
            return blocks.counts
        running_counts = F.pad(is_token.cumsum(0), (1, 0))
        return running_counts[blocks.ends] - running_counts[blocks.ends - blocks.counts]
