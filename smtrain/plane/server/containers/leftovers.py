"""What a crash leaves of hosts that were containers: the containers, the networks, the mounts. Found by labels."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smtrain.plane.docker import HOME, HOST, JOB
from smtrain.plane.server.namespaces import LINUX, MNT_DETACH, libc

USED = "docker-used"
"""A file that says that jobs of this home have run in containers: who never did so is not kept waiting for Docker."""


def containers(client: Any, label: str, value: str) -> list[Any]:
    """Containers with a label, whatever their state; those that vanish meanwhile are left out."""
    return list(client.containers.list(all=True, filters={"label": f"{label}={value}"}, ignore_removed=True))


def networks(client: Any, label: str, value: str) -> list[Any]:
    return list(client.networks.list(filters={"label": f"{label}={value}"}))


def remove_host(client: Any, folder: Path) -> None:
    """Kill and remove the container of a host."""
    _remove(containers(client, HOST, str(folder)))


def remove_job(client: Any, home: Path, job: str) -> None:
    """Remove all containers and networks of a job."""
    _remove([c for c in containers(client, HOME, str(home)) if c.labels.get(JOB) == job])
    _drop([n for n in networks(client, HOME, str(home)) if (n.attrs.get("Labels") or {}).get(JOB) == job])


def remove_home(client: Any, home: Path) -> int:
    """Remove everything that jobs of a home folder have left in Docker; gives how many things that were."""
    left, nets = containers(client, HOME, str(home)), networks(client, HOME, str(home))
    _remove(left)
    _drop(nets)
    return len(left) + len(nets)


def remove_stray(client: Any, home: Path, running: Callable[[], set[str]]) -> tuple[int, int]:
    """Remove containers and networks of jobs of a home that do not run; gives how many of either there were.

    `running` is asked after Docker: a job that begins meanwhile is not among what was found.
    """
    boxes, nets = containers(client, HOME, str(home)), networks(client, HOME, str(home))
    names = running()
    boxes = [one for one in boxes if one.labels.get(JOB) not in names]
    nets = [one for one in nets if (one.attrs.get("Labels") or {}).get(JOB) not in names]
    _remove(boxes)
    _drop(nets)
    return len(boxes), len(nets)


def _remove(found: list[Any]) -> None:
    import docker.errors

    for container in found:
        with contextlib.suppress(docker.errors.NotFound):
            try:
                container.remove(force=True, v=True)
            except docker.errors.APIError as error:
                if "already in progress" not in str(error):
                    raise


def _drop(found: list[Any]) -> None:
    import docker.errors

    for network in found:
        with contextlib.suppress(docker.errors.NotFound):
            network.remove()


def mounts(folder: Path) -> list[str]:
    """Mount points of this machine below a folder, the innermost first."""
    if not LINUX:
        return []
    found = []
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        point = line.split(" ")[4].encode(errors="surrogateescape").decode("unicode_escape")
        if point.startswith(f"{folder}{os.sep}"):
            found.append(point)
    return sorted(found, key=len, reverse=True)


def unmount(folder: Path) -> int:
    """Detach every mount below a folder; gives how many there were."""
    found = mounts(folder)
    for point in found:
        with contextlib.suppress(OSError):
            libc("umount2", os.fsencode(point), MNT_DETACH)
    return len(found)


def mark(state: Path) -> None:
    """From now on this home may have left something in Docker."""
    with contextlib.suppress(OSError):
        (state / USED).touch()


def used(state: Path) -> bool:
    """Whether jobs of this home have ever run in containers."""
    return (state / USED).exists()


def end_containers(state: Path) -> None:
    """End what ran in containers when the control plane ended; a daemon that does not answer is left alone."""
    unmount(state / "jobs")
    if used(state):
        with contextlib.suppress(Exception):
            from smtrain.plane.docker import connect

            remove_home(connect(), state.parent)
