"""What the control plane makes hosts of where a request does not say it, kept over restarts."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from smtrain.core.files import write_atomically
from smtrain.plane.hosts import RUN_IN, LocalHosts
from smtrain.plane.server.containers import leftovers
from smtrain.plane.written import read_json, set_aside

FILE = "hosts.json"
USED = "docker-used"
"""A file that says that jobs of this home have run in containers: who never did so is not kept waiting for Docker."""


def load(state: Path) -> LocalHosts:
    """The settings of this home; the defaults where there are none, or none that make sense."""
    path = state / FILE
    if not os.path.lexists(path):
        return LocalHosts()
    try:
        return checked(read_json(path) or {"damaged": True})
    except (ValueError, TypeError):
        set_aside(path, "is damaged")
        return LocalHosts()


def checked(asked: dict[str, Any]) -> LocalHosts:
    """Settings from the outside. Raises ValueError or TypeError for what is none."""
    hosts = LocalHosts(**{key: str(value or "") for key, value in asked.items()})
    if hosts.run_in not in ("", *RUN_IN):
        raise ValueError(f"run_in is {hosts.run_in!r}, not one of {', '.join(RUN_IN)}")
    return hosts


def save(state: Path, hosts: LocalHosts) -> None:
    write_atomically(state / FILE, json.dumps(vars(hosts)), mode=0o600)


def mark(state: Path) -> None:
    """From now on this home may have left something in Docker."""
    with contextlib.suppress(OSError):
        (state / USED).touch()


def used(state: Path) -> bool:
    """Whether jobs of this home have ever run in containers."""
    return (state / USED).exists()


def end_containers(state: Path) -> None:
    """End what ran in containers when the control plane ended; a daemon that does not answer is left alone."""
    leftovers.unmount(state / "jobs")
    if used(state):
        with contextlib.suppress(Exception):
            from smtrain.plane.docker import connect

            leftovers.remove_home(connect(), state.parent)
