"""docs/neuron-operators.md: `python -m tests.worker.engine.neuron.page` writes it."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.worker.engine.neuron import runs
from tests.worker.engine.world import World

PAGE = Path(__file__).parents[4] / "docs/neuron-operators.md"
HEAD = """# Operators of a step on Neuron

This page lists what engine native asks of a device: each operator as torch calls it, before torch splits what has no
kernel of its own, and each collective. It was recorded on a device that imitates TorchNeuron in host memory
(`tests/worker/engine/neuron`), with {versions}. Nothing here was run on Neuron.

On Neuron, an operator without a kernel runs on the CPU, with a copy each way. AWS lists the operators that have one in
`docs/torch_api_compatibility.md` of [aws-neuron/torch-neuronx](https://github.com/aws-neuron/torch-neuronx): compare it
with the first table. A job on a real machine prints the operators of its second step and those that were left to the
CPU, and keeps them in `operators.json` next to its metrics.

A device without a kernel for `silu_backward` or `native_layer_norm` gets torch's own sequence of smaller operators,
which differs in the last digit. Backward operators of views (`slice_backward`, `select_backward`) write into slices.
"""
EVERY = "a step"


def recorded() -> dict[str, tuple[dict[str, set[str]], set[str]]]:
    """Feature -> the dtypes and dimensions of each operator, and the collectives, over all
    ranks.
    """
    worlds = {size: World(size, "neuron") for size in (1, 4)}
    out: dict[str, tuple[dict[str, set[str]], set[str]]] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for i, (feature, (text, _, _)) in enumerate(runs.FEATURES.items()):
                size = 1
                for digit in text.split()[0]:
                    size *= int(digit)
                operators: dict[str, set[str]] = defaultdict(set)
                collectives: set[str] = set()
                answers: Any = worlds[size].run(runs.operators, feature, Path(folder) / str(i))
                for called, collected in answers:
                    for name, tensors, _ in called:
                        kinds = (tensor.partition("[")[0] for tensor in tensors.split())
                        operators[name.removeprefix("aten.")].update(kinds)
                    collectives |= set(collected)
                out[feature] = operators, collectives
    finally:
        for world in worlds.values():
            world.stop()
    return out


def text(features: dict[str, tuple[dict[str, set[str]], set[str]]]) -> str:
    """The page."""
    operators: dict[str, tuple[set[str], list[str]]] = {}
    collectives: dict[str, list[str]] = {}
    for feature, (called, collected) in features.items():
        for name, dtypes in called.items():
            kinds, users = operators.setdefault(name, (set(), []))
            kinds |= dtypes
            users.append(feature)
        for name in collected:
            collectives.setdefault(name, []).append(feature)
    lines = [HEAD.format(versions=versions()), f"## {len(operators)} operators", ""]
    lines += ["| operator | dtypes | in |", "|---|---|---|"]
    for name, (kinds, users) in sorted(operators.items()):
        lines.append(f"| `{name}` | {', '.join(sorted(kinds))} | {_users(users)} |")
    lines += ["", f"## {len(collectives)} collectives", "", "| collective | in |", "|---|---|"]
    lines += [f"| `{name}` | {_users(users)} |" for name, users in sorted(collectives.items())]
    return "\n".join(lines) + "\n"


def versions() -> str:
    """The libraries that decide which operators a step calls."""
    return f"torch {_minor(torch.__version__)} and transformers {_minor(transformers.__version__)}"


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _users(features: list[str]) -> str:
    return "every step" if EVERY in features else ", ".join(features)


if __name__ == "__main__":
    PAGE.write_text(text(recorded()), "utf-8")
    print(f"{PAGE} is written")
