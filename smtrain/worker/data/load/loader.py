"""Token batches for training, in an order computed purely from (seed, epoch).

Sample i of the endless stream belongs to epoch i // samples and is the window of `seq_len` + 1
tokens that `order` names. A global batch is `global_batch_size` consecutive samples, dealt to the
data-parallel ranks in equal contiguous parts, so it is the same batch for every number of ranks,
and (seed, samples consumed) is the whole state.

Several threads with their own open files read batches ahead: a FastFile channel answers one read of
an open file at a time, and each jump is a request to S3. Also, one process per host reads such a
channel once from beginning to end, which is fast, so that the kernel has the pages when the jumps
come.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from smtrain.core.errors import DataError
from smtrain.core.model.hf_folder import tokenizer_digest
from smtrain.core.protocol.prepared import vocabulary_fault
from smtrain.worker.data.load.rows import TextRows, rows_of
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.object_store import kind_of_mount

AHEAD = 4
"""Batches read ahead."""
READERS = 4
"""Threads that read, each with its own open files."""
_WARM_BYTES = 4 << 20


class Deal(NamedTuple):
    """The division of global batches over the data-parallel ranks, in equal contiguous parts."""

    rank: int
    ranks: int
    batch_at: Callable[[int], int]

    def rank_samples(self, samples_consumed: int) -> range:
        """This rank's samples of the global batch that follows a number of samples."""
        share = self.batch_at(samples_consumed) // self.ranks
        first = samples_consumed + self.rank * share
        return range(first, first + share)

    def following(self, samples_consumed: int) -> int:
        """The samples consumed after that batch."""
        return samples_consumed + self.batch_at(samples_consumed)


class TokenLoader:
    """Batches of one data-parallel rank from a prepared folder; `vocab_size` is the model's.

    `weights` and `document_mask` are for text, whose samples are its rows. Rows of instruction data
    are samples or pairs packed together, and global batches and the position of a checkpoint count
    these rows. Raises DataError if the folder is not a prepared dataset, is damaged, or was
    prepared for another seq_len or vocabulary, or if there is not one weight per part.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seq_len: int,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        vocab_size: int,
        weights: Sequence[float] | None = None,
        document_mask: bool = False,
        packing: bool = True,
        batch_at: Callable[[int], int] | None = None,
        model: Path | None = None,
    ) -> None:
        """`batch_at` is the global batch that follows a number of samples, if it is not always the
        same; `model` as for `check_fits`.
        """
        if global_batch_size % dp_size or not 0 <= dp_rank < dp_size:
            raise ValueError(
                f"rank {dp_rank} of {dp_size} cannot share a global batch of {global_batch_size}"
            )
        self.manifest = DatasetManifest.load(folder)
        check_fits(self.manifest, folder, seq_len, vocab_size, model)
        self.samples = self.manifest.samples
        self.waited = 0.0
        """Seconds that `batch` has waited for data so far."""
        self.padding: int | None = None
        """Positions without a token in the global batches so far; None for text, whose rows are
        full, and on ranks that do not log.
        """
        self.deal = Deal(dp_rank, dp_size, batch_at or (lambda samples: global_batch_size))
        self.rows = rows_of(
            folder,
            self.manifest,
            seq_len,
            seed,
            packing=packing,
            document_mask=document_mask,
            weights=weights,
            readers=READERS,
        )
        text = isinstance(self.rows, TextRows)
        self._closing = threading.Event()
        self._warmer = threading.Thread(target=self._warm, name="warm", daemon=True)
        if (
            text
            and kind_of_mount(folder).startswith("fuse")
            and os.environ.get("LOCAL_RANK", "0") == "0"
        ):
            self._warmer.start()
        # one thread packs rows
        self._readers = ThreadPoolExecutor(READERS if text else 1, thread_name_prefix="read-ahead")
        self._most = AHEAD if text else 1
        self._ahead: dict[int, Future[tuple[tuple[torch.Tensor, ...], int | None]]] = {}

    def batch(self, samples_consumed: int) -> tuple[torch.Tensor, ...]:
        """This rank's part of the global batch that follows `samples_consumed` samples.

        Returns (input_ids, labels) and perhaps more (`Rows`), int64, each [global_batch_size /
        dp_size, seq_len]; labels are the inputs shifted by one. The batches after it are read in
        the background.
        """
        batch_starts = [samples_consumed]
        for _ in range(self._most):
            batch_starts.append(self.deal.following(batch_starts[-1]))
        for batch_start in [c for c in self._ahead if c not in batch_starts]:
            self._ahead.pop(batch_start).cancel()
        for batch_start in batch_starts:
            if batch_start not in self._ahead:
                self._ahead[batch_start] = self._readers.submit(self._read, batch_start)
        began = time.perf_counter()
        batch, padding = self._ahead.pop(samples_consumed).result()
        self.waited += time.perf_counter() - began
        if padding is not None:
            self.padding = (self.padding or 0) + padding
        return batch

    def _read(self, samples_consumed: int) -> tuple[tuple[torch.Tensor, ...], int | None]:
        """This rank's batch, and the padding of the global one on the rank that logs."""
        batch = self.rows.batch(self.deal.rank_samples(samples_consumed))
        if self.deal.rank:
            return batch, None
        return batch, self.rows.padding(
            range(samples_consumed, self.deal.following(samples_consumed))
        )

    def close(self) -> None:
        self._closing.set()
        self._readers.shutdown(cancel_futures=True)
        if self._warmer.is_alive():
            self._warmer.join()
        self.rows.close()

    def _warm(self) -> None:
        """Read everything once, in order, up to half of the free memory."""
        remaining_bytes = free_memory() // 2
        for path in self.rows.files.paths if isinstance(self.rows, TextRows) else ():
            with path.open("rb", buffering=0) as file:
                while remaining_bytes > 0 and not self._closing.is_set():
                    try:
                        read = len(file.read(_WARM_BYTES))
                    except OSError:
                        return  # reading a batch reports it
                    if not read:
                        break
                    remaining_bytes -= read


def free_memory() -> int:
    """Bytes available without swapping; 0 if unknown."""
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:
        return 0
    available = [
        line.split()[1] for line in meminfo.splitlines() if line.startswith("MemAvailable")
    ]
    return int(available[0]) * 1024 if available else 0


def check_fits(
    manifest: DatasetManifest,
    folder: Path,
    seq_len: int,
    vocab_size: int,
    model: Path | None = None,
) -> None:
    """Refuse a dataset prepared for another seq_len or vocabulary. Raises DataError.

    `model` is the folder of the model, whose tokenizer may have made the data for a model with
    another number of embeddings.
    """
    if manifest.seq_len != seq_len:
        raise DataError(
            f"{folder} was prepared for seq_len {manifest.seq_len} and train.seq_len is {seq_len}; "
            f"prepare it again, or set train.seq_len: {manifest.seq_len}."
        )
    same_tokenizer = model is not None and tokenizer_digest(model) == manifest.tokenizer_sha256
    if fault := vocabulary_fault(vars(manifest), vocab_size, same_tokenizer):
        raise DataError(f"{folder}: {fault}; prepare it again with this model's tokenizer.")
