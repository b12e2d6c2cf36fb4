"""fp32 master weights of neuronx-nemo-megatron: what ZeRO-1 keeps of them, a part on each data-parallel rank.

`optim/dp_rank_DDD/NAME-optimizer_states.ckpt` numbers them in the order of the model's state_dict, its buffers left
out. Each is padded to a multiple of the ranks along its first dimension and cut there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.block_source import TensorBlock
from smtrain.worker.checkpoint.dtypes import FP32
from smtrain.worker.checkpoint.megatron.names import ignored
from smtrain.worker.checkpoint.nxd.reader import referred
from smtrain.worker.checkpoint.storage import Place
from smtrain.worker.checkpoint.tensor_ranges import Slab, contiguous
from smtrain.worker.checkpoint.torch_files import zip as torchzip
from smtrain.worker.checkpoint.torch_files.unpickle import Reference

BUFFERS = "untrained_buffer_names"
"""A list among the names of a state_dict, and no tensor."""


@dataclass(frozen=True)
class Master:
    """A tensor of one rank, in parts along its rows."""

    whole: Slab
    """Its shape and type; there are no bytes at its place, which only tells it from others."""
    parts: tuple[Slab, ...]

    def of(self, block: TensorBlock) -> Iterator[TensorBlock]:
        """What of the parts stands in for a block of the whole."""
        each, first, (a, b) = self.parts[0].shape[0], block.at[0], block.spans[0]
        for number, slab in enumerate(self.parts):
            low, high = max(first, number * each), min(first + b - a, (number + 1) * each)
            if low < high:
                spans = ((a + low - first, a + high - first), *block.spans[1:])
                yield replace(block, spans=spans, slab=slab, at=(low - number * each, *block.at[1:]))


def masters(where: Place, file: str, state: Mapping[str, Any]) -> dict[str, Master]:
    """Those of one rank's `file`, whose state_dict is `state`, by its names.

    Raises CheckpointError where they are missing, or do not fit the names.
    """
    folder, _, name = file.rpartition("/")
    name = re.sub(r"(-last)?\.ckpt$", r"-optimizer_states\1.ckpt", name)
    pattern = re.compile(re.escape(f"{folder}/" if folder else "") + r"optim/dp_rank_(\d{3})/" + re.escape(name))
    paths = {int(found[1]): path for path in where.files() if (found := pattern.fullmatch(path))}
    if not paths or sorted(paths) != list(range(len(paths))):
        missing = next((n for n in range(len(paths)) if n not in paths), len(paths))
        raise CheckpointError(
            f"{where} has no {name} in optim/dp_rank_{missing:03d} beside {file}, where master weights would be; take "
            "the weights themselves, without --masters (masters=True)."
        )
    held = [_first(where, paths[rank]) for rank in sorted(paths)]
    buffers = buffers_of(state) | {*held[0].get("untrained_buffers", ())}
    names = [key for key in state if key not in buffers and not ignored(key)]
    out: dict[str, Master] = {}
    for number, key in enumerate(names):
        parts = tuple(_part(where, paths[rank], key, found, number) for rank, found in enumerate(held))
        shape = _shape(held[0].get("shape_info", {}).get(number)) or _shape(state[key])
        rows, rest = sum(part.shape[0] for part in parts if part.shape), parts[0].shape[1:]
        if not shape or {p.shape for p in parts} != {parts[0].shape} or rest != shape[1:] or not shape[0] <= rows:
            raise CheckpointError(
                f"{where}/{paths[0]}: parts of master weight {number} do not make up {key[:200]}; copy this file again."
            )
        out[key] = Master(Slab(where, f"{paths[0]}#", number, FP32, shape, contiguous(shape)), parts)
    if any(len(found["sharded_master_weights"]) != len(names) for found in held):
        raise CheckpointError(
            f"{where}/{paths[0]} has another number of master weights than {file} has names; take both of one step."
        )
    return out


def _first(where: Place, file: str) -> dict[str, Any]:
    """The state of the first optimizer in a file."""
    content = torchzip.load(where, file, lenient=True)
    found = content[0] if isinstance(content, (list, tuple)) and content else None
    if not isinstance(found, dict) or not isinstance(found.get("sharded_master_weights"), dict):
        raise CheckpointError(
            f"{where}/{file} has no sharded_master_weights: the run kept none (zero_use_master_weights); take the "
            "weights themselves, without --masters (masters=True)."
        )
    return found


def _part(where: Place, file: str, key: str, found: dict[str, Any], number: int) -> Slab:
    held = found["sharded_master_weights"].get(number)
    slab = referred(where, file, key, held) if isinstance(held, Reference) else held
    if not isinstance(slab, Slab) or not slab.shape:
        raise CheckpointError(
            f"{where}/{file} has no master weight {number}, which is {key[:200]}; copy this file again."
        )
    return slab


def buffers_of(state: Mapping[str, Any]) -> set[str]:
    """What a state_dict holds that is no weight: those that it names itself, and the list of their names."""
    found = state.get(BUFFERS)
    names = found if isinstance(found, (list, tuple, set)) else ()
    return {BUFFERS, *(name for name in names if isinstance(name, str))}


def _shape(found: Any) -> tuple[int, ...]:
    numbers = found.shape if isinstance(found, Slab) else found
    right = isinstance(numbers, (list, tuple)) and all(type(n) is int and n > 0 for n in numbers)
    return tuple(numbers) if right else ()
