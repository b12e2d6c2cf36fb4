"""Losses of pairs of a chosen and a rejected answer: direct preference optimization and its kin, as
TRL 1.16 has them.

Both answers of a pair are segments of one row. The log-probability of an answer is the sum over its
labels, so a loss of a pair is a function of two sums; its gradient reaches every token of the two.
All shapes depend on the batch's shape only, and all arithmetic is fp32. Tensors are taken apart by
`unbind`: the backward pass of an index would write into a slice, for which Neuron has no kernel.

sigmoid: Rafailov et al. 2023; robust: Chowdhury et al. 2024; ipo: Azar et al. 2023, with
log-probabilities per token as its authors ran it; hinge: Zhao et al. 2023 (SLiC); sft_weight: Pang
et al. 2024 (RPO).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from smtrain.core.config.training import DpoSection
from smtrain.core.model.footprint import IGNORED_LABEL
from smtrain.worker.engine.base import PairMetrics
from smtrain.worker.engine.native.comm import ProcessMesh, reduce_from, to_device

SUMS = 7
"""Numbers of `PreferenceLoss.sums`."""


class PairBatch(NamedTuple):
    """The pairs of a micro-batch of B rows, at most P in a row, on the device."""

    mesh: ProcessMesh
    places: torch.Tensor
    """int64 [B * own tokens]: the answer that each position belongs to, counted over the rows: (row
    * P + pair) * 2, + 1 if it is the rejected one.
    """
    references: torch.Tensor
    """fp32 [B, P, 2]: the reference's log-probabilities; 0 if a row has no such pair."""

    @classmethod
    def of(cls, segments: torch.Tensor, references: torch.Tensor, mesh: ProcessMesh) -> PairBatch:
        """From segments [B, S] and references [B, P, 2] of the host. Padding counts for the last
        answer: it has no labels.
        """
        answers = 2 * references.shape[1]
        first = torch.arange(len(segments), device="cpu")[:, None] * answers
        places = (mesh.own_tokens(segments).clamp(max=answers - 1) + first).flatten()
        # NaN stands for a pair that the row does not have. Masking its loss in `sums` is not
        # enough: in the backward pass 0 times NaN is NaN.
        return cls(
            mesh, to_device(places, mesh.device), to_device(references.nan_to_num(0.0), mesh.device)
        )

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a value of each own position [B, own tokens] over each answer, [B, P, 2],
        whose tokens other ranks may have too.
        """
        total = values.new_zeros(self.references.numel())
        total = total.index_add(0, self.places, values.flatten()).view(self.references.shape)
        return total if self.mesh.cp_group is None else reduce_from(total, self.mesh.cp_group)


class PreferenceLoss:
    """A loss of pairs: its value, the weights of its sums, and the metrics of a batch."""

    def __init__(self, options: DpoSection) -> None:
        self._options = options

    def sums(self, losses: torch.Tensor, labels: torch.Tensor, pairs: PairBatch) -> torch.Tensor:
        """Sums over the pairs of token losses [B, S], fp32 [SUMS].

        The pairs' losses, the losses of the chosen answers' tokens, and without a gradient the
        rewards of chosen and rejected answers, the pairs whose chosen answer has the larger one,
        and the log-probabilities of both.
        """
        logps = pairs.sums(-losses)
        lengths = pairs.sums((labels != IGNORED_LABEL).to(logps.dtype))
        real = lengths.amin(-1) > 0
        gains = logps - pairs.references
        chosen_logps, rejected_logps = logps.detach().unbind(-1)
        better, worse = (self._options.beta * gains.detach()).unbind(-1)
        numbers = (
            self._of_pairs(gains, lengths),
            -logps.unbind(-1)[0],
            better,
            worse,
            (better > worse).to(logps.dtype),
            chosen_logps,
            rejected_logps,
        )
        return torch.stack([torch.where(real, x, 0.0).sum() for x in numbers])

    def scale(self, pair: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """The factors [2] of the first two sums, from 1 / pairs and 1 / tokens of chosen answers in
        the step.
        """
        return torch.stack([pair, token * self._options.sft_weight])

    def scale_loss(self, sums: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The part of the step's loss that has these sums."""
        pair, token = scale.unbind()
        losses, answers = sums.unbind()[:2]
        return losses * pair + answers * token

    def loss(self, sums: Sequence[float], pairs: float, tokens: float) -> float:
        """The loss of a batch of so many pairs, and tokens of chosen answers."""
        return sums[0] / pairs + self.answer_loss(sums, tokens)

    def answer_loss(self, sums: Sequence[float], tokens: float) -> float:
        """A part of the loss: the weighted mean over so many tokens of chosen answers."""
        return self._options.sft_weight * sums[1] / tokens

    def metrics(self, sums: Sequence[float], pairs: float) -> PairMetrics:
        """The means of a batch of so many pairs."""
        return PairMetrics(*(number / pairs for number in sums[2:]))

    def _of_pairs(self, gains: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The loss of each pair [B, P], from what its answers have gained on the reference, and
        their tokens.
        """
        o = self._options
        if o.loss in ("ipo", "sigmoid_norm"):
            # At least 1 for pairs that a row does not have, whose loss `sums` drops.
            gains = gains / lengths.clamp(min=1)
        chosen_gain, rejected_gain = gains.unbind(-1)
        difference = chosen_gain - rejected_gain
        if o.loss == "ipo":
            # Equation 17 of Azar et al.; their tau is our beta.
            return (difference - 1 / (2 * o.beta)).square()
        if o.loss == "hinge":
            return torch.relu(1 - o.beta * difference)
        right = -F.logsigmoid(o.beta * difference)
        if o.loss == "robust":
            # Unbiased if a share `label_smoothing` of the pairs is the wrong way round. The divisor
            # is positive because that share is below 1/2.
            wrong = -F.logsigmoid(-o.beta * difference)
            return ((1 - o.label_smoothing) * right - o.label_smoothing * wrong) / (
                1 - 2 * o.label_smoothing
            )
        return right


def pair_counts(
    labels: torch.Tensor, segments: torch.Tensor | None, references: torch.Tensor | None
) -> tuple[int, int]:
    """The pairs of a batch on the host, and the labels of their chosen answers."""
    assert segments is not None
    assert references is not None
    is_chosen_label = (labels != IGNORED_LABEL) & (segments % 2 == 0)
    return int(references[..., 0].isfinite().sum()), int(is_chosen_label.sum())
