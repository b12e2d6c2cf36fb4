"""Batches of what a prepared folder holds out: the same rows for every mesh, mixture and seed."""

from __future__ import annotations

from pathlib import Path

import torch

from smtrain.core.errors import DataError
from smtrain.worker.data.load.rows import SampleRows, rows_of
from smtrain.worker.data.manifest import DatasetManifest


class HeldOut:
    """The held-out rows of one data-parallel rank, in global batches; `count` of them at most.

    A row is a window of text, or whole samples or pairs (without `packing` one pair); `count` takes
    them from all over the text. With `document_mask` a row's documents are kept apart. Rows that
    fill up the last batch have no labels. Raises DataError if the folder has no held-out part, or
    is damaged.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seq_len: int,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        count: int | None = None,
        document_mask: bool = False,
        packing: bool = True,
    ) -> None:
        manifest = DatasetManifest.load(folder)
        if not manifest.validation:
            raise DataError(
                f"train.validation: {folder} was prepared without a held-out part; prepare the text"
                " again with train.validation.fraction or train.validation.path."
            )
        self._batch, self._share = global_batch_size, global_batch_size // dp_size
        self._first = dp_rank * self._share
        self._rows = rows_of(
            folder,
            manifest,
            seq_len,
            0,
            held_out=True,
            packing=packing,
            document_mask=document_mask,
        )
        self.packed = self._rows if isinstance(self._rows, SampleRows) else None
        """The held-out samples or pairs; None for text."""
        self._count = self._rows.epoch_rows
        batches = -(-self._count // global_batch_size)
        self.batches = batches if count is None else min(count, batches)

    def batch(self, number: int) -> tuple[torch.Tensor, ...]:
        """This rank's part of batch `number`, in the form of a training batch."""
        first = number * self._batch + self._first
        return self._rows.batch(
            [i if i < self._count else None for i in range(first, first + self._share)]
        )

    def close(self) -> None:
        self._rows.close()
