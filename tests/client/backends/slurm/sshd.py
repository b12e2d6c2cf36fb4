"""A real sshd of the test's own on 127.0.0.1: its port, keys and config; and an `ssh` that reads no
other config.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.ports import free_port

READY = 60.0
_PRIVATE = Path("/run/sshd")  # an empty folder that sshd requires, usually made by its service


def lacking() -> str | None:
    """The reason why sshd cannot run here; None if it can."""
    absent = [program for program in ("ssh", "ssh-keygen") if shutil.which(program) is None]
    if absent or _program() is None:
        return f"no {', '.join(absent) or 'sshd'} here (apt-get install openssh-server)"
    if os.geteuid():
        return None
    with suppress(OSError):
        _PRIVATE.mkdir(mode=0o755, exist_ok=True)
    return None if _PRIVATE.is_dir() else f"sshd needs {_PRIVATE}, which cannot be made here"


@contextmanager
def reached_by_ssh(folder: Path, environment: dict[str, str]) -> Iterator[Sshd]:
    """A daemon whose commands have this environment; `ssh head` of this process connects to it."""
    daemon = Sshd(folder, environment)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}/bin{os.pathsep}{os.environ['PATH']}")
        try:
            daemon.start()
            yield daemon
        finally:
            daemon.end()


def _program() -> str | None:
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


class Sshd:
    """The daemon, and `head`, its name for clients."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        (folder / "bin").mkdir(parents=True)
        self.new_host_key()
        self.key = self.new_key("mine")
        shutil.copy(f"{self.key}.pub", folder / "authorized")
        self.known = folder / "known"
        self.trust()
        (folder / "config").write_text(self.client(self.key))
        # ssh finds its config through the password file, not through $HOME.
        (folder / "bin/ssh").write_text(
            f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n'
        )
        (folder / "bin/ssh").chmod(0o755)

    def start(self) -> None:
        set_ = " ".join(f"{name}={value}" for name, value in self.environment.items())
        (self.folder / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1\nPort {self.port}\nHostKey {self.folder}/host\nPidFile"
            f" none\nUsePAM no\nAuthorizedKeysFile {self.folder}/authorized\nStrictModes"
            " no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxStartups"
            f" 100\nPermitRootLogin yes\nSetEnv {set_}\n"
        )
        program = _program()
        assert program
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [program, "-D", "-e", "-f", str(self.folder / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + READY
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError((self.folder / "log").read_text())
            time.sleep(0.1)

    def end(self) -> None:
        """Stop the daemon and all connections."""
        self.hang_up()
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None
        self.hang_up()

    def hang_up(self) -> int:
        """Break every connection, as if the cable was pulled; the remote processes run on.

        Returns their number.
        """
        broken = 0
        for pid in _sshd_below(self.process.pid) if self.process else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                broken += 1
        return broken

    def new_key(self, name: str) -> Path:
        """A new key pair's file."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
        subprocess.run(made, check=True, stdin=subprocess.DEVNULL)
        return path

    def new_host_key(self) -> None:
        """Replace the host's key; a running daemon uses it after its next start."""
        self.new_key("host")

    def trust(self) -> None:
        """Add the host's current key to the clients' known hosts."""
        key = (self.folder / "host.pub").read_text().split()[:2]
        self.known.write_text(f"[127.0.0.1]:{self.port} {' '.join(key)}\n")

    def client(self, key: Path) -> str:
        """A client's config, with only this key."""
        return (
            f"Host head\n  HostName 127.0.0.1\n  Port {self.port}\n  User root\n  IdentityFile"
            f" {key}\n  IdentitiesOnly yes\n  IdentityAgent none\n  UserKnownHostsFile"
            f" {self.known}\n  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n"
        )


def _sshd_below(parent: int) -> list[int]:
    """sshd's own processes for its connections."""
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
                if name == "sshd" and int(rest.split()[1]) == parent:
                    pids += [int(entry.name), *_sshd_below(int(entry.name))]
    return pids
