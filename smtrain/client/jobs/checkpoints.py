"""The checkpoints of a run in S3: which steps exist, and which are complete by
`core.protocol.checkpoints`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smtrain.client.backends.base import Backend
from smtrain.core.files import parse_object
from smtrain.core.protocol.checkpoints import RECORDS, Sizes, renaming_fault, size_faults
from smtrain.core.protocol.lineage import Lines
from smtrain.core.protocol.uris import split_uri


@dataclass(frozen=True)
class Step:
    """The folder of one step in S3."""

    uri: str
    missing_files: tuple[str, ...]
    """Files that are missing or of another size than in the record; the record if it is missing,
    damaged or of another step.
    """
    model: dict[str, Any] | None
    """The config.json of the model that was trained, if the record holds it."""

    @property
    def name(self) -> str:
        return self.uri.rstrip("/").rpartition("/")[2]

    @property
    def is_complete(self) -> bool:
        """True if the record exists, and every file in it, with its size."""
        return not self.missing_files


def compare_with_record(
    text: bytes, files: Sizes, step: str
) -> tuple[list[str] | None, dict[str, Any] | None]:
    """The files of a step's folder that differ from the record in `text`, and the model's
    config.json.

    None for a damaged record, or that of another step.
    """
    try:
        record = parse_object(text)
        # a size each, or a mapping with it
        sizes = {
            name: entry if isinstance(entry, int) else entry["size"]
            for name, entry in record["files"].items()
        }
        if renaming_fault(step.rpartition("/")[2], record["step"]):
            return None, None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, None
    model = record.get("config")
    return list(size_faults(sizes, files)), model if isinstance(model, dict) else None


def saved_steps(target: Backend, uri: str, job: str | None = None) -> list[Step]:
    """The steps of one lineage below a run's checkpoint prefix, oldest first: that of `job`, else
    the run's newest.

    Raises `JobError` if the prefix may not be listed.
    """
    uri = uri.rstrip("/") + "/"
    _, prefix = split_uri(uri)

    def read(name: str) -> bytes:
        return target.read(uri + name)

    sizes = {item["Key"][len(prefix) :]: item["Size"] for item in target.listing(uri)}
    lines = Lines(sizes, read)
    steps = []
    for _, step in lines.steps(lines.parts(job if job in lines.folders else lines.newest)):
        files = {
            name[len(step) + 1 :]: size
            for name, size in sizes.items()
            if name.startswith(f"{step}/")
        }
        record = next((name for name in RECORDS.values() if name in files), None)
        faults, model = (
            (None, None)
            if record is None
            else compare_with_record(read(f"{step}/{record}"), files, step)
        )
        missing_files = [record or RECORDS["native"]] if faults is None else faults
        steps.append(Step(f"{uri}{step}/", tuple(missing_files), model))
    return steps
