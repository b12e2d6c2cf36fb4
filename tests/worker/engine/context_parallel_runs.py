"""Steps of engines whose rows are cut over ranks, with every gradient; importable by a world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from smtrain.core.model import footprint
from smtrain.core.model.blocks import keeps_fp32
from smtrain.core.model.layout import Layout
from smtrain.worker.checkpoint.native.reader import StateReader
from smtrain.worker.checkpoint.training_state import KINDS
from smtrain.worker.engine.base import OptimizerOptions, ParallelOptions
from smtrain.worker.engine.native import NativeEngine
from tests.worker.engine import cases, packed

BARE = OptimizerOptions(betas=(0.0, 0.0), weight_decay=0.0, grad_clip=0.0)
"""With these AdamW's first moment is the gradient."""
AT_ONCE = 5
"""Queries of a chunk: rows of 32 tokens are then several chunks, the last of them shorter."""


def gradients(
    rank: int,
    config: dict[str, Any],
    options: ParallelOptions,
    folder: Path,
    apart: bool,
    length: int = 32,
    varlen: bool = False,
) -> dict[str, Any]:
    """A step, with what comes before it: loss, norm, evaluation and logits; the gradients are saved
    in `folder`.
    """
    footprint.QUERIES["cpu"] = AT_ONCE
    source: Any = cases.Memory(config, cases.weights(config))
    e = NativeEngine(config, options, BARE, source, 3)
    e.stage.context.varlen = varlen  # documents in place of masks, as on CUDA
    ids, labels, segments = (whole[:, :length] for whole in packed.batch(config, 0))
    each = cases.BATCH // e.dp_size
    mine = slice(e.dp_rank * each, (e.dp_rank + 1) * each)
    within = segments[mine] if apart else None
    logits = e.logits(ids[:2], segments[:2] if apart else None)
    evaluated = e.evaluate(ids[mine], labels[mine], within)
    result = e.step(ids[mine], labels[mine], 0.0, within)
    e.save(folder, 1, {})
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "evaluated": evaluated,
        "routing": result.routing,
        "logits": None if logits is None else logits.numpy(),
        "next": [e.next_token(ids[:1, :n]) for n in (1, 9, length)],
        "scores": sum(sum(range(start + 1, stop + 1)) for start, stop in e.mesh.own_pieces(length)),
    }


def read_gradients(folder: Path) -> dict[str, torch.Tensor]:
    """The gradients that `gradients` saved."""
    reader = StateReader(folder / "step_00000001")
    whole = Layout(reader.manifest.layout.shape, 1, 1)
    return {
        spec.name: reader.read("exp_avg", spec.name, whole, 0).clone()
        for spec in whole.shape.specs
        if not keeps_fp32(spec.name)
    }


def furthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference of any gradient from one rank's, relative to that one's largest
    number; and its name.

    The bias of keys that are not turned has the gradient 0, of which rounding is left: at least
    1/200 of the largest number of all counts, so that a difference of 1e-5 is 5e-8 of that number,
    the precision of fp32.
    """
    assert ours.keys() == theirs.keys()
    least = max(float(grad.abs().max()) for grad in theirs.values()) / 200
    off = {
        name: float((grad - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=least))
        for name, grad in ours.items()
    }
    return max((value, name) for name, value in off.items())


def state(checkpoint: Path) -> dict[str, bytes]:
    """The bits of the weights and of the optimizer's state of a checkpoint."""
    reader = StateReader(checkpoint)
    whole = Layout(reader.manifest.layout.shape, 1, 1)
    return {
        f"{kind} {spec.name}": reader.read(kind, spec.name, whole, 0).numpy().tobytes()
        for kind in KINDS
        for spec in whole.shape.specs
    }
