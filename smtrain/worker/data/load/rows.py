"""Rows of a batch: windows of text, or whole samples or pairs of samples packed into rows.

A row is (input_ids, labels), and segments if its tokens must not all attend to each other: a run of
equal segment numbers is one sample or document with its own attention and positions, whose last
token predicts nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from smtrain.core.errors import DataError
from smtrain.core.model.footprint import IGNORED_LABEL
from smtrain.worker.data.load.order import Order, Packing
from smtrain.worker.data.load.verify_on_read import VerifiedFiles
from smtrain.worker.data.manifest import DatasetManifest


class Rows(Protocol):
    """An endless stream of rows, `epoch_rows` in its first epoch."""

    @property
    def epoch_rows(self) -> int: ...

    def batch(self, numbers: Sequence[int | None]) -> tuple[torch.Tensor, ...]:
        """Rows of the stream by number, int64, each [rows, seq_len]; None is a row without
        labels.
        """
        ...

    def padding(self, numbers: range) -> int | None:
        """The positions of these rows that hold no token; None for text, whose rows are full."""
        ...

    def close(self) -> None: ...


def rows_of(
    folder: Path,
    manifest: DatasetManifest,
    seq_len: int,
    seed: int,
    *,
    held_out: bool = False,
    packing: bool = True,
    document_mask: bool = False,
    weights: Sequence[float] | None = None,
    readers: int = 1,
) -> Rows:
    """The rows of a prepared folder, or of its held-out part, in the order of `seed`.

    `packing` is for pairs, without which each pair has a separate row; the rest is for text: see
    `TextRows` and `Order`. Raises DataError if the files do not match the manifest, or if there is
    not one weight per part.
    """
    parts = [manifest.validation] if held_out and manifest.validation else manifest.parts
    if manifest.objective == "pretrain":
        if weights and len(weights) != len(parts):
            raise DataError(
                f"data.sources has {len(weights)} weights and {folder} {len(parts)} parts; give one"
                " for each."
            )
        order = Order(seed, [part["samples"] for part in parts], weights)
        return TextRows(
            folder, manifest, parts, seq_len, order, document_mask=document_mask, readers=readers
        )
    if manifest.objective == "dpo":
        return PairRows(Samples(folder, manifest, parts[0], 2), seq_len, seed, packing=packing)
    return SampleRows(Samples(folder, manifest, parts[0]), seq_len, seed)


class TextRows:
    """Windows of `seq_len` + 1 tokens of the parts, one every `seq_len`; the last of a part may be
    shorter.

    With `document_mask` the documents of a window are segments, and the last token of each has the
    label -100; that takes 16 bytes of memory per document. At most `readers` threads read at a
    time, each its own open files.
    """

    def __init__(
        self,
        folder: Path,
        manifest: DatasetManifest,
        parts: Sequence[dict[str, Any]],
        seq_len: int,
        order: Order,
        *,
        document_mask: bool,
        readers: int,
    ) -> None:
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._seq_len, self._order, self._tokens = (
            seq_len,
            order,
            [part["tokens"] for part in parts],
        )
        self.files = VerifiedFiles(folder, [(part, self._dtype.itemsize, False) for part in parts])
        self._starts: list[NDArray[np.int64]] | None = None
        if document_mask:
            self._starts = [
                self.files.index(number).document_starts() for number in range(len(parts))
            ]
        # opened before anything is read: an open drops the pages that the kernel keeps of a FUSE
        # file
        self._free = self.files.open(readers)
        self._ordering = threading.Lock()
        self.epoch_rows = order.epoch_samples

    def windows(self, numbers: Sequence[int | None]) -> list[tuple[int, int] | None]:
        """The part of each row, and the number of its window in it."""
        with self._ordering:
            return [None if number is None else self._order.sample(number) for number in numbers]

    def batch(self, numbers: Sequence[int | None]) -> tuple[torch.Tensor, ...]:
        shape, size = (len(numbers), self._seq_len), self._dtype.itemsize
        ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
        segments = np.zeros(shape, np.int64)
        windows = self.windows(numbers)
        files = self._free.pop()
        try:
            for row, window in enumerate(windows):
                if window is None:
                    continue
                part, start = window[0], window[1] * self._seq_len
                length = min(self._seq_len + 1, self._tokens[part] - start)
                raw = self.files.read(part, files, start * size, length * size)
                tokens: Any = np.frombuffer(raw, self._dtype)
                ids[row, : length - 1], labels[row, : length - 1] = tokens[:-1], tokens[1:]
                if self._starts is not None:
                    documents = _documents(self._starts[part], start, length)
                    segments[row, : length - 1], segments[row, length - 1 :] = (
                        documents[:-1],
                        documents[-1] + 1,
                    )
                    labels[row, : length - 1][documents[:-1] != documents[1:]] = IGNORED_LABEL
        finally:
            self._free.append(files)
        batch = torch.from_numpy(ids), torch.from_numpy(labels)
        return batch if self._starts is None else (*batch, torch.from_numpy(segments))

    def padding(self, numbers: range) -> None:
        return None

    def close(self) -> None:
        for files in self._free:
            files.close()


def _documents(starts: NDArray[np.int64], first: int, length: int) -> NDArray[np.int64]:
    """The document of each of `length` tokens from `first`, counted from 0, int64 [length]."""
    low, high = np.searchsorted(starts, [first, first + length - 1], "right")
    begins = np.zeros(length, np.int64)
    begins[starts[low:high] - first] = 1
    return np.cumsum(begins)


class Samples:
    """The samples of a row of the manifest that `prepare_sft` wrote: tokens, and the mask of tokens
    to learn.

    There are `sequences` times as many as the row says. `lengths` are their numbers of tokens.
    Raises DataError if the files do not match the manifest.
    """

    def __init__(
        self, folder: Path, manifest: DatasetManifest, row: dict[str, Any], sequences: int = 1
    ) -> None:
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._padding = manifest.eos_id or 0
        self.checks = VerifiedFiles(folder, [(row, self._dtype.itemsize, False), (row, 1, True)])
        index = self.checks.index(0)
        self.lengths, self._starts = index.lengths, index.offsets // self._dtype.itemsize
        if len(self.lengths) != sequences * row["samples"] or (self.lengths < 2).any():
            raise DataError(
                f"{folder} has an index that does not match its manifest; prepare the data again."
            )
        self._files = self.checks.open()[0]

    def rows(self, samples: list[list[int]], seq_len: int) -> tuple[torch.Tensor, ...]:
        """Rows of these samples, one after another: (input_ids, labels, segments), int64, each
        [rows, seq_len].

        Labels outside of answers are -100. The end of a row is padding, a separate segment without
        labels.
        """
        shape = (len(samples), seq_len)
        ids, labels = (
            np.full(shape, self._padding, np.int64),
            np.full(shape, IGNORED_LABEL, np.int64),
        )
        segments = np.zeros(shape, np.int64)
        for row, row_samples in enumerate(samples):
            at = 0
            for number, sample in enumerate(row_samples):
                tokens, learn_mask = self.sample(sample)
                end = at + len(tokens) - 1
                ids[row, at:end] = tokens[:-1]
                labels[row, at:end] = np.where(learn_mask[1:], tokens[1:], IGNORED_LABEL)
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


class SampleRows:
    """Samples of instruction data.

    A sample of n tokens takes n - 1 positions: its last token is only predicted.
    """

    def __init__(self, samples: Samples, seq_len: int, seed: int) -> None:
        self.samples, self._seq_len = samples, seq_len
        self._positions = samples.lengths - 1
        self.packing = Packing(seed, self._positions, seq_len)

    @property
    def epoch_rows(self) -> int:
        return self.packing.rows(0)

    def batch(self, numbers: Sequence[int | None]) -> tuple[torch.Tensor, ...]:
        return self.rows([[] if number is None else self.packing.row(number) for number in numbers])

    def padding(self, numbers: range) -> int:
        samples = [sample for number in numbers for sample in self.packing.row(number)]
        return len(numbers) * self._seq_len - int(self._positions[samples].sum())

    def rows(self, numbers: list[list[int]]) -> tuple[torch.Tensor, ...]:
        """Rows of the samples of these numbers: (input_ids, labels, segments)."""
        return self.samples.rows(numbers, self._seq_len)

    def close(self) -> None:
        self.samples.close()


class PairRows(SampleRows):
    """Pairs of a chosen and a rejected sample, with the reference's log-probabilities of them.

    With `packing` a row takes whole pairs while there is room, else one pair.
    """

    def __init__(self, samples: Samples, seq_len: int, seed: int, *, packing: bool) -> None:
        super().__init__(samples, seq_len, seed)
        positions = self._positions = (samples.lengths - 1).reshape(-1, 2).sum(-1)
        if (positions > seq_len).any():
            raise DataError(
                f"a pair of the prepared data does not fit into a row of {seq_len}; prepare it"
                " again."
            )
        self.packing = Packing(
            seed, positions if packing else np.full_like(positions, seq_len), seq_len
        )
        self.most = max(1, seq_len // int(positions.min())) if packing else 1
        """The most pairs of a row."""
        self.references: NDArray[np.float32] = np.zeros((len(positions), 2), np.float32)
        """[pairs, 2]: the reference's log-probability of the chosen and of the rejected answer of
        each pair.
        """

    def rows(self, numbers: list[list[int]]) -> tuple[torch.Tensor, ...]:
        """Rows of the pairs of these numbers for `Engine.step`: (input_ids, labels, segments,
        references).
        """
        samples = [
            [sample for pair in row for sample in (2 * pair, 2 * pair + 1)] for row in numbers
        ]
        references = np.full((len(numbers), self.most, 2), np.nan, np.float32)
        for row, row_pairs in enumerate(numbers):
            references[row, : len(row_pairs)] = self.references[row_pairs]
        return *super().rows(samples), torch.from_numpy(references)
