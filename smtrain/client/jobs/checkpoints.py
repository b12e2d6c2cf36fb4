"""The checkpoints of a run in S3: which steps exist, and which are complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smtrain.client.backends.base import JobPlace
from smtrain.core.files import parse_object
from smtrain.core.protocol.lineage import Lines
from smtrain.core.protocol.uris import split_uri

_RECORDS = ("manifest.json", "smtrain.json")  # of engine native, and of engine nxd


@dataclass(frozen=True)
class Step:
    """The folder of one step in S3."""

    uri: str
    lacking: tuple[str, ...]
    """Files that are missing, or of another size than in the manifest; the manifest if it is missing or damaged."""
    model: dict[str, Any] | None
    """The config.json of the model that was trained, if the record holds it."""

    @property
    def name(self) -> str:
        return self.uri.rstrip("/").rpartition("/")[2]

    @property
    def whole(self) -> bool:
        """True if the manifest exists, and every file in it, with its size."""
        return not self.lacking


def _compared(text: bytes, files: Mapping[str, int], record: str) -> tuple[list[str], dict[str, Any] | None]:
    """The files of a step that differ from its record, and its model's config.json; the record if it is damaged."""
    try:
        about = parse_object(text)
        # a size each, or a mapping with it
        sizes = {name: entry if isinstance(entry, int) else entry["size"] for name, entry in about["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return [record], None
    model = about.get("config")
    return [name for name, size in sizes.items() if files.get(name) != size], model if isinstance(model, dict) else None


def saved_steps(target: JobPlace, uri: str, job: str | None = None) -> list[Step]:
    """The steps of one lineage below a run's checkpoint prefix, oldest first: that of `job`, else the run's newest.

    Raises `JobError` if the prefix may not be listed.
    """
    uri = uri.rstrip("/") + "/"
    _, prefix = split_uri(uri)

    def read(name: str) -> bytes:
        return target.read(uri + name)

    held = {item["Key"][len(prefix) :]: item["Size"] for item in target.listing(uri)}
    lines = Lines(held, read)
    steps = []
    for _, step in lines.steps(lines.parts(job if job in lines.folders else lines.newest)):
        files = {name[len(step) + 1 :]: size for name, size in held.items() if name.startswith(f"{step}/")}
        lacking, model = [_RECORDS[0]], None
        if record := next((name for name in _RECORDS if name in files), None):
            lacking, model = _compared(read(f"{step}/{record}"), files, record)
        steps.append(Step(f"{uri}{step}/", tuple(lacking), model))
    return steps
