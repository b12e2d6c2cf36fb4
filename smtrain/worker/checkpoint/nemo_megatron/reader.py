"""Read neuronx-nemo-megatron checkpoints: a `.ckpt` for each rank, whole or with each tensor in a
file (xser).

ZeRO-1 keeps fp32 master weights in parts on the data-parallel ranks:
`optim/dp_rank_DDD/NAME-optimizer_states.ckpt` numbers them in the order of the model's state_dict
without buffers. Each is padded along its first dimension to a multiple of the ranks, and cut there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.core.model.blocks import Role
from smtrain.core.model.other_forms import refuse_elsewhere
from smtrain.core.model.shape import ModelShape
from smtrain.core.text import with_article
from smtrain.worker.checkpoint.conversion_manifest import checksums, read_manifest
from smtrain.worker.checkpoint.dtypes import FP32, Bits
from smtrain.worker.checkpoint.megatron.legacy import RankSource
from smtrain.worker.checkpoint.megatron.names import HEAD, is_ignored
from smtrain.worker.checkpoint.nemo_megatron.names import canonical, part, rank_files
from smtrain.worker.checkpoint.nxd.reader import resolve_reference
from smtrain.worker.checkpoint.sources import WeightSource, WrappedSource
from smtrain.worker.checkpoint.storage import Bounds, Place
from smtrain.worker.checkpoint.tensor_blocks import TensorBlock
from smtrain.worker.checkpoint.tensor_ranges import Slab, Tally, contiguous
from smtrain.worker.checkpoint.torch_files import zip as torchzip
from smtrain.worker.checkpoint.torch_files.unpickle import Reference


class NNMSource(RankSource):
    """A folder of rank files, whole or xser; with `masters` the fp32 master weights replace the
    model's own.
    """

    def __init__(self, location: Place, config: dict[str, Any], masters: bool = False) -> None:
        manifest = read_manifest(location)
        shape = ModelShape.from_config(config)
        refuse_elsewhere(shape, "NemoMegatron")
        master_slabs: dict[tuple[str, int], Master] | None = {} if masters else None

        files = rank_files(location.files())

        def chunks(rank: tuple[int, int]) -> list[dict[str, Slab]]:
            return _chunks(location, files[rank], manifest, master_slabs)

        def place(
            key: str, slab: Slab, tp: int, t: int
        ) -> tuple[str, list[tuple[int, int]]] | None:
            return part(shape, key, slab.shape[0] if slab.shape else 0, tp, t)

        def replace(block: TensorBlock) -> Iterator[TensorBlock]:
            assert master_slabs is not None
            return master_slabs[block.slab.file, block.slab.offset].of(block)

        super().__init__(
            location, location, config, files, chunks, place, replace if masters else None
        )


def _chunks(
    location: Place,
    file: str,
    manifest: dict[str, Any],
    master_slabs: dict[tuple[str, int], Master] | None,
) -> list[dict[str, Slab]]:
    """Read one rank's file: a dict for each virtual stage, under Megatron-core's names.

    If `master_slabs` is given, the master weights are added to it, and placeholders for them are
    returned.
    """
    # lenient: hyper_parameters holds OmegaConf objects, which become Opaque.
    content = torchzip.load(location, file, lenient=True)
    state = content.get("state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict) or not state:
        raise CheckpointError(
            f"{location}/{file} has no state_dict; it is not a checkpoint of neuronx-nemo-megatron."
        )
    # Virtual stages nest: model0, model1 and so on in the state_dict.
    virtual = isinstance(state.get("model0"), dict)
    models = [state.get(f"model{v}") for v in range(len(state))] if virtual else [state]
    if master_slabs is not None and virtual:
        raise CheckpointError(
            f"{location}/{file} has virtual stages, and the order of their master weights is not"
            " known; take the weights themselves, without --masters (masters=True)."
        )
    better = masters_of(location, file, state) if master_slabs is not None else {}
    crcs = {
        crc
        for name in manifest.get("files", {})
        # A prefix: xser has its tensors in FILE.tensors/.
        if name.startswith(file)
        for crc in checksums(manifest, name).values()
    }
    out = []
    for model in models:
        tensors: dict[str, Slab] = {}
        buffers = buffers_of(model) if isinstance(model, dict) else ()
        for key, value in model.items() if isinstance(model, dict) else ():
            if not isinstance(key, str) or is_ignored(key) or key in buffers:
                continue
            if master_slabs is not None and key in better:
                slab = better[key].placeholder
                # The placeholder's file and offset find the master when blocks are replaced.
                master_slabs[slab.file, slab.offset] = better[key]
            else:
                slab = (
                    resolve_reference(location, file, key, value)
                    if isinstance(value, Reference)
                    else value
                )
            if not isinstance(slab, Slab):
                raise CheckpointError(
                    f"{location}/{file}: {key[:200]} is not a tensor; copy this file again.",
                    code="checkpoint.damaged",
                )
            if crcs and slab.crc32 is not None and slab.crc32 not in crcs:
                raise CheckpointError(
                    f"{location}/{file}: {key} is not what the manifest lists; convert the model"
                    " again.",
                    code="checkpoint.damaged",
                )
            name = canonical(key)
            if name in tensors and name != HEAD:  # the head may be stored under both of its names
                raise CheckpointError(
                    f"{location}/{file} has {name[:200]} twice; copy this file again.",
                    code="checkpoint.damaged",
                )
            tensors.setdefault(name, slab)
        out.append(tensors)
    return out


BUFFERS = "untrained_buffer_names"
"""Key of a list in the state_dict, not of a tensor."""


@dataclass(frozen=True)
class Master:
    """A master weight of one rank, in parts along its rows."""

    placeholder: Slab
    """Shape and type; a placeholder whose file and offset only identify it."""
    parts: tuple[Slab, ...]

    def of(self, block: TensorBlock) -> Iterator[TensorBlock]:
        """The blocks of the parts that replace a block of the whole."""
        rows_per_part, first, (a, b) = self.parts[0].shape[0], block.at[0], block.spans[0]
        for number, slab in enumerate(self.parts):
            low, high = (
                max(first, number * rows_per_part),
                min(first + b - a, (number + 1) * rows_per_part),
            )
            if low < high:
                spans = ((a + low - first, a + high - first), *block.spans[1:])
                yield replace(
                    block, spans=spans, slab=slab, at=(low - number * rows_per_part, *block.at[1:])
                )


def masters_of(location: Place, file: str, state: Mapping[str, Any]) -> dict[str, Master]:
    """Master weights of one rank's `file` by the names of its state_dict `state`.

    Raises CheckpointError if they are missing, or do not fit the names.
    """
    folder, _, name = file.rpartition("/")
    # NAME-last.ckpt has its masters in NAME-optimizer_states-last.ckpt.
    name = re.sub(r"(-last)?\.ckpt$", r"-optimizer_states\1.ckpt", name)
    pattern = re.compile(
        re.escape(f"{folder}/" if folder else "") + r"optim/dp_rank_(\d{3})/" + re.escape(name)
    )
    paths = {int(match[1]): path for path in location.files() if (match := pattern.fullmatch(path))}
    if not paths or sorted(paths) != list(range(len(paths))):
        first_missing = next((n for n in range(len(paths)) if n not in paths), len(paths))
        raise CheckpointError(
            f"{location} has no {name} in optim/dp_rank_{first_missing:03d} next to {file}, which"
            " would hold the master weights; take the weights themselves, without --masters"
            " (masters=True)."
        )
    states = [_first(location, paths[rank]) for rank in sorted(paths)]
    buffers = buffers_of(state) | {*states[0].get("untrained_buffers", ())}
    # Never sort: the place in the state_dict is the number of the master.
    names = [key for key in state if key not in buffers and not is_ignored(key)]
    out: dict[str, Master] = {}
    for number, key in enumerate(names):
        parts = tuple(
            _part(location, paths[rank], key, optimizer, number)
            for rank, optimizer in enumerate(states)
        )
        # The parts are padded along the rows, so their sum is no shape.
        shape = _shape(states[0].get("shape_info", {}).get(number)) or _shape(state[key])
        rows, inner_shape = sum(part.shape[0] for part in parts if part.shape), parts[0].shape[1:]
        if (
            not shape
            or {p.shape for p in parts} != {parts[0].shape}
            or inner_shape != shape[1:]
            or not shape[0] <= rows
        ):
            raise CheckpointError(
                f"{location}/{paths[0]}: parts of master weight {number} do not make up"
                f" {key[:200]}; copy this file again.",
                code="checkpoint.damaged",
            )
        # No file is called `...ckpt#`: reading the placeholder itself must fail.
        out[key] = Master(
            Slab(location, f"{paths[0]}#", number, FP32, shape, contiguous(shape)), parts
        )
    # With one too few or too many, the numbers would be of the wrong parameters.
    if any(len(optimizer["sharded_master_weights"]) != len(names) for optimizer in states):
        raise CheckpointError(
            f"{location}/{paths[0]} has another number of master weights than {file} has names;"
            " take both of one step."
        )
    return out


def _first(location: Place, file: str) -> dict[str, Any]:
    """Read the state of the first optimizer in a file."""
    # A list with one state for each optimizer; only the first has master weights.
    content = torchzip.load(location, file, lenient=True)
    optimizer = content[0] if isinstance(content, (list, tuple)) and content else None
    if not isinstance(optimizer, dict) or not isinstance(
        optimizer.get("sharded_master_weights"), dict
    ):
        raise CheckpointError(
            f"{location}/{file} has no sharded_master_weights: the run kept none"
            " (zero_use_master_weights); take the weights themselves, without --masters"
            " (masters=True)."
        )
    return optimizer


def _part(location: Place, file: str, key: str, optimizer: dict[str, Any], number: int) -> Slab:
    value = optimizer["sharded_master_weights"].get(number)
    slab = resolve_reference(location, file, key, value) if isinstance(value, Reference) else value
    if not isinstance(slab, Slab) or not slab.shape:
        raise CheckpointError(
            f"{location}/{file} has no master weight {number}, which is {key[:200]}; copy this file"
            " again.",
            code="checkpoint.damaged",
        )
    return slab


def buffers_of(state: Mapping[str, Any]) -> set[str]:
    """Names in a state_dict that are no weights: the buffers that it lists, and that list
    itself.
    """
    buffer_names = state.get(BUFFERS)
    names = buffer_names if isinstance(buffer_names, (list, tuple, set)) else ()
    return {BUFFERS, *(name for name in names if isinstance(name, str))}


def _shape(value: Any) -> tuple[int, ...]:
    numbers = value.shape if isinstance(value, Slab) else value
    right = isinstance(numbers, (list, tuple)) and all(type(n) is int and n > 0 for n in numbers)
    return tuple(numbers) if right else ()


class ReorderedSource(WrappedSource):
    """A GPT-NeoX whose rows of q, k and v are in a wrong order, read in the right one.

    neuronx-nemo-megatron's convert_HF_to_nemo_neox.py takes the rows for (3, heads, d) and turns
    them to (heads, 3, d) once too often. Raises CheckpointError for a family that it does not
    write.
    """

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self._shape = ModelShape.from_config(source.config)
        if self._shape.family != "gpt_neox":
            raise CheckpointError(
                f"{source.location} is {with_article(self._shape.family)} model, and"
                " convert_HF_to_nemo_neox.py makes only GPT-NeoX; leave out --reordered-qkv"
                " (reordered_qkv=True)."
            )
        self._names = {spec.name for spec in self._shape.specs if spec.role is Role.QKV}

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        if name not in self._names:
            return self._source.bits(name, bounds, tally)
        (start, stop), d, heads = bounds[0], self._shape.head_dim, self._shape.heads
        pieces = []
        for unit in range(start // d, -(-stop // d)):
            third, head = divmod(unit, heads)
            # Unit (third, head) of the right order is head * 3 + third in the file.
            at = (head * 3 + third - unit) * d
            low, high = max(start, unit * d), min(stop, (unit + 1) * d)
            pieces.append(self._source.bits(name, [(low + at, high + at), *bounds[1:]], tally))
        return np.concatenate(pieces)

    def seams(self, name: str) -> list[int]:
        # Reordered rows come from all over the stored tensor, so its seams mean nothing.
        return [] if name in self._names else self._source.seams(name)

    def stamp(self) -> list[object]:
        return ["reordered", self._source.stamp()]
