"""Functions for worlds on the imitated device; the first argument is the rank."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.train.operators import Call, Operators
from tests.worker.engine import adapters, cases, packed, preference
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.neuron import imitation
from tests.worker.engine.neuron.imitation import Limits


def limited(rank: int, limits: Limits, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function of a world on a device that has limits."""
    imitation.start(limits)
    return function(rank, *args)


def refused(rank: int, limits: Limits, function: Callable[..., Any], *args: Any) -> str:
    """The device's refusal, or "done"."""
    imitation.start(limits)
    try:
        function(rank, *args)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        return str(error)
    return "done"


def whole(rank: int, config: dict[str, Any], options: ParallelOptions, folder: Path) -> list[Any]:
    """All that an engine does, as numbers: steps, evaluation, logits, the next token, a checkpoint
    and a resume.
    """
    e = cases.engine(config, options)
    out: list[Any] = cases.steps(e, 0, 3)
    ids, labels = cases.own(e, cases.batch(config, 3))
    evaluated, logits = e.evaluate(ids, labels), e.logits(ids)
    out += [evaluated.loss, evaluated.correct, None if logits is None else logits.numpy().tobytes()]
    out += [e.next_token(ids[:1, :7])]
    e.save(folder, 3, {})
    again = cases.engine(config, options, seed=7)
    again.load(folder / "step_00000003")
    resumed = cases.steps(again, 3, 5)
    assert resumed == cases.steps(e, 3, 5)
    return [*out, *resumed]


class _Heard(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


@contextmanager
def heard() -> Iterator[list[str]]:
    """The warnings of smtrain meanwhile."""
    lines: list[str] = []
    handler = _Heard(lines)
    logging.getLogger("smtrain").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("smtrain").removeHandler(handler)


FEATURES: dict[str, tuple[str, str, str]] = {
    "a step": ("111", "train", "llama"),
    "tensor parallel": ("411", "train", "llama-tied-509"),
    "copies of key and value heads": ("411", "train", "llama-kv1"),
    "sequence parallel": ("411 sp", "train", "llama"),
    "pipeline parallel": ("141", "train", "llama-tied-509"),
    "data parallel": ("114", "train", "llama"),
    "full sharding": ("114 shards bf16", "train", "llama"),
    "bf16": ("111 bf16", "train", "llama"),
    "recomputation": ("111 full", "train", "llama"),
    "a sliding window": ("111", "train", "mistral-window"),
    "Qwen2": ("111", "train", "qwen2"),
    "Qwen3": ("111", "train", "qwen3"),
    "GPT-NeoX": ("111", "train", "gpt_neox"),
    "GPT-2": ("111", "train", "gpt2-509"),
    "Gemma 3": ("111", "train", "gemma3"),
    "Gemma 4": ("111", "train", "gemma4"),
    "OLMo 2": ("411", "train", "olmo2"),
    "Granite": ("111", "train", "granite"),
    "Phi-3": ("111", "train", "phi3-partial"),
    "Ministral 3": ("111", "train", "ministral3"),
    "Qwen3.5": ("111", "packed", "qwen3_5"),
    "packed rows, SFT": ("111", "packed", "llama"),
    "pairs of answers, DPO": ("411", "pairs", "llama"),
    "LoRA with dropout": ("111", "lora", "llama"),
    "evaluation and the next token": ("411", "look", "llama-tied-509"),
    "loading and saving": ("111", "save", "llama"),
}
"""Feature -> mesh, what is run, config: the rows of docs/neuron-operators.md."""


def operators(rank: int, feature: str, folder: Path) -> tuple[list[Call], Counter[str]]:
    """Operators as torch calls them, and collectives, in what a feature runs once its engine is
    built.
    """
    text, what, name = FEATURES[feature]
    config, options = CONFIGS[name], replace(mesh(text))
    if what == "lora":
        e = adapters.engine(config, options, adapters.lora(config, dropout=0.1))
    elif what == "pairs":
        e = preference.engine(options)
    else:
        e = cases.engine(config, options)
    if what == "save":
        cases.steps(e, 0, 1)
    imitation.forget()
    with Operators("neuron") as counted:
        if what == "packed":
            ids, labels, segments = packed.batch(config, 0)
            e.step(ids, labels, 1e-3, segments)
        elif what == "pairs":
            preference.stepped(e, 2, preference.references_of(e, 2, 4 * preference.LIMIT), range(1))
        elif what == "look":
            ids, labels = cases.own(e, cases.batch(config, 0))
            e.evaluate(ids, labels)
            e.next_token(ids[:1])
        elif what == "save":
            e.save(folder, 1, {})
            e.load(folder / "step_00000001")
        else:
            cases.steps(e, 0, 1)
    return [c for c in counted.calls if c.operator.startswith("aten.")], Counter(
        imitation.collectives
    )


def threads(rank: int) -> str:
    """The device of a gradient, computed in autograd's own thread."""
    x = torch.ones(3, device="neuron", requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad is not None
    return str(x.grad.device)
