"""Batches of samples that must not attend to each other: packed instruction data, and text with a document mask.

Both loaders return (input_ids, labels, segments): a run of equal segment numbers is one sample with its own attention
and positions, whose last token predicts nothing. Pairs of preferences have a fourth tensor (`PairRows.rows`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from smtrain.core.model.footprint import IGNORED
from smtrain.worker.data.checksums import sums_of_pair
from smtrain.worker.data.load.loader import Deal, TokenLoader, check_fits
from smtrain.worker.data.load.rows import Batch, rows_of
from smtrain.worker.data.manifest import DatasetManifest, shards_of
from smtrain.worker.data.pack.indexed import joined_index, read_index


class PackedLoader:
    """Rows of whole samples or pairs for one data-parallel rank, from the folder that `prepare_sft` wrote.

    Global batches and the position of a checkpoint count rows, not samples. A sample of n tokens takes n - 1 positions
    of a row: its last token is only predicted. Without `packing` a pair has a row of its own. Raises DataError like
    `TokenLoader`.
    """

    def __init__(
        self, folder: Path, *, seq_len: int, global_batch_size: int, dp_rank: int, dp_size: int, seed: int,
        vocab_size: int, packing: bool = True, batch_at: Callable[[int], int] | None = None,
    ) -> None:  # fmt: skip
        if global_batch_size % dp_size or not 0 <= dp_rank < dp_size:
            raise ValueError(f"rank {dp_rank} of {dp_size} cannot share a global batch of {global_batch_size}")
        self.manifest = DatasetManifest.load(folder)
        check_fits(self.manifest, folder, seq_len, vocab_size)
        self.seq_len, self.waited = seq_len, 0.0
        self._deal = Deal(dp_rank, dp_size, batch_at or (lambda rows: global_batch_size))
        self.rows = rows_of(folder, self.manifest, seq_len, seed, packing=packing)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._ahead: tuple[int, Future[tuple[torch.Tensor, ...]]] | None = None

    def batch(self, samples_consumed: int) -> tuple[torch.Tensor, ...]:
        """This rank's part of the global batch that follows `samples_consumed` rows; reads the next in the background.

        Returns (input_ids, labels, segments), int64, each [global_batch_size / dp_size, seq_len]. Labels outside of
        answers are -100. The end of a row is padding, a segment of its own without labels.
        """
        began = time.perf_counter()
        if self._ahead is None or self._ahead[0] != samples_consumed:
            self._ahead = samples_consumed, self._reader.submit(self._read, samples_consumed)
        batch = self._ahead[1].result()
        self.waited += time.perf_counter() - began
        following = self._deal.following(samples_consumed)
        self._ahead = following, self._reader.submit(self._read, following)
        return batch

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self.rows.close()

    def _read(self, samples_consumed: int) -> tuple[torch.Tensor, ...]:
        return self.rows.rows([self.rows.packing.row(i) for i in self._deal.own(samples_consumed)])


class WithinDocuments:
    """A TokenLoader's batches with documents as segments; it takes 16 bytes of memory per document."""

    def __init__(self, loader: TokenLoader, folder: Path) -> None:
        self._loader = loader
        self._starts = []
        for part in loader.manifest.parts:
            paths = [folder / shard.prefix for shard in shards_of(part)]
            indexes = [read_index(path.with_name(f"{path.name}.idx"), sums_of_pair(path)) for path in paths]
            self._starts.append(joined_index(indexes).document_starts())

    @property
    def waited(self) -> float:
        return self._loader.waited

    def batch(self, samples_consumed: int) -> Batch:
        """The loader's batch with segments; the last token of a document has the label -100."""
        input_ids, labels = self._loader.batch(samples_consumed)
        windows = self._loader.sample_ids(samples_consumed)
        segments = torch.from_numpy(np.stack([self._segments(part, window) for part, window in windows]))
        within = segments[:, :-1] == segments[:, 1:]
        return input_ids, labels.masked_fill(~within, IGNORED), segments[:, :-1].contiguous()

    def close(self) -> None:
        self._loader.close()

    def _segments(self, part: int, window: int) -> NDArray[np.int64]:
        """The number of each token's document in the window, counted from 0, int64 [seq_len + 1]."""
        length = self._loader.seq_len
        first = window * length
        starts = self._starts[part]
        low, high = np.searchsorted(starts, [first, first + length], "right")
        begins = np.zeros(length + 1, np.int64)
        begins[starts[low:high] - first] = 1
        return np.cumsum(begins)
