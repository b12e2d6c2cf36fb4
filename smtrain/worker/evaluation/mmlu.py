"""Make tasks for lm-evaluation-harness from MMLU's files: the hub's Parquet or the original CSV
folders.

Tasks, prompts and groups are the harness's own `mmlu`; only the source of the questions differs.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from smtrain.core.benchmarks import ALL_SUBJECTS, Parts
from smtrain.core.errors import DataError
from smtrain.worker.data.read.ignored_fields import IgnoredText, count_ignored_columns
from smtrain.worker.evaluation.questions import count_others, parquet_table, refuse_two_copies

_SPLITS = ("test", "dev")
_LETTERS = "ABCD"
Question = dict[str, Any]
"""question, subject, choices [4], answer 0 to 3."""


def write_tasks(subjects: Parts, out: Path, ignored_text: IgnoredText) -> list[str]:
    """Write the questions and one task a subject into `out`; returns the tasks and groups.

    `ignored_text` counts columns and files that no task uses. Raises `DataError` for a file without
    MMLU's layout.
    """
    questions = {split: _by_subject(subjects, split, ignored_text) for split in _SPLITS}
    count_others(subjects, _SPLITS, ignored_text)
    out.mkdir(parents=True)
    template = yaml.safe_load((_harness() / "_default_template_yaml").read_text("utf-8"))
    groups: dict[str, list[str]] = {}
    for subject in sorted(questions["test"]):
        name, files = f"mmlu_{subject}", {}
        for split in _SPLITS:
            if rows := questions[split].get(subject, []):
                files[split] = str(out / f"{subject}_{split}.jsonl")
                Path(files[split]).write_text(
                    "".join(json.dumps(row) + "\n" for row in rows), "utf-8"
                )
        task_keys = {
            "task": name,
            "task_alias": subject,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files},
            "description": (
                "The following are multiple choice questions (with answers) about "
                f"{subject.replace('_', ' ')}.\n\n"
            ),
        }
        task = {**template, **task_keys}
        if "dev" not in files:
            task.pop("fewshot_split")
            task.pop("fewshot_config")
        (out / f"{name}.yaml").write_text(yaml.safe_dump(task, sort_keys=False), "utf-8")
        groups.setdefault(_group_of(subject), []).append(name)
    for group, names in {**groups, "mmlu": sorted(groups)}.items():
        listing = {
            "group": group, "task": names, "metadata": {"version": 2},
            "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
        }  # fmt: skip
        (out / f"_{group}.yaml").write_text(yaml.safe_dump(listing, sort_keys=False), "utf-8")
    return ["mmlu", *groups, *(name for names in groups.values() for name in names)]


def _group_of(subject: str) -> str:
    """The harness's group of a subject."""
    try:
        task = yaml.safe_load((_harness() / f"mmlu_{subject}.yaml").read_text("utf-8"))
        return str(task["tag"]).removesuffix("_tasks")
    except OSError:
        return "mmlu_other"


def _harness() -> Path:
    package = find_spec("lm_eval")
    assert package is not None
    assert package.origin
    return Path(package.origin).parent / "tasks/mmlu/default"


def _by_subject(
    subjects: Parts, split: str, ignored_text: IgnoredText
) -> dict[str, list[Question]]:
    questions: dict[str, list[Question]] = {}
    for subject, splits in subjects.items():
        refuse_two_copies("mmlu", subject, splits.get(split, []))
        for path in splits.get(split, []):
            for row in (
                _csv_rows(path, subject)
                if path.suffix == ".csv"
                else _parquet_rows(path, subject, ignored_text)
            ):
                questions.setdefault(row["subject"], []).append(row)
    return questions


def _csv_rows(path: Path, subject: str) -> Iterator[Question]:
    """Read rows of a question, four choices and a letter, with or without a header."""
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if number == 1 and len(row) == 6 and row[5].strip().lower() == "answer":
                continue
            if len(row) != 6 or row[5].strip().upper() not in tuple(_LETTERS):
                raise DataError(
                    f"{path}: row {number} is not a question, four choices and a letter from A to"
                    " D, as MMLU's are; correct it or remove the file."
                )
            answer = _LETTERS.index(row[5].strip().upper())
            yield {"question": row[0], "subject": subject, "choices": row[1:5], "answer": answer}


def _parquet_rows(path: Path, subject: str, ignored_text: IgnoredText) -> Iterator[Question]:
    """Read question, subject, choices and the answer's number (or letter); the choices may be
    columns A to D.
    """
    table = parquet_table(path)
    names = set(table.column_names)
    has_letter_columns = set(_LETTERS) <= names
    absent_columns = [
        name
        for name in ("question", "answer", *([] if has_letter_columns else ["choices"]))
        if name not in names
    ]
    if absent_columns:
        raise DataError(
            f"{path} has no column {absent_columns[0]}, only {', '.join(table.column_names)}; give"
            " MMLU's own."
        )
    ignored_text.count(
        count_ignored_columns(
            table,
            ("question", "answer", "subject", *(_LETTERS if has_letter_columns else ("choices",))),
        )
    )
    for row in table.to_pylist():
        choices = (
            [row[letter] for letter in _LETTERS] if has_letter_columns else list(row["choices"])
        )
        answer = row["answer"]
        answer = _LETTERS.index(answer.strip().upper()) if isinstance(answer, str) else int(answer)
        kind = subject if subject != ALL_SUBJECTS else str(row["subject"])
        yield {"question": row["question"], "subject": kind, "choices": choices, "answer": answer}
