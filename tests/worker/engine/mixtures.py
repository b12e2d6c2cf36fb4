"""Runs of worlds for tests of mixtures of experts; the first argument is the rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from smtrain.core.config.training import DpoSection
from smtrain.core.model.hf_config import normalise
from smtrain.worker.engine.base import ParallelOptions, RoutingMetrics
from smtrain.worker.engine.native import NativeEngine
from smtrain.worker.engine.native.zero1 import OptimizerShard
from smtrain.worker.engine.step_timing import StepTimer, mark_parts
from tests.worker.engine import cases
from tests.worker.engine.cases import BATCH, OPTIMIZER, batch, lr

Numbers = tuple[float, float, float]
"""Loss, auxiliary loss, norm of the gradient."""


def _aux(
    config: dict[str, Any],
    logits: tuple[torch.Tensor, ...],
    by_layer: bool,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    shape = normalise(config).shape
    assert shape.experts is not None
    sizes = shape.experts.count, shape.experts.chosen
    if not by_layer:
        return load_balancing_loss_func(logits, *sizes, mask)
    each = [load_balancing_loss_func((one,), *sizes, mask) for one in logits]
    return torch.stack(each).sum() / sizes[1]


def plain(
    rank: int, config: dict[str, Any], count: int, samples: int, by_layer: bool = False
) -> list[Numbers]:
    """transformers and torch alone, with a forward pass for each `samples` of the batch."""
    model = cases.transformers_model(config).train()
    routing = normalise(config).routing
    assert routing is not None
    biases = [p for n, p in model.named_parameters() if p.ndim == 1 or n.endswith("_bias")]
    matrices = [p for n, p in model.named_parameters() if p.ndim > 1 and not n.endswith("_bias")]
    groups = [
        {"params": matrices, "weight_decay": OPTIMIZER.weight_decay},
        {"params": biases, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    out = []
    for step in range(count):
        ids, labels = batch(config, step)
        labelled, loss, aux = (labels != -100).sum(), 0.0, 0.0
        for part, wanted in zip(ids.split(samples), labels.split(samples), strict=True):
            made = model(input_ids=part, use_cache=False, output_router_logits=True)
            one = (
                F.cross_entropy(made.logits.flatten(0, 1), wanted.flatten(), reduction="sum")
                / labelled
            )
            balance = _aux(config, made.router_logits, by_layer) * samples / BATCH
            (one + routing.aux * balance).backward()
            loss, aux = loss + float(one.detach()), aux + float(balance.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip)
        for group in adamw.param_groups:
            group["lr"] = lr(step)
        adamw.step()
        adamw.zero_grad()
        out.append((loss, aux, float(norm)))
    return out


def padded_batch(
    config: dict[str, Any], step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, labels and segments of rows of one sample each, of different lengths, and padding."""
    ids, labels = batch(config, step)
    lengths = torch.linspace(ids.shape[1] // 4, ids.shape[1], len(ids)).long()
    segments = torch.arange(ids.shape[1]).ge(lengths[:, None]).long()
    return ids, labels.masked_fill(segments > 0, -100), segments


def padded_plain(
    rank: int, config: dict[str, Any], samples: int, by_layer: bool
) -> tuple[float, float]:
    """The auxiliary loss and the gradient's norm of transformers with an attention mask."""
    model = cases.transformers_model(config).train()
    routing, (ids, labels, segments) = normalise(config).routing, padded_batch(config, 0)
    assert routing is not None
    aux = 0.0
    for part, wanted, padding in zip(
        ids.split(samples), labels.split(samples), segments.split(samples), strict=True
    ):
        mask = 1 - padding
        made = model(
            input_ids=part, attention_mask=mask, use_cache=False, output_router_logits=True
        )
        one = F.cross_entropy(made.logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        balance = _aux(config, made.router_logits, by_layer, mask) * samples / BATCH
        (one / (labels != -100).sum() + routing.aux * balance).backward()
        aux += float(balance.detach())
    return aux, float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip))


def train_padded(
    rank: int, config: dict[str, Any], options: ParallelOptions
) -> tuple[float, float, RoutingMetrics]:
    """The auxiliary loss and the gradient's norm of a step on rows with padding, and its routing."""
    e = cases.engine(config, options)
    each = BATCH // e.dp_size
    own = (x[e.dp_rank * each : (e.dp_rank + 1) * each] for x in padded_batch(config, 0))
    ids, labels, segments = own
    result = e.step(ids, labels, lr(0), segments)
    assert result.routing is not None
    return result.routing.aux_loss, result.grad_norm, result.routing


def _steps(e: Any, first: int, last: int) -> list[tuple[Numbers, RoutingMetrics]]:
    out = []
    for step in range(first, last):
        result = e.step(*cases.own(e, batch(e.config, step)), lr(step))
        assert result.routing is not None
        out.append(((result.loss, result.routing.aux_loss, result.grad_norm), result.routing))
    return out


def train(rank: int, config: dict[str, Any], options: ParallelOptions, count: int) -> list[Numbers]:
    return [numbers for numbers, _ in _steps(cases.engine(config, options), 0, count)]


def prefer(rank: int, config: dict[str, Any], options: ParallelOptions) -> tuple[float, float]:
    """Loss and norm of the gradient of a step on pairs: the halves of each row."""
    source: Any = cases.Memory(config, cases.weights(config))
    e = NativeEngine(config, options, OPTIMIZER, source, 0, preference=DpoSection())
    ids, labels = cases.own(e, batch(config, 0))
    segments = torch.arange(ids.shape[1]).ge(ids.shape[1] // 2).long().expand_as(ids)
    result = e.step(ids, labels, lr(0), segments, torch.zeros(len(ids), 1, 2))
    return result.loss, result.grad_norm


def evaluated(rank: int, config: dict[str, Any], options: ParallelOptions) -> tuple[float, int]:
    """The loss of a batch without a step, and the labels that are the likeliest token."""
    e = cases.engine(config, options)
    made = e.evaluate(*cases.own(e, batch(config, 0)))
    return made.loss, made.correct


def watch(rank: int, config: dict[str, Any], options: ParallelOptions) -> RoutingMetrics:
    """The routing of the first step."""
    return _steps(cases.engine(config, options), 0, 1)[0][1]


def places(rank: int, config: dict[str, Any], options: ParallelOptions) -> set[str]:
    """The parts that a step spends time on."""
    e, clock = cases.engine(config, options), StepTimer()
    with mark_parts(clock):
        _steps(e, 0, 1)
    return {name for name, seconds in clock.seconds.items() if seconds}


def bits(
    rank: int, config: dict[str, Any], options: ParallelOptions, checkpoint: Path
) -> list[bytes]:
    """The bits of this rank's weights and optimizer state."""
    e = cases.engine(config, options, seed=7)
    e.load(checkpoint)
    return [
        t.numpy().tobytes()
        for shard in e.optimizer.shards
        if isinstance(shard, OptimizerShard)
        for t in (shard.master, shard.exp_avg, shard.exp_avg_sq)
    ]


def over_and_back(
    rank: int,
    config: dict[str, Any],
    over: ParallelOptions,
    back: ParallelOptions,
    old: Path,
    folder: Path,
    step: int,
) -> list[bytes]:
    """`bits` of a checkpoint that another mesh has loaded and saved."""
    cases.save_again(rank, config, over, old, folder, step)
    return bits(rank, config, back, folder / f"step_{step:08d}")
