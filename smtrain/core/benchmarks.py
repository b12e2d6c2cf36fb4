"""Find the files of benchmarks in a folder by the names under which they are distributed.

The client checks a folder with it before a run, the worker reads the files that it finds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from smtrain.core.files import parse_json

Parts = dict[str, dict[str, list[Path]]]
"""The files of each split of each part (a subject or a task) of a benchmark."""
_DEPTH = 4
"""Folders below the named one that are searched: a folder for each benchmark, with the benchmark's
own below it.
"""

BBH_TASKS = (
    "boolean_expressions",
    "causal_judgement",
    "date_understanding",
    "disambiguation_qa",
    "dyck_languages",
    "formal_fallacies",
    "geometric_shapes",
    "hyperbaton",
    "logical_deduction_five_objects",
    "logical_deduction_seven_objects",
    "logical_deduction_three_objects",
    "movie_recommendation",
    "multistep_arithmetic_two",
    "navigate",
    "object_counting",
    "penguins_in_a_table",
    "reasoning_about_colored_objects",
    "ruin_names",
    "salient_translation_error_detection",
    "snarks",
    "sports_understanding",
    "temporal_sequences",
    "tracking_shuffled_objects_five_objects",
    "tracking_shuffled_objects_seven_objects",
    "tracking_shuffled_objects_three_objects",
    "web_of_lies",
    "word_sorting",
)
"""Files of suzgunmirac/BIG-Bench-Hard (9ee07bd)."""
AGIEVAL_CHINESE = (
    "gaokao-biology",
    "gaokao-chemistry",
    "gaokao-chinese",
    "gaokao-geography",
    "gaokao-history",
    "gaokao-mathcloze",
    "gaokao-mathqa",
    "gaokao-physics",
    "jec-qa-ca",
    "jec-qa-kd",
    "logiqa-zh",
)
AGIEVAL_ENGLISH = (
    "aqua-rat",
    "gaokao-english",
    "logiqa-en",
    "lsat-ar",
    "lsat-lr",
    "lsat-rc",
    "math",
    "sat-en",
    "sat-en-without-passage",
    "sat-math",
)
"""Files of ruixiangcui/AGIEval (5c77d07), with those whose prompts are Chinese."""
AGIEVAL_CLOZE = ("math", "gaokao-mathcloze")
"""The tasks of AGIEval whose answers are generated."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of lm-evaluation-harness whose files are read without the hub."""

    title: str
    form: str
    """The names of its files, for a message."""
    scored_split: str
    """The split with the questions."""
    tasks: tuple[str, ...]
    """Names of the harness's tasks and groups, or patterns of those of one part, with PART."""


BENCHMARKS = {
    "mmlu": Benchmark(
        "MMLU",
        "SUBJECT/test-*.parquet, or test/SUBJECT_test.csv",
        "test",
        ("mmlu", "mmlu_stem", "mmlu_humanities", "mmlu_social_sciences", "mmlu_other", "mmlu_PART"),
    ),
    "boolq": Benchmark(
        "BoolQ",
        "dev.jsonl or val.jsonl, or validation-*.parquet",
        "validation",
        ("boolq", "boolq-seq2seq", "super_glue-boolq-t5-prompt"),
    ),
    "bbh": Benchmark(
        "BBH",
        "TASK.json, or TASK/test-*.parquet",
        "test",
        (
            "bbh",
            *(
                f"bbh_{way}{part}"
                for way in ("cot_fewshot", "cot_zeroshot", "fewshot", "zeroshot")
                for part in ("", "_PART")
            ),
        ),
    ),
    "agieval": Benchmark(
        "AGIEval",
        "TASK.jsonl, or agieval-TASK/data/test-*.parquet",
        "test",
        ("agieval", "agieval_cn", "agieval_en", "agieval_nous", "agieval_PART"),
    ),
    "ceval": Benchmark(
        "C-Eval",
        "val/SUBJECT_val.csv, or SUBJECT/val-*.parquet",
        "val",
        ("ceval-valid", "ceval-valid_PART"),
    ),
    "humaneval": Benchmark(
        "HumanEval",
        "HumanEval.jsonl or .jsonl.gz, or openai_humaneval/test-*.parquet",
        "test",
        ("humaneval", "humaneval_instruct", "humaneval_64", "humaneval_64_instruct"),
    ),
}
ALL_SUBJECTS = "all"
"""MMLU's file with the questions of every subject."""
_EXAMPLES = {"agieval": 0, "bbh": 3}
"""Most worked examples of the harness (0.4.13); of other benchmarks they are other questions."""
_RUN_CODE = re.compile(r"(humaneval|mbpp)(_.*)?")


def runs_code(task: str) -> bool:
    """Whether a task of the harness runs the code that the model writes, by the metric that smtrain
    runs confined.
    """
    return _RUN_CODE.fullmatch(task) is not None


def code_fault(tasks: Iterable[str], is_allowed: bool) -> str | None:
    """A sentence if one of these tasks runs the model's code without permission."""
    code_tasks = [] if is_allowed else [task for task in tasks if runs_code(task)]
    if not code_tasks:
        return None
    return (
        f"{', '.join(code_tasks)} run code that the model writes; turn evaluate.run_generated_code"
        " on to run it in confined processes, or leave out such tasks"
    )


def shots_fault(tasks: Iterable[str], shots: int | None) -> str | None:
    """A sentence if the harness has fewer worked examples for one of these tasks; it fails in the
    middle otherwise.
    """
    for task in tasks:
        max_shots = _EXAMPLES.get(benchmark_of(task) or "", shots or 0)
        if (shots or 0) > max_shots:
            return (
                f"the harness has {max_shots or 'no'} worked examples for {task}, not {shots};"
                " leave it out, or evaluate such tasks separately"
            )
    return None


def benchmarks_in(folder: Path) -> dict[str, Parts]:
    """The files of each benchmark in a folder; one without a file of the split with its questions
    is left out.
    """
    files_by_name: dict[str, Parts] = {}
    for path in _files_in(folder):
        if place := _place(path, folder):
            name, part, split = place
            files_by_name.setdefault(name, {}).setdefault(part, {}).setdefault(split, []).append(
                path
            )
    benchmarks = {}
    for name, parts in files_by_name.items():
        scored_parts = {
            part: splits
            for part, splits in parts.items()
            if BENCHMARKS[name].scored_split in splits
        }
        if len(scored_parts) > 1:
            scored_parts.pop(ALL_SUBJECTS, None)  # its questions are in the subjects' own files
        elif ALL_SUBJECTS in scored_parts:
            scored_parts = {ALL_SUBJECTS: parts[ALL_SUBJECTS]}
        if scored_parts:
            benchmarks[name] = scored_parts
    return benchmarks


def tasks_of(benchmarks: dict[str, Parts]) -> dict[str, str]:
    """The harness's tasks and groups that these files have questions for, each with its
    benchmark.
    """
    return {
        task.replace("PART", part.replace("-", "_")): name
        for name, parts in benchmarks.items()
        for task in BENCHMARKS[name].tasks
        for part in (parts if "PART" in task else ("",))
    }


def benchmark_of(task: str) -> str | None:
    """The benchmark that a task's or group's name belongs to, whether or not there is such a
    part.
    """
    for name, benchmark in BENCHMARKS.items():
        for pattern in benchmark.tasks:
            if re.fullmatch(re.escape(pattern).replace("PART", r"\w+"), task):
                return name
    return None


def forms_of(tasks: Iterable[str]) -> str:
    """The benchmarks of these tasks, else all, each with the names of its files, for a message."""
    names = sorted({name for name in map(benchmark_of, tasks) if name}) or list(BENCHMARKS)
    return "; ".join(f"{BENCHMARKS[name].title} ({BENCHMARKS[name].form})" for name in names)


def _files_in(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder, followlinks=True):
        directory = Path(root)
        deep = len(directory.relative_to(folder).parts)
        # A copy of the hub's keeps its state in .cache.
        folders[:] = sorted(name for name in folders if not name.startswith(".") and deep < _DEPTH)
        yield from (directory / name for name in sorted(files) if not name.startswith("."))


def _place(path: Path, folder: Path) -> tuple[str, str, str] | None:
    """The benchmark, part and split of a file; None if it is not a benchmark's.

    The name of `folder` itself does not count, because a job has the folder under another name.
    """
    name = path.name.lower()
    if name.endswith(".parquet"):
        return _place_of_parquet(path, folder)
    if name.endswith(".csv"):
        return _place_of_csv(path, folder)
    if name.endswith(".json"):
        return ("bbh", path.stem, "test") if path.stem in BBH_TASKS else None
    if re.fullmatch(r"human[-_]?eval(-v\d+)?\.jsonl(\.gz)?", name):
        return "humaneval", "humaneval", "test"
    if name.endswith(".jsonl"):
        if path.stem in (*AGIEVAL_CHINESE, *AGIEVAL_ENGLISH):
            return "agieval", path.stem, "test"
        split = {
            "train": "train",
            "dev": "validation",
            "val": "validation",
            "validation": "validation",
        }.get(path.stem)
        keys = _first_keys(path) if split else set()
        if split and {"question", "passage"} <= keys and keys & {"answer", "label"}:
            return "boolq", "boolq", split
    return None


def _place_of_parquet(path: Path, folder: Path) -> tuple[str, str, str] | None:
    split = re.match(r"(train|dev|val|validation|test)(?=[-.])", path.name)
    if split is None:
        return None
    owner = path.parent
    if owner.name == "data" and owner != folder:
        owner = owner.parent
    if owner == folder:
        return ("boolq", "boolq", split[1]) if split[1] in ("train", "validation") else None
    part = owner.name
    task = re.sub("^agieval[-_]", "", part.lower()).replace("_", "-")
    if part in BBH_TASKS:
        return "bbh", part, split[1]
    if task in (*AGIEVAL_CHINESE, *AGIEVAL_ENGLISH):
        return "agieval", task, split[1]
    if part.lower() == "boolq":
        return "boolq", "boolq", split[1]
    if part.lower() in ("openai_humaneval", "humaneval"):
        return "humaneval", "humaneval", split[1]
    # MMLU's own split of this kind is named `validation`.
    return ("ceval" if any(path.parent.glob("val-*.parquet")) else "mmlu"), part, split[1]


def _place_of_csv(path: Path, folder: Path) -> tuple[str, str, str] | None:
    split = path.parent.name if path.parent != folder else ""
    if split not in ("test", "dev", "val") or not path.name.endswith(f"_{split}.csv"):
        return None
    with path.open("rb") as file:
        head = file.readline(64).decode("utf-8-sig", errors="replace")
    # MMLU's have no number, and no heading when they are Hendrycks'.
    name = "ceval" if head.replace('"', "").lower().startswith("id,question,") else "mmlu"
    return name, path.name.removesuffix(f"_{split}.csv"), split


def _first_keys(path: Path) -> set[str]:
    try:
        with path.open("rb") as file:
            first = parse_json(file.readline(1 << 20).decode("utf-8-sig"))
    except (OSError, ValueError):
        return set()
    return set(first) if isinstance(first, dict) else set()
