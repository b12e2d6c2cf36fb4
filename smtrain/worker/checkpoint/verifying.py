"""Whether files hold the bytes that were written: hashed on threads, while something else is done with the same pages.

A Python thread that hashes holds no lock, so that a checkpoint is loaded meanwhile; both read the files front to back,
and the second to come finds the pages in memory. Pure Python, no torch.
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
from smtrain.worker.checkpoint.checksum import crc32
from smtrain.worker.checkpoint.manifest import NAME, Manifest, fault

_BLOCK = 4 << 20


class GivenUpError(Exception):
    """Nobody waits for a checksum any more."""


def sums_of(
    path: Path, *kinds: str, from_disk: bool = False, given_up: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """The checksums of a file's bytes that a record keeps, read once: `sha256` in hex, `crc32`.

    `from_disk`, of pages that have been flushed and are read anew. Raises OSError as the disk does, and `GivenUpError`
    soon after `given_up` says so.
    """
    digest, crc, buffer = hashlib.sha256(), 0, bytearray(_BLOCK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while n := file.readinto(view):
            if given_up():
                raise GivenUpError
            if "sha256" in kinds:
                digest.update(view[:n])
            if "crc32" in kinds:
                crc = crc32(view[:n], crc)
    return {kind: digest.hexdigest() if kind == "sha256" else crc for kind in kinds}


def quickest(about: Mapping[str, Any]) -> str | None:
    """Which of the checksums that a file was written with tells damage at the least cost; None where it has none.

    crc32 runs at some ten times the speed of sha256. Older versions wrote sha256 alone.
    """
    return next((kind for kind in ("crc32", "sha256") if kind in about), None)


def differs(path: Path, about: Mapping[str, Any], given_up: Callable[[], bool] = lambda: False) -> str | None:
    """In what the bytes of a file are not those that its record is `about`, None where they are.

    Raises as `sums_of` does.
    """
    kind = quickest(about) or "sha256"
    return _difference(kind, sums_of(path, kind, given_up=given_up)[kind], about[kind])


def _difference(kind: str, found: Any, written: Any) -> str | None:
    if found == written:
        return None
    if kind == "crc32":
        found, written = f"{found:08x}", f"{written:08x}"
    return f"has {kind} {found[:12]} and was written with {written[:12]}"


def check_hash(checkpoint: Path, name: str, about: Mapping[str, Any], record: str = NAME) -> None:
    """Raises `CheckpointError` where the bytes of file `name` are not those that the `record` is `about`."""
    try:
        reason = differs(checkpoint / name, about)
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
    """Read every file and compare its hash. Raises `CheckpointError` naming the first that differs or is missing."""
    reason = fault(checkpoint)
    if reason is not None:
        raise CheckpointError(f"the checkpoint {checkpoint} is not whole: {reason}", code="checkpoint.damaged")
    for name, about in Manifest.read(checkpoint).files.items():
        check_hash(checkpoint, name, about)


class Verification:
    """Hashes files of a checkpoint on `threads` threads, from the moment it is made."""

    def __init__(
        self, checkpoint: Path, files: Mapping[str, Mapping[str, Any]], threads: int = 1, loaded: Collection[str] = ()
    ) -> None:
        """`files` gives what the record says of each, by its path in the checkpoint; each has a checksum.

        Those of `loaded` that have a crc32 are left to who loads them, so that the disk is read once.
        """
        self._checkpoint, self._files = checkpoint, files
        self._loaded = {name for name in loaded if name in files and quickest(files[name]) == "crc32"}
        self._lock, self.bytes, self._closed = threading.Lock(), 0, threading.Event()
        self._pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="verify")
        self._running = {name: self._pool.submit(self._differs, name) for name in sorted(files.keys() - self._loaded)}

    @property
    def done(self) -> bool:
        """Whether `fault` has nothing to wait for."""
        return not self._loaded and all(running.done() for running in self._running.values())

    def close(self) -> None:
        """Hash no more: the process is to end."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def fault(self, read: Mapping[str, int]) -> str | None:
        """Waits until all is hashed; the first file that differs, and in what, None if none does.

        `read` gives the crc32 of what has been loaded; a file whose loading failed midway is read here.
        """
        told: dict[str, str | None] = {}
        for name in sorted(self._loaded):
            if name in read:
                told[name] = _difference("crc32", read[name], self._files[name]["crc32"])
                self.bytes += int(self._files[name]["size"])
            else:
                self._running[name] = self._pool.submit(self._differs, name)
        told |= {name: running.result() for name, running in self._running.items()}
        found = [f"{name} {reason}" for name, reason in sorted(told.items()) if reason]
        self._pool.shutdown()
        return found[0] + (f", and so do {len(found) - 1} more files" if len(found) > 1 else "") if found else None

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
    """Checks whole, on threads, what a source of weights is read of in parts; it is what `WeightSource.watch` takes."""

    def __init__(
        self, threads: int = 1, share: tuple[int, int] = (0, 1), known: Mapping[str, int] | None = None
    ) -> None:
        """`share` (i, n): of what n processes read alike, this is the i-th, which checks its n-th part at once.

        `known` are crc32 of what nobody wrote any for, as a former reader found them.
        """
        self._share, self._known, self._lock = share, dict(known or {}), threading.Lock()
        self._pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="verify")
        self._read: dict[str, Callable[[], int | None]] = {}
        self._running: dict[str, Future[int | None]] = {}
        self.found: dict[str, int] = {}
        """crc32 of what nobody wrote any for."""

    def __call__(self, name: str, check: Callable[[], int | None]) -> None:
        mine, of = self._share
        with self._lock:
            if name not in self._read:
                self._read[name] = check
                if zlib.crc32(name.encode()) % of == mine:
                    self._running[name] = self._pool.submit(check)

    @property
    def left(self) -> set[str]:
        """What has been read here and is another's to check, if that one reads it too."""
        return set(self._read) - set(self._running)

    @property
    def begun(self) -> set[str]:
        """What is checked here."""
        return set(self._running)

    def add(self, names: Iterable[str]) -> None:
        """Check these too, which have been read."""
        for name in names:
            self._running[name] = self._pool.submit(self._read[name])

    def fault(self) -> str | None:
        """Waits until all is checked; what is wrong with the first that is not as it was written, None if all is."""
        self._pool.shutdown()
        faults = [told for name, running in self._running.items() if (told := self._told(name, running))]
        return faults[0] if faults else None

    def _told(self, name: str, running: Future[int | None]) -> str | None:
        if (error := running.exception()) is not None:
            return str(error)
        if (crc := running.result()) is None:
            return None
        if self._known.setdefault(name, crc) == crc:
            self.found[name] = crc
            return None
        return (
            f"{name} is not what this run first read (its crc32 was {self._known[name]:08x} and is {crc:08x}): bring "
            "back the file as it was, or give the run another name to begin from this one"
        )


def deal(needed: Sequence[Collection[str]], sizes: Mapping[str, int]) -> list[list[str]]:
    """Who hashes what among the processes of a host: each file once, by one that needs it, evenly in bytes.

    `needed` are the files that each process reads; all of them come to the same answer.
    """
    held = [0] * len(needed)
    out: list[list[str]] = [[] for _ in needed]
    for name in sorted(set().union(*needed), key=lambda name: (-sizes.get(name, 0), name)):
        mine = min((i for i, names in enumerate(needed) if name in names), key=lambda i: (held[i], i))
        out[mine].append(name)
        held[mine] += sizes.get(name, 0)
    return out


def host_of(local_ranks: Sequence[int], rank: int) -> range:
    """The ranks on the host of `rank`; `local_ranks` has everyone's number on its host, by rank."""
    first = [at for at, local in enumerate(local_ranks) if local == 0]
    return range(
        max((at for at in first if at <= rank), default=0), min([at for at in first if at > rank] or [len(local_ranks)])
    )
