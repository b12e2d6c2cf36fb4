"""The processes of a host, found by a variable that all of them inherit.

In a PID namespace the kernel ends them with the leader. Without one, a killed supervisor would
leave them behind: ranks are session leaders, and no living process is their parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from smtrain.core.interrupts import poll

MARK = "SMTRAIN_LOCAL_HOST"
"""Its value is the host's folder."""


def end_all(folder: Path, *, include_subfolders: bool = False, seconds: float = 10.0) -> bool:
    """SIGKILL every process of the host with this folder, or of all hosts below it.

    Repeats until no process is left, as one may start another meanwhile. False if some are left
    after `seconds`, in a system call that cannot be interrupted.
    """

    def none_left() -> bool:
        running_pids = marked_pids(folder, include_subfolders=include_subfolders)
        for pid in running_pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return not running_pids

    return poll(none_left, 0.01, seconds)


def marked_pids(folder: Path, *, include_subfolders: bool = False) -> set[int]:
    """Processes with the mark of this folder, and their descendants; empty on systems without
    /proc.
    """
    if not sys.platform.startswith("linux"):
        return set()
    mark = f"\0{MARK}={folder}".encode() + (b"/" if include_subfolders else b"\0")
    parents: dict[int, int] = {}
    pids: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The command in parentheses may hold anything; the fields after it are state and
            # parent.
            state, parent = (
                Path(f"/proc/{name}/stat")
                .read_text(errors="replace")
                .rpartition(")")[2]
                .split()[:2]
            )
            if state in "ZX":
                continue
            parents[int(name)] = int(parent)
            if mark in b"\0" + Path(f"/proc/{name}/environ").read_bytes() + b"\0":
                pids.add(int(name))
    pids.discard(os.getpid())
    while (
        descendants := {pid for pid, parent in parents.items() if parent in pids}
        - pids
        - {os.getpid()}
    ):
        pids |= descendants
    return pids


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except OSError:
        return False


def children_of(parent: int) -> set[int]:
    """The children of a process, adopted ones and zombies included."""
    children = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The command in parentheses may hold anything; the fields after it are state and
                # parent.
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent:
                    children.add(int(name))
    return children
