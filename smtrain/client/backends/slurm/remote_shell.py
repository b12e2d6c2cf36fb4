"""Run commands on the head node, locally or through the user's own ssh, and copy files of the
shared folder.

Only `sh` and POSIX tools are used; nothing is installed there.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from smtrain.core.errors import JobError
from smtrain.core.files import home

SSH_LOST = 255
"""Exit status of ssh itself, as opposed to the command's."""
_LONGEST_SOCKET = 90  # characters: the kernel takes 107, and ssh adds some
# ssh's message, its meaning and the remedy; waiting does not help against these.
_LASTING = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key differs from the one that your ssh knows",
        (
            "if the head node is a new one, forget the old key with `ssh-keygen -R` and connect"
            " once by hand: `ssh {host}`"
        ),
    ),
    (
        "Host key verification failed",
        "your ssh does not know its host key yet",
        "connect once by hand and confirm it: `ssh {host}`",
    ),
    (
        "Permission denied",
        "it refused your key",
        "make `ssh {host} true` work by hand: ssh-add your key, or name it in ~/.ssh/config",
    ),
    (
        "Too many authentication failures",
        "it refused your keys",
        "name the right one in ~/.ssh/config (IdentityFile, IdentitiesOnly yes)",
    ),
    (
        "Name or service not known",
        "there is no host of this name",
        "correct cluster.host, or add it to ~/.ssh/config",
    ),
    ("Bad configuration option", "your ssh cannot read its config", "correct ~/.ssh/config"),
    ("Bad owner or permissions", "your ssh refuses its config", "run `chmod 600 ~/.ssh/config`"),
)


def ssh_options() -> list[str]:
    """ssh's options: one connection for all calls, kept for a minute, and closed when it is
    dead.
    """
    folder = home() / "ssh"
    if len(str(folder)) > _LONGEST_SOCKET - 42:  # %C has 40 characters
        folder = Path(tempfile.gettempdir()) / f"smtrain-ssh-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    options = {
        "ControlMaster": "auto", "ControlPath": f"{folder}/%C", "ControlPersist": "60",
        "ConnectTimeout": "20", "ServerAliveInterval": "15", "ServerAliveCountMax": "3",
    }  # fmt: skip
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def _ssh_command(host: str, words: list[str]) -> list[str]:
    return ["ssh", *ssh_options(), host, shlex.join(words)]


def explain_ssh(host: str, stderr_text: str) -> tuple[str, bool]:
    """Explain the last message of ssh, and say whether the failure is permanent."""
    for words, problem, remedy in _LASTING:
        if words in stderr_text:
            return f"{host}: {problem}; {remedy.format(host=host)}", True
    last = (
        stderr_text.strip().splitlines()[-1].strip()
        if stderr_text.strip()
        else "the connection broke"
    )
    return f"{host} cannot be reached by ssh ({last}); check the network, and cluster.host", False


SECONDS = 60.0
"""A command without an answer for so long is given up; copies have no limit."""
# Writes a file atomically: if the connection breaks, `cat` sees a normal end of its input.
_WRITE = """
mkdir -p "$(dirname "$1")" || exit 1
cat >"$1.part.$$" && [ "$(wc -c <"$1.part.$$")" -eq "$2" ] && mv "$1.part.$$" "$1" || { rm -f "$1.part.$$"; exit 1; }
"""


class HeadError(JobError):
    """The head node cannot be reached, or a command on it failed."""


class HeadLostError(HeadError):
    """The connection broke, or cannot be made now; the same call may succeed a little later."""


@dataclass(frozen=True)
class Head:
    """The machine on which Slurm's commands run. `host` None: this machine."""

    host: str | None = None

    def run(
        self, *command: str, feed: bytes | None = None, seconds: float | None = SECONDS
    ) -> bytes:
        """Run a command; returns its output.

        Raises `HeadError` with its error output if it fails.
        """
        with tempfile.TemporaryFile() as stdin:
            stdin.write(feed or b"")
            stdin.seek(0)
            return self._call(command, stdin, subprocess.PIPE, seconds)

    def sh(self, script: str, *arguments: str, seconds: float | None = SECONDS) -> bytes:
        """Run a shell script, with the arguments as $1, $2...; returns its output."""
        return self.run("sh", "-c", script, "sh", *arguments, seconds=seconds)

    @property
    def name(self) -> str:
        return self.host or "this machine"

    def write(self, path: str, content: bytes) -> None:
        """Write a file atomically, and make its folder."""
        self.run("sh", "-c", _WRITE, "sh", path, str(len(content)), feed=content, seconds=None)

    def copy(self, source: Path, path: str) -> None:
        """Copy a file of this machine, atomically."""
        with source.open("rb") as content:
            size = str(source.stat().st_size)
            self._call(("sh", "-c", _WRITE, "sh", path, size), content, subprocess.PIPE, None)

    def fetch(self, path: str, destination: Path) -> None:
        """Copy a file of the shared folder to this machine, appending to the bytes that the
        destination has.
        """
        with destination.open("ab") as out:
            self._call(("tail", "-c", f"+{out.tell() + 1}", path), subprocess.DEVNULL, out, None)

    def read(self, path: str, offset: int = 0) -> bytes | None:
        """A file from a byte on; None if it does not exist."""
        script = 'if [ -e "$1" ]; then printf y; tail -c "+$2" "$1"; fi'
        content = self.sh(script, path, str(offset + 1), seconds=None)
        return content[1:] if content else None

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of every file below a folder by its relative path; empty if there is no such
        folder.
        """
        return {name: size for name, (size, _) in self.stamps(folder).items()}

    def stamps(self, folder: str) -> dict[str, tuple[int, str]]:
        """Bytes and time of the last change of every file below a folder, as `sizes`."""
        listing = self.sh(
            'if [ -d "$1" ]; then cd "$1" && find -L . -type f -printf "%s %T@ %P\\0"; fi',
            folder,
            seconds=None,
        )
        rows = (
            row.decode(errors="surrogateescape").split(" ", 2)
            for row in listing.split(b"\0")
            if row
        )
        return {name: (int(size), modified_at) for size, modified_at, name in rows}

    def sha256(self, folder: str, names: Sequence[str]) -> dict[str, str]:
        """SHA-256 (hex) of files below a folder by their relative paths; each must exist."""
        if not names:
            return {}
        feed = b"\0".join(name.encode(errors="surrogateescape") for name in names) + b"\0"
        script = 'cd "$1" && exec xargs -0 sha256sum --'
        lines = self.run("sh", "-c", script, "sh", folder, feed=feed, seconds=None).split(b"\n")[
            :-1
        ]
        # sha256sum escapes line ends in names, and marks such a line with a backslash.
        digests = [line.lstrip(b"\\")[:64].decode(errors="replace") for line in lines]
        if len(digests) != len(names):
            raise HeadLostError(
                f"{self.name}: sha256sum has not answered for every file of {folder}; try again"
            )
        return dict(zip(names, digests, strict=True))

    def _call(
        self,
        words: tuple[str, ...],
        stdin: IO[bytes] | int,
        out: IO[bytes] | int,
        seconds: float | None,
    ) -> bytes:
        argv = list(words) if self.host is None else _ssh_command(self.host, list(words))
        # Errors go to a file: a connection kept open may also hold a pipe open.
        with tempfile.TemporaryFile() as complaint:
            try:
                process = subprocess.run(
                    argv, stdin=stdin, stdout=out, stderr=complaint, timeout=seconds
                )
            except FileNotFoundError:
                raise HeadError(self._absent(argv[0])) from None
            except subprocess.TimeoutExpired:
                text = f"{self.name}: {words[0]} has not answered for {seconds:.0f} s; try again"
                raise HeadLostError(text) from None
            complaint.seek(0)
            stderr_text = complaint.read().decode(errors="replace")
        if process.returncode:
            raise self._call_error(words, process.returncode, stderr_text)
        return process.stdout or b""

    def _call_error(self, words: tuple[str, ...], status: int, stderr_text: str) -> HeadError:
        if self.host is not None and status == SSH_LOST:
            text, lasting = explain_ssh(self.host, stderr_text)
            return HeadError(text) if lasting else HeadLostError(text)
        reason = " ".join(stderr_text.split()) or f"it ended with status {status}"
        return HeadError(f"{self.name}: {words[0]} failed: {reason}")

    def _absent(self, program: str) -> str:
        if self.host is not None and program == "ssh":
            return (
                "there is no ssh on this machine; install it, or start smtrain on the head node"
                " without cluster.host"
            )
        return (
            f"{program} is not on this machine, so it is not a head node of Slurm; set cluster.host"
            " to one that your ssh reaches, or start smtrain there"
        )
