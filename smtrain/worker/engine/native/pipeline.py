"""Pipeline parallelism: 1F1B over the stages (Narayanan et al. 2021, not interleaved), point to
point, on any backend.

A backend may hold a message until its receiver takes it. Then two neighbours that both send first
would wait for each other, so even stages send first and odd ones receive first.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from smtrain.worker.engine.native.comm import ProcessMesh
from smtrain.worker.engine.native.fused_loss import LabelledRows
from smtrain.worker.engine.native.load_balancing import RoutingCounts
from smtrain.worker.engine.native.preference import SUMS, PairBatch, PreferenceLoss
from smtrain.worker.engine.native.stage import Stage
from smtrain.worker.engine.step_timing import part

log = logging.getLogger(__name__)
Shape = Sequence[int]


class MicroBatch(NamedTuple):
    """Token ids and labels [B, own tokens] and segments [B, S] of one pipeline slot, on every
    stage.

    Segments stay on the host; None: a row is one sample.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    segments: torch.Tensor | None
    at: tuple[int, int] | None = None
    """The optimizer step, and the first sample's place in the global batch; dropout depends on
    them.
    """
    pairs: PairBatch | None = None
    """The pairs among the segments, if the loss is theirs."""
    labelled_rows: LabelledRows | None = None
    """The rows that need logits; None: all."""
    padding: torch.Tensor | None = None
    """`find_padding` on the host, if experts are balanced."""


class Message(NamedTuple):
    """Hidden states or gradients from one stage to its neighbour."""

    hidden_states: torch.Tensor
    """Hidden states, or their gradients."""
    loads: torch.Tensor | None = None
    """`Balance.totals` of the stages so far, or with gradients of all."""


class Pipeline:
    """Runs micro-batches through the stages; with one stage this is gradient accumulation."""

    def __init__(
        self, stage: Stage, mesh: ProcessMesh, preference: PreferenceLoss | None = None
    ) -> None:
        """`preference` is the loss of pairs; None: batches have no pairs."""
        self.stage, self.mesh, self._preference = stage, mesh, preference
        ranks = dist.get_process_group_ranks(mesh.pp_group)
        p = mesh.pp_rank
        self._before = ranks[p - 1] if p > 0 else None
        self._after = ranks[p + 1] if p + 1 < mesh.pp else None
        self.routing = torch.zeros(0, device=mesh.device)
        """`Balance.numbers` of the last step."""
        balance = stage.balance
        self._loads = (
            (2, balance.sizes.count)
            if balance is not None and balance.together and mesh.pp > 1
            else None
        )
        """The shape of the loads of experts that travel with a step's hidden states and gradients.
        """
        self._pairs: dict[int, dist.ProcessGroup] | None = None
        """The group with each neighbour; None: the backend has send and receive."""
        if mesh.pp > 1 and mesh.device.type == "neuron":
            self._pairs = self._without_messages()

    def train(
        self,
        batches: Sequence[MicroBatch],
        scale: torch.Tensor,
        before_last: Callable[[], None] = lambda: None,
        aux_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run forward and backward of every micro-batch, with losses times `scale`, a number or
        `PreferenceLoss.scale`.

        Returns the unscaled sum of losses, or of `PreferenceLoss.sums`; 0 except on the last stage.
        Calls `before_last` before the last backward pass. A stage holds the activations of at most
        (stages - its rank) micro-batches.

        `aux_scale` is the weight of the auxiliary loss of one micro-batch's experts in the step's
        loss; `routing` then has the step's numbers.
        """
        stage, n = self.stage, len(batches)
        warm_up = min(self.mesh.pp - self.mesh.pp_rank - 1, n)
        in_flight: deque[tuple[torch.Tensor, torch.Tensor, RoutingCounts | None]] = deque()
        preference, balance = self._preference, stage.balance
        losses = torch.zeros(() if preference is None else (SUMS,), device=self.mesh.device)
        aux, routings = torch.zeros((), device=self.mesh.device), list[RoutingCounts]()
        passes_left = n

        def forward(i: int, h: Message | None) -> Message | None:
            # A leaf of this stage's graph: its .grad is the message to the stage before.
            x = batches[i].ids if h is None else h.hidden_states.requires_grad_()
            if stage.dropout is not None:
                stage.dropout.begin(batches[i].at)
            routing = None
            if balance is not None:
                routing = balance.begin(batches[i].ids.numel(), batches[i].padding)
            out = stage.hidden_states(x, batches[i].segments)
            if stage.last and preference is not None:
                out = self._sums(preference, out, batches[i])
                if not self.mesh.cp_rank:  # other ranks that share the rows have the same sums
                    losses.add_(out.detach())
                out = preference.scale_loss(out, scale)
            elif stage.last:
                out = stage.loss_sum(out, batches[i].labels, scale, batches[i].labelled_rows)
                losses.add_(out.detach())
            if balance is not None and routing is not None:
                balance.join(routing)
                routing.totals = balance.totals(routing, None if h is None else h.loads)
                routings.append(routing)
            in_flight.append((x, out, routing))
            return (
                None
                if stage.last
                else Message(out.detach(), None if routing is None else routing.totals)
            )

        def backward(gradient: Message | None) -> Message | None:
            nonlocal passes_left
            x, out, routing = in_flight.popleft()
            passes_left -= 1
            if balance is not None and routing is not None and aux_scale is not None:
                if gradient is not None and gradient.loads is not None:
                    routing.totals = gradient.loads
                balance.finish(routing, aux_scale)
                if stage.last or not balance.together:
                    aux.add_(balance.loss(routing))
            if not passes_left:
                before_last()
            torch.autograd.backward(out, None if gradient is None else gradient.hidden_states)
            if stage.first or x.grad is None:
                return None
            return Message(x.grad, None if routing is None else routing.totals)

        def shape(i: int) -> Shape | None:
            return stage.hidden_shape(batches[i].ids) if i < n else None

        loads = self._loads
        # 1F1B: stage r runs ahead of its first backward pass by the stages behind it, so it never
        # holds more than p - r micro-batches, however many a step has.
        for i in range(warm_up):
            h, _ = self._exchange(shape_before=shape(i), loads=loads)
            self._exchange(to_after=forward(i, h), loads=loads)
        h, _ = self._exchange(shape_before=shape(warm_up), loads=loads)
        for i in range(warm_up, n):
            out = forward(i, h)
            _, gradient = self._exchange(to_after=out, shape_after=shape(i - warm_up), loads=loads)
            h, _ = self._exchange(
                to_before=backward(gradient), shape_before=shape(i + 1), loads=loads
            )
        # The rest of the backward passes, one for each forward pass of the warm-up.
        for i in range(n - warm_up, n):
            _, gradient = self._exchange(shape_after=shape(i), loads=loads)
            self._exchange(to_before=backward(gradient), loads=loads)
        if balance is not None:
            self.routing = balance.numbers(aux, routings) * (
                not self.mesh.cp_rank
            )  # ranks of the same rows have the same
            balance.end()
        return losses

    def evaluate(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """The sums of a batch, 0 except on the last stage: those of `PreferenceLoss.sums`, or [3]:
        the sum of token losses, labels that are the likeliest token, labels.
        """
        preference = self._preference
        sums = torch.zeros(3 if preference is None else SUMS, device=self.mesh.device)

        def add(number: int, h: torch.Tensor) -> None:
            batch = batches[number]
            if preference is None:
                sums.add_(self.stage.evaluate(h, batch.labels, batch.labelled_rows))
            else:
                sums.add_(self._sums(preference, h, batch) * (not self.mesh.cp_rank))

        self._forward_all(batches, add)
        return sums

    def log_probabilities(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """The log-probabilities of the answers of every pair, fp32 [B, pairs of a row, 2]; 0 except
        on the last stage.
        """
        pairs = [batch.pairs for batch in batches if batch.pairs is not None]
        log_probs = [torch.zeros_like(pair_batch.references) for pair_batch in pairs]

        def fill(number: int, h: torch.Tensor) -> None:
            batch = batches[number]
            log_probs[number] = pairs[number].sums(
                -self.stage.token_losses(h, batch.labels, batch.labelled_rows)
            )

        self._forward_all(batches, fill)
        return torch.cat(log_probs)

    def _sums(self, preference: PreferenceLoss, h: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        assert batch.pairs is not None
        losses = self.stage.token_losses(h, batch.labels, batch.labelled_rows)
        return preference.sums(losses, batch.labels, batch.pairs)

    @torch.no_grad()
    def _forward_all(
        self, batches: Sequence[MicroBatch], last: Callable[[int, torch.Tensor], None]
    ) -> None:
        """Run the batches forward; on the last stage call `last` with the number and final hidden
        states of each.
        """
        self._drop_nothing()
        for number, batch in enumerate(batches):
            h = self.stage.hidden_states(self._arrive(batch.ids), batch.segments)
            if self.stage.last:
                last(number, h)
            else:
                self._exchange(to_after=Message(h))

    @torch.no_grad()
    def hidden_states(
        self, ids: torch.Tensor, segments: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The final hidden states of one batch on the last stage, else None."""
        self._drop_nothing()
        return self.through(ids, lambda x: self.stage.hidden_states(x, segments))

    def through(
        self, ids: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor | None:
        """Pass what `run` makes of the ids, or of the hidden states before, to the next stage; the
        last returns it.
        """
        out = run(self._arrive(ids))
        if self.stage.last:
            return out
        self._exchange(to_after=Message(out))
        return None

    def broadcast_from_last(self, values: torch.Tensor) -> None:
        """Give the first stage the last stage's values; the stages between take part."""
        last = dist.get_process_group_ranks(self.mesh.pp_group)[-1]
        dist.broadcast(values, last, group=self.mesh.pp_group)

    def _drop_nothing(self) -> None:
        if self.stage.dropout is not None:
            self.stage.dropout.begin(None)

    def _arrive(self, ids: torch.Tensor) -> torch.Tensor:
        h, _ = self._exchange(shape_before=self.stage.hidden_shape(ids))
        return ids if h is None else h.hidden_states

    def _without_messages(self) -> dict[int, dist.ProcessGroup] | None:
        """Try a message each way between neighbours; if the backend has none, make groups to
        broadcast in.

        Neuron's documents name pipeline parallelism, and its code had no send and receive half a
        year before.
        """
        fault = None
        try:
            probe = [
                torch.zeros(1, device=self.mesh.device, dtype=self.stage.dtype) for _ in range(2)
            ]
            self._exchange(
                to_before=Message(probe[0]),
                to_after=Message(probe[1]),
                shape_before=(1,),
                shape_after=(1,),
            )
        except (RuntimeError, NotImplementedError) as error:
            fault = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        faults = [f for f in self.mesh.gather(fault) if f]
        if not faults:
            return None
        if self.mesh.rank == 0:
            log.warning(
                "parallel.pp: no send and receive on this machine (%s); stages broadcast to their"
                " neighbour instead, which is slower",
                faults[0],
            )
        out: dict[int, dist.ProcessGroup] = {}
        for p in range(self.mesh.pp - 1):
            group = self.mesh.subgroup("pp", [(p, p + 1)])
            if group is not None:
                neighbour = p + 1 if p == self.mesh.pp_rank else p
                out[dist.get_process_group_ranks(self.mesh.pp_group)[neighbour]] = group
        return out

    def _exchange(
        self,
        to_before: Message | None = None,
        to_after: Message | None = None,
        shape_before: Shape | None = None,
        shape_after: Shape | None = None,
        loads: Shape | None = None,
    ) -> tuple[Message | None, Message | None]:
        """Send and receive in one batch, so that neighbours do not wait for each other; skip
        missing neighbours.

        With `loads`, their shape, every message has some.
        """
        sends: list[tuple[Any, torch.Tensor, int]] = []
        receives: list[tuple[Any, torch.Tensor, int]] = []

        def send(message: Message | None, peer: int | None) -> None:
            if message is not None and peer is not None:
                sends.append((dist.isend, message.hidden_states.contiguous(), peer))
                if loads is not None and message.loads is not None:
                    sends.append((dist.isend, message.loads, peer))

        def receive(shape: Shape | None, peer: int | None) -> Message | None:
            if shape is None or peer is None:
                return None
            x = torch.empty(tuple(shape), dtype=self.stage.dtype, device=self.mesh.device)
            receives.append((dist.irecv, x, peer))
            if loads is None:
                return Message(x)
            with_it = torch.empty(tuple(loads), device=self.mesh.device)
            receives.append((dist.irecv, with_it, peer))
            return Message(x, with_it)

        send(to_before, self._before)
        from_before = receive(shape_before, self._before)
        send(to_after, self._after)
        from_after = receive(shape_after, self._after)
        with part("pipeline"):
            # Even stages send first and odd ones receive first, so no two neighbours both wait to
            # send.
            self._move([*sends, *receives] if self.mesh.pp_rank % 2 == 0 else [*receives, *sends])
        return from_before, from_after

    def _move(self, ops: Sequence[tuple[Any, torch.Tensor, int]]) -> None:
        """Run (isend or irecv, tensor, peer) in order, and wait."""
        if self._pairs is not None:
            for send_or_receive, x, peer in ops:
                dist.broadcast(
                    x,
                    self.mesh.rank if send_or_receive is dist.isend else peer,
                    group=self._pairs[peer],
                )
        elif ops:
            for work in dist.batch_isend_irecv([dist.P2POp(*op, self.mesh.pp_group) for op in ops]):
                work.wait()
