"""Faults of `evaluate.data` that this machine can see: no tasks, or a task without its questions."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smtrain.core.config.cluster_paths import readable_schemes
from smtrain.core.config.schema import JobConfig
from smtrain.core.config.yaml_file import read_settings
from smtrain.core.errors import ConfigError
from smtrain.core.protocol.uris import respelled
from smtrain.core.yaml_text import YamlError, parse

Fault = tuple[set[str], str]
_MMLU = ("*_test.csv", "test-*.parquet")


def task_faults(config: JobConfig) -> Iterator[Fault]:
    """Tasks of stage evaluate that are on this machine and are not there."""
    data = config.evaluate.data
    if data is None or data.startswith(("s3://", *readable_schemes(config.target))):
        return
    folder = Path(data)
    if told := respelled(data, ("s3://",)):
        yield {"evaluate.data"}, f"evaluate.data: {told}"
        return
    if "://" in data or not folder.is_dir():
        yield (
            {"evaluate.data"},
            f"evaluate.data: {data} is neither a folder nor an s3:// URI; give one of task YAMLs, or of MMLU's files",
        )
        return
    own = tasks_in(folder)
    if not own and not any(folder.rglob("*.yaml")):
        yield (
            {"evaluate.data"},
            f"evaluate.data: {data} holds neither a task's .yaml nor MMLU (SUBJECT/test-*.parquet, or "
            "test/SUBJECT_test.csv); give the folder that does",
        )
    for name in config.evaluate.tasks:
        for file in _files(own.get(name, {})):
            if "://" not in file and not glob.has_magic(file) and not (folder / file).exists():
                yield (
                    {"evaluate.data"},
                    f"evaluate.data: the task {name} reads {folder / file}, which does not exist; put it there, or "
                    "correct the task's data_files",
                )


def tasks_in(folder: Path) -> dict[str, dict[str, Any]]:
    """What the YAML of each task and group in a folder says, by name; of MMLU's own files, `mmlu` alone."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*.yaml")):
        told = _read(path)
        found |= {told[key]: told for key in ("task", "group", "tag") if isinstance(told.get(key), str)}
    if any(any(folder.rglob(kind)) for kind in _MMLU):
        found["mmlu"] = {}
    return found


def _read(path: Path) -> dict[str, Any]:
    """A task's YAML, {} where it is none: the harness says what is wrong with it."""
    try:
        told = parse(read_settings(path, "task", "name a task"), unknown_tags=True)
    except (ConfigError, YamlError):
        return {}
    return told if isinstance(told, dict) else {}


def _files(task: dict[str, Any]) -> Iterator[str]:
    given = task.get("dataset_kwargs")
    found = given.get("data_files") if isinstance(given, dict) else None
    for some in found.values() if isinstance(found, dict) else [found]:
        yield from (file for file in (some if isinstance(some, list) else [some]) if isinstance(file, str))
