"""Weights assembled from blocks, as all of Megatron's checkpoints are read."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.dtypes import FLOATS, Bits, DType
from smtrain.worker.checkpoint.megatron.names import EXPERT, FusedTensor, unreadable
from smtrain.worker.checkpoint.megatron.unfused_source import UprightPart, upright_parts
from smtrain.worker.checkpoint.sources import ReadCallback, WeightSource
from smtrain.worker.checkpoint.storage import Bounds, Place
from smtrain.worker.checkpoint.tensor_blocks import TensorBlock, sort_tiles
from smtrain.worker.checkpoint.tensor_ranges import Tally


class PieceSource(WeightSource):
    """Hugging Face parameters assembled from blocks of Megatron's tensors.

    `blocks` maps each key of `tensors` to its blocks; `twins` are those of a tied head, which must
    equal the embedding. Raises CheckpointError if a tensor is not covered, or its blocks differ in
    type.
    """

    def __init__(
        self,
        location: Place,
        config: dict[str, Any],
        tensors: Iterable[FusedTensor],
        blocks: Mapping[str, list[TensorBlock]],
        twins: list[TensorBlock] | None = None,
    ) -> None:
        self._place, self._config = location, config
        self._shape = ModelShape.from_config(config)
        self._specs = {spec.name: spec for spec in self._shape.specs}
        upright = upright_parts(self._shape)
        self._parts: dict[str, list[UprightPart]] = {}
        for upright_part in upright.values():
            self._parts.setdefault(upright_part.of, []).append(upright_part)
        self._blocks: dict[str, list[TensorBlock]] = {}
        self._together: dict[str, tuple[str, ...]] = {}
        for fused_tensor in tensors:
            pieces = blocks.get(fused_tensor.key)
            if not pieces:
                raise _lacks(location, fused_tensor.key, blocks)
            stored_names = tuple(dict.fromkeys(upright[part].of for part in fused_tensor.parts))
            self._together |= dict.fromkeys(stored_names, stored_names)
            for part, part_blocks in _parts(fused_tensor, pieces).items():
                self._blocks[part] = _sort_tiles(
                    location, fused_tensor.key, part_blocks, upright[part].spec.shape
                )
        # A tied head that a file has too must equal the embedding: `bits` compares them.
        self._twins = twins and _sort_tiles(
            location, "the output layer", twins, self._specs[self._shape.embed_name].shape
        )
        self._checked: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self._read: ReadCallback | None = None

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    def names(self) -> list[str]:
        return sorted(self._together)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._specs[name].shape

    def dtype(self, name: str) -> DType:
        # Any block would do: _sort_tiles refuses a tensor of several types.
        return self._pieces_of(name)[0][1][0].slab.dtype

    @property
    def location(self) -> Place:
        return self._place

    def seams(self, name: str) -> list[int]:
        part, blocks = self._pieces_of(name)[0]
        return (
            # Spans are rows of Megatron's tensor, which transposed and stacked parameters lack.
            sorted({block.spans[0][0] for block in blocks})
            if part.is_whole and not part.is_transposed
            else []
        )

    def watch(self, read: ReadCallback) -> None:
        self._read = read

    def check(self, name: str, tally: Tally | None = None) -> None:
        piece_blocks = [block for _, blocks in self._pieces_of(name) for block in blocks]
        for block in (
            *piece_blocks,
            *((self._twins or ()) if name == self._shape.embed_name else ()),
        ):
            key = block.slab.file, block.slab.offset
            with self._lock:  # several parameters may be cut from one tensor: check it once
                if key in self._checked:
                    continue
                self._checked.add(key)
            block.slab.check(name, tally)

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        pieces = self._pieces_of(name)
        if not pieces[0][0].is_whole:
            return self._stack(pieces, bounds, tally)
        # GPT-2's Conv1D has the inputs first, its blocks have the outputs first.
        if pieces[0][0].is_transposed:
            return self._assemble(pieces[0][1], bounds[::-1], tally).T
        bits = self._assemble(pieces[0][1], bounds, tally)
        twins = self._twins if name == self._shape.embed_name else None
        if twins and not np.array_equal(bits, self._assemble(twins, bounds, None)):
            raise CheckpointError(
                f"{self._place}: the output layer differs from {name}, to which config.json ties"
                " it; set tie_word_embeddings: false there if they were trained apart.",
                code="checkpoint.other_model",
            )
        return bits

    def _assemble(self, blocks: list[TensorBlock], bounds: Bounds, tally: Tally | None) -> Bits:
        """A view if one block has all of it, else a copy."""
        pieces = [piece for block in blocks if (piece := block.intersect(bounds)) is not None]
        if self._read is not None:
            for piece in pieces:
                self._read(
                    f"{piece.slab.file} {piece.slab.offset}",
                    partial(piece.slab.check_or_hash, piece.slab.file),
                )
        # _sort_tiles leaves no overlaps, so a single piece fills the window.
        if len(pieces) == 1:
            return pieces[0].bits(tally)
        out: Bits = np.empty([b - a for a, b in bounds], blocks[0].slab.dtype.bits)
        for piece in pieces:
            out[
                tuple(
                    slice(a - low, b - low)
                    for (a, b), (low, _) in zip(piece.spans, bounds, strict=True)
                )
            ] = piece.bits(tally)
        return out

    def _stack(
        self,
        parts: list[tuple[UprightPart, list[TensorBlock]]],
        bounds: Bounds,
        tally: Tally | None,
    ) -> Bits:
        """A window of a tensor of all experts, from those of each."""
        out: Bits = np.empty([b - a for a, b in bounds], parts[0][1][0].slab.dtype.bits)
        for part, blocks in parts:
            if (place := part.bounds_in_window(bounds)) is not None:
                bits = self._assemble(blocks, place[0], tally)
                out[place[1]] = bits.T if part.is_transposed else bits
        return out

    def _pieces_of(self, name: str) -> list[tuple[UprightPart, list[TensorBlock]]]:
        """The parameters of which a stored one consists, with their blocks."""
        if name not in self._together:
            raise CheckpointError(f"{self._place} has no parameter {name}.")
        return [(part, self._blocks[part.spec.name]) for part in self._parts[name]]


def _parts(fused_tensor: FusedTensor, blocks: list[TensorBlock]) -> dict[str, list[TensorBlock]]:
    """Split the blocks of a fused tensor into blocks of the parameters that it consists of."""
    out: dict[str, list[TensorBlock]] = {part: [] for part in fused_tensor.parts}
    starts = fused_tensor.starts()
    # A parameter may have many segments: q, k and v take turns by query group.
    for (part, first, _), (low, high) in zip(fused_tensor.segments, pairwise(starts), strict=True):
        for block in blocks:
            piece = block.intersect([(low, high), *((0, n) for n in fused_tensor.shape[1:])])
            if piece is not None:
                a, b = piece.spans[0]
                out[part].append(
                    replace(piece, spans=((a - low + first, b - low + first), *piece.spans[1:]))
                )
    return out


def _lacks(location: Place, key: str, blocks: Mapping[str, list[TensorBlock]]) -> CheckpointError:
    """The error for a tensor of which there is nothing; if its layer has other experts, a file was
    left behind.
    """
    expert = EXPERT.fullmatch(key)
    if expert is not None and any(name.startswith(f"{expert[1]}.") for name in blocks):
        return CheckpointError(
            f"{location} lacks expert {expert[2]} ({expert[3]}) of {expert[1]}, which has more;"
            " copy the files that were left behind, or take an earlier checkpoint.",
            code="checkpoint.damaged",
        )
    return CheckpointError(
        f"{location} lacks {key}; check that config.json is this model's.",
        code="checkpoint.other_model",
    )


def _sort_tiles(
    location: Place, key: str, blocks: list[TensorBlock], shape: tuple[int, ...]
) -> list[TensorBlock]:
    tiles = sort_tiles(location, key, blocks, shape)
    if tiles[0].slab.dtype not in FLOATS:
        raise unreadable(location, key, str(tiles[0].slab.dtype))
    return tiles
