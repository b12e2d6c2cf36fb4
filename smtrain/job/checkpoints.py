"""The checkpoints of a run as they lie in S3: which steps there are, and which of them are whole."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from smtrain.job.inputs import list_objects, split_uri
from smtrain.job.target import Target

_RECORDS = ("manifest.json", "smtrain.json")  # of engine native, and of engine nxd
_STEP_FOLDER = re.compile(r"step_(\d+)/(.+)")


@dataclass(frozen=True)
class Step:
    """One step's folder in S3."""

    uri: str
    lacking: tuple[str, ...]
    """Files that are missing or of another size than the manifest says; the manifest itself where it is missing."""

    @property
    def name(self) -> str:
        return self.uri.rstrip("/").rpartition("/")[2]

    @property
    def whole(self) -> bool:
        """Its manifest is there, and so is every file that the manifest names, with its size."""
        return not self.lacking


def saved_steps(target: Target, uri: str) -> list[Step]:
    """Every step below a checkpoint prefix, oldest first. Raises `JobError` where the prefix may not be listed."""
    uri = uri.rstrip("/") + "/"
    bucket, prefix = split_uri(uri)
    found: dict[str, dict[str, int]] = {}
    for item in list_objects(target, uri):
        named = _STEP_FOLDER.fullmatch(item["Key"][len(prefix) :])
        if named:
            found.setdefault(f"step_{named[1]}", {})[named[2]] = item["Size"]
    steps = []
    for step, files in sorted(found.items()):
        lacking = [_RECORDS[0]]
        if record := next((name for name in _RECORDS if name in files), None):
            body = target.s3.get_object(Bucket=bucket, Key=f"{prefix}{step}/{record}")["Body"].read()
            sizes = {name: entry if isinstance(entry, int) else entry["size"] for name, entry in _files(body).items()}
            lacking = [name for name, size in sizes.items() if files.get(name) != size]
        steps.append(Step(f"{uri}{step}/", tuple(lacking)))
    return steps


def _files(record: bytes) -> dict[str, Any]:
    """The files that a record names: their sizes, or mappings that hold it."""
    found: dict[str, Any] = json.loads(record)["files"]
    return found
