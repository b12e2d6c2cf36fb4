"""The head node: commands that run on it, here or through the user's own ssh, and files of the shared folder.

Everything is `sh` and what POSIX has beside it; nothing is installed there. ssh keeps one connection open for all calls
(ControlMaster), with the user's agent, config and jump hosts.
"""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from smtrain.errors import JobError
from smtrain.home import home

SECONDS = 60.0
"""After so long without an answer a command is given up; copies take as long as they take."""
_LONGEST_SOCKET = 90  # characters: the kernel takes 107, and ssh adds some


class HeadError(JobError):
    """The head node cannot be reached, or a command on it failed."""


@dataclass(frozen=True)
class Head:
    """Where Slurm's commands run. `host` None: this machine."""

    host: str | None = None

    def run(self, *command: str, feed: bytes | None = None, seconds: float | None = SECONDS) -> bytes:
        """What a command prints. Raises `HeadError` with its own words where it fails."""
        argv = list(command) if self.host is None else ["ssh", *_options(), self.host, shlex.join(command)]
        try:
            done = subprocess.run(argv, input=feed if feed is not None else b"", capture_output=True, timeout=seconds)
        except FileNotFoundError:
            raise HeadError(self._absent(argv[0])) from None
        except subprocess.TimeoutExpired:
            raise HeadError(f"{self.name}: {command[0]} has not answered for {seconds:.0f} s; try again") from None
        if done.returncode:
            told = done.stderr.decode(errors="replace").strip() or f"it ended with status {done.returncode}"
            raise HeadError(f"{self.name}: {command[0]} failed: {' '.join(told.split())}")
        return done.stdout

    def sh(self, script: str, *arguments: str, seconds: float | None = SECONDS) -> bytes:
        """What a shell script prints; its arguments are $1, $2..."""
        return self.run("sh", "-c", script, "sh", *arguments, seconds=seconds)

    @property
    def name(self) -> str:
        return self.host or "this machine"

    def write(self, path: str, content: bytes) -> None:
        """Write a file whole or not at all, with its folder."""
        self.run(
            "sh", "-c", 'mkdir -p "$(dirname "$1")" && cat >"$1.part.$$" && mv "$1.part.$$" "$1"', "sh", path,
            feed=content, seconds=None,
        )  # fmt: skip

    def copy(self, source: Path, path: str) -> None:
        """Copy a file of this machine, whole or not at all."""
        script = 'mkdir -p "$(dirname "$1")" && cat >"$1.part.$$" && mv "$1.part.$$" "$1"'
        command = ["sh", "-c", script, "sh", path]
        argv = command if self.host is None else ["ssh", *_options(), self.host, shlex.join(command)]
        with source.open("rb") as content:
            done = subprocess.run(argv, stdin=content, capture_output=True)
        if done.returncode:
            told = " ".join(done.stderr.decode(errors="replace").split())
            raise HeadError(f"{self.name}: {path} could not be written: {told}")

    def fetch(self, path: str, destination: Path) -> None:
        """Copy a file of the shared folder to this machine."""
        command = ["cat", path]
        argv = command if self.host is None else ["ssh", *_options(), self.host, shlex.join(command)]
        with destination.open("wb") as out:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE)
        if done.returncode:
            told = " ".join(done.stderr.decode(errors="replace").split())
            raise HeadError(f"{self.name}: {path} could not be read: {told}")

    def read(self, path: str, offset: int = 0) -> bytes | None:
        """A file from a byte on; None where there is none."""
        script = 'if [ -e "$1" ]; then printf y; tail -c "+$2" "$1"; fi'
        found = self.sh(script, path, str(offset + 1), seconds=None)
        return found[1:] if found else None

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of every file below a folder by its relative path; empty where there is no such folder."""
        found = self.sh(
            'if [ -d "$1" ]; then cd "$1" && find -L . -type f -printf "%s %P\\0"; fi', folder, seconds=None
        )
        rows = (row.decode(errors="surrogateescape").partition(" ") for row in found.split(b"\0") if row)
        return {name: int(size) for size, _, name in rows}

    def _absent(self, program: str) -> str:
        if self.host is not None and program == "ssh":
            return "there is no ssh on this machine; install it, or start smtrain on the head node without cluster.host"
        return (
            f"{program} is not on this machine, so it is no head node of Slurm; set cluster.host to one that your ssh "
            "reaches, or start smtrain there"
        )


def _options() -> list[str]:
    """ssh's options: one connection for all calls, kept for a minute."""
    folder = home() / "ssh"
    if len(str(folder)) > _LONGEST_SOCKET - 42:  # %C has 40 characters
        folder = Path(tempfile.gettempdir()) / f"smtrain-ssh-{_user()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return ["-o", "ControlMaster=auto", "-o", f"ControlPath={folder}/%C", "-o", "ControlPersist=60"]


def _user() -> int:
    import os

    return os.getuid()
