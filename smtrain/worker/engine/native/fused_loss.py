"""The output matrix and the cross entropy in pieces of rows, so that no tensor has all logits of a
micro-batch.

The gradients of a sum of losses are computed in the forward pass, piece by piece, as Liger does
(Hsu et al. 2024, arXiv 2410.10989): computing logits a second time costs 7 % of a step. Token
losses whose upstream gradients are not known yet (DPO) do compute them again.
torch.nn.functional.linear_cross_entropy, which torch has from 2.13, knows no vocabulary cut over
ranks, no soft cap, and returns the weight's gradient in a new tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from smtrain.core.model.family import Scale
from smtrain.core.model.footprint import IGNORED_LABEL, loss_rows
from smtrain.worker.engine.native.comm import likeliest, to_device
from smtrain.worker.engine.native.cross_entropy import (
    Columns,
    combine_sums,
    cut_gradient,
    local_sums,
    loss_gradient,
    scale_and_cap,
)
from smtrain.worker.engine.native.layers import compile_or_fall_back
from smtrain.worker.engine.native.linears import Sink, add_product

_ROW_MULTIPLE = 128
"""Selected rows are padded to a multiple of this, so that products stay aligned and graphs few."""
_WORTH = 0.9
"""Rows are selected if fewer than this share have labels: the copies must cost less than the logits
saved.
"""


class LabelledRows(NamedTuple):
    """The rows of a micro-batch that need logits, at least one of them without a label."""

    rows: torch.Tensor
    """int64 [n] of the N rows: those with labels, then one without, as often as alignment needs."""
    places: torch.Tensor
    """int64 [N]: the place of each row among `rows`; rows without a label have that of one without.
    """

    @classmethod
    def of(cls, labels: torch.Tensor, device: torch.device) -> LabelledRows | None:
        """Select the rows of labels [B, S] of the host; None if that would not save enough."""
        has_label = labels.flatten() != IGNORED_LABEL
        count = int(has_label.sum())
        # Always more than `count`, as the places of rows without a label need one such row.
        padded_count = (count // _ROW_MULTIPLE + 1) * _ROW_MULTIPLE
        if padded_count > _WORTH * len(has_label):
            return None
        rows = has_label.nonzero().flatten()
        unlabelled_row = (~has_label).nonzero()[:1].flatten()
        rows = torch.cat([rows, unlabelled_row.expand(padded_count - count)])
        places = torch.where(has_label, has_label.cumsum(0) - 1, count)
        return cls(to_device(rows, device), to_device(places, device))


class LinearCrossEntropy:
    """The output matrix of a stage, and losses of its logits.

    Hidden states are [..., H], already whole on each rank.

    `scales` are those of `Described`: logits are divided by "logits", then bounded by "cap".
    """

    def __init__(
        self,
        head: Any,
        columns: Columns,
        scales: Mapping[Scale, float],
        device: torch.device,
        fast: bool,
    ):
        """`head` is a linear without a bias; `fast` compiles what comes after its product."""
        self._head, self._columns, self._device = head, columns, device
        self._divisor, self._cap = scales.get("logits", 1.0), scales.get("cap")
        self.shared: Sink | None = None
        """Takes the gradient of an output matrix shared with the embedding."""
        self._padding: torch.Tensor | None = None
        if columns.group is not None and columns.valid < len(head.weight):
            padding = torch.arange(len(head.weight), device="cpu") >= columns.valid
            self._padding = to_device(padding, device)
        self._gradient: Callable[..., Any] = loss_gradient
        self._local, self._cut_gradient = local_sums, cut_gradient
        if fast:
            self._gradient, self._local, self._cut_gradient = (
                compile_or_fall_back(function, "the loss", device.type)
                for function in (loss_gradient, local_sums, cut_gradient)
            )

    def rows(self, tokens: int) -> int:
        """The rows of a piece of a micro-batch of so many tokens."""
        columns, hidden_size = self._head.weight.shape
        return min(tokens, loss_rows(tokens, hidden_size, columns, self._device.type))

    def select_labelled(self, labels: torch.Tensor) -> LabelledRows | None:
        """The rows that need logits, from labels [B, S] of the host; None: all.

        A batch of one piece uses all rows, and so does Neuron, which would compile a graph for each
        number of rows.
        """
        if self._device.type == "neuron" or self.rows(labels.numel()) == labels.numel():
            return None
        return LabelledRows.of(labels, self._device)

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """This rank's columns of the logits [..., ceil(V / tp)], with the padding of the
        vocabulary.
        """
        return scale_and_cap(F.linear(h, self._head.weight), self._divisor, self._cap)

    def sum(
        self,
        h: torch.Tensor,
        labels: torch.Tensor,
        scale: torch.Tensor,
        labelled_rows: LabelledRows | None = None,
    ) -> torch.Tensor:
        """The sum of the token losses, fp32 [].

        Its gradients are those of the sum times `scale` [].

        They are computed in the forward pass: the sum must be the root of the backward pass, whose
        gradient is 1.
        """
        apply: Any = _Sum.apply
        total: torch.Tensor = apply(h, self._head.weight, labels, scale, self, labelled_rows)
        return total

    def token_losses(
        self, h: torch.Tensor, labels: torch.Tensor, labelled_rows: LabelledRows | None = None
    ) -> torch.Tensor:
        """The loss of each token, fp32 like `labels`; 0 without a label.

        The backward pass computes logits again.
        """
        apply: Any = _TokenLosses.apply
        losses: torch.Tensor = apply(h, self._head.weight, labels, self, labelled_rows)
        return losses

    @torch.no_grad()
    def evaluate(
        self, h: torch.Tensor, labels: torch.Tensor, labelled_rows: LabelledRows | None = None
    ) -> torch.Tensor:
        """[3]: sum of losses, labels that are the likeliest token, and labels."""
        total, correct = torch.zeros((), device=h.device), torch.zeros((), device=h.device)
        for hidden_rows, targets in self._pieces(h, labels, labelled_rows=labelled_rows):
            logits = self.logits(hidden_rows)
            total += self._losses(logits, targets).sum()
            correct += (likeliest(logits, *self._columns) == targets).sum().to(correct.dtype)
        return torch.stack([total, correct, (labels != IGNORED_LABEL).sum().to(total.dtype)])

    @torch.no_grad()
    def likeliest(self, h: torch.Tensor) -> torch.Tensor:
        """The likeliest token after each hidden state, int64 [...], on all tp ranks."""
        tokens = [
            likeliest(self.logits(hidden_rows), *self._columns)
            for (hidden_rows,) in self._pieces(h)
        ]
        return _concatenate(tokens).view(h.shape[:-1])

    def losses(
        self, h: torch.Tensor, labels: torch.Tensor, labelled_rows: LabelledRows | None
    ) -> torch.Tensor:
        """Compute the losses of `token_losses` without a gradient."""
        pieces = self._pieces(h, labels, labelled_rows=labelled_rows)
        return _spread(
            _concatenate(
                [self._losses(self.logits(hidden_rows), targets) for hidden_rows, targets in pieces]
            ),
            labelled_rows,
        ).view(labels.shape)

    def gradients(
        self,
        h: torch.Tensor,
        labels: torch.Tensor,
        factors: torch.Tensor,
        labelled_rows: LabelledRows | None,
        needs_weight: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The sum of the losses, and the gradients of the sum of each loss times its factor.

        `factors` are like `labels`. The gradients are those of `h` and, if `needs_weight`, of the
        weight, which its sink gets if it has one.
        """
        weight, sink = self._head.weight, self.sink
        totals, of_h, of_weight = [], [], None
        for hidden_rows, targets, times in self._pieces(
            h, labels, factors, labelled_rows=labelled_rows
        ):
            losses, gradient = self._piece(F.linear(hidden_rows, weight), targets, times)
            totals.append(losses.sum())
            of_h.append(gradient.mm(weight))
            if needs_weight and sink is not None:
                sink.add_product(gradient, hidden_rows)
            elif needs_weight and of_weight is None:
                # One product is rounded once anyway; sums over pieces need fp32.
                is_one_piece = len(hidden_rows) == h[..., 0].numel()
                of_weight = torch.empty_like(
                    weight, dtype=weight.dtype if is_one_piece else torch.float32
                )
                add_product(of_weight, gradient, hidden_rows, fresh=True)
            elif of_weight is not None:
                add_product(of_weight, gradient, hidden_rows, fresh=False)
            # Or two pieces of logits would exist while the next one is computed.
            del gradient
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        return (
            torch.stack(totals).sum(),
            _spread(_concatenate(of_h), labelled_rows).view(h.shape),
            of_weight,
        )

    @property
    def sink(self) -> Sink | None:
        """The taker of the weight's gradient; None: autograd."""
        return self.shared or getattr(self._head, "sink", None)

    def _pieces(
        self, h: torch.Tensor, *tensors: torch.Tensor, labelled_rows: LabelledRows | None = None
    ) -> Iterator[Any]:
        """Pieces of the rows of `h` [..., H] and of tensors [...]; only of those with labels if
        `labelled_rows` has them.
        """
        flat = [h.reshape(-1, h.shape[-1]), *(x.reshape(-1) for x in tensors)]
        size = self.rows(len(flat[0]))
        if labelled_rows is not None:
            flat = [x.index_select(0, labelled_rows.rows) for x in flat]
        return zip(*(torch.split(x, size) for x in flat), strict=True)

    def _piece(
        self, product: torch.Tensor, labels: torch.Tensor, factors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses [R] of a piece, and the gradient of its product [R, C]."""
        columns = self._columns
        if columns.group is None:
            result: tuple[torch.Tensor, torch.Tensor] = self._gradient(
                product, labels, factors, self._divisor, self._cap
            )
            return result
        exponentials, sums = self._sums(product, labels)
        losses, shares = combine_sums(sums, labels, columns.group)
        column_args = columns.start, columns.valid, self._divisor, self._cap
        return losses, self._cut_gradient(
            product, exponentials, labels, shares * factors, factors, *column_args
        )

    def _losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The token losses [R] of logits that are bounded already."""
        if self._columns.group is None:
            return F.cross_entropy(
                logits.float(), labels, reduction="none", ignore_index=IGNORED_LABEL
            )
        _, sums = local_sums(
            logits, labels, self._columns.start, self._columns.valid, self._padding, 1.0, None
        )
        return combine_sums(sums, labels, self._columns.group)[0]

    def _sums(
        self, product: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns = self._columns
        result: tuple[torch.Tensor, torch.Tensor] = self._local(
            product, labels, columns.start, columns.valid, self._padding, self._divisor, self._cap
        )
        return result


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        scale: torch.Tensor,
        loss: LinearCrossEntropy,
        labelled_rows: LabelledRows | None,
    ) -> torch.Tensor:
        needs_weight = ctx.needs_input_grad[1]
        total, *ctx.made = loss.gradients(
            h, labels, scale.expand(labels.shape), labelled_rows, needs_weight
        )
        ctx.sink = loss.sink if needs_weight else None
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # `grad` is not used, because `LinearCrossEntropy.sum` must be the root. The context lives
        # as long as the loss does, so the gradients may not stay in it.
        (of_h, of_weight), ctx.made = ctx.made, None
        if ctx.sink is not None:
            # not before: the last backward pass is announced after the forward pass
            ctx.sink.announce_added()
        return of_h, of_weight, None, None, None, None


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        loss: LinearCrossEntropy,
        labelled_rows: LabelledRows | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(h, labels)
        ctx.loss, ctx.labelled = loss, labelled_rows
        return loss.losses(h, labels, labelled_rows)

    @staticmethod
    def backward(ctx: Any, factors: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, labels = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[1]
        _, of_h, of_weight = ctx.loss.gradients(h, labels, factors, ctx.labelled, needs_weight)
        if needs_weight and ctx.loss.sink is not None:
            ctx.loss.sink.announce_added()
        return of_h, of_weight, None, None, None


def _concatenate(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _spread(values: torch.Tensor, labelled_rows: LabelledRows | None) -> torch.Tensor:
    """Values of all rows from those of the selected ones; rows without a label have 0."""
    return values if labelled_rows is None else values.index_select(0, labelled_rows.places)
