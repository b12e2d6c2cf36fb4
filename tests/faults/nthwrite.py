"""A disk that fails the n-th write-like call of all processes started with `environment()`."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("nthwrite.c")
ALWAYS = (1 << 64) - 1


class FailingDisk:
    """Counts writes below some folders; those from number `first` to `last` fail with an errno."""

    def __init__(self, work: Path, under: list[Path]) -> None:
        """`work` holds the compiled library and the count, and lies outside of `under`."""
        work.mkdir(parents=True, exist_ok=True)
        self._library, self._under = work / "nthwrite.so", [str(folder) for folder in under]
        self._log = work / "failed.log"
        if not self._library.exists():
            library = work / f"nthwrite.{os.getpid()}.so"
            command = [
                "gcc",
                "-O1",
                "-shared",
                "-fPIC",
                "-w",
                "-o",
                str(library),
                str(SOURCE),
                "-ldl",
            ]
            subprocess.run(command, check=True)
            library.rename(self._library)
        state = work / "state"
        state.write_bytes(bytes(32))
        with open(state, "r+b") as file:
            self._state = mmap.mmap(file.fileno(), 32)
        self._file = state

    def environment(self) -> dict[str, str]:
        """Variables for a process and its children; the control plane passes these names on to its
        own processes.
        """
        return {
            "LD_PRELOAD": str(self._library),
            "NTHWRITE_STATE": str(self._file),
            "NTHWRITE_UNDER": ":".join(self._under),
            "NTHWRITE_LOG": str(self._log),
        }

    def fail(self, error: int, first: int, last: int | None = None) -> None:
        """Start counting again; calls `first` to `last` (default: only the first) fail."""
        self._log.unlink(missing_ok=True)
        self._state[:] = struct.pack("<4Q", 0, first, first if last is None else last, error)

    def heal(self) -> None:
        """No further call fails; the count continues."""
        self._state[8:24] = struct.pack("<2Q", 0, 0)

    @property
    def count(self) -> int:
        """Number of write-like calls since `fail`."""
        return int(struct.unpack("<Q", self._state[:8])[0])

    @property
    def failed(self) -> list[str]:
        """`number process call path` of each failed call."""
        return self._log.read_text().splitlines() if self._log.exists() else []
