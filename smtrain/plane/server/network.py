"""The network of an isolated job: loopback alone, kept by a process of its own for as long as the job has hosts."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

from smtrain.plane.process import server_environment

PACKAGE_PARENT = Path(__file__).resolve().parents[3]


class HostNetwork:
    """A network namespace that the hosts of one job share. OSError where this machine gives none."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            [sys.executable, "-m", "smtrain.plane.server.namespaces"],
            cwd=PACKAGE_PARENT,
            env=server_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout
        with self._holder.stdout as said:
            line = said.readline()
        refusal = json.loads(line)["refusal"] if line else "the process that was to keep it ended"
        if refusal:
            self.end()
            raise OSError(refusal)

    @property
    def pid(self) -> int:
        return self._holder.pid

    def end(self) -> None:
        """Give it up; the kernel removes it with its last process."""
        assert self._holder.stdin
        with contextlib.suppress(BrokenPipeError):
            self._holder.stdin.close()
        self._holder.wait()


def refusal(namespaces: bool) -> str | None:
    """Why a job cannot be isolated on this machine, as a sentence; None where it can."""
    try:
        if not namespaces:
            raise OSError("it was started without namespaces")
        HostNetwork().end()
    except OSError as error:
        return (
            "EnableNetworkIsolation cannot be honoured: smtrain's local control plane has no network namespace for "
            f"the job ({error.strerror or error}); leave network isolation out here"
        )
    return None
