"""Containers, networks and mounts that a crash leaves behind, found by labels."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smtrain.plane.docker import HOME, HOST, JOB
from smtrain.plane.server.namespaces import LINUX, MNT_DETACH, libc

USED = "docker-used"
"""A file that marks a home whose jobs have run in containers; without it, a start does not wait for
Docker.
"""


def containers(client: Any, label: str, value: str) -> list[Any]:
    """Containers with a label, in any state."""
    return list(
        client.containers.list(all=True, filters={"label": f"{label}={value}"}, ignore_removed=True)
    )


def networks(client: Any, label: str, value: str) -> list[Any]:
    return list(client.networks.list(filters={"label": f"{label}={value}"}))


def remove_host(client: Any, folder: Path) -> None:
    """Kill and remove the container of a host."""
    _remove(containers(client, HOST, str(folder)))


def remove_job(client: Any, home: Path, job: str) -> None:
    """Remove all containers and networks of a job."""
    _remove([c for c in containers(client, HOME, str(home)) if c.labels.get(JOB) == job])
    _drop(
        [
            n
            for n in networks(client, HOME, str(home))
            if (n.attrs.get("Labels") or {}).get(JOB) == job
        ]
    )


def remove_home(client: Any, home: Path) -> int:
    """Remove everything that jobs of a home folder have left in Docker; return the count."""
    return sum(remove_stray(client, home, set))


def remove_stray(client: Any, home: Path, running_jobs: Callable[[], set[str]]) -> tuple[int, int]:
    """Remove containers and networks of a home's jobs that do not run; return the counts of both.

    `running_jobs` is called after Docker has answered, so that a job that starts meanwhile is not
    removed.
    """
    boxes, nets = containers(client, HOME, str(home)), networks(client, HOME, str(home))
    names = running_jobs()
    boxes = [item for item in boxes if item.labels.get(JOB) not in names]
    nets = [item for item in nets if (item.attrs.get("Labels") or {}).get(JOB) not in names]
    _remove(boxes)
    _drop(nets)
    return len(boxes), len(nets)


def _remove(boxes: list[Any]) -> None:
    import docker.errors

    for container in boxes:
        with contextlib.suppress(docker.errors.NotFound):
            try:
                container.remove(force=True, v=True)
            except docker.errors.APIError as error:
                if "already in progress" not in str(error):
                    raise


def _drop(nets: list[Any]) -> None:
    import docker.errors

    for network in nets:
        with contextlib.suppress(docker.errors.NotFound):
            network.remove()


def mounts(folder: Path) -> list[str]:
    """Mount points below a folder, the innermost first."""
    if not LINUX:
        return []
    points = []
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        point = line.split(" ")[4].encode(errors="surrogateescape").decode("unicode_escape")
        if point.startswith(f"{folder}{os.sep}"):
            points.append(point)
    return sorted(points, key=len, reverse=True)


def unmount(folder: Path) -> int:
    """Detach every mount below a folder; return the count."""
    points = mounts(folder)
    for point in points:
        with contextlib.suppress(OSError):
            libc("umount2", os.fsencode(point), MNT_DETACH)
    return len(points)


def mark_home(state: Path) -> None:
    """Mark a home whose jobs run in containers."""
    with contextlib.suppress(OSError):
        (state / USED).touch()


def has_used_containers(state: Path) -> bool:
    """Whether jobs of this home have ever run in containers."""
    return (state / USED).exists()


def end_containers(state: Path) -> None:
    """Remove the containers that ran when the control plane ended, if Docker answers."""
    unmount(state / "jobs")
    if has_used_containers(state):
        with contextlib.suppress(Exception):
            from smtrain.plane.docker import connect

            remove_home(connect(), state.parent)
