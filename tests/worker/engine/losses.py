"""The loss in pieces and the loss of whole logits, for tests and worlds; a world's first argument
is the rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smtrain.core.config.training import DpoSection
from smtrain.core.model.footprint import IGNORED_LABEL
from smtrain.core.model.lora import Lora
from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.native import NativeEngine, fused_loss
from smtrain.worker.engine.native.cross_entropy import Columns
from smtrain.worker.engine.native.fused_loss import LinearCrossEntropy
from smtrain.worker.engine.native.gradients import Gradients
from tests.worker.engine import adapters, cases, preference

Gradient = tuple[torch.Tensor, torch.Tensor]
CPU = torch.device("cpu")


@contextmanager
def pieces_of(rows: int, aligned: int = 4) -> Iterator[None]:
    """Cut losses into pieces of so many rows, also those of small batches."""
    with (
        patch.object(fused_loss, "loss_rows", lambda tokens, hidden, columns, device: rows),
        patch.object(fused_loss, "_ROW_MULTIPLE", aligned),
    ):
        yield


def problem(
    seed: int, tokens: int, hidden: int, vocab: int, ignored: float
) -> tuple[torch.Tensor, ...]:
    """Hidden states [N, H], a weight [V, H], labels [N] of which a share is ignored, and factors
    [N].
    """
    generator = torch.Generator().manual_seed(seed)
    h, weight = (torch.randn(n, hidden, generator=generator) for n in (tokens, vocab))
    labels = torch.randint(vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = IGNORED_LABEL
    return h, weight, labels, torch.randn(tokens, generator=generator)


def whole(
    h: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    factors: torch.Tensor,
    scales: dict[Any, float],
) -> tuple[torch.Tensor, Gradient]:
    """Losses [N] of whole logits, and the gradients of their sum times the factors, by torch."""
    h, weight = (x.detach().requires_grad_() for x in (h, weight))
    logits = F.linear(h, weight) / scales.get("logits", 1.0)
    if "cap" in scales:
        logits = torch.tanh(logits / scales["cap"]) * scales["cap"]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(wide, labels, reduction="none", ignore_index=IGNORED_LABEL)
    of_h, of_weight = torch.autograd.grad(losses, (h, weight), factors.to(losses.dtype))
    return losses.detach(), (of_h, of_weight)


def head(weight: torch.Tensor, sink: bool = False) -> tuple[Any, Callable[[], torch.Tensor | None]]:
    """A linear with this weight, and a function that returns its gradient: from a sink, or
    torch's.
    """
    weight = torch.nn.Parameter(weight)
    if not sink:
        return SimpleNamespace(weight=weight, sink=None), lambda: weight.grad
    table = SimpleNamespace(entries=[("head", 0, weight.numel())])
    trained: Any = SimpleNamespace(
        flat=weight.view(-1),
        parameters={"head": weight},
        table=table,
        leaf=lambda name: weight,
        first_name=str,
    )
    linear = SimpleNamespace(weight=weight, sink=None)
    gradients = Gradients(trained, {"head": linear}, CPU)
    return linear, lambda: gradients.of["head"]


def fused(
    h: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    factors: torch.Tensor,
    scales: dict[Any, float],
    columns: Columns,
    *,
    sink: bool = False,
    each: bool = False,
    select: bool = False,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """The same in pieces, with the first factor for all losses unless `each`; `select` rows with
    labels.
    """
    linear, gradient = head(weight, sink)
    loss = LinearCrossEntropy(linear, columns, scales, CPU, fast=False)
    labelled = loss.select_labelled(labels) if select else None
    h = h.detach().requires_grad_()
    if each:
        made = loss.token_losses(h, labels, labelled)
        made.backward(factors)
    else:
        made = loss.sum(h, labels, factors[0], labelled)
        made.backward()
    return made.detach(), (h.grad, gradient())


def over_ranks(rank: int, seeds: range) -> list[float]:
    """The largest errors of losses and gradients over a vocabulary cut over all ranks,
    relative to whole ones.

    The vocabulary is uneven: the last rank has fewer tokens than columns, or none.
    """
    size, worst = dist.get_world_size(), [0.0, 0.0, 0.0]
    for seed in seeds:
        vocab, rows, each = 5 + 4 * seed, 3 + seed, bool(seed % 2)
        h, weight, labels, factors = problem(seed, 11, 6, vocab, 0.3)
        scales: dict[Any, float] = [{}, {"cap": 3.0}, {"logits": 4.0}][seed % 3]
        per = -(-vocab // size)
        own = torch.zeros(per, 6)
        valid = max(0, min(per, vocab - rank * per))
        own[:valid] = weight[rank * per : rank * per + valid]
        columns = Columns(rank * per, valid, dist.group.WORLD)
        with pieces_of(rows):
            options = {"each": each, "sink": seed % 4 < 2, "select": seed % 5 > 2}
            made, (of_h, of_weight) = fused(h, own, labels, factors, scales, columns, **options)
        assert of_h is not None
        assert of_weight is not None
        dist.all_reduce(of_h)
        factors = factors if each else factors[0].expand(len(factors))
        losses, (whole_h, whole_weight) = whole(h, weight, labels, factors, scales)
        pairs = [
            (made, losses if each else losses.sum()),
            (of_h, whole_h),
            (of_weight[:valid], whole_weight[rank * per : rank * per + valid]),
        ]
        worst = [max(w, error(*pair)) for w, pair in zip(worst, pairs, strict=True)]
        assert not of_weight[valid:].any(), "padding has a gradient"
    return worst


def error(made: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference, relative to the largest number."""
    if not right.numel():
        return 0.0
    return float(
        (made.double() - right.double()).abs().max() / right.double().abs().max().clamp(min=1e-30)
    )


class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensors by their numbers while entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[int] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        self.seen.update(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        return out


LORA = Lora(4, 8.0, targets=("q_proj", "down_proj"))
VOCAB, ROWS = 4096, 32


def largest(rank: int, options: ParallelOptions, objective: str) -> tuple[int, int]:
    """The numbers of the largest tensor of a step, an evaluation and a next token, and those of a
    piece's logits.

    128 tokens in a micro-batch, of a model with a vocabulary of 4096 and 8 hidden numbers.
    """
    config = cases.config(
        "llama",
        vocab_size=VOCAB,
        hidden_size=8,
        head_dim=4,
        num_attention_heads=2,
        intermediate_size=16,
        num_key_value_heads=2,
        num_hidden_layers=2,
    )
    options_of_pairs = DpoSection() if objective == "dpo" else None
    e = NativeEngine(config, options, cases.OPTIMIZER, None, 0, None, options_of_pairs)
    ids, labels = cases.batch(config, 0)
    rest: tuple[torch.Tensor, ...] = ()
    if objective != "pretrain":
        labels[:, ::2] = IGNORED_LABEL
        rest = (torch.arange(cases.SEQ_LEN).div(16).long().expand(cases.BATCH, -1),)
    if objective == "dpo":
        rest = (*rest, torch.zeros(cases.BATCH, 1, 2))
    with pieces_of(ROWS), Sizes() as sizes:
        e.step(ids, labels, 1e-3, *rest)
        e.evaluate(ids, labels, *rest)
        e.next_token(ids[:1])
    return max(sizes.seen), ROWS * VOCAB // options.tp


def steps(
    rank: int, options: ParallelOptions, rows: int, kind: str = "pretrain"
) -> list[tuple[float, ...]]:
    """Losses and norms of two steps, and the loss and the right tokens of an evaluation, with
    pieces of so many rows; of dpo all numbers of the golden steps.

    `kind`: pretrain, tied, cap, logits, lora or dpo.
    """
    with pieces_of(rows):
        if kind == "dpo":
            return [
                tuple(step.values()) for step in preference.steps(rank, options, "sigmoid_sft", 2)
            ]
        names = {"tied": "llama-tied-509", "cap": "gemma3", "logits": "granite"}
        config = cases.CONFIGS[names.get(kind, "llama")]
        e = (
            cases.engine(config, options)
            if kind != "lora"
            else adapters.engine(config, options, LORA)
        )
        ids, labels = cases.batch(config, 0)
        labels[:, 1::2] = IGNORED_LABEL  # so that rows are selected
        made = [e.step(*cases.own(e, (ids, labels)), 1e-3) for _ in range(2)]
        tested = e.evaluate(*cases.own(e, (ids, labels)))
        return [*((one.loss, one.grad_norm) for one in made), (tested.loss, float(tested.correct))]


def has_sink(
    rank: int, name: str, options: ParallelOptions, lora: Lora | None = None
) -> bool | None:
    """Whether the weight's gradient of the loss goes straight to the optimizer's buffer; None
    without a loss.
    """
    config = cases.CONFIGS[name]
    e = cases.engine(config, options) if lora is None else adapters.engine(config, options, lora)
    return None if e.stage.loss is None else e.stage.loss.sink is not None
