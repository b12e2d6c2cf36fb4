"""Verify that files hold the bytes that were written: hash them on threads while they are loaded.

Hashing releases the interpreter's lock, so a checkpoint can be loaded meanwhile; both read the
files front to back, and the second reader finds the pages in memory. Pure Python, no torch.
"""

from __future__ import annotations

import hashlib
import os
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from smtrain.core.errors import CheckpointError, first_line
from smtrain.worker.checkpoint.manifest import NAME, Manifest, fault
from smtrain.worker.checksum import crc32

_BLOCK = 4 << 20


class GivenUpError(Exception):
    """The checksum is no longer needed."""


def sums_of(
    path: Path, *kinds: str, given_up: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Checksums of a file, read once: `sha256` in hex, `crc32`.

    Raises OSError as the disk does, and `GivenUpError` soon after `given_up()`.
    """
    digest, crc, buffer = hashlib.sha256(), 0, bytearray(_BLOCK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(view):
            # Asked at each block: a process that ends must not first hash the rest of a large file.
            if given_up():
                raise GivenUpError
            if "sha256" in kinds:
                digest.update(view[:n])
            if "crc32" in kinds:
                crc = crc32(view[:n], crc)
    return {kind: digest.hexdigest() if kind == "sha256" else crc for kind in kinds}


def quickest(entry: Mapping[str, Any]) -> str | None:
    """The cheapest checksum in a file's record: crc32 is some ten times as fast as sha256.

    None without any.
    """
    return next((kind for kind in ("crc32", "sha256") if kind in entry), None)


def differs(
    path: Path, entry: Mapping[str, Any], given_up: Callable[[], bool] = lambda: False
) -> str | None:
    """Describe how a file differs from its record `entry`, None if it does not.

    Raises as `sums_of` does.
    """
    kind = quickest(entry) or "sha256"
    return _difference(kind, sums_of(path, kind, given_up=given_up)[kind], entry[kind])


def _difference(kind: str, actual: Any, recorded_sum: Any) -> str | None:
    if actual == recorded_sum:
        return None
    if kind == "crc32":
        actual, recorded_sum = f"{actual:08x}", f"{recorded_sum:08x}"
    return f"has {kind} {actual[:12]} and was written with {recorded_sum[:12]}"


def check_hash(checkpoint: Path, name: str, entry: Mapping[str, Any], record: str = NAME) -> None:
    """Raises `CheckpointError` if file `name` differs from its `entry` in the file
    `record`.
    """
    try:
        reason = differs(checkpoint / name, entry)
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint / name} cannot be read ({first_line(error)}): take another checkpoint",
            code="checkpoint.damaged",
        ) from None
    if reason:
        raise CheckpointError(
            f"{checkpoint / name} is damaged, it {reason} (by {record}): take another checkpoint",
            code="checkpoint.damaged",
        )


def verify(checkpoint: Path) -> None:
    """Compare all files with their hashes.

    Raises `CheckpointError` for the first that differs or is missing.
    """
    reason = fault(checkpoint)
    if reason is not None:
        raise CheckpointError(
            f"the checkpoint {checkpoint} is not whole: {reason}", code="checkpoint.damaged"
        )
    for name, entry in Manifest.read(checkpoint).files.items():
        check_hash(checkpoint, name, entry)


class Verification:
    """Hashes files of a checkpoint on `threads` threads, starting at once."""

    def __init__(
        self,
        checkpoint: Path,
        files: Mapping[str, Mapping[str, Any]],
        threads: int = 1,
        loaded_names: Collection[str] = (),
    ) -> None:
        """`files`: path in the checkpoint -> record, each with a checksum.

        Those of `loaded_names` that have a crc32 are left to the loader, so that the disk is read
        once.
        """
        self._checkpoint, self._files = checkpoint, files
        # A loader computes only crc32 on the way, so files with only a sha256 are read here.
        self._loaded = {
            name for name in loaded_names if name in files and quickest(files[name]) == "crc32"
        }
        self._lock, self.bytes, self._closed = threading.Lock(), 0, threading.Event()
        self._pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="verify")
        self._running = {
            name: self._pool.submit(self._differs, name)
            for name in sorted(files.keys() - self._loaded)
        }

    @property
    def is_done(self) -> bool:
        """Whether `fault` has nothing to wait for."""
        return not self._loaded and all(future.done() for future in self._running.values())

    def close(self) -> None:
        """Stop hashing, because the process is about to end."""
        self._closed.set()
        # Waiting for the threads would delay the end by the block that each of them hashes.
        self._pool.shutdown(wait=False, cancel_futures=True)

    def fault(self, read: Mapping[str, int]) -> str | None:
        """Wait for all hashes; describes the first file that differs, None if all match.

        `read`: crc32 of the files that were loaded; a file whose loading failed midway is read
        here.
        """
        reasons: dict[str, str | None] = {}
        for name in sorted(self._loaded):
            if name in read:
                reasons[name] = _difference("crc32", read[name], self._files[name]["crc32"])
                self.bytes += int(self._files[name]["size"])
            else:
                # Loading stopped midway, so no crc32 of the whole file is known.
                self._running[name] = self._pool.submit(self._differs, name)
        reasons |= {name: future.result() for name, future in self._running.items()}
        faults = [f"{name} {reason}" for name, reason in sorted(reasons.items()) if reason]
        self._pool.shutdown()
        return (
            faults[0] + (f", and so do {len(faults) - 1} more files" if len(faults) > 1 else "")
            if faults
            else None
        )

    def _differs(self, name: str) -> str | None:
        try:
            reason = differs(self._checkpoint / name, self._files[name], self._closed.is_set)
            size = os.stat(self._checkpoint / name).st_size
        except OSError as error:
            return f"cannot be read ({error.strerror or error})"
        with self._lock:
            self.bytes += size
        return reason


class Watch:
    """Checks tensors as a whole, on threads, while a source reads parts of them; for
    `WeightSource.watch`.
    """

    def __init__(
        self,
        threads: int = 1,
        share: tuple[int, int] = (0, 1),
        known_crcs: Mapping[str, int] | None = None,
    ) -> None:
        """`share` (i, n): this is the i-th of n processes that read the same, each of which checks
        its part at once.

        `known_crcs`: crc32 that an earlier reader found of tensors without a checksum.
        """
        self._share, self._known, self._lock = share, dict(known_crcs or {}), threading.Lock()
        self._pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="verify")
        self._read: dict[str, Callable[[], int | None]] = {}
        self._running: dict[str, Future[int | None]] = {}
        self.crcs: dict[str, int] = {}
        """crc32 of tensors without a checksum."""

    def __call__(self, name: str, check: Callable[[], int | None]) -> None:
        index, of = self._share
        with self._lock:
            if name not in self._read:
                self._read[name] = check
                # Not hash(), which differs from process to process: each name must have one
                # checker.
                if zlib.crc32(name.encode()) % of == index:
                    self._running[name] = self._pool.submit(check)

    @property
    def unchecked_names(self) -> set[str]:
        """Names read here that another process checks, if it reads them too."""
        return set(self._read) - set(self._running)

    @property
    def checked_names(self) -> set[str]:
        """Names that are checked here."""
        return set(self._running)

    def add(self, names: Iterable[str]) -> None:
        """Check these names too, which have been read."""
        for name in names:
            self._running[name] = self._pool.submit(self._read[name])

    def fault(self) -> str | None:
        """Wait for all checks; describes the first tensor that differs from the written one, None
        if all agree.
        """
        self._pool.shutdown()
        faults = [
            fault
            for name, future in self._running.items()
            if (fault := self._fault_of(name, future))
        ]
        return faults[0] if faults else None

    def _fault_of(self, name: str, future: Future[int | None]) -> str | None:
        if (error := future.exception()) is not None:
            return str(error)
        if (crc := future.result()) is None:
            return None
        # The first reading defines what later attempts must find.
        if self._known.setdefault(name, crc) == crc:
            self.crcs[name] = crc
            return None
        return (
            f"{name} is not what this run first read (its crc32 was {self._known[name]:08x} and is"
            f" {crc:08x}): bring back the file as it was, or give the run another name to begin"
            " from this one"
        )


def deal(files_by_process: Sequence[Collection[str]], sizes: Mapping[str, int]) -> list[list[str]]:
    """Share the files among a host's processes: each once, to one that needs it, evenly in bytes.

    `files_by_process`: the files that each process reads. The result is the same on all of them.
    """
    load = [0] * len(files_by_process)
    out: list[list[str]] = [[] for _ in files_by_process]
    # Largest first evens out the load; names break ties, as all processes must deal alike.
    for name in sorted(
        set().union(*files_by_process), key=lambda name: (-sizes.get(name, 0), name)
    ):
        process = min(
            (i for i, names in enumerate(files_by_process) if name in names),
            key=lambda i: (load[i], i),
        )
        out[process].append(name)
        load[process] += sizes.get(name, 0)
    return out


def host_of(local_ranks: Sequence[int], rank: int) -> range:
    """The ranks on the host of `rank`; `local_ranks`: every rank's number on its host."""
    # Launchers number the ranks of a host consecutively, so local rank 0 begins a host.
    first = [at for at, local in enumerate(local_ranks) if local == 0]
    return range(
        max((at for at in first if at <= rank), default=0),
        min([at for at in first if at > rank] or [len(local_ranks)]),
    )
