"""Checkpoints of fully sharded runs as folders of torch.distributed.checkpoint (DCP).

The two folders have the names and keys of accelerate's FSDP and transformers' Trainer, so both read
them while the run trains. Each rank writes the rows that it has, in fp32, without gathering them.
`torch.distributed.checkpoint.save` plans and writes in the thread of the save, with a separate
group. `async_save` calls the same after a copy, for which training would wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, save
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from smtrain.core.model.families import FAMILIES
from smtrain.core.model.layout import Shard
from smtrain.worker.checkpoint.dcp.module_names import module_tensors
from smtrain.worker.checkpoint.dcp.optimizer_values import accelerate_values
from smtrain.worker.checkpoint.dcp.reader import MODEL_FOLDER, OPTIMIZER_FOLDER
from smtrain.worker.checkpoint.manifest import Manifest
from smtrain.worker.checkpoint.torch_files.distributed import METADATA
from smtrain.worker.checkpoint.training_state import KINDS
from smtrain.worker.checkpoint.verifying import sums_of
from smtrain.worker.engine.host_copies import Files
from smtrain.worker.engine.native.dcp_planner import ChunkPlanner, KeyPath, TensorChunk
from smtrain.worker.engine.native.full_shard import FullShard
from smtrain.worker.engine.native.persist import StageContents

if TYPE_CHECKING:
    from smtrain.worker.engine.native.engine import NativeEngine


class DcpContents(StageContents):
    """A rank's rows of the weights and of AdamW's state, as chunks of whole tensors."""

    def __init__(self, engine: NativeEngine) -> None:
        """Collective: makes the group of the thread that saves."""
        super().__init__(engine)
        self._group = dist.new_group(backend="gloo")
        self._chunks: dict[str, dict[str, TensorChunk]] = {}
        modules = module_tensors(engine.shape)
        self._modules = {part: module for module in modules for part in module.parts}
        self._parameters = {m.name: len(m.shape) for m in modules if not m.is_buffer}

    @property
    def are_copies(self) -> bool:
        return False

    def files(self) -> Files:
        """The tensors of each of the two folders, by names that only this rank knows."""
        out: Files = {MODEL_FOLDER: {}, OPTIMIZER_FOLDER: {}}
        chunks: dict[str, dict[str, TensorChunk]] = {MODEL_FOLDER: {}, OPTIMIZER_FOLDER: {}}
        for folder, chunk, values in self._values():
            name = f"{chunk.key} {chunk.offsets}"
            chunks[folder][name], out[folder][name] = chunk, values
        self._chunks = chunks
        return out

    def manifest(self, step: int, state: dict[str, Any], root: str) -> Manifest:
        return replace(super().manifest(step, state, root), storage="dcp")

    def write(
        self, path: Path, manifest: Manifest, files: Files, read_back: bool
    ) -> dict[str, dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = {}
        for folder, tensors in files.items():
            name = f"{manifest.root}{folder}"
            own_files = f"__{self._engine.rank}_*.distcp"
            for old_file in (path / name).glob(own_files):
                old_file.unlink()  # of a save that was killed
            planner = ChunkPlanner(self._chunks[folder], tensors, self._objects(folder, manifest))
            writer = _AliasWriter(path / name, self._aliases(folder))
            try:
                # An empty state dict: the planner has the chunks.
                save({}, storage_writer=writer, planner=planner, process_group=self._group)
            except CheckpointException as error:
                if (failure := error.failures.get(self._engine.rank)) is not None:
                    raise failure[0] from None
                # The rank that failed tells why.
                return {}
            paths = [*(path / name).glob(own_files)]
            paths += [path / name / METADATA] if self._engine.rank == 0 else []
            for file in paths:
                entries[f"{name}/{file.name}"] = _entry(file, read_back)
        return entries

    def _values(self) -> Iterator[tuple[str, TensorChunk, torch.Tensor]]:
        engine, layout = self._engine, self._engine.layout
        for name, offset, numbers in self._rows():
            local_shape = layout.local_shape(name, engine.mesh.tp_rank)
            shard, module = layout.shard(name, engine.mesh.tp_rank), self._modules[name]
            for kind, values in numbers.items():
                folder, path = _path_of(kind, module.name)
                for offsets, part in place_rows(shard, local_shape, offset, values):
                    if layout.spec(name).is_stacked:
                        first_expert = layout.experts(engine.mesh.ep_rank).start
                        offsets = first_expert + offsets[0], *offsets[1:]
                    if module.is_stack:
                        expert, row = module.place(name, layout.spec(name).shape)
                        place = expert, row + offsets[0], *offsets[1:]
                        yield folder, TensorChunk(path, place, module.shape), part[None]
                    else:
                        yield folder, TensorChunk(path, offsets, module.shape), part
        # The same on all ranks of a stage: DCP writes equal chunks once.
        for name, bias in engine.stage.router_biases.items():
            folder, path = _path_of("master", self._modules[name].name)
            yield folder, TensorChunk(path, (0,) * bias.dim(), tuple(bias.shape)), bias
        if engine.rank == 0:
            steps = torch.tensor(float(engine.optimizer.updates), device="cpu")
            for name in self._parameters:
                path = "optimizer", "state", name, "step"
                yield OPTIMIZER_FOLDER, TensorChunk(path, (), ()), steps

    def _rows(self) -> Iterator[tuple[str, int, dict[str, torch.Tensor]]]:
        """Each parameter with rows on this rank: the first number of its part that they are, and
        their masters and moments.
        """
        for shard in self._engine.optimizer.shards:
            if isinstance(shard, FullShard):
                for rows in shard.rows.values():
                    for name, start, stop, offset in rows.pieces():
                        yield name, offset, _state_of(rows, start, stop)
                continue
            # One process shards nothing, and has whole parameters.
            for name, at, size in shard.table.entries:
                yield name, 0, _state_of(shard, at, at + size)

    def _objects(self, folder: str, manifest: Manifest) -> dict[KeyPath, Any]:
        """AdamW's settings, on rank 0; a save without a record of its run has none."""
        if folder == MODEL_FOLDER or self._engine.rank or not manifest.state.get("settings"):
            return {}
        progress = _RunPosition(manifest.step, manifest.state)
        return dict(accelerate_values(progress, "", self._parameters))

    def _aliases(self, folder: str) -> dict[str, KeyPath]:
        """Keys of tensors and the path of another one with the same bytes: a state dict of
        transformers lists a tied head too.
        """
        shape = self._engine.shape
        if folder != MODEL_FOLDER or not shape.tied:
            return {}
        head = f"{FAMILIES[shape.family].head}.weight"
        return {f"model.{shape.embed_name}": ("model", head)}


@dataclass(frozen=True)
class _RunPosition:
    """The step of a run, and the record of its loop."""

    step: int
    loop: dict[str, Any]


class _AliasWriter(FileSystemWriter):
    """torch's writer of files, which also names tensors twice."""

    def __init__(self, path: Path, aliases: dict[str, KeyPath]) -> None:
        super().__init__(path)
        self._aliases = aliases

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        for key, path in self._aliases.items():
            alias = ".".join(map(str, path))
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
            metadata.planner_data[alias] = path
            results = [
                [
                    *rank_results,
                    *(
                        replace(result, index=MetadataIndex(alias, result.index.offset))
                        for result in rank_results
                        if result.index.fqn == key
                    ),
                ]
                for rank_results in results
            ]
        super().finish(metadata, results)


def place_rows(
    shard: Shard, local_shape: tuple[int, ...], offset: int, values: torch.Tensor
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Place whole rows of a tensor-parallel part of a parameter, which begin at its number
    `offset`, in the whole parameter.

    Yields the offsets of the first element along every dimension, and the values there; rows that
    only pad the part are left out.
    """
    rows = values.view(-1, *local_shape[1:])
    first = offset // max(1, rows[:1].numel())
    origin = (first, *(0 for _ in local_shape[1:]))
    if shard.dim is None:
        yield origin, rows
        return
    at = 0
    for start, stop in shard.ranges:
        size = stop - start
        if shard.dim:
            offsets = (*origin[: shard.dim], start, *origin[shard.dim + 1 :])
            yield offsets, rows.narrow(shard.dim, at, size)
        else:
            low, high = max(first, at), min(first + len(rows), at + size)
            if low < high:
                yield (start + low - at, *origin[1:]), rows[low - first : high - first]
        at += size


def _state_of(owner: Any, start: int, stop: int) -> dict[str, torch.Tensor]:
    """Numbers of masters and moments."""
    return {kind: getattr(owner, kind)[start:stop] for kind in KINDS}


def _path_of(kind: str, name: str) -> tuple[str, KeyPath]:
    """The folder of a parameter's weights or moment, and its path in the nested dict there."""
    if kind == "master":
        return MODEL_FOLDER, ("model", name)
    return OPTIMIZER_FOLDER, ("optimizer", "state", name, kind)


def _entry(file: Path, read_back: bool) -> dict[str, Any]:
    """The manifest's entry of a flushed file; `read_back` hashes the bytes on the disk, not those
    in memory.
    """
    if read_back and hasattr(os, "posix_fadvise"):
        with open(file, "rb") as data:
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return {"size": file.stat().st_size, **sums_of(file, "sha256", "crc32")}
