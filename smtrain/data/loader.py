"""Token batches for training, in an order that is a pure function of (seed, epoch).

Sample i of the endless stream belongs to epoch i // samples and is the window of `seq_len` + 1 tokens that the epoch's
permutation names. A global batch is `global_batch_size` consecutive samples, dealt to the data-parallel ranks in equal
contiguous parts, so it is the same batch for every number of ranks, and (seed, samples consumed) is the whole state.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from smtrain.data.manifest import PREFIX, Manifest
from smtrain.errors import DataError


class TokenLoader:
    """Batches of one data-parallel rank out of the folder that `prepare` wrote.

    Raises DataError where the folder is no prepared dataset, is damaged, or was prepared for another seq_len or
    vocabulary. `vocab_size` is the model's.
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
    ) -> None:
        if global_batch_size % dp_size or not 0 <= dp_rank < dp_size:
            raise ValueError(f"rank {dp_rank} of {dp_size} cannot share a global batch of {global_batch_size}")
        self.manifest = Manifest.load(folder)
        _check(self.manifest, folder, seq_len, vocab_size)
        self.seq_len = seq_len
        self.global_batch_size = global_batch_size
        self.samples = self.manifest.samples
        self._share = global_batch_size // dp_size
        self._first = dp_rank * self._share
        self._seed = seed
        self._orders: dict[int, NDArray[Any]] = {}
        self._dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self._path = folder / f"{PREFIX}.bin"
        # plain reads and not a mapping: over FastFile a failed page would be SIGBUS, a failed read is an error
        try:
            self._file = os.open(self._path, os.O_RDONLY)
            size = os.fstat(self._file).st_size
        except OSError as error:
            raise DataError(f"{self._path} cannot be read ({error.strerror}); prepare the data again.") from error
        if size != self.manifest.tokens * self._dtype.itemsize:
            os.close(self._file)
            raise DataError(
                f"{self._path} has {size} bytes and its manifest tells of "
                f"{self.manifest.tokens * self._dtype.itemsize}; prepare the data again."
            )
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._ahead: tuple[int, Future[torch.Tensor]] | None = None

    def batch(self, samples_consumed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the global batch that follows `samples_consumed` samples.

        Returns (input_ids, labels), int64, each [global_batch_size / dp_size, seq_len]; labels are the inputs shifted
        by one. The batch after it is read in the background.
        """
        if self._ahead is not None and self._ahead[0] == samples_consumed:
            windows = self._ahead[1].result()
        else:
            windows = self._reader.submit(self._read, samples_consumed).result()
        following = samples_consumed + self.global_batch_size
        self._ahead = (following, self._reader.submit(self._read, following))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def sample_ids(self, samples_consumed: int) -> list[int]:
        """Which windows of the dataset this rank's part of that global batch holds."""
        first = samples_consumed + self._first
        return [self._sample(i) for i in range(first, first + self._share)]

    def close(self) -> None:
        """End the read-ahead and close the file."""
        self._reader.shutdown(cancel_futures=True)
        os.close(self._file)

    def _sample(self, index: int) -> int:
        epoch, place = divmod(index, self.samples)
        order = self._orders.get(epoch)
        if order is None:
            order = epoch_order(self._seed, epoch, self.samples)
            # a global batch may reach over the end of an epoch, so the one before is still of use
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1} | {epoch: order}
        return int(order[place])

    def _read(self, samples_consumed: int) -> torch.Tensor:
        windows = np.empty((self._share, self.seq_len + 1), np.int64)
        length = (self.seq_len + 1) * self._dtype.itemsize
        for row, sample in enumerate(self.sample_ids(samples_consumed)):
            try:
                raw = os.pread(self._file, length, sample * self.seq_len * self._dtype.itemsize)
            except OSError as error:
                raise DataError(f"{self._path} cannot be read ({error.strerror}); check the channel.") from error
            if len(raw) != length:
                raise DataError(f"{self._path} became shorter while it was read; prepare the data again.")
            windows[row] = np.frombuffer(raw, self._dtype)
        return torch.from_numpy(windows)


def epoch_order(seed: int, epoch: int, samples: int) -> NDArray[Any]:
    """The order of an epoch's samples, int32 or int64 [samples].

    RandomState over Philox, because numpy promises that both keep their streams for ever, and a resumed run may have
    another numpy.
    """
    order = np.arange(samples, dtype=np.int32 if samples < 2**31 else np.int64)
    key = np.array([seed % 2**64, epoch], np.uint64)
    np.random.RandomState(np.random.Philox(key=key)).shuffle(order)
    return order


def _check(manifest: Manifest, folder: Path, seq_len: int, vocab_size: int) -> None:
    if manifest.seq_len != seq_len:
        raise DataError(
            f"{folder} was prepared for seq_len {manifest.seq_len} and train.seq_len is {seq_len}; "
            "prepare it again or set train.seq_len to the former."
        )
    known = manifest.model_vocab_size
    if vocab_size < manifest.vocab_size or (known is not None and known != vocab_size):
        raise DataError(
            f"{folder} was prepared for a vocabulary of {known or manifest.vocab_size} and the model has {vocab_size}; "
            "prepare it again with this model's tokenizer."
        )
