"""The weights that a run begins from, compared while they are read with what was written, or with what was first read.

A model of others has no checksums. It gets a crc32 of every tensor when the run first reads it whole, kept below the
run's checkpoints, where its next attempt finds them: of one that was cut off before its first checkpoint, and of a run
that trains an adapter, whose base is read at every start.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch.distributed as dist

from smtrain.core.config import JobConfig
from smtrain.core.errors import CheckpointError
from smtrain.core.machine import cores_here
from smtrain.worker.checkpoint.checksum import crc32
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.checkpoint.verifying import Watch, deal, host_of
from smtrain.worker.train.engines import Gather

KEPT = "model-checksums"
"""The folder below a run's checkpoints."""


class BaseWeights:
    """Checks on threads what this process reads of them, from now on. Collective."""

    def __init__(self, source: WeightSource | None, config: JobConfig, gather: Gather, checkpoints: Path) -> None:
        """`source` is None where the run goes on from a checkpoint, or begins from nothing."""
        self._gather, self._watch, self._path = gather, None, checkpoints / KEPT
        self._here = host_of(gather(int(os.environ.get("LOCAL_RANK", "0"))), dist.get_rank())
        known: dict[str, int] = {}
        if source is not None and config.checkpoint.verify == "full" and dist.get_rank() == 0:
            self._path /= f"{_shapes(source)}.json"
            known = _read(self._path)
        self._known: dict[str, int] = gather(known)[0]
        if source is not None and config.checkpoint.verify == "full":
            threads = max(1, cores_here() // len(self._here))
            self._watch = Watch(threads, _share(config, source, self._here), self._known)
            source.watch(self._watch)

    def refuse_damaged(self) -> None:
        """Raise `CheckpointError` on every rank where what any has read is not what was written. Collective."""
        self._share_what_is_left()
        everyone = self._gather((self._watch.fault(), self._watch.found) if self._watch else (None, {}))
        first: dict[str, tuple[int, int]] = {}
        for rank, (fault, found) in enumerate(everyone):
            if fault is not None:
                raise CheckpointError(f"the weights that the run begins from are damaged: {fault} (rank {rank})")
            for name, crc in found.items():
                before, one = first.setdefault(name, (crc, rank))
                if before != crc:
                    raise CheckpointError(
                        f"the weights that the run begins from are not the same everywhere: ranks {one} and {rank} "
                        f"read different bytes of {name}; start the job again to read them anew"
                    )
        crcs = {name: crc for name, (crc, _) in first.items()}
        if dist.get_rank() == 0 and not set(crcs) <= set(self._known):
            _write(self._path, {**self._known, **crcs})

    def _share_what_is_left(self) -> None:
        """What was another's to check, which did not read it, by those of this host that did."""
        watch = self._watch
        told = self._gather((watch.left, watch.begun) if watch else (set(), set()))
        here = [told[rank] for rank in self._here]
        begun = set().union(*(names for _, names in here))
        left = [names - begun for names, _ in here]
        if watch:
            watch.add(deal(left, dict.fromkeys(set().union(*left), 1))[dist.get_rank() - self._here.start])


def _share(config: JobConfig, source: WeightSource, here: range) -> tuple[int, int]:
    """Which part this rank checks of what it reads, as (i, n); a guess at who else reads it."""
    tp, stage, rank = config.parallel.tp, config.parallel.tp * config.dp, dist.get_rank()
    if config.train.engine != "native":  # the nxd engine lays its ranks out by itself
        return (here.index(rank), len(here)) if source.read_alike else (0, 1)
    alike = [r for r in here if r // stage == rank // stage and (source.read_alike or r % tp == rank % tp)]
    return alike.index(rank), len(alike)


def _shapes(source: WeightSource) -> str:
    """A name for the record: another model's is another."""
    held = [[name, source.shape(name), str(source.dtype(name))] for name in source.names()]
    return hashlib.sha256(json.dumps(held).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, int]:
    """What is kept; nothing, and said so, where that is damaged."""
    if not path.is_file():
        return {}
    try:
        told = json.loads(path.read_bytes())
        if told["sum"] == _sum(told["crc32"]):
            return {name: int(crc, 16) for name, crc in told["crc32"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    print(f"{path} is damaged: the model's checksums are made anew", flush=True)
    return {}


def _write(path: Path, crcs: dict[str, int]) -> None:
    kept = {name: f"{crc:08x}" for name, crc in sorted(crcs.items())}
    partial = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as out:
            json.dump({"sum": _sum(kept), "crc32": kept}, out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror}); check the disk.") from error


def _sum(kept: dict[str, str]) -> str:
    return f"{crc32(json.dumps(kept, sort_keys=True).encode()):08x}"
