"""Write Hugging Face folders: safetensors, config.json, companions; of a multimodal model all its
parts.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.core.model.blocks import keeps_fp32
from smtrain.core.model.card import README
from smtrain.core.model.extension import with_rope_of
from smtrain.core.model.hf_config import for_everyone, normalise
from smtrain.core.model.layout import Shard
from smtrain.core.model.shape import ModelShape
from smtrain.core.model.text_part import is_multimodal, parts_named
from smtrain.core.text import Say
from smtrain.worker.checkpoint.conversion_plan import ConversionPlan
from smtrain.worker.checkpoint.dtypes import Bits, DType
from smtrain.worker.checkpoint.execute import execute
from smtrain.worker.checkpoint.huggingface import safetensors
from smtrain.worker.checkpoint.huggingface.companions import CompanionFiles, companions_of
from smtrain.worker.checkpoint.huggingface.folder import SINGLE, HFSource, is_hf_folder, read_config
from smtrain.worker.checkpoint.sources import WeightSource, WrappedSource
from smtrain.worker.checkpoint.storage import Bounds, Place, place
from smtrain.worker.checkpoint.tensor_files import Job, Tensor, TensorFile, Write
from smtrain.worker.checkpoint.tensor_ranges import Tally

INDEX = "model.safetensors.index.json"


class MultimodalSource(WrappedSource):
    """A multimodal folder whose text part has the weights of another source; all under their names
    in the files.
    """

    def __init__(self, text: WeightSource, folder: HFSource) -> None:
        super().__init__(text)
        self._folder, self._own = folder, dict(folder.stored)
        head, shape = f"{folder.text_shape.rules.head}.weight", folder.text_shape
        for stored_name, inner_name in folder.stored.items():
            if shape.tied and inner_name == head:
                self._own[stored_name] = shape.embed_name  # a tied matrix that the files have twice

    @property
    def config(self) -> dict[str, Any]:
        return self._folder.whole

    def names(self) -> list[str]:
        return [*self.own_names(), *self.other_names()]

    def own_names(self) -> list[str]:
        """Names of the text part."""
        return [*self._own]

    def other_names(self) -> list[str]:
        """Names of the other parts, which stay as they are."""
        return sorted(self._folder.others)

    def _experts(self, name: str) -> list[list[str]]:
        """The parameters of each expert, one below the other, that a tensor of all experts has."""
        stack_shape = self._folder.stacks[name]
        parts = [*self._folder.text_shape.file_parts(self._own[name], stack_shape)]
        per = len(parts) // stack_shape[0]
        return [parts[at : at + per] for at in range(0, len(parts), per)]

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._folder.stacks:
            return self._folder.stacks[name]
        return (
            self._source.shape(self._own[name])
            if name in self._own
            else self._folder.others[name].shape
        )

    def dtype(self, name: str) -> DType:
        if name in self._folder.stacks:
            return self._source.dtype(self._experts(name)[0][0])
        return (
            self._source.dtype(self._own[name])
            if name in self._own
            else self._folder.others[name].dtype
        )

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        if name in self._folder.stacks:
            (first, last), rows, columns = bounds
            stack = [self._rows(parts, rows, columns) for parts in self._experts(name)[first:last]]
            return np.stack(stack)
        if name in self._own:
            return self._source.bits(self._own[name], bounds, tally)
        return self._folder.others[name].bits(bounds, tally)

    def _rows(self, parts: list[str], rows: tuple[int, int], columns: tuple[int, int]) -> Bits:
        """Rows of parameters that lie one below the other."""
        windows, at = [], 0
        for part in parts:
            count = self._source.shape(part)[0]
            start, stop = max(rows[0] - at, 0), min(rows[1] - at, count)
            if start < stop:
                windows.append(self._source.bits(part, [(start, stop), columns]))
            at += count
        return np.concatenate(windows)

    def check(self, name: str, tally: Tally | None = None) -> None:
        if name in self._folder.stacks:
            for part in chain(*self._experts(name)):
                self._source.check(part)
        elif name in self._own:
            self._source.check(self._own[name], tally)
        else:
            self._folder.others[name].check(name, tally)

    def stamp(self) -> Any:
        return ["whole", self._source.stamp(), self._folder.stamp()]

    def stored_with(self, name: str) -> tuple[str, ...]:
        # The text source would answer with inner names, which `_jobs` compares with stored ones.
        return (name,)

    def seams(self, name: str) -> list[int]:
        is_read_whole = name in self._own and name not in self._folder.stacks
        return self._source.seams(self._own[name]) if is_read_whole else []


class Uncut:
    """Every tensor whole: the `Sharding` of a folder with tensors that no layout knows."""

    def shard(self, name: str, tp_rank: int) -> Shard:
        return Shard()


def write_hf(
    source: WeightSource,
    target: Path | str,
    companions: Path | str | None = None,
    max_shard_size: int = 5_000_000_000,
    overwrite: bool = True,
    readme: bytes | None = None,
    companion_files: CompanionFiles | None = None,
) -> str:
    """Write a standard Hugging Face folder, a few blocks in memory at a time; it appears whole.

    Names and types are the source's. `companions` is the folder whose config.json describes the
    weights; its companion files are written too, or `companion_files` instead. `readme` is the
    model card. Files are cut at `max_shard_size` bytes. If the companions are of a multimodal
    model, its other parts are copied; returns their names. Raises CheckpointError if the target is
    a file, or the companions are of another model.
    """
    normal = normalise(source.config)
    folder = None if companions is None else place(companions)
    config = source.config if folder is None else read_config(folder)
    # The run changed the rotary embeddings (model.rope); the companions have the old ones.
    if source.has_extended_rope:
        config = with_rope_of(config, source.config)
    # transformers 4 and 5 write one model differently, so the raw configs may differ.
    if normalise(config) != normal:
        raise CheckpointError(
            f"{companions}/config.json describes another model than the weights; give the folder"
            " training started from.",
            code="checkpoint.other_model",
        )
    multimodal = folder is not None and is_multimodal(config)
    if folder is not None and multimodal:
        source = MultimodalSource(source, _all_parts(folder))
    names = source.names() if multimodal else _names(source, normal.shape)
    tensors = {name: Tensor(source.dtype(name), source.shape(name)) for name in names}
    shards = _shards(tensors, max_shard_size)
    containers, groups = [], []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = (
            SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        container = safetensors.container(file, {name: tensors[name] for name in shard})
        containers.append(container)
        groups.append(_jobs(source, container))
        weight_map |= dict.fromkeys(shard, file)
    companion_files = companion_files or (
        CompanionFiles() if folder is None else companions_of(folder)
    )
    extras = dict(companion_files.files)
    if readme is not None:
        extras[README] = readme
    if len(shards) > 1:
        total = sum(tensor.size for tensor in tensors.values())
        extras[INDEX] = _json({"metadata": {"total_size": total}, "weight_map": weight_map})
    # The other parts are copied in their types, so only the text part decides the dtype.
    types = {
        source.dtype(name)
        for name in (source.own_names() if isinstance(source, MultimodalSource) else names)
        if not keeps_fp32(name)
    }
    extras["config.json"] = _json(
        # for_everyone returns only the text part, which would drop the other parts' config.
        _with_dtype(config if multimodal else for_everyone(config), types)
    )
    # All counts of shards: shards of an earlier export must not lie next to these.
    replaces = (SINGLE, INDEX, "model-*-of-*.safetensors")
    execute(
        source,
        target,
        ConversionPlan(Uncut(), groups, containers, extras, {"kind": "hf"}, replaces),
        overwrite,
    )
    return parts_named(source.other_names()) if isinstance(source, MultimodalSource) else ""


def tell_unchanged(parts: str, say: Say) -> None:
    """Report the parts of a multimodal model that `write_hf` copied."""
    if parts:
        say(f"the text part is new; unchanged: {parts}")


def _all_parts(folder: Place) -> HFSource:
    """The folder of a multimodal model, with its weights."""
    if is_hf_folder(folder):
        return HFSource(folder)
    raise CheckpointError(
        f"{folder} has the config.json of a multimodal model and no weights, and its other parts"
        " are to stay as they are: name the folder that has them.",
        code="checkpoint.missing",
    )


def _names(source: WeightSource, shape: ModelShape) -> list[str]:
    """The parameters in the order of the files."""
    return list(
        dict.fromkeys(part for spec in shape.specs for part in source.stored_with(spec.name))
    )


def _jobs(source: WeightSource, container: TensorFile) -> list[Job]:
    """Jobs in the order of the file; parameters that are one tensor in the source share a job."""
    jobs: list[Job] = []
    # By offset: `container` sorts by type, so the model's order is not the file's.
    for name in sorted(container.offsets, key=container.offsets.__getitem__):
        write = Write(name, (name,), (container,))
        if jobs and jobs[-1][-1].name in source.stored_with(name):
            jobs[-1] = (*jobs[-1], write)
        else:
            jobs.append((write,))
    return jobs


def _with_dtype(config: dict[str, Any], dtypes: set[DType]) -> dict[str, Any]:
    """Set the type that config.json names to the weights', since loaders go by it."""
    # Several types have no common name: the entry stays as it was.
    name = str(dtypes.pop()) if len(dtypes) == 1 else None
    return {**config, **{key: name for key in ("torch_dtype", "dtype") if name and key in config}}


def _shards(tensors: dict[str, Tensor], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        # A tensor is never split: one above the limit gets a shard to itself.
        if shards[-1] and size + tensor.size > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.size
    return shards


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
