"""Time of the pass that computes the reference's log-probabilities of all pairs before the first
step of objective dpo.

The pass is the forward part of a step, on the engine and mesh of the training, over every row once:
its memory stays below that of a step. A pair is two sequences, each with the prompt.
"""

from __future__ import annotations

from pathlib import Path

from smtrain.client.planner.machines import Mesh, Work
from smtrain.client.planner.workload import files_bytes, text_bytes
from smtrain.core.config import JobConfig
from smtrain.core.config.units import spell
from smtrain.core.files import read_object

CHARACTERS = 4.0
"""Characters of a token of English text; an assumption, as in client/preflight/disk.py (3 to 5)."""
CHARACTERS_SPREAD = 1.3
"""Tokens of a pair's two sequences for each token of its record, as the prompt is in both; an
assumption.
"""
FILL_SHARE = 0.9
"""Share of a row that packing fills; an assumption."""


def rows(config: JobConfig) -> float | None:
    """Rows of all pairs, held-out ones included; None if nothing on this machine says how many
    there are.
    """
    length = config.train.seq_len * FILL_SHARE
    if config.data.prepared is None:
        size, held_out = (
            text_bytes(config),
            (config.train.validation.path if config.train.validation else None),
        )
        held_out_bytes = files_bytes([held_out]) if held_out else 0.0
        return (
            None
            if size is None or held_out_bytes is None
            else max(1.0, (size + held_out_bytes) / CHARACTERS * CHARACTERS_SPREAD / length)
        )
    try:
        manifest = read_object(Path(config.data.prepared) / "manifest.json")
        held_out = (manifest.get("validation") or {}).get("tokens", 0)
        return max(1.0, (float(manifest["tokens"]) + float(held_out)) / length)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def seconds(config: JobConfig, work: Work, mesh: Mesh, step_s: float) -> float:
    """Seconds of the pass; 0 without one, and if the number of rows is unknown."""
    preference = config.train.preference
    if preference is None or preference.reference == "none":
        return 0.0
    steps = (rows(config) or 0.0) / work.global_batch
    return steps * step_s * _forward(work, mesh)


def warnings(config: JobConfig, work: Work, mesh: Mesh, step_s: float) -> list[str]:
    """A sentence about the pass, if there is one."""
    preference = config.train.preference
    if preference is None or preference.reference == "none":
        return []
    share = (
        f"{_forward(work, mesh):.0%} of a step's time for each global batch, within a step's memory"
    )
    row_count = rows(config)
    if row_count is None:
        return [
            f"reference: one forward pass over all pairs before the first step takes {share}; not"
            " in the time here"
        ]
    took = spell(seconds(config, work, mesh, step_s))
    return [
        f"reference: {took} of the time go to one forward pass over all pairs, about"
        f" {row_count:,.0f} rows: {share}"
    ]


def _forward(work: Work, mesh: Mesh) -> float:
    """Share of a step's matrix products that the forward pass has: a backward pass has twice as
    many, or as many with frozen weights, and a full recomputation repeats the forward pass.
    """
    backward = 1.0 if work.lora else 2.0
    return 1 / (1 + backward + (mesh.recompute == "full"))
