"""The local control plane's server as a process: its command, its environment and what its log says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

IDLE_EXIT_SECONDS = 4 * 3600


class ServerProcess:
    """Started as a daemon, which outlives the caller."""

    def __init__(self, home: Path, log: Path) -> None:
        """Raises OSError where it cannot be started, or `log` cannot be written."""
        self.log = log
        command = [sys.executable, "-m", "smtrain.plane.server.serve", "--home", str(home)]
        command += ["--idle-exit", str(IDLE_EXIT_SECONDS)]
        with open(log, "ab") as out:
            self._began = out.tell()
            self._process = subprocess.Popen(
                command,
                cwd=Path(__file__).resolve().parents[2],
                env=server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.returncode

    def lines(self) -> list[str]:
        """What it has written to its log."""
        with open(self.log, errors="replace") as log:
            log.seek(self._began)
            return [line.strip() for line in log if line.strip()]

    def let_go(self) -> None:
        """It lives on by design, so its Popen must not warn about that when it is collected."""
        self._process.returncode = 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def server_environment() -> dict[str, str]:
    """The caller's environment without anything that could lead the server to real AWS or into a proxy."""
    dropped = ("AWS_", "MOTO_", "SMTRAIN_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
    return {k: v for k, v in os.environ.items() if not k.upper().startswith(dropped)}
