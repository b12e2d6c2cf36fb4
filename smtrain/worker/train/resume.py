"""Choose the checkpoint to resume from: newest, complete on every host, verified."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from smtrain.core.config import JobConfig
from smtrain.core.errors import CheckpointError
from smtrain.core.machine import cores_here
from smtrain.core.model.lora import Lora, another_adapter
from smtrain.core.protocol.checkpoints import RECORDS
from smtrain.core.protocol.container import Container
from smtrain.core.protocol.lineage import Lineage
from smtrain.worker.checkpoint import manifest as checkpoint_manifest
from smtrain.worker.checkpoint.verifying import Verification, deal, host_of, quickest
from smtrain.worker.engine.base import Engine
from smtrain.worker.output import log_line
from smtrain.worker.train.data_position import arithmetic
from smtrain.worker.train.engines import EngineRecords, Gather

_NO_CHECKPOINT = (
    "no checkpoint of this run can be trained on: {}; bring back what was written, or give the run"
    " another name to start over"
)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint, whole by the sizes of its files, on the disk of every host."""

    step: int
    name: str
    """Its path below the run's prefix."""
    path: Path
    digest: str
    """sha256 of its record, which tells apart two checkpoints of the same step."""
    state: dict[str, Any]
    """The training loop's part."""


@dataclass(frozen=True)
class ResumeChoice:
    """The checkpoints that a run may resume from; it takes the first good one."""

    checkpoints: list[SavedCheckpoint]
    abandoned_checkpoints: list[SavedCheckpoint]
    """Newer ones that the user passed over (checkpoint.step); the run never returns to them."""


def choose(
    lineage: Lineage, records: EngineRecords, gather: Gather, step: int | None
) -> ResumeChoice:
    """Choose the checkpoints of a line that are whole on every host, the newest first. Collective.

    `step` is `checkpoint.step`: take the checkpoint of that step, or the newest that was trained
    from it. Raises `CheckpointError` if no checkpoint matches.
    """
    own_checkpoints, faults, damaged_names = _on_this_host(lineage, records)
    everyone = gather((sorted(own_checkpoints), faults, damaged_names))
    common = set(own_checkpoints).intersection(*(keys for keys, _, _ in everyone))
    checkpoints = [own_checkpoints[key] for key in sorted(common, reverse=True)]
    reasons = {
        name: f"{reason} (on rank {rank})"
        for name, (rank, reason) in _first_faults(everyone).items()
    }
    for name, reason in reasons.items() if dist.get_rank() == 0 else ():
        log_line(f"passing over checkpoint {name}: {reason}")
    if not checkpoints and any(
        damaged_names for _, _, damaged_names in everyone
    ):  # a run that has trained never silently starts over
        raise CheckpointError(
            _NO_CHECKPOINT.format("; ".join(reasons.values())), code="checkpoint.damaged"
        )
    if step is None:
        abandoned_digests = {digest for s in checkpoints for digest in s.state.get("abandoned", ())}
        return ResumeChoice(
            [s for s in checkpoints if s.digest not in abandoned_digests],
            [s for s in checkpoints if s.digest in abandoned_digests],
        )
    matching = [s for s in checkpoints if s.step == step or s.state.get("chosen") == step]
    if not matching:
        steps = ", ".join(str(s.step) for s in reversed(checkpoints)) or "none"
        raise CheckpointError(
            f"checkpoint.step: {step} is not a whole checkpoint of this run (those are: {steps});"
            " name one of them, or leave it out to resume from the newest",
            code="checkpoint.missing",
        )
    return ResumeChoice(matching, [s for s in checkpoints if s not in matching and s.step > step])


def _on_this_host(
    lineage: Lineage, records: EngineRecords
) -> tuple[dict[tuple[int, str], SavedCheckpoint], dict[str, str], list[str]]:
    """This host's checkpoints: those that are whole, the faults of incomplete ones, and which of
    these are damaged.

    One that was never completed, or never arrived, is cut short but not damaged.
    """
    checkpoints: dict[tuple[int, str], SavedCheckpoint] = {}
    faults: dict[str, str] = {}
    damaged_names: list[str] = []
    for step, path in lineage.checkpoints():
        reason, state = records.fault(path), {}
        if (path / records.name).exists():
            try:
                state = records.state(path)
                wrong = arithmetic(step, state)
            except CheckpointError as error:
                wrong = str(error)
            if wrong is not None:
                damaged_names.append(lineage.name(path))
                reason = wrong
        if reason is None:
            digest = hashlib.sha256((path / records.name).read_bytes()).hexdigest()
            checkpoints[step, digest] = SavedCheckpoint(
                step, lineage.name(path), path, digest, state
            )
        else:
            faults[lineage.name(path)] = reason
    return checkpoints, faults, damaged_names


def _first_faults(everyone: list[tuple[Any, dict[str, str], Any]]) -> dict[str, tuple[int, str]]:
    """For each checkpoint with a fault, the first rank that has one, and the reason."""
    out: dict[str, tuple[int, str]] = {}
    for rank, (_, faults, _) in enumerate(everyone):
        for name, reason in faults.items():
            out.setdefault(name, (rank, reason))
    return dict(sorted(out.items()))


class Resume:
    """Loads the newest checkpoint whose bytes are those written.

    Files that the engine reads whole are hashed while they are loaded. Hashing of its other files
    begins at once; files that it does not read are hashed during the first steps.
    """

    def __init__(
        self, choice: ResumeChoice, records: EngineRecords, gather: Gather, config: JobConfig
    ) -> None:
        self._choice, self._records, self._gather = choice, records, gather
        self._mesh = (config.parallel.tp, config.parallel.pp, config.shards)
        self._full, self._steps = config.checkpoint.verify == "full", config.train.steps
        self._first_verification = (
            self._verify(choice.checkpoints[0]) if choice.checkpoints else None
        )
        self.passed_over: list[str] = []
        """Names of damaged checkpoints."""
        self._unread: tuple[SavedCheckpoint, Verification] | None = None
        self._doubtful: set[str] = set()
        self.hashed, self.loading, self.waited = 0, 0.0, 0.0
        """This rank's bytes, the seconds that loading took, and those spent waiting only for
        hashes.
        """

    def load(self, engine: Engine) -> SavedCheckpoint | None:
        """Load the engine's state; returns the checkpoint, or None if there is nothing to resume.

        Collective.

        Raises `CheckpointError` if every checkpoint is damaged: a run that has trained never
        silently starts over.
        """
        damaged_texts = []
        for at, checkpoint in enumerate(self._choice.checkpoints):
            verification = self._first_verification if at == 0 else self._verify(checkpoint)
            load_error, began, read = None, time.perf_counter(), dict[str, int]()
            try:
                engine.load(checkpoint.path, read if verification else None)
            except CheckpointError as error:
                load_error = error
            load_end = time.perf_counter()
            faults = self._gather(verification.fault(read) if verification else None)
            fault = _first_fault(faults)
            if fault is None:
                if (
                    load_error is not None
                ):  # the bytes are right, so the engine and the checkpoint do not fit
                    raise load_error
                self.waited = time.perf_counter() - load_end
                self._say(checkpoint, verification, load_end - began)
                self._verify_unread(checkpoint)
                return checkpoint
            damaged_texts.append(f"{checkpoint.name}: {fault}")
            self.passed_over.append(checkpoint.name)
            following = self._choice.checkpoints[at + 1 : at + 2]
            if dist.get_rank() == 0 and following:
                log_line(
                    f"passing over checkpoint {checkpoint.name}, which is damaged: {fault};"
                    f" resuming from {following[0].name}, {checkpoint.step - following[0].step}"
                    " steps are trained again (`--from-step N`, checkpoint.step, chooses another)"
                )
        if damaged_texts:
            raise CheckpointError(
                _NO_CHECKPOINT.format("; ".join(damaged_texts)), code="checkpoint.damaged"
            )
        return None

    def doubtful(self, wait: bool) -> set[str]:
        """The checkpoint that was loaded, until it is known to be whole. Collective.

        The run can train from it, but a file that it did not load (the bf16 weights next to the
        master weights) may be damaged. Rank 0 says so once.
        """
        if self._unread is None:
            return self._doubtful
        checkpoint, verification = self._unread
        if not all(self._gather(wait or verification.is_done)):
            return self._doubtful
        faults = self._gather(verification.fault({}))
        self._unread = None
        fault = _first_fault(faults)
        if fault is None:
            self._doubtful = set()
        elif dist.get_rank() == 0:
            log_line(
                f"checkpoint {checkpoint.name} is damaged: {fault}; training, which does not read"
                " that file, continues, and older checkpoints are kept until newer ones are whole."
                " Export and generate from a later one"
            )
        return self._doubtful

    def close(self) -> None:
        """Stop hashing: the process is about to end."""
        if self._unread is not None:
            self._unread[1].close()

    def _verify_unread(self, checkpoint: SavedCheckpoint) -> None:
        files = self._records.files(checkpoint.path)
        unread_names = sorted(
            name for name in self._records.unread_files(checkpoint.path) if quickest(files[name])
        )
        if unread_names and self._full and checkpoint.step < self._steps:
            own_names = unread_names[dist.get_rank() :: dist.get_world_size()]
            self._unread = (
                checkpoint,
                Verification(checkpoint.path, {name: files[name] for name in own_names}),
            )
            self._doubtful = {checkpoint.name}

    def _verify(self, checkpoint: SavedCheckpoint) -> Verification | None:
        """Begin to hash this rank's share of the files that the ranks of its host read.

        Collective.
        """
        locals_ = self._gather(int(os.environ.get("LOCAL_RANK", "0")))
        if not self._full:
            return None
        rank = dist.get_rank()
        host_ranks = host_of(locals_, rank)
        files = self._records.files(checkpoint.path)
        # If nothing is left to train, the checkpoint is the result of the run: all of it has to be
        # good.
        last = (
            self._records.unread_files(checkpoint.path) if checkpoint.step >= self._steps else set()
        )
        files_by_rank = [
            self._records.read_by(checkpoint.path, self._mesh, peer) | last for peer in host_ranks
        ]
        share = deal(files_by_rank, {name: entry["size"] for name, entry in files.items()})[
            rank - host_ranks.start
        ]
        hashes = {name: files[name] for name in share if quickest(files[name])}
        if rank == 0 and not all(quickest(entry) for entry in files.values()):
            log_line(
                f"checkpoint {checkpoint.name} was written without hashes: only sizes are compared"
            )
        loaded_files = self._records.read_whole(checkpoint.path, self._mesh, rank)
        return Verification(
            checkpoint.path, hashes, max(1, cores_here() // len(host_ranks)), loaded_files
        )

    def _say(
        self, checkpoint: SavedCheckpoint, verification: Verification | None, loading: float
    ) -> None:
        if verification is None or not verification.bytes:
            return
        self.hashed, self.loading = verification.bytes, loading
        if dist.get_rank() == 0:
            gigabytes = verification.bytes / 1e9
            log_line(
                f"checkpoint {checkpoint.name} is what was written: rank 0 checked {gigabytes:.3g}"
                f" GB, loaded in {loading:.1f} s and waited {self.waited:.1f} s"
            )


def _first_fault(faults: list[str | None]) -> str | None:
    return next(
        (f"{fault} (rank {rank})" for rank, fault in enumerate(faults) if fault is not None), None
    )


def lineage_of(container: Container, gather: Gather) -> Lineage:
    """The line of checkpoints that this job continues, the same on every host. Collective."""
    root = container.checkpoint_dir
    return Lineage(
        root, gather(Lineage.of(root, container.job).parts if dist.get_rank() == 0 else None)[0]
    )


def check_engine(lineage: Lineage, engine: str, adapter: bool) -> None:
    """Raise `CheckpointError` if the run's checkpoints are another engine's: this one would start
    over.

    Adapters have one format for both engines.
    """
    reads = "native" if adapter else engine
    for other_engine, mark in RECORDS.items():
        for _, path in reversed(lineage.checkpoints()):
            if other_engine == reads or not (path / mark).exists():
                continue
            if reason := _other_adapter(path, adapter, other_engine):
                raise CheckpointError(f"{path.name} of this run {reason}")
            raise CheckpointError(
                f"train.engine: {path.name} of this run was written by engine {other_engine}; set"
                " that, or start another run from its weights (`smtrain convert`) with engine"
                f" {engine}"
            )


def _other_adapter(path: Path, adapter: bool, engine: str) -> str | None:
    """Explain that only one of checkpoint and config has an adapter; None for any other reason."""
    if engine == "nxd":
        return another_adapter(None, Lora(1, 1.0)) if adapter else None
    try:
        return another_adapter(checkpoint_manifest.Manifest.read(path).lora, None)
    except CheckpointError:
        return None  # `choose` reports what is wrong with it
