"""Batches of what a prepared folder holds out: the same rows for every mesh, mixture and seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from smtrain.core.errors import DataError
from smtrain.core.model.footprint import IGNORED
from smtrain.worker.data.load.order import epoch_order
from smtrain.worker.data.load.rows import Rows, rows_of
from smtrain.worker.data.load.verify_on_read import StoredTokens, VerifiedFiles
from smtrain.worker.data.manifest import DatasetManifest, shards_of


class HeldOut:
    """The held-out rows of one data-parallel rank, in global batches; `count` of them at most.

    A row is a window of text, or whole samples or pairs (without `packing` one pair); `count` takes them from all over
    the text. With `document_mask` a row's documents are kept apart. Rows that fill up the last batch have no labels.
    Raises DataError if the folder has no held-out part, or is damaged.
    """

    def __init__(
        self, folder: Path, *, seq_len: int, global_batch_size: int, dp_rank: int, dp_size: int,
        count: int | None = None, document_mask: bool = False, packing: bool = True,
    ) -> None:  # fmt: skip
        manifest = DatasetManifest.load(folder)
        if not manifest.validation:
            raise DataError(
                f"train.validation: {folder} was prepared without a held-out part; prepare the text again with "
                "train.validation.fraction or train.validation.path."
            )
        row, self._batch = manifest.validation, global_batch_size
        self._share = global_batch_size // dp_size
        self._first = dp_rank * self._share
        self.packed: Rows | None = None
        """The held-out samples or pairs; None for text."""
        self._windows: _Windows | None = None
        if manifest.objective != "pretrain":
            self.packed = rows_of(folder, manifest, seq_len, 0, packing=packing, held_out=True)
            self._rows = self.packed.packing.rows(0)
        else:
            self._windows = _Windows(folder, manifest, row, seq_len, document_mask)
            self._rows = row["samples"]
            self._order = epoch_order(0, 0, self._rows)
        batches = -(-self._rows // global_batch_size)
        self.batches = batches if count is None else min(count, batches)

    def batch(self, number: int) -> tuple[torch.Tensor, ...]:
        """This rank's part of batch `number`, in the form of a training batch."""
        first = number * self._batch + self._first
        wanted = [i if i < self._rows else None for i in range(first, first + self._share)]
        if self.packed is not None:
            return self.packed.rows([[] if i is None else self.packed.packing.row(i) for i in wanted])
        assert self._windows is not None
        return self._windows.rows([None if i is None else int(self._order[i]) for i in wanted])

    def close(self) -> None:
        if self.packed is not None:
            self.packed.close()
        if self._windows is not None:
            self._windows.close()


class _Windows:
    """Windows of `seq_len` + 1 tokens, one every `seq_len`; the last one may be shorter."""

    def __init__(
        self, folder: Path, manifest: DatasetManifest, row: dict[str, Any], seq_len: int, document_mask: bool
    ) -> None:
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._seq_len, self._tokens = seq_len, row["tokens"]
        stored = StoredTokens.of(shards_of(row), self._dtype.itemsize)
        stored.check_sizes(folder)
        self._checks = VerifiedFiles(folder, [stored])
        self._starts: NDArray[np.int64] | None = None
        if document_mask:
            self._starts = self._checks.index(0).document_starts()
        self._files = self._checks.open()[0]

    def rows(self, windows: list[int | None]) -> tuple[torch.Tensor, ...]:
        shape, size = (len(windows), self._seq_len), self._dtype.itemsize
        ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        segments = np.zeros(shape, np.int64)
        for row, window in enumerate(windows):
            if window is None:
                continue
            start = window * self._seq_len
            length = min(self._seq_len + 1, self._tokens - start)
            raw = self._checks.read(0, self._files, start * size, length * size)
            tokens: Any = np.frombuffer(raw, self._dtype).astype(np.int64)
            ids[row, : length - 1], labels[row, : length - 1] = tokens[:-1], tokens[1:]
            if self._starts is not None:
                of_token = np.searchsorted(self._starts, np.arange(start, start + length), "right")
                segments[row, : length - 1] = of_token[:-1] - of_token[0]
                segments[row, length - 1 :] = of_token[-1] - of_token[0] + 1
                labels[row, : length - 1][of_token[:-1] != of_token[1:]] = IGNORED
        batch = torch.from_numpy(ids), torch.from_numpy(labels)
        return batch if self._starts is None else (*batch, torch.from_numpy(segments))

    def close(self) -> None:
        self._files.close()
