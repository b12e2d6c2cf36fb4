"""Remember which cluster each job was submitted to, for commands that only name a job: one file a job."""

from __future__ import annotations

import json
import os
from pathlib import Path

from smtrain.core.config.cluster import Cluster
from smtrain.core.errors import ConfigError
from smtrain.core.files import home, write_atomically
from smtrain.core.protocol.requests import is_of_run

VARIABLE = "SMTRAIN_CLUSTER"
_LATEST = "latest"


def remember(section: Cluster, job: str) -> None:
    """Note the cluster of a job; it is also the default cluster from now on."""
    for name in (job, _LATEST):
        path = _file(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, section.model_dump_json(exclude_defaults=True), sync=False)


def forget(job: str) -> None:
    """Remove the note about a job that was deleted."""
    _file(job).unlink(missing_ok=True)


def knows(job: str) -> bool:
    """True if a job, or a job of a run of this name, was submitted to a cluster from here."""
    return _noted(job) is not None


def cluster_of(job: str | None = None) -> Cluster:
    """The cluster of a job, else of $SMTRAIN_CLUSTER ([HOST:]/SHARED), else the one used last.

    Raises `ConfigError` if none is known.
    """
    named = os.environ.get(VARIABLE)
    if job and (path := _noted(job)):
        return _read(path)
    if named:
        host, _, shared = named.rpartition(":")
        try:
            return Cluster(host=host or None, shared=shared)
        except ConfigError:
            raise ConfigError(
                f"{VARIABLE} is {named!r}; it must look like me@head:/fsx/smtrain, or /fsx/smtrain on the head node",
                code="config.wrong_value",
            ) from None
    if _file(_LATEST).is_file():
        return _read(_file(_LATEST))
    raise ConfigError(
        f"no Slurm cluster is known here; start a run with --target slurm, or set {VARIABLE}=me@head:/fsx/smtrain",
        code="config.missing_key",
    )


def _noted(name: str) -> Path | None:
    """The file of a job, or the newest of a run's jobs."""
    if not name or "/" in name or name == _LATEST:
        return None
    if (path := _file(name)).is_file():
        return path
    of_run = (path for path in path.parent.glob("*.json") if is_of_run(path.stem, name))
    return max(of_run, key=lambda path: path.stat().st_mtime, default=None)


def _file(name: str) -> Path:
    return home() / "slurm" / f"{name}.json"


def _read(path: Path) -> Cluster:
    try:
        return Cluster.model_validate(json.loads(path.read_text("utf-8")))
    except ValueError as error:
        raise ConfigError(
            f"{path} cannot be read ({str(error).splitlines()[0]}); delete it", code="config.unreadable"
        ) from None
