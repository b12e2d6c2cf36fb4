"""Verify the weights that a run starts from while they are read.

smtrain's own files have checksums. For other models the run keeps a crc32 of every tensor next to
its checkpoints when it first reads them all. A later attempt compares: one that starts before the
first checkpoint, or that trains an adapter, whose base is read at every start.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch.distributed as dist

from smtrain.core.config import JobConfig
from smtrain.core.errors import CheckpointError
from smtrain.core.files import read_object, write_atomically
from smtrain.core.machine import cores_here
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.checkpoint.verifying import Watch, deal, host_of
from smtrain.worker.checksum import crc32
from smtrain.worker.train.engines import Gather

CHECKSUM_FOLDER = "model-checksums"
"""The folder below a run's checkpoints."""


class BaseWeights:
    """Checks what this process reads, on threads, from now on. Collective."""

    def __init__(
        self, source: WeightSource | None, config: JobConfig, gather: Gather, checkpoints: Path
    ) -> None:
        """`source` is None if the run resumes from a checkpoint or starts from random weights."""
        self._gather, self._watch, self._path = gather, None, checkpoints / CHECKSUM_FOLDER
        self._host_ranks = host_of(gather(int(os.environ.get("LOCAL_RANK", "0"))), dist.get_rank())
        known_crcs: dict[str, int] = {}
        if source is not None and config.checkpoint.verify == "full" and dist.get_rank() == 0:
            self._path /= f"{_shapes(source)}.json"
            known_crcs = _read(self._path)
        self._known_crcs: dict[str, int] = gather(known_crcs)[0]
        if source is not None and config.checkpoint.verify == "full":
            threads = max(1, cores_here() // len(self._host_ranks))
            self._watch = Watch(threads, _share(config, source, self._host_ranks), self._known_crcs)
            source.watch(self._watch)

    def refuse_damaged(self) -> None:
        """Raise `CheckpointError` on every rank if any has read bytes that differ from those
        written. Collective.
        """
        self._share_what_is_left()
        everyone = self._gather(
            (self._watch.fault(), self._watch.crcs) if self._watch else (None, {})
        )
        first: dict[str, tuple[int, int]] = {}
        for rank, (fault, checksums) in enumerate(everyone):
            if fault is not None:
                raise CheckpointError(
                    f"the weights that the run begins from are damaged: {fault} (rank {rank})",
                    code="checkpoint.damaged",
                )
            for name, crc in checksums.items():
                first_crc, first_rank = first.setdefault(name, (crc, rank))
                if first_crc != crc:
                    raise CheckpointError(
                        "the weights that the run begins from are not the same everywhere: ranks"
                        f" {first_rank} and {rank} read different bytes of {name}; start the job"
                        " again to read them again"
                    )
        crcs = {name: crc for name, (crc, _) in first.items()}
        if dist.get_rank() == 0 and not set(crcs) <= set(self._known_crcs):
            _write(self._path, {**self._known_crcs, **crcs})

    def _share_what_is_left(self) -> None:
        """Check what another rank of this host was to check but did not read. Collective."""
        watch = self._watch
        progress = self._gather(
            (watch.unchecked_names, watch.checked_names) if watch else (set(), set())
        )
        host_progress = [progress[rank] for rank in self._host_ranks]
        begun_names = set().union(*(names for _, names in host_progress))
        unread_names = [names - begun_names for names, _ in host_progress]
        if watch:
            watch.add(
                deal(unread_names, dict.fromkeys(set().union(*unread_names), 1))[
                    dist.get_rank() - self._host_ranks.start
                ]
            )


def _share(config: JobConfig, source: WeightSource, host_ranks: range) -> tuple[int, int]:
    """The part of its reads that this rank checks, as (i, n): a guess at which ranks read the
    same.
    """
    tp, stage, rank = config.parallel.tp, config.parallel.tp * config.shards, dist.get_rank()
    if config.train.engine != "native":  # the nxd engine lays its ranks out by itself
        return (host_ranks.index(rank), len(host_ranks)) if source.read_alike else (0, 1)
    same_readers = [
        r
        for r in host_ranks
        if r // stage == rank // stage and (source.read_alike or r % tp == rank % tp)
    ]
    return same_readers.index(rank), len(same_readers)


def _shapes(source: WeightSource) -> str:
    """Name the record after names, shapes and types, so that another model gets another record."""
    shapes = [[name, source.shape(name), str(source.dtype(name))] for name in source.names()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, int]:
    """The checksums that are kept; {} with a line in the log if the record is damaged."""
    if not path.is_file():
        return {}
    try:
        record = read_object(path)
        if record["sum"] == _sum(record["crc32"]):
            return {name: int(crc, 16) for name, crc in record["crc32"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    print(f"{path} is damaged: the model's checksums are made again", flush=True)
    return {}


def _write(path: Path, crcs: dict[str, int]) -> None:
    crc_texts = {name: f"{crc:08x}" for name, crc in sorted(crcs.items())}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"sum": _sum(crc_texts), "crc32": crc_texts}, indent=1))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror}); check the disk."
        ) from error


def _sum(crc_texts: dict[str, str]) -> str:
    return f"{crc32(json.dumps(crc_texts, sort_keys=True).encode()):08x}"
