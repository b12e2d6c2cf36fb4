"""Tensors of several chunks that read like one slab."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smtrain.worker.checkpoint.dcp.names import RowOrder
from smtrain.worker.checkpoint.dtypes import Bits
from smtrain.worker.checkpoint.storage import Bounds, Place
from smtrain.worker.checkpoint.tensor_blocks import TensorBlock, sort_tiles
from smtrain.worker.checkpoint.tensor_ranges import Slab, Tally, contiguous
from smtrain.worker.checkpoint.torch_files.distributed import StoredChunk
from smtrain.worker.checksum import combine_crcs


@dataclass(frozen=True)
class ChunkedSlab(Slab):
    """A tensor that lies in chunks, one for each rank that saved it."""

    # Without a crc32: each chunk has one.
    blocks: tuple[TensorBlock, ...] = ()

    @classmethod
    def of(
        cls, location: Place, key: str, shape: tuple[int, ...], chunks: list[StoredChunk]
    ) -> Slab:
        """Join the chunks of a tensor.

        Raises CheckpointError if they leave a hole or differ in type.
        """
        if len(chunks) == 1 and chunks[0].slab.shape == shape:
            return chunks[0].slab
        blocks = [
            TensorBlock(
                tuple((a, a + n) for a, n in zip(c.offsets, c.slab.shape, strict=True)),
                c.slab,
                (0,) * len(shape),
            )
            # FSDP gives a rank an empty part if there are fewer rows than ranks.
            for c in chunks
            if 0 not in c.slab.shape
        ]
        tiles = sort_tiles(location, key, blocks, shape)
        first = tiles[0].slab
        return cls(
            first.place,
            first.file,
            first.offset,
            first.dtype,
            shape,
            contiguous(shape),
            None,
            tuple(tiles),
        )

    def bits(self, bounds: Bounds, tally: Tally | None = None) -> Bits:
        """Read the part within `bounds`; a view if one chunk has all of it."""
        parts = [part for block in self.blocks if (part := block.intersect(bounds)) is not None]
        if len(parts) == 1:
            return parts[0].bits(tally)
        out: Bits = np.empty([b - a for a, b in bounds], self.dtype.bits)
        for part in parts:
            place = zip(part.spans, bounds, strict=True)
            out[tuple(slice(a - low, b - low) for (a, b), (low, _) in place)] = part.bits(tally)
        return out

    def check(self, name: str, tally: Tally | None = None) -> None:
        """Raises CheckpointError if the bytes of a chunk are not those of its checksum."""
        for block in self.blocks:
            block.slab.check(name, tally)

    def check_or_hash(self, name: str) -> int | None:
        """`Slab.check_or_hash` of all chunks together."""
        crc = 0
        for block in self.blocks:
            chunk_crc = block.slab.check_or_hash(name)
            crc = crc if chunk_crc is None else combine_crcs(crc, chunk_crc, block.slab.size)
        # 0: all chunks had a checksum, or are in an object store, so nothing was hashed.
        return crc or None


@dataclass(frozen=True)
class ReorderedSlab(Slab):
    """A parameter whose rows lie in another order in a stored tensor, or between rows of other parameters."""

    stored: Slab | None = None
    order: RowOrder | None = None

    @classmethod
    def of(cls, stored: Slab, order: RowOrder) -> Slab:
        """A parameter of the stored tensor, with rows in Hugging Face's order."""
        shape = (len(order.heads) * order.head_dim, *stored.shape[1:])
        return cls(
            stored.place,
            stored.file,
            stored.offset,
            stored.dtype,
            shape,
            contiguous(shape),
            None,
            stored,
            order,
        )

    def bits(self, bounds: Bounds, tally: Tally | None = None) -> Bits:
        """Read the part within `bounds`, as a copy."""
        assert self.stored is not None
        assert self.order is not None
        (start, stop), columns = bounds[0], bounds[1:]
        if start == stop:
            return np.empty([b - a for a, b in bounds], self.dtype.bits)
        rows = self.order.rows(start, stop)
        low = int(rows.min())
        # One read of all rows in between: at most one group of heads more than asked for.
        block = self.stored.bits([(low, int(rows.max()) + 1), *columns], tally)
        block_rows: Bits = block[rows - low]
        return block_rows

    def check(self, name: str, tally: Tally | None = None) -> None:
        """`Slab.check` of the stored tensor."""
        assert self.stored is not None
        self.stored.check(name, tally)

    def check_or_hash(self, name: str) -> int | None:
        """`Slab.check_or_hash` of the stored tensor."""
        assert self.stored is not None
        return self.stored.check_or_hash(name)
