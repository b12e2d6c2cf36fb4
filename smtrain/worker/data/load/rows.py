"""The samples of a prepared folder, or its pairs of samples, and their distribution over rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from smtrain.core.errors import DataError
from smtrain.core.model.footprint import IGNORED
from smtrain.worker.data.load.verify_on_read import StoredTokens, VerifiedFiles
from smtrain.worker.data.manifest import DatasetManifest, shards_of
from smtrain.worker.data.pack.packing import Packing

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Samples:
    """The samples of a row of the manifest that `prepare_sft` wrote: tokens, and the mask of tokens to learn.

    There are `sequences` times as many as the row says. `lengths` are their numbers of tokens. Raises DataError if the
    files do not match the manifest.
    """

    def __init__(self, folder: Path, manifest: DatasetManifest, row: dict[str, Any], sequences: int = 1) -> None:
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._padding = manifest.eos_id or 0
        stored = [StoredTokens.of(shards_of(row), self._dtype.itemsize, mask=mask) for mask in (False, True)]
        self.checks = VerifiedFiles(folder, stored)
        index = self.checks.index(0)
        self.lengths, self._starts = index.lengths, index.offsets // self._dtype.itemsize
        if len(self.lengths) != sequences * row["samples"] or (self.lengths < 2).any():
            raise DataError(f"{folder} has an index that is not its manifest's; prepare the data again.")
        for part in stored:
            part.check_sizes(folder)
        self._files = self.checks.open()[0]

    def rows(self, samples: list[list[int]], seq_len: int) -> Batch:
        """Rows of these samples, one after another, as `PackedLoader.batch` returns them."""
        shape = (len(samples), seq_len)
        ids, labels = np.full(shape, self._padding, np.int64), np.full(shape, IGNORED, np.int64)
        segments = np.zeros(shape, np.int64)
        for row, within in enumerate(samples):
            at = 0
            for number, sample in enumerate(within):
                tokens, learned = self.sample(sample)
                end = at + len(tokens) - 1
                ids[row, at:end] = tokens[:-1]
                labels[row, at:end] = np.where(learned[1:], tokens[1:], IGNORED)
                segments[row, at:end] = number
                segments[row, end:] = number + 1
                at = end
        return torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(segments)

    def sample(self, sample: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """A sample's tokens, and a mask of those to learn."""
        start, length = int(self._starts[sample]), int(self.lengths[sample])
        # widen first: -100 would wrap in uint16
        tokens = self._array(0, start, length, self._dtype).astype(np.int64)
        return tokens, self._array(1, start, length, np.dtype("u1"))

    def close(self) -> None:
        self._files.close()

    def _array(self, file: int, start: int, length: int, dtype: np.dtype) -> NDArray[Any]:
        raw = self.checks.read(file, self._files, start * dtype.itemsize, length * dtype.itemsize)
        return np.frombuffer(raw, dtype)


class Rows(Protocol):
    """Whole samples, or pairs of them, and their distribution over rows."""

    samples: Samples
    packing: Packing

    def rows(self, numbers: list[list[int]]) -> tuple[torch.Tensor, ...]:
        """Rows of the samples or pairs of these numbers, as `PackedLoader.batch` returns them."""
        ...

    def close(self) -> None: ...


def rows_of(
    folder: Path, manifest: DatasetManifest, seq_len: int, seed: int, *, packing: bool = True, held_out: bool = False
) -> Rows:
    """The rows of a folder that `prepare_sft` wrote, or of what it holds out, in the order of `seed`.

    Without `packing` a pair has a row of its own. Raises DataError if the files do not match the manifest.
    """
    row = manifest.validation if held_out else manifest.parts[0]
    assert row is not None  # `HeldOut` refuses a folder without
    if manifest.objective == "dpo":
        return PairRows(Samples(folder, manifest, row, 2), seq_len, seed, packing=packing)
    return SampleRows(Samples(folder, manifest, row), seq_len, seed)


class SampleRows:
    """Samples of instruction data."""

    def __init__(self, samples: Samples, seq_len: int, seed: int) -> None:
        self.samples, self._seq_len = samples, seq_len
        self.packing = Packing(seed, samples.lengths - 1, seq_len)

    def rows(self, numbers: list[list[int]]) -> Batch:
        """Rows of these samples: (input_ids, labels, segments)."""
        return self.samples.rows(numbers, self._seq_len)

    def close(self) -> None:
        self.samples.close()


class PairRows:
    """Pairs of a chosen and a rejected sample, with the reference's log-probabilities of them.

    With `packing` a row takes whole pairs while there is room, else one pair.
    """

    def __init__(self, samples: Samples, seq_len: int, seed: int, *, packing: bool) -> None:
        self.samples, self._seq_len = samples, seq_len
        positions = (samples.lengths - 1).reshape(-1, 2).sum(-1)
        if (positions > seq_len).any():
            raise DataError(f"a pair of the prepared data does not fit into a row of {seq_len}; prepare it again.")
        self.packing = Packing(seed, positions if packing else np.full_like(positions, seq_len), seq_len)
        self.most = max(1, seq_len // int(positions.min())) if packing else 1
        """The most pairs of a row."""
        self.references: NDArray[np.float32] = np.zeros((len(positions), 2), np.float32)
        """[pairs, 2]: the reference's log-probability of the chosen and of the rejected answer of each pair."""

    def rows(self, numbers: list[list[int]]) -> tuple[torch.Tensor, ...]:
        """Rows of these pairs: (input_ids, labels, segments, references), as `Engine.step` takes them."""
        samples = [[sample for pair in row for sample in (2 * pair, 2 * pair + 1)] for row in numbers]
        references = np.full((len(numbers), self.most, 2), np.nan, np.float32)
        for row, within in enumerate(numbers):
            references[row, : len(within)] = self.references[within]
        return *self.samples.rows(samples, self._seq_len), torch.from_numpy(references)

    def close(self) -> None:
        self.samples.close()
