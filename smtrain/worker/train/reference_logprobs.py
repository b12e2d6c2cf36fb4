"""The reference's log-probabilities of all pairs of a run, computed once and kept with its
checkpoints.

The reference is the model that the run starts from, or another folder, never weights that were
trained here. A pass over all pairs before the first step, on the engine and mesh of the training,
gives two numbers a pair. They are kept in a file named after the reference's weights, the data and
the row's length; each later attempt verifies and reads it. With LoRA the adapters are new in that
pass and add exactly 0, so the reference is the base model.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from smtrain.core.config import JobConfig
from smtrain.core.digests import digest
from smtrain.core.errors import CheckpointError
from smtrain.core.files import parse_json, write_atomically
from smtrain.worker.checkpoint.digest import weights_digest
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.data.load.rows import PairRows
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.output import log_line
from smtrain.worker.train.engines import Gather

if TYPE_CHECKING:
    from smtrain.worker.engine.native import NativeEngine

REFERENCE_FOLDER = "reference-logps"
"""The folder below a run's checkpoints."""
SAY_EVERY = 60.0
"""Seconds between lines of a long pass."""
FORMAT = 1
StopCheck = Callable[[], bool]


class References:
    """The reference of a run, and its log-probabilities if an attempt before has kept them.

    Collective.
    """

    def __init__(
        self,
        config: JobConfig,
        manifest: DatasetManifest,
        source: WeightSource | None,
        gather: Gather,
        checkpoints: Path,
        resumed_digest: str | None,
    ) -> None:
        """`source` has the reference's weights; None: they are gone, and `resumed_digest` is their
        digest in a checkpoint.

        Raises `CheckpointError` on every rank if the file with the numbers is damaged, or of
        another reference.
        """
        self._config, self._source = config, source
        self._none = config.train.dpo is not None and config.train.dpo.reference == "none"
        reference_state: tuple[str | None, NDArray[np.float32] | None, str | None] = (
            None,
            None,
            None,
        )
        if dist.get_rank() == 0:
            weights = (
                "none"
                if self._none
                else resumed_digest
                if source is None
                else weights_digest(source, every_layer=True)
            )
            reference_state = (weights, None, None)
        self.weights = gather(reference_state)[0][0]
        """A digest of the reference's weights, or `none`."""
        content = {
            name: entry for name, entry in manifest.files.items() if name in manifest.content
        }
        held_out = {
            name: entry for name, entry in manifest.files.items() if name.startswith("validation")
        }
        parts = [content, held_out if config.train.validation else None]
        self._key = digest([FORMAT, self.weights, *parts, config.train.seq_len])
        self.path = checkpoints / REFERENCE_FOLDER / f"{self._key[:16]}.f32"
        self._numbers: NDArray[np.float32] | None = None
        fault = None
        if dist.get_rank() == 0 and self.path.is_file():
            try:
                self._numbers = _read(self.path, self._key)
            except CheckpointError as error:
                fault = str(error)
        fault, self._numbers = gather((fault, self._numbers))[0]
        if fault is not None:
            raise CheckpointError(fault, code="checkpoint.damaged")

    @property
    def is_complete(self) -> bool:
        """Whether no pass is needed."""
        return self._none or self._numbers is not None

    def fill(
        self,
        engine: NativeEngine,
        parts: Sequence[PairRows],
        start: WeightSource | None,
        beat: Callable[[str], None],
        is_stopped: StopCheck,
    ) -> None:
        """Give the pairs of all `parts` their numbers, by a pass over them unless `is_complete`.

        Collective.

        The engine has the weights of the run's start, which `start` can fill in again. If
        `is_stopped` becomes true, the pairs stay without numbers, and no step may follow.
        """
        if self._none:
            return
        if self._numbers is None:
            began = time.monotonic()
            numbers = self._compute(engine, parts, start, beat, is_stopped)
            if numbers is None:
                return
            self._numbers = numbers
            fault = None
            if engine.rank == 0:
                fault = self._write(numbers)
                log_line(
                    f"reference: log-probabilities of {len(numbers)} pairs computed in"
                    f" {time.monotonic() - began:.1f} s"
                )
            if fault := engine.mesh.gather(fault)[0]:
                raise CheckpointError(fault, code="disk.unwritable")
        elif engine.rank == 0:
            log_line(
                f"reference: log-probabilities of {len(self._numbers)} pairs read from"
                f" {REFERENCE_FOLDER}/{self.path.name}"
            )
        at = 0
        for part in parts:
            part.references[:] = self._numbers[at : at + len(part.references)]
            at += len(part.references)

    def _compute(
        self,
        engine: NativeEngine,
        parts: Sequence[PairRows],
        start: WeightSource | None,
        beat: Callable[[str], None],
        is_stopped: StopCheck,
    ) -> NDArray[np.float32] | None:
        has_other_weights = (
            self._config.train.dpo is not None and self._config.train.dpo.folder is not None
        )
        if has_other_weights:
            assert self._source is not None
            engine.begin_from(self._source)
        part_numbers = [self._pass(engine, part, beat, is_stopped) for part in parts]
        if has_other_weights:
            assert start is not None
            engine.begin_from(start)
        if any(part_result is None for part_result in part_numbers):
            return None
        numbers = np.concatenate(
            [part_result for part_result in part_numbers if part_result is not None]
        )
        if not np.isfinite(numbers).all():
            pair = int(np.flatnonzero(~np.isfinite(numbers).all(-1))[0])
            raise CheckpointError(
                f"the reference gives pair {pair} a log-probability of NaN or infinity:"
                " its weights are damaged, or beyond what train.precision holds; compare them with"
                " their hashes, or set bf16 or fp32",
                code="checkpoint.damaged",
            )
        return numbers

    def _pass(
        self,
        engine: NativeEngine,
        part: PairRows,
        beat: Callable[[str], None],
        is_stopped: StopCheck,
    ) -> NDArray[np.float32] | None:
        """The numbers of one part, [pairs, 2], from the rows of its first epoch; None if it is
        stopped.

        The training's first epoch has the same rows, so that on the same mesh its first numbers are
        the same bits.
        """
        batch, rows = self._config.train.global_batch_size, part.packing.rows(0)
        share = batch // engine.dp_size
        out, last_report = torch.zeros(part.references.shape), time.monotonic()
        for first in range(engine.dp_rank * share, rows + engine.dp_rank * share, batch):
            if is_stopped():
                return None
            pairs = [part.packing.row(i) if i < rows else [] for i in range(first, first + share)]
            input_ids, labels, segments, _ = part.rows(pairs)
            logps = engine.log_probabilities(input_ids, labels, segments, part.most)
            for row, pair_numbers in enumerate(pairs):
                out[pair_numbers] = logps[row, : len(pair_numbers)]
            beat("the reference's log-probabilities")
            if engine.rank == 0 and time.monotonic() - last_report > SAY_EVERY:
                last_report = time.monotonic()
                log_line(f"reference: log-probabilities of {first + share} of {rows} rows so far")
        return engine.sum_over_data_ranks(out).numpy()

    def _write(self, numbers: NDArray[np.float32]) -> str | None:
        """Keep the numbers; returns a sentence if the disk refuses."""
        raw = np.ascontiguousarray(numbers, "<f4").tobytes()
        head = {"key": self._key, "pairs": len(numbers), "sha256": hashlib.sha256(raw).hexdigest()}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(head).encode() + b"\n" + raw)
        except OSError as error:
            return f"{self.path} cannot be written ({error.strerror}); check the disk"
        return None


def _read(path: Path, key: str) -> NDArray[np.float32]:
    """The numbers of a file, [pairs, 2].

    Raises `CheckpointError` if it is damaged or has another key.
    """
    remedy = "delete it, and the next attempt computes it again from the reference's weights"
    try:
        line, _, raw = path.read_bytes().partition(b"\n")
        head: dict[str, Any] = parse_json(line)
        stored_key, pairs, checksum = head["key"], head["pairs"], head["sha256"]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); check the disk") from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path} is damaged: it has no header; {remedy}") from None
    if stored_key != key:
        raise CheckpointError(
            f"{path} holds the log-probabilities of another reference, of other pairs or for"
            f" another train.seq_len; {remedy}"
        )
    if len(raw) != 8 * pairs or hashlib.sha256(raw).hexdigest() != checksum:
        raise CheckpointError(
            f"{path} is damaged: its bytes are not those that were written; {remedy}"
        )
    return np.frombuffer(raw, "<f4").reshape(-1, 2).astype(np.float32)
