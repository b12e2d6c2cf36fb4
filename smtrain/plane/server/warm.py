"""A Python that has already imported torch, for the hosts of jobs (entrypoints/warm.py).

The control plane keeps the socket; it starts the Python when a launcher first calls, and again
after it has ended.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

from smtrain.core.protocol.entrypoints import entrypoints_folder

# Room for command lines in ps and /proc, which cut longer ones; torchrun's are the longest.
ROOM = 1 << 13


class WarmPython:
    """The socket and its Python; a control plane has one."""

    VARIABLE = "SMTRAIN_WARM"

    def __init__(self, environment: dict[str, str]) -> None:
        """`environment` holds the default variables of jobs: a caller with other variables gets no
        copy.
        """
        self.name = f"smtrain-{os.getuid()}-{secrets.token_hex(8)}"
        # As launch.py sets them for every stage.
        self._environment = {**environment, "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
        self._ready = False
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"\0{self.name}")
        self._listening.listen(64)
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def value(self) -> str:
        """The value of the variable for launchers."""
        return f"{self.name} ready" if self._ready else self.name

    def _run(self) -> None:
        """Start the Python whenever a launcher calls and it does not run."""
        with self._listening:  # once closed, launchers do not wait in vain
            while True:
                select.select([self._listening], [], [])
                if not self._serve_until_end():
                    return

    def _serve_until_end(self) -> bool:
        """Run a Python to its end; whether it started to listen."""
        with self._start() as process:
            assert process.stdout
            began = process.stdout.readline() == "ready\n"
            self._ready = began
            process.wait()
            self._ready = False
            return began

    def _start(self) -> subprocess.Popen[str]:
        script = str(entrypoints_folder() / "warm.py")
        return subprocess.Popen(
            [sys.executable, script, str(self._listening.fileno()), "-" * ROOM],
            cwd=Path("/"),
            env={**self._environment, "SMTRAIN_WARM_ROOM": "-" * 2 * ROOM},
            pass_fds=[self._listening.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


def can_offer_copies(namespaces: bool) -> bool:
    """Whether hosts can get copies: in PID namespaces, of a Python that has torch."""
    return (
        namespaces
        and sys.platform.startswith("linux")
        and importlib.util.find_spec("torch") is not None
    )
