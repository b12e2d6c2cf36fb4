"""The native engine's format as a target: the weights of a model before its first step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from smtrain.checkpoint import manifest as manifests
from smtrain.checkpoint.layout import Layout
from smtrain.checkpoint.manifest import Manifest
from smtrain.checkpoint.native import model_file, write_safetensors
from smtrain.checkpoint.places import is_uri
from smtrain.checkpoint.sources import WeightSource
from smtrain.checkpoint.staging import staged
from smtrain.errors import CheckpointError
from smtrain.model.families import ModelShape

_PRECISIONS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def write_native(source: WeightSource, target: Path | str, *, tp: int, pp: int) -> None:
    """Write `target/step_00000000`, a rank's part of one tensor in memory at a time.

    It holds weights and no optimizer state: a model to start training from, in the cut of (tp, pp). Raises
    CheckpointError where the weights are not all bf16 or all fp32, or the target is not a folder of this machine.
    """
    if is_uri(target):
        raise CheckpointError(f"{target}: native checkpoints are written to a folder; copy it there afterwards.")
    dtypes = {source.dtype(name) for name in source.names()}
    if len(dtypes) > 1 or not dtypes <= set(_PRECISIONS):
        raise CheckpointError("a native checkpoint is all bf16 or all fp32, the source is not; convert with --dtype.")
    layout = Layout(ModelShape.from_config(source.config), tp, pp)
    checkpoint = manifests.step_folder(Path(target), 0)
    told = json.dumps([manifests.FORMAT, tp, pp, source.config, source.stamp()], default=str)
    try:
        with staged(checkpoint, hashlib.sha256(told.encode()).hexdigest()) as stage:
            if not stage.moving:
                files = {}
                for p in range(pp):
                    for t in range(tp):
                        part = _Part(source, layout, p, t)
                        for name in part:
                            source.check(name)
                        files[model_file(t, p)] = write_safetensors(stage.folder / model_file(t, p), part)
                tables = [layout.flat_table(p) for p in range(pp)]
                manifest = Manifest(
                    step=0,
                    optimizer_steps=0,
                    topology={"tp": tp, "pp": pp, "dp": 1},
                    precision=_PRECISIONS[dtypes.pop()],
                    config=source.config,
                    flat=[[list(entry) for entry in table.entries] for table in tables],
                    shard=[table.size for table in tables],
                    files=files,
                    state={},
                    shapes={spec.name: list(spec.shape) for spec in layout.shape.specs},
                )
                manifests.write_manifest(stage.folder, manifest)
            stage.publish(manifests.NAME, ("model/*.safetensors", "optim/*.safetensors"))
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written ({error}); see to the disk and run it again.") from None


class _Part(Mapping[str, torch.Tensor]):
    """What one rank holds, read when it is asked for and not kept."""

    def __init__(self, source: WeightSource, layout: Layout, pp_rank: int, tp_rank: int) -> None:
        self._source, self._layout, self._tp_rank = source, layout, tp_rank
        self._names = layout.names(pp_rank)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> torch.Tensor:
        shard = self._layout.shard(name, self._tp_rank)
        if shard.dim is None:
            return self._source.read(name).contiguous()
        out = torch.zeros(self._layout.local_shape(name, self._tp_rank), dtype=self._source.dtype(name))
        at = 0
        for start, stop in shard.ranges:
            if start < stop:
                out.narrow(shard.dim, at, stop - start).copy_(self._source.read(name, shard.dim, start, stop))
            at += stop - start
        return out
