"""Write folders of torch.distributed.checkpoint, for torchtitan and for accelerate's FSDP."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from smtrain.core.model.blocks import Role, Spec
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.conversion_plan import ConversionPlan
from smtrain.worker.checkpoint.dcp import names as titan
from smtrain.worker.checkpoint.dcp.module_names import ModuleTensor, module_tensors
from smtrain.worker.checkpoint.dcp.optimizer_values import accelerate_values, titan_values
from smtrain.worker.checkpoint.dcp.reader import MODEL_FOLDER, OPTIMIZER_FOLDER
from smtrain.worker.checkpoint.dcp.stored_tensors import StoredTensors, TensorOfParts
from smtrain.worker.checkpoint.dtypes import FP32
from smtrain.worker.checkpoint.execute import execute
from smtrain.worker.checkpoint.huggingface.companions import NO_COMPANIONS, CompanionFiles
from smtrain.worker.checkpoint.huggingface.writer import Uncut
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.checkpoint.targets import Dcp
from smtrain.worker.checkpoint.tensor_files import Job, Tensor, TensorFile
from smtrain.worker.checkpoint.torch_files import zip_writer
from smtrain.worker.checkpoint.torch_files.distributed import METADATA
from smtrain.worker.checkpoint.torch_files.distributed_writer import (
    Location,
    WrittenChunk,
    lay_out_files,
    metadata_of,
)
from smtrain.worker.checkpoint.torch_files.pickling import dumps
from smtrain.worker.checkpoint.training_state import Kind, TrainingState
from smtrain.worker.checksum import crc32

_OBJECTS = "__0_1.distcp"
"""The file of values that are no large tensors; torch names files by rank and number."""
_REPLACES = ("*.distcp", METADATA, MODEL_FOLDER, OPTIMIZER_FOLDER)
_KeyPath = tuple[str | int, ...]


@dataclass
class _Folder:
    """One folder with a `.metadata` file."""

    name: str
    """"" or ending in a slash."""
    tensors: dict[_KeyPath, TensorOfParts] = field(default_factory=dict)
    aliases: dict[_KeyPath, _KeyPath] = field(default_factory=dict)
    """Paths of tensors that are the same bytes as another one."""
    values: dict[_KeyPath, Any] = field(default_factory=dict)
    steps: tuple[_KeyPath, ...] = ()
    """Paths of the number of updates, a tensor for each parameter."""


def write_dcp(
    source: WeightSource,
    target: Path | str,
    to: Dcp,
    state: TrainingState | None = None,
    overwrite: bool = True,
    companions: CompanionFiles = NO_COMPANIONS,
) -> None:
    """Write a folder in the form of `to`, a few blocks in memory at a time; it appears whole.

    With `state` AdamW's state goes along, and the weights are its fp32 masters unless `to` names a
    type. Raises CheckpointError if the form has no names for the model, or the state does not
    record how it was trained.
    """
    shape = ModelShape.from_config(source.config)
    kind: Kind | None = "master" if state is not None and to.dtype is None else None
    folders = (
        _titan_folders(source, state, shape, kind)
        if to.form == "torchtitan"
        else _accelerate_folders(source, state, shape, kind)
    )
    stored_tensors = {
        _key(path): tensor for folder in folders for path, tensor in folder.tensors.items()
    }
    tensors = StoredTensors(source, state, stored_tensors)
    containers: list[TensorFile] = []
    groups: list[list[Job]] = []
    extras = dict(companions.with_config(source.config))
    for folder in folders:
        files, jobs, small_files = _lay_out(folder, tensors, state)
        containers += files
        groups += jobs
        extras |= small_files
    metadata = {"kind": "dcp", "form": to.form}
    plan = ConversionPlan(Uncut(), groups, containers, extras, metadata, _REPLACES)
    execute(tensors, target, plan, overwrite)


def _titan_folders(
    source: WeightSource, state: TrainingState | None, shape: ModelShape, kind: Kind | None
) -> list[_Folder]:
    titan.refuse_unknown_to_titan(shape)
    names: dict[str, list[Spec]] = {}
    for spec in sorted(shape.specs, key=lambda spec: spec.expert or 0):
        names.setdefault(titan.titan_name(spec.name, source.location, shape), []).append(spec)
    folder = _Folder("")
    for titan_name, specs in names.items():
        order = titan.row_order(titan_name, shape, fused=False)
        parts = tuple((spec.name, order) for spec in specs)
        folder.tensors[(titan_name,)] = TensorOfParts(parts, kind, _stack_of(specs))
    if shape.tied:
        folder.aliases[("lm_head.weight",)] = ("tok_embeddings.weight",)
    if state is None:
        return [folder]
    parameters: dict[str, int] = {}
    # torchtitan joins q, k and v into one parameter, and splits only the weights when it saves.
    for titan_name, specs in names.items():
        fused_name = titan.fused_name(titan_name)
        if fused_name in parameters or specs[0].role is Role.ROUTER_BIAS:
            continue
        fused_parts = titan.parts_of(fused_name)
        members = tuple(
            (spec.name, titan.row_order(part, shape, fused=len(fused_parts) > 1))
            for part in fused_parts
            for spec in names[part]
        )
        stack = _stack_of(specs)
        parameters[fused_name] = len(stack or specs[0].shape)
        for moment in ("exp_avg", "exp_avg_sq"):
            path = "optimizer", f"state.{fused_name}.{moment}"
            folder.tensors[path] = TensorOfParts(members, moment, stack)
    folder.steps = tuple(("optimizer", f"state.{name}.step") for name in parameters)
    folder.values = dict(titan_values(state, source.location, parameters))
    return [folder]


def _stack_of(specs: list[Spec]) -> tuple[int, ...] | None:
    """The shape of a tensor of these matrices of experts; None for a single parameter."""
    return None if specs[0].expert is None else (len(specs), *specs[0].shape)


def _accelerate_folders(
    source: WeightSource, state: TrainingState | None, shape: ModelShape, kind: Kind | None
) -> list[_Folder]:
    model = _Folder(f"{MODEL_FOLDER}/")
    modules = module_tensors(shape)
    for module in modules:
        model.tensors["model", module.name] = _tensor_of(module, kind)
    if shape.tied:
        # A state dict of transformers lists a tied head too.
        head = f"{FAMILIES[shape.family].head}.weight"
        model.aliases["model", head] = ("model", shape.embed_name)
    if state is None:
        return [model]
    optimizer = _Folder(f"{OPTIMIZER_FOLDER}/")
    trained = [module for module in modules if not module.is_buffer]
    parameters = {module.name: len(module.shape) for module in trained}
    for module in trained:
        for moment in ("exp_avg", "exp_avg_sq"):
            path = "optimizer", "state", module.name, moment
            optimizer.tensors[path] = _tensor_of(module, moment)
    optimizer.steps = tuple(("optimizer", "state", name, "step") for name in parameters)
    optimizer.values = dict(accelerate_values(state, source.location, parameters))
    return [model, optimizer]


def _tensor_of(module: ModuleTensor, kind: Kind | None) -> TensorOfParts:
    parts = tuple((part, None) for part in module.parts)
    return TensorOfParts(parts, kind, module.shape if module.is_stack else None)


def _lay_out(
    folder: _Folder, source: StoredTensors, state: TrainingState | None
) -> tuple[list[TensorFile], list[list[Job]], dict[str, bytes]]:
    """The files of a folder: with tensors, their jobs, and the small ones."""
    chunks = [_read_whole(_key(path), source) for path in folder.tensors]
    containers, groups, places = lay_out_files(chunks, folder.name)
    objects = _Objects()
    paths: dict[str, _KeyPath] = {_key(path): path for path in folder.tensors}
    aliases: list[WrittenChunk] = []
    for path, twin in folder.aliases.items():
        paths[_key(path)] = path
        twin_chunk = _read_whole(_key(twin), source)
        aliases.append(
            WrittenChunk(
                twin_chunk.name, _key(path), twin_chunk.offsets, twin_chunk.sizes, twin_chunk.tensor
            )
        )
    if state is not None and folder.steps:
        place = objects.add(_number(state.optimizer_steps))
        for path in folder.steps:
            key = _key(path)
            paths[key], places[key] = path, place
            aliases.append(WrittenChunk(key, key, (), (), Tensor(FP32, ())))
    values: dict[str, Location] = {}
    for path, value in folder.values.items():
        paths[_key(path)] = path
        values[_key(path)] = objects.add(zip_writer.save_object("archive", dumps(value)))
    small_files = {
        f"{folder.name}{METADATA}": metadata_of([*chunks, *aliases], places, values, paths)
    }
    if objects.data:
        small_files[f"{folder.name}{_OBJECTS}"] = bytes(objects.data)
    return containers, groups, small_files


def _read_whole(key: str, source: StoredTensors) -> WrittenChunk:
    shape = source.shape(key)
    return WrittenChunk(key, key, (0,) * len(shape), shape, Tensor(source.dtype(key), shape))


class _Objects:
    """The file of small values; equal ones are stored once, since settings repeat for every
    parameter.
    """

    def __init__(self) -> None:
        self.data = bytearray()
        self._places: dict[bytes, Location] = {}

    def add(self, stream: bytes) -> Location:
        if stream not in self._places:
            self._places[stream] = (_OBJECTS, len(self.data), len(stream))
            self.data += stream
        return self._places[stream]


def _number(value: int) -> bytes:
    """A stream of torch.save with one fp32 number, as AdamW counts its updates."""
    stream = zip_writer.TensorStream("archive", Tensor(FP32, ()))
    data = np.float32(value).tobytes()
    return stream.head + data + stream.tail(crc32(data))


def _key(path: _KeyPath) -> str:
    return ".".join(map(str, path))
