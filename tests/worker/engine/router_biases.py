"""Runs of worlds for tests of the biases by which routers choose; the first argument is the rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from smtrain.core.model.lora import Lora, linears
from smtrain.core.model.shape import ModelShape
from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.native import NativeEngine
from tests.worker.engine import cases
from tests.worker.engine.cases import batch, own

BIAS = "e_score_correction_bias"
Run = tuple[list[tuple[float, float]], dict[str, list[float]]]
"""Loss and norm of each step, and the biases at the end."""


def plain(rank: int, config: dict[str, Any], count: int, rate: float, aux: float = 0.0) -> Run:
    """transformers and torch alone; after each step the rule of the paper, written out.

    `aux` multiplies the auxiliary loss of all layers together, of scores over their sum.
    """
    model = cases.transformers_model(config).train()
    routers = {name: module for name, module in model.named_modules() if hasattr(module, BIAS)}
    chosen, logits_of = dict[str, torch.Tensor](), dict[str, torch.Tensor]()

    def note(module: torch.nn.Module, _: Any, out: tuple[torch.Tensor, ...]) -> None:
        name = next(name for name, router in routers.items() if router is module)
        logits_of[name], chosen[name] = out[0], out[2].flatten()

    for module in routers.values():
        module.register_forward_hook(note)

    def backward(step: int) -> float:
        ids, labels = batch(config, step)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        scores = torch.cat([each.sigmoid() for each in logits_of.values()])
        probabilities = (scores / scores.sum(-1, keepdim=True)).mean(0)
        experts = len(probabilities)
        shares = torch.cat([*chosen.values()]).bincount(minlength=experts) / len(scores)
        (loss + aux * experts * (shares * probabilities).sum()).backward()
        for name, module in routers.items():
            bias = getattr(module, BIAS)
            loads = chosen[name].bincount(minlength=len(bias)).tolist()
            for expert, load in enumerate(loads):
                mean = sum(loads) / len(loads)
                bias[expert] += rate if load < mean else -rate if load > mean else 0.0
        return float(loss.detach())

    numbers = cases.adamw_steps(list(model.parameters()), backward, count)
    return numbers, {f"{n}.{BIAS}": getattr(m, BIAS).tolist() for n, m in routers.items()}


def train(rank: int, config: dict[str, Any], options: ParallelOptions, count: int) -> Run:
    e = cases.engine(config, options)
    numbers = cases.steps(e, 0, count)
    return numbers, {name: bias.tolist() for name, bias in e.stage.router_biases.items()}


def resume(
    rank: int,
    config: dict[str, Any],
    options: ParallelOptions,
    checkpoint: Path,
    at: int,
    last: int,
) -> Run:
    e = cases.engine(config, options, seed=7)
    e.load(checkpoint)
    numbers = cases.steps(e, at, last)
    return numbers, {name: bias.tolist() for name, bias in e.stage.router_biases.items()}


def adapt(
    rank: int, config: dict[str, Any], options: ParallelOptions, quantize: Any = None
) -> tuple[Any, Any]:
    """Loss and norm of steps of adapters of all linears of latent attention and of experts."""
    names = linears(ModelShape.from_config(config))
    targets = (*names, "experts.gate_up_proj", "experts.down_proj")
    lora = Lora(4, 8.0, targets=targets, quantize=quantize)
    source: Any = cases.Memory(config, cases.weights(config))
    e = NativeEngine(config, options, cases.OPTIMIZER, source, 0, lora)
    before = {name: bias.clone() for name, bias in e.stage.router_biases.items()}
    numbers = [e.step(*own(e, batch(config, i)), 1e-2) for i in range(3)]
    assert all(torch.equal(before[n], bias) for n, bias in e.stage.router_biases.items())
    return names, [(one.loss, one.grad_norm) for one in numbers]
