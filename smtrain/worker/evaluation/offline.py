"""Make the harness's own tasks read a benchmark's files on this machine.

Each task made here includes the harness's YAML: prompt, examples, filter and metric are its own,
and only the source of the questions differs.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from smtrain.core.benchmarks import BENCHMARKS, Parts, benchmark_of, benchmarks_in, tasks_of
from smtrain.worker.data.read.ignored_fields import IgnoredText
from smtrain.worker.evaluation import mmlu
from smtrain.worker.evaluation.questions import count_others, questions_in

_FOLDERS = {
    "boolq": "super_glue/boolq",
    "bbh": "bbh",
    "agieval": "agieval",
    "ceval": "ceval",
    "humaneval": "humaneval",
}
_CODE_FOLDERS = ("humaneval", "humaneval_infilling", "mbpp")
_YAMLS = {"bbh": "*/PART.yaml", "agieval": "PART.yaml", "ceval": "ceval-valid_PART.yaml"}
"""The harness's tasks over a part, in its folder; every other part has all."""
_TASK = re.compile(r"""^["']?task["']?:[ \t]*["']?([\w.-]+)""", re.MULTILINE)
_EXAMPLES = {"boolq": ("train", "training_split"), "ceval": ("dev", "fewshot_split")}
"""The split of worked examples, which may be missing, and the task's key that names it."""


def write_tasks(
    folder: Path, names: tuple[str, ...], work: Path, ignored_text: IgnoredText
) -> list[str]:
    """Write the questions and tasks of the benchmarks that these names belong to below `work`.

    Returns the names of the tasks and groups, [] without any in the folder. `ignored_text` counts
    fields and files that no task uses. Raises `DataError` for a file that differs from the
    benchmark's own in form.
    """
    benchmarks = benchmarks_in(folder)
    task_names: list[str] = []
    for name in dict.fromkeys(map(benchmark_of, names)):
        if name == "mmlu" and name in benchmarks:
            task_names += mmlu.write_tasks(benchmarks[name], work / name, ignored_text)
        elif name in benchmarks:
            task_names += _write(name, benchmarks[name], work / name, ignored_text)
    return task_names


def _write(name: str, parts: Parts, out: Path, ignored_text: IgnoredText) -> list[str]:
    known_tasks, task_names = tasks_of({name: parts}), []
    out.mkdir(parents=True)
    for part, splits in parts.items():
        files = _write_questions(name, part, splits, out, ignored_text)
        for path in sorted(
            (tasks_folder() / _FOLDERS[name]).glob(_YAMLS.get(name, "*.yaml").replace("PART", part))
        ):
            name_match = _TASK.search(path.read_text("utf-8"))
            if name_match and name_match[1] in known_tasks:
                task = {"include": str(path), **_source(name, files)}
                (out / f"{name_match[1]}.yaml").write_text(
                    yaml.safe_dump(task, sort_keys=False), "utf-8"
                )
                task_names.append(name_match[1])
    count_others(parts, _splits(name), ignored_text)
    return [*task_names, *_write_groups(name, task_names, out)]


def _write_groups(name: str, tasks: list[str], out: Path) -> list[str]:
    """Write the harness's groups of these tasks; a folder may hold a part of a group's."""
    group_names = []
    for path in sorted((tasks_folder() / _FOLDERS[name]).rglob("*.yaml")):
        text = path.read_text("utf-8")
        if not text.startswith("group:") and "\ngroup:" not in text:
            continue
        group = yaml.safe_load(text)
        if present := [task for task in group["task"] if task in tasks]:
            listing = yaml.safe_dump({**group, "task": present}, sort_keys=False)
            (out / f"_{group['group']}.yaml").write_text(listing, "utf-8")
            group_names.append(str(group["group"]))
    return group_names


def _write_questions(
    name: str, part: str, splits: dict[str, list[Path]], out: Path, ignored_text: IgnoredText
) -> dict[str, str]:
    """Write the records of each split that a task uses; returns the files."""
    files = {}
    for split in _splits(name):
        if split in splits:
            records = questions_in(name, part, splits[split], ignored_text)
            path = out / f"{part}_{split}.jsonl"
            path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
            files[split] = str(path)
    return files


def _source(name: str, files: dict[str, str]) -> dict[str, Any]:
    """The keys of a task that name its data."""
    task_keys: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
    }
    split, key = _EXAMPLES.get(name, ("", ""))
    if split and split not in files:
        task_keys |= {key: None, "fewshot_config": None}
    return task_keys


def _splits(name: str) -> tuple[str, ...]:
    """The splits that a benchmark's tasks use."""
    return (BENCHMARKS[name].scored_split, *_EXAMPLES.get(name, ())[:1])


def write_confined(work: Path) -> None:
    """Allow the harness's tasks that run generated code, which it refuses as unsafe, those made by
    `write_tasks` too.

    Only tasks that run code by the metric `code_eval`, whose programs are confined.
    """
    task_files = {path.stem: path for path in work.rglob("*.yaml")}
    for folder in _CODE_FOLDERS:
        for path in sorted((tasks_folder() / folder).glob("*.yaml")):
            if name_match := _TASK.search(path.read_text("utf-8")):
                task_file = task_files.get(name_match[1])
                task = (
                    yaml.safe_load(task_file.read_text("utf-8"))
                    if task_file
                    else {"include": str(path)}
                )
                text = yaml.safe_dump(
                    {**task, "task": name_match[1], "unsafe_code": False}, sort_keys=False
                )
                (task_file or work / f"{name_match[1]}.yaml").write_text(text, "utf-8")


def tasks_folder() -> Path:
    """The folder of the harness's own tasks."""
    package = find_spec("lm_eval")
    assert package is not None
    assert package.origin
    return Path(package.origin).with_name("tasks")
