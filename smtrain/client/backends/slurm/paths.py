"""Paths on a cluster, and which of them a stage sees: cluster.shared, and in a container also each
input outside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smtrain.core.config.cluster import Cluster
from smtrain.core.errors import ConfigError
from smtrain.core.text import shell_word

SCHEME = "file://"


def path_of(uri: str) -> str:
    """The absolute path of a file:// URI."""
    return uri.removeprefix(SCHEME)


def uri_of(path: str) -> str:
    """The file:// URI of an absolute path."""
    return f"{SCHEME}{path}"


def is_visible(path: Path | str, cluster: Cluster) -> bool:
    """Whether every stage reads this file or folder as this machine does, with the targets of links
    in it.

    The nodes are assumed to have the file system of `cluster.shared`. A container sees only what is
    mounted in it.
    """
    try:
        shared_folder, place = Path(str(cluster.shared)).resolve(), Path(path).resolve()
        device = os.stat(shared_folder).st_dev
        if os.stat(place).st_dev != device:
            return False
        for target in _targets(place):
            is_mounted = target.is_relative_to(place) or target.is_relative_to(shared_folder)
            if target.exists() and (
                os.stat(target).st_dev != device or (cluster.container and not is_mounted)
            ):
                return False
    except OSError:
        return False
    return True


def container_options(request: Mapping[str, Any], cluster: Cluster) -> tuple[list[str], list[str]]:
    """Options of srun, and the command in front of the stage's own, that start `cluster.container`;
    shell words.

    Inputs outside `cluster.shared` are mounted for reading, each under the path that it has on the
    node. Raises `ConfigError` for a path that cannot be mounted.
    """
    if not cluster.container:
        return [], []
    image, shared_folder, apptainer = (
        shell_word(cluster.container),
        cluster.shared or "/",
        cluster.container.endswith(".sif"),
    )
    shared_mount = (
        shell_word(shared_folder)
        if apptainer
        else f"{shell_word(shared_folder)}:{shell_word(shared_folder)}"
    )
    # Sorted, so that a folder comes before those below it: mounted later, it would hide them.
    paths = sorted([shared_folder, *_inputs_outside(request, shared_folder)])
    mounts = [
        shared_mount if path == shared_folder else f"{shell_word(path)}:{shell_word(path)}:ro"
        for path in paths
    ]
    if apptainer:
        return [], [
            "apptainer",
            "exec",
            *(word for mount in mounts for word in ("--bind", mount)),
            image,
        ]
    return [f"--container-image={image}", f"--container-mounts={','.join(mounts)}"], []


def _inputs_outside(request: Mapping[str, Any], shared_folder: str) -> list[str]:
    """Sorted paths of the request's inputs outside `shared_folder`, without those below another."""
    uris = [
        channel["DataSource"]["S3DataSource"]["S3Uri"] for channel in request["InputDataConfig"]
    ]
    paths = sorted({path_of(uri).rstrip("/") for uri in uris if uri.startswith(SCHEME)})
    outside_paths: list[str] = []
    for path in paths:
        if any(Path(path).is_relative_to(folder) for folder in (shared_folder, *outside_paths)):
            continue
        if set(path) & set(",:"):
            raise ConfigError(
                f"cluster.container: {path} cannot be mounted in it, because its name has a colon"
                " or a comma; rename it, or move it below cluster.shared",
                code="config.combination",
            )
        outside_paths.append(path)
    return outside_paths


def _targets(place: Path) -> Iterator[Path]:
    """The targets of all links below a folder; no link to a folder is followed further."""
    folders = [place] if place.is_dir() else []
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    yield Path(entry.path).resolve()
                elif entry.is_dir():
                    folders.append(Path(entry.path))
