"""A target's facts are in one record, and code asks the record instead of comparing names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from smtrain.core.config import JobConfig
from smtrain.core.targets import TARGETS, TargetName, target_of_arn

PACKAGE = Path(__file__).resolve().parents[2] / "smtrain"
OWN = (
    "client/backends/sagemaker",
    "client/backends/slurm",
    "client/backends/pai",
    "client/backends/kubernetes",
    "core/targets.py",
    "plane",
    "worker",
)
"""Folders and files of one target, and rooms that know none."""
MOST = 1


def compared(source: str) -> Iterator[int]:
    """Lines that compare something with a target's name, or make a table keyed by such names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and _texts(node.left, *node.comparators) & set(TARGETS):
            yield node.lineno
        elif isinstance(node, ast.Dict):
            keys = _texts(*filter(None, node.keys))
            if keys and keys <= set(TARGETS):
                yield node.lineno


def _texts(*nodes: ast.expr) -> set[str]:
    """The constant texts among nodes and in their tuples, lists and sets."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            found |= _texts(*node.elts)
    return found


def test_few_lines_compare_the_name_of_a_target() -> None:
    files = {path: path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    found = [
        f"{name}:{line}"
        for path, name in files.items()
        if not name.startswith(OWN)
        for line in compared(path.read_text("utf-8"))
    ]
    assert len(found) <= MOST, "\n".join(found)


def test_each_form_of_a_comparison_is_found() -> None:
    source = (
        'a == "aws"\n"slurm" != b\nc in ("local", "x")\n{"aws": 1, "local": 2}\n{"aws": 1, "x":'
        ' 2}\nd == "other"\n'
    )
    assert list(compared(source)) == [1, 2, 3, 4]


def test_each_target_has_one_record_and_its_own_words() -> None:
    assert set(TARGETS) == set(get_args(TargetName)) == {record.name for record in TARGETS.values()}
    for words in ("title", "place"):
        assert len({getattr(record, words) for record in TARGETS.values()}) == len(TARGETS)
    sections = {record.section for record in TARGETS.values() if record.section}
    assert sections <= set(JobConfig.model_fields)


def test_the_target_of_an_arn() -> None:
    assert target_of_arn("arn:aws:sagemaker:us-east-1:000000000000:training-job/a") is None
    for record in TARGETS.values():
        assert record.sagemaker or target_of_arn(f"{record.arn}1:job") == record
