"""The contents of a native engine's checkpoint (worker/engine/saving.py writes them), and how to
load one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smtrain.core.model.footprint import Precision
from smtrain.core.model.lora import lora_settings
from smtrain.worker.checkpoint.dtypes import FP32, Bits, tensor
from smtrain.worker.checkpoint.manifest import Manifest
from smtrain.worker.checkpoint.native.files import (
    EXPERTS,
    cut_for,
    cut_of,
    model_file,
    optimizer_file,
    topology_of,
)
from smtrain.worker.checkpoint.native.reader import StateReader
from smtrain.worker.checkpoint.training_state import KINDS
from smtrain.worker.engine.host_copies import Files
from smtrain.worker.engine.native.full_shard import FlatPart, FullShard
from smtrain.worker.engine.native.gradients import FlatParameters
from smtrain.worker.engine.native.zero1 import OptimizerShard
from smtrain.worker.engine.saving import fill_from, write_native

if TYPE_CHECKING:
    from smtrain.worker.engine.native.engine import NativeEngine


class StageContents:
    """A rank's part of the weights and of the optimizer's state."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self._parts: dict[bool, FlatPart] = {}
        """Copies of fully sharded state; True: of experts."""

    @property
    def are_copies(self) -> bool:
        return isinstance(self._engine.optimizer.dense, FullShard)

    def finite(self) -> bool:
        return self._engine.optimizer.is_finite()

    def files(self) -> Files:
        engine = self._engine
        engine.optimizer.settle()
        mesh, optimizer, dense = engine.mesh, engine.optimizer, engine.optimizer.dense
        part, experts = self._part_of(dense), None
        state: dict[str, torch.Tensor] = {kind: getattr(part, kind) for kind in KINDS}
        if optimizer.experts is not None:
            experts = self._part_of(optimizer.experts, is_of_experts=True)
            state |= {f"{EXPERTS}{kind}": getattr(experts, kind) for kind in KINDS}
        if _precision(engine) == "fp32":
            state = {
                kind: values for kind, values in state.items() if not kind.endswith("master")
            }  # in model files
        out = {optimizer_file(mesh.shard_rank, mesh.tp_rank, mesh.pp_rank): state}
        # Ranks that differ in dp and cp only hold the same parameters: one of them writes.
        if mesh.shard_rank == 0:
            weights = _weights_of(part, engine.stage.trained)
            biases = engine.stage.router_biases if engine.lora is None else {}
            if self.are_copies:
                biases = {name: bias.to("cpu", copy=True) for name, bias in biases.items()}
            out[model_file(mesh.tp_rank, mesh.pp_rank)] = {**weights, **biases}
        trained_experts = engine.stage.trained_experts
        if experts is not None and trained_experts is not None and not mesh.expert_replicas.rank:
            own_weights = _weights_of(experts, trained_experts)
            out[model_file(mesh.tp_rank, mesh.pp_rank, mesh.ep_rank)] = dict(own_weights)
        return out

    def _part_of(
        self, shard: OptimizerShard | FullShard, is_of_experts: bool = False
    ) -> OptimizerShard | FlatPart:
        """This rank's part; of fully sharded state a copy, in memory that stays between saves."""
        if not isinstance(shard, FullShard):
            return shard
        if is_of_experts not in self._parts:
            self._parts[is_of_experts] = shard.empty_part()
        shard.collect(self._parts[is_of_experts])
        return self._parts[is_of_experts]

    def manifest(self, step: int, state: dict[str, Any], root: str) -> Manifest:
        engine, mesh = self._engine, self._engine.mesh
        layout, lora = engine.stage.trained.layout, engine.lora
        tables = [layout.flat_table(p) for p in range(mesh.pp)]
        return Manifest(
            step=step,
            optimizer_steps=engine.optimizer.updates,
            topology=topology_of((mesh.tp, mesh.pp, mesh.shards), _ep(engine)),
            precision=_precision(engine),
            config=engine.config,
            flat=[[list(entry) for entry in t.entries] for t in tables],
            shard=[max(1, -(-t.size // mesh.shards)) for t in tables],
            files={},
            state=state,
            shapes={s.name: list(s.shape) for s in layout.shape.specs},
            root=root,
            adapter=None if lora is None else lora_settings(lora, engine.options.precision),
            cut=cut_of(layout.uneven),
            loss_scale=(
                None if engine.optimizer.loss_scale is None else engine.optimizer.loss_scale.state()
            ),
        )

    def write(
        self, path: Path, manifest: Manifest, files: Files, read_back: bool
    ) -> dict[str, dict[str, Any]]:
        return write_native(path, manifest, files, read_back)


def load(engine: NativeEngine, checkpoint: Path, read: dict[str, int] | None) -> dict[str, Any]:
    """See `Engine.load`."""
    shards = engine.optimizer.shards
    parts = [s.empty_part() if isinstance(s, FullShard) else s for s in shards]
    manifest = fill_from(
        checkpoint,
        engine.mesh,
        engine.shape,
        engine.lora,
        lambda reader: _fill(engine, parts, reader, read),
    )
    # Not before every rank has read its part: a rank that fails would let the other ones wait.
    for shard, part in zip(shards, parts, strict=True):
        if isinstance(shard, FullShard) and isinstance(part, FlatPart):
            shard.distribute(part)
    engine.optimizer.restore(manifest.optimizer_steps, manifest.loss_scale)
    return manifest.state


def _weights_of(
    part: OptimizerShard | FlatPart, flat_parameters: FlatParameters
) -> Mapping[str, torch.Tensor]:
    """The whole weights that a rank writes with its part."""
    return part.weights if isinstance(part, FlatPart) else flat_parameters.parameters


def _precision(engine: NativeEngine) -> Precision:
    """The precision of the weights in model files: adapters are trained in fp32."""
    return engine.options.precision if engine.lora is None else "fp32"


def _ep(engine: NativeEngine) -> int:
    """The ranks that divide trained experts; 1 for adapters of other linears only."""
    return 1 if engine.optimizer.experts is None else engine.mesh.ep


def _fill(
    engine: NativeEngine,
    parts: Sequence[OptimizerShard | FlatPart],
    reader: StateReader,
    read: dict[str, int] | None,
) -> None:
    """Fill this rank's `parts`, the last of which is of experts if there are two, with master
    weights and moments, and the biases of its routers.
    """
    mesh, layout = engine.mesh, engine.stage.trained.layout
    dense, experts = parts[0], parts[1] if len(parts) > 1 else None
    filled_kinds: set[str] = set()
    for name, bias in engine.stage.router_biases.items() if engine.lora is None else ():
        bias.copy_(reader.wide_weight(name))
    if cut_for(reader.manifest, (mesh.tp, mesh.pp, mesh.shards), layout.uneven, _ep(engine)):

        def put(kind: str, at: int, numbers: Bits) -> None:
            filled_kinds.add(kind)
            shard = experts if kind.startswith(EXPERTS) else dense
            getattr(shard, kind.removeprefix(EXPERTS))[at : at + len(numbers)].copy_(
                tensor(numbers, FP32)
            )

        name, crc = reader.own_part(
            mesh.shard_rank, mesh.tp_rank, mesh.pp_rank, put, crc=read is not None
        )
        if read is not None and crc is not None:
            read[name] = crc
    for kind, shard in product(KINDS, parts):
        # The masters of an fp32 run are not in optimizer files, so `own_part` does not fill them.
        if (f"{EXPERTS}{kind}" if shard is experts else kind) in filled_kinds:
            continue
        target = getattr(shard, kind)
        target.zero_()  # also the padding, which may hold values of a damaged checkpoint
        for name, at, size in shard.table.entries:
            low, high = max(at, shard.start), min(at + size, shard.start + shard.shard)
            if low < high:
                values = reader.read(kind, name, layout, mesh.tp_rank, mesh.ep_rank).reshape(-1)
                target[low - shard.start : high - shard.start].copy_(values[low - at : high - at])
