"""Describe a checkpoint, compare two, and verify the hashes of one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.conversion_manifest import matches_manifest, read_manifest
from smtrain.worker.checkpoint.conversion_plan import MANIFEST
from smtrain.worker.checkpoint.dcp.reader import DcpSource
from smtrain.worker.checkpoint.dtypes import values
from smtrain.worker.checkpoint.huggingface.folder import HFSource
from smtrain.worker.checkpoint.megatron.legacy import MegatronSource
from smtrain.worker.checkpoint.megatron.torch_dist import TorchDistSource
from smtrain.worker.checkpoint.native.reader import NativeSource
from smtrain.worker.checkpoint.nemo_megatron.reader import NNMSource
from smtrain.worker.checkpoint.nxd.reader import NxDSource
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.sources import WeightSource, precisions_of
from smtrain.worker.checkpoint.tensor_files import BLOCK
from smtrain.worker.checkpoint.verifying import verify as verify_native

_STEP = re.compile(r"(?:global_?step|step|iter|iteration|checkpoint)[_-]?(\d+)")
"""Names of a step's folder in training scripts, such as those of NxD; other numbers in a name are
no step.
"""


@dataclass(frozen=True)
class CheckpointSummary:
    """The description of a checkpoint."""

    path: str
    kind: str
    """hf, nxd, native, megatron, nemo-megatron or dcp."""
    family: str
    parameters: int
    dtype: str
    bytes: int
    """Size of all files, optimizer state included."""
    topology: dict[str, int]
    step: int | None
    whole: bool
    hashes: bool
    """Whether `verify` has something to compare with."""
    qkv: str | None = None
    """NxD's form of the attention inputs."""
    kv_multiplier: int | None = None
    active_parameters: int | None = None
    """Parameters that a token meets; this and the next two only of a mixture of experts."""
    experts: int | None = None
    """Experts of a layer that has some."""
    experts_per_token: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


def inspect(path: Path | str, config: dict[str, Any] | None = None) -> CheckpointSummary:
    """Read what a checkpoint is.

    Raises CheckpointError, with the reason, if it is not a whole one.
    """
    source = open_weights(path, config)
    location = source.location
    shape = ModelShape.from_config(source.config)
    dtypes = sorted(map(str, precisions_of(source)))
    facts: dict[str, Any] = {"kind": "hf", "topology": {}, "hashes": True, "step": None}
    if isinstance(source, NativeSource):
        facts |= {
            "kind": "native",
            "topology": source.manifest.topology,
            "step": source.manifest.step,
        }
    elif isinstance(source, NxDSource):
        step_match = _STEP.fullmatch(str(location).rstrip("/").rsplit("/", 1)[-1])
        facts |= {"kind": "nxd", "topology": {"tp": source.tp, "pp": source.pp}}
        facts |= {
            "qkv": source.form,
            "kv_multiplier": source.kv_multiplier,
            "step": int(step_match[1]) if step_match else None,
        }
    elif isinstance(source, (MegatronSource, TorchDistSource, NNMSource)):
        folder = "" if isinstance(source, NNMSource) else source.folder
        step_match = _STEP.fullmatch(folder or str(location).rstrip("/").rsplit("/", 1)[-1])
        kind = "nemo-megatron" if isinstance(source, NNMSource) else "megatron"
        facts |= {"kind": kind, "step": int(step_match[1]) if step_match else None}
        if isinstance(source, (MegatronSource, NNMSource)):
            facts["topology"] = {"tp": source.tp, "pp": source.pp}
        if isinstance(source, MegatronSource) and shape.experts is not None:
            facts["topology"] |= {"ep": source.ep}
    elif isinstance(source, DcpSource):
        step_match = _STEP.fullmatch(str(location).rstrip("/").rsplit("/", 1)[-1])
        facts |= {"kind": "dcp", "step": int(step_match[1]) if step_match else None}
    else:
        facts["hashes"] = bool(read_manifest(location))
    if shape.experts is not None:
        facts |= {"active_parameters": shape.active_parameters()}
        facts |= {"experts": shape.experts.count, "experts_per_token": shape.experts.chosen}
    return CheckpointSummary(
        path=str(location),
        family=shape.family,
        parameters=shape.parameters(),
        dtype=" and ".join(dtypes),
        bytes=sum(location.files().values()),
        whole=True,
        **facts,
    )


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that two checkpoints do not share bit for bit."""

    name: str
    reason: str
    max_abs: float | None = None
    """Largest absolute difference, if the shapes are the same."""


def diff(
    a: Path | str, b: Path | str, config: dict[str, Any] | None = None
) -> Iterator[TensorDifference]:
    """Compare the weights of two checkpoints of any kind and cut, in the model's order.

    It compares names, types, shapes and bits, a few blocks in memory at a time. Raises
    CheckpointError if one cannot be read.
    """
    first, second = open_weights(a, config), open_weights(b, config)
    order = [spec.name for spec in ModelShape.from_config(first.config).specs]
    names = [set(source.names()) for source in (first, second)]
    # The model's order, and after it names that only the second checkpoint has.
    for name in [*order, *sorted(names[1] - set(order))]:
        if name not in names[0] or name not in names[1]:
            yield TensorDifference(name, f"only in {a if name in names[0] else b}")
        elif first.shape(name) != second.shape(name):
            yield TensorDifference(
                name, f"shape {list(first.shape(name))} and {list(second.shape(name))}"
            )
        else:
            differs, max_difference = _compare(first, second, name)
            if first.dtype(name) != second.dtype(name):
                yield TensorDifference(
                    name, f"type {first.dtype(name)} and {second.dtype(name)}", max_difference
                )
            elif differs:
                yield TensorDifference(name, "values", max_difference)


def _compare(first: WeightSource, second: WeightSource, name: str) -> tuple[bool, float]:
    shape, differs, max_difference = first.shape(name), False, 0.0
    step = max(1, BLOCK // max(1, prod(shape[1:]) * 8))
    for start in range(0, shape[0], step):
        bounds = [(start, min(start + step, shape[0])), *((0, n) for n in shape[1:])]
        x, y = first.bits(name, bounds), second.bits(name, bounds)
        if first.dtype(name) == second.dtype(name) and np.array_equal(x, y):
            continue
        differs = True
        numbers = [
            # fp64 holds every number of the smaller float types, so the difference is not rounded.
            values(bits, source.dtype(name)).astype("f8")
            for bits, source in ((x, first), (y, second))
        ]
        with np.errstate(invalid="ignore"):  # infinities have no difference
            max_difference = max(max_difference, float(np.abs(numbers[0] - numbers[1]).max()))
    return differs, max_difference


def verify(path: Path | str, config: dict[str, Any] | None = None) -> int:
    """Compare all bytes with their hashes; returns the number of tensors (in native checkpoints:
    files).

    Raises CheckpointError, which names the first that differs, and if there are no hashes.
    """
    source = open_weights(path, config)
    location = source.location
    if location.path() is None:
        raise CheckpointError(
            f"{path} is in an object store; copy it to this machine to verify it."
        )
    if isinstance(source, NativeSource):
        verify_native(Path(str(location)))
        return len(source.manifest.files)
    has_hashes = isinstance(source, DcpSource)  # in the zips of its chunks
    if isinstance(source, HFSource) and not has_hashes and not read_manifest(location):
        raise CheckpointError(
            f"{path} has no {MANIFEST}, so there is no hash to compare with; checkpoints that"
            " smtrain wrote have one."
        )
    other_slabs = source.others if isinstance(source, HFSource) else {}
    for name in source.names():
        source.check(name)
    # The parts of a multimodal model that are not trained have checksums too.
    for name, slab in other_slabs.items():
        slab.check(name)
    for file, entry in read_manifest(location).get("files", {}).items():
        if not matches_manifest(location, file, entry):
            raise CheckpointError(
                f"{location}/{file} is not what was written; it was edited, or damaged.",
                code="checkpoint.damaged",
            )
    return len(source.names()) + len(other_slabs)
