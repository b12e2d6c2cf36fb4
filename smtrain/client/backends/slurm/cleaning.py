"""Clean the shared folder: remove files that smtrain made there for finished runs, and no other
file.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from smtrain.client.backends.slurm.backend import SlurmBackend
from smtrain.client.backends.slurm.paths import SCHEME, path_of
from smtrain.client.backends.slurm.registry import REGISTRY
from smtrain.client.backends.slurm.script import REQUEST
from smtrain.core.files import parse_json
from smtrain.core.protocol.removable_jobs import Record, RunRemoval, select_removal

KINDS = {
    "jobs": "logs, results and code of jobs",
    "checkpoints": "of runs",
    "inputs": "models and texts that were copied here, code and configs",
    "caches": "copies of S3 objects, compiled graphs, parts of copies that broke off",
}
_YOUNG_S = 3600  # younger files may belong to a launch that has not submitted its job yet
# Links count as files and are never followed: a node's /opt/ml leads to other data.
_FILES = r"""id -un; [ -d "$1" ] || exit 0; cd "$1" && find . -xdev \( -type f -o -type l \) -printf '%u %s %T@ %P\0'"""
_REQUESTS = f"""cd "$1" || exit 0
for f in */jobs/*/{REQUEST}; do
  [ -f "$f" ] || continue
  printf '%s\\0' "$f"; cat "$f" | tr -d '\\0'; printf '\\0'
done
"""
# A folder is removed together with the last file in it.
_REMOVE = r"""cd "$1" || exit 1
xargs -0 sh -c '
for p; do
  rm -rf -- "$p" || exit 255
  d=$(dirname -- "$p")
  while [ "$d" != . ] && rmdir -- "$d" 2>/dev/null; do d=$(dirname -- "$d"); done
done' sh
"""


@dataclass
class Unit:
    """A folder that is removed as a whole."""

    path: str
    """Relative to the shared folder."""
    kind: str
    size: int = 0
    newest: float = 0.0
    owners: set[str] = field(default_factory=set)


@dataclass
class SharedFolder:
    """The files that smtrain has made in a shared folder."""

    folder: str
    me: str
    units: list[Unit]
    records: list[Record]

    def uri(self, unit: Unit) -> str:
        """The prefix of everything in a unit."""
        return f"{SCHEME}{self.folder}/{unit.path}/"

    def sizes(self) -> dict[str, int]:
        """Bytes by kind."""
        return {kind: sum(unit.size for unit in self.units if unit.kind == kind) for kind in KINDS}


def list_files(backend: SlurmBackend) -> SharedFolder:
    """List the shared folder and its jobs. Raises `HeadError` if the head node does not answer."""
    output = backend.head.sh(_FILES, backend.shared_folder, seconds=None).decode(
        errors="surrogateescape"
    )
    me, _, file_rows = output.partition("\n")
    requests = dict(_requests(backend))
    runs = {name.partition("/")[0] for name in requests}
    units: dict[str, Unit] = {}
    for row in filter(None, file_rows.split("\0")):
        owner, size, modified_at, path = row.split(" ", 3)
        if unit_fields := _unit(path, runs):
            unit = units.setdefault(unit_fields[0], Unit(*unit_fields))
            unit.size += int(size)
            unit.newest = max(unit.newest, float(modified_at))
            unit.owners.add(owner)
    shared_folder = SharedFolder(backend.shared_folder, me, list(units.values()), [])
    owners = {unit.path: unit.owners for unit in shared_folder.units}
    states = {row["TrainingJobName"]: row for page in backend.rows(None, 100) for row in page}
    shared_folder.records = [
        _record(path.rpartition("/")[0], request, states, owners, me)
        for path, request in requests.items()
    ]
    return shared_folder


def plan(
    shared_folder: SharedFolder,
    *,
    jobs: bool = False,
    older_than: float | None = None,
    everything: bool = False,
    run: str | None = None,
) -> tuple[RunRemoval, list[Unit]]:
    """Choose what to remove, as for the home of this machine (plane/server/clean.py). `everything`:
    also inputs and caches that no other job needs. Raises `JobError` for an unknown run or one that
    must stay.
    """
    removal = select_removal(
        shared_folder.records, jobs=jobs, older_than=older_than, all_stages=everything, run=run
    )
    needed_uris, removable_uris = (
        removal.prefixes_to_retain(shared_folder.records),
        removal.prefixes_to_remove(),
    )
    in_s3 = any(uri.startswith("s3://") for uri in needed_uris)
    units = []
    for unit in shared_folder.units:
        uri = shared_folder.uri(unit)
        loose = (
            everything
            and unit.kind in ("inputs", "caches")
            and time.time() - unit.newest > _YOUNG_S
        )
        if unit.kind == "caches" and (in_s3 or removal.retained_runs):
            continue
        if (
            unit.owners <= {shared_folder.me}
            and not _touches(uri, needed_uris)
            and (loose or _is_below(uri, removable_uris))
        ):
            units.append(unit)
    return removal, units


def remove(backend: SlurmBackend, removal: RunRemoval, units: Iterable[Unit]) -> int:
    """Remove them; returns the freed bytes. Raises `HeadError` if one cannot be removed."""
    units = list(units)
    if units:
        names = "\0".join(f"./{unit.path}" for unit in units).encode(errors="surrogateescape")
        backend.head.run("sh", "-c", _REMOVE, "sh", backend.shared_folder, feed=names, seconds=None)
    for record in removal.jobs:
        REGISTRY.forget(record.name)
    return sum(unit.size for unit in units)


def _unit(path: str, runs: set[str]) -> tuple[str, str] | None:
    """The folder that a file belongs to, and its kind; None for a file that smtrain did not
    make.
    """
    parts = path.split("/")
    first, second = parts[0], parts[1] if len(parts) > 2 else ""
    if first in runs and second in ("jobs", "prepare") and len(parts) > 3:
        return "/".join(parts[:3]), "jobs" if second == "jobs" else "checkpoints"
    if first in runs and second == "checkpoints":
        return f"{first}/{second}", "checkpoints"
    if first == "inputs" and len(parts) > 3 and _is_content_hash(parts[2]):
        return "/".join(parts[:3]), "inputs"
    if first in ("code", "configs") and _is_content_hash(second):
        return f"{first}/{second}", "inputs"
    if first in ("s3", "neuron-cache") and second:
        return f"{first}/{second}", "caches"
    return (first, "caches") if first == ".partial" and second else None


def _is_content_hash(name: str) -> bool:
    return len(name) == 16 and set(name) <= set("0123456789abcdef")


def _requests(backend: SlurmBackend) -> Iterator[tuple[str, Any]]:
    """The request of every job by its path; None for an unreadable one."""
    parts = (
        backend.head.sh(_REQUESTS, backend.shared_folder, seconds=None)
        .decode(errors="replace")
        .split("\0")
    )
    for path, text in zip(parts[::2], parts[1::2], strict=False):
        try:
            yield path, parse_json(text)
        except ValueError:
            yield path, None


def _record(
    folder: str, request: Any, states: dict[str, Any], owners: dict[str, set[str]], me: str
) -> Record:
    name = folder.rpartition("/")[2]
    keep_reason, state = None, states.get(name)
    if other_owners := owners.get(folder, set()) - {me}:
        keep_reason = f"of {', '.join(sorted(other_owners))}"
    elif request is None:
        keep_reason = f"the request of {name} cannot be read"
    elif state is None:
        keep_reason = f"{name} is being submitted, or was not"
    end_time = (
        state.get("TrainingEndTime", state["LastModifiedTime"]).timestamp()
        if state
        else time.time()
    )
    creation_time = state["CreationTime"].timestamp() if state else time.time()
    sources = [
        channel["DataSource"]["S3DataSource"]["S3Uri"]
        for channel in (request or {}).get("InputDataConfig", [])
    ]
    writes = {f"{uri.rstrip('/')}/" for uri in _written_uris(request, folder)}
    return Record(
        name,
        state["TrainingJobStatus"] if state else "Failed",
        creation_time,
        end_time,
        frozenset(sources),
        frozenset(writes),
        kept=keep_reason,
    )


def _written_uris(request: Any, folder: str) -> Iterator[str]:
    if request:
        yield (
            f"{request['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{folder.rpartition('/')[2]}"
        )
        if checkpoints := request.get("CheckpointConfig"):
            yield checkpoints["S3Uri"]


def _is_below(uri: str, prefixes: Iterable[str]) -> bool:
    return any(uri.startswith(f"{prefix.rstrip('/')}/") for prefix in prefixes)


def _touches(uri: str, prefixes: Iterable[str]) -> bool:
    """True if one of the prefixes is above or below the URI."""
    return any(
        f"{path_of(prefix).rstrip('/')}/".startswith(path_of(uri)) for prefix in prefixes
    ) or _is_below(uri, prefixes)
