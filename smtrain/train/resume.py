"""Where a run goes on: the newest whole checkpoint that every host has, if it belongs to this run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from smtrain.checkpoint import manifest as checkpoint_manifest
from smtrain.config import JobConfig
from smtrain.config.schema import digest
from smtrain.container import Container
from smtrain.data.manifest import Manifest
from smtrain.engine.nxd import whole
from smtrain.errors import CheckpointError
from smtrain.lines import Line
from smtrain.train.engines import Fault, Gather


def line_of(container: Container, gather: Gather) -> Line:
    """The line that this job writes and goes on with, the same on every host. Collective."""
    root = container.checkpoint_dir
    return Line(root, gather(Line.of(root, container.job).parts if dist.get_rank() == 0 else None)[0])


def newest_common(line: Line, fault: Fault, gather: Gather) -> tuple[int, Path] | None:
    """Step and folder of a line's newest checkpoint that is whole on the disk of every host. Collective.

    `fault` and `gather` are the engine's (train/engines.py).
    """
    mine = {}
    for step, path in line.checkpoints():
        reason = fault(path)
        if reason is None:
            mine[step] = path
        elif dist.get_rank() == 0:
            print(f"passing over checkpoint {line.name(path)}: {reason}", flush=True)
    common = set(mine).intersection(*map(set, gather(sorted(mine))))
    return (max(common), mine[max(common)]) if common else None


def check_engine(line: Line, engine: str) -> None:
    """Raise `CheckpointError` where the run's checkpoints are another engine's: this one would begin anew."""
    marks = {"native": checkpoint_manifest.NAME, "nxd": whole.NAME}
    for other, mark in marks.items():
        for _, path in reversed(line.checkpoints()):
            if other != engine and (path / mark).exists():
                raise CheckpointError(
                    f"train.engine: {path.name} of this run was written by engine {other}; set that, or start another "
                    f"run from its weights (`smtrain convert`) with engine {engine}"
                )


def position(config: JobConfig, manifest: Manifest, samples: int) -> dict[str, Any]:
    """The caller's part of a checkpoint: where in the data the run is, and what that position depends on."""
    return {
        "samples": samples,
        "seq_len": config.train.seq_len,
        "seed": config.train.seed,
        "data": digest(manifest.content),
        "weights": config.data.weights,
    }


def check_position(path: Path, state: dict[str, Any], expected: dict[str, Any]) -> int:
    """Samples consumed so far; raises `CheckpointError` where data, order or cut are not those of the checkpoint."""
    words = {"seq_len": "train.seq_len", "seed": "train.seed", "data": "the prepared data", "weights": "data.sources"}
    for key, word in words.items():
        if state.get(key) != expected[key]:
            found = "" if key == "data" else f" ({json.dumps(state.get(key))} there, {json.dumps(expected[key])} here)"
            raise CheckpointError(
                f"{path.name}: was written with another value of {word}{found}, so its place in the data means "
                "nothing here; restore that value, or give the run another name"
            )
    return int(state["samples"])
