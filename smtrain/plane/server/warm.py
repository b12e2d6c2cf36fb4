"""A Python for the hosts of a plane's jobs that has imported torch already (entrypoints/warm.py).

The plane keeps the socket; the Python is started on it when a launcher first calls, and again after it has ended.
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

# What has no room is not shown by ps and /proc; the longest command lines are torchrun's.
ROOM = 1 << 13


class WarmPython:
    """The socket and what listens on it; one for a control plane."""

    VARIABLE = "SMTRAIN_WARM"

    def __init__(self, environment: dict[str, str]) -> None:
        """`environment` is what jobs have by default: a caller with another gets no copy."""
        self.name = f"smtrain-{os.getuid()}-{secrets.token_hex(8)}"
        # As launch.py has them for every stage.
        self._environment = {**environment, "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
        self._ready = False
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"\0{self.name}")
        self._listening.listen(64)
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def told(self) -> str:
        """What launchers find in the variable."""
        return f"{self.name} ready" if self._ready else self.name

    def _run(self) -> None:
        """Start it when somebody calls, as often as it has ended."""
        with self._listening:  # closed, it keeps no launcher waiting for what does not come
            while True:
                select.select([self._listening], [], [])
                if not self._started():
                    return

    def _started(self) -> bool:
        """Run one to its end; whether it came so far as to listen."""
        script = str(entrypoints_folder() / "warm.py")
        with subprocess.Popen(
            [sys.executable, script, str(self._listening.fileno()), "-" * ROOM],
            cwd=Path("/"), env={**self._environment, "SMTRAIN_WARM_ROOM": "-" * 2 * ROOM},
            pass_fds=[self._listening.fileno()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout
            began = process.stdout.readline() == "ready\n"
            self._ready = began
            process.wait()
            self._ready = False
            return began


def offered(namespaces: bool) -> bool:
    """Whether hosts can have copies here: in PID namespaces, of a Python that has torch."""
    return namespaces and sys.platform.startswith("linux") and importlib.util.find_spec("torch") is not None
