"""No module changes a table of another one when it is imported: what is found would depend on what
was imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.tools import check, pipeline, run
from smtrain.tools.tune import tune

PACKAGE = Path(smtrain.__file__).parent
CHANGED = re.compile(
    r"^(\w+)(?:(?:\.\w+|\[.*?\])*\.(?:append|extend|update|add|insert|setdefault|register)\("
    r"|(?:\.\w+|\[.*?\])+ *[|+-]?=(?!=))",
    re.MULTILINE,
)


def changed_by_import(text: str) -> Iterator[str]:
    """Names from other modules of the package that the top level of this source changes."""
    roots = {match[1] for match in CHANGED.finditer(text)}
    if roots:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("smtrain"):
                yield from (one.name for one in node.names if (one.asname or one.name) in roots)


@pytest.mark.parametrize(
    "line",
    [
        "checks.CHECKS['pairs'] = 1",
        "TABLE.append(2)",
        "checks.TABLE |= {}",
        "checks.TABLE += [1]",
        "checks.f = g",
    ],
)
def test_a_changed_table_is_found(line: str) -> None:
    text = (
        "from smtrain.client.preflight import checks\nfrom smtrain.core.public_api import"
        f" TABLE\n\n{line}\n"
    )
    assert [*changed_by_import(text)] == [line.partition(".")[0]]
    assert not [*changed_by_import(text.replace(line, f"def f() -> None:\n    {line}"))]


def test_no_import_changes_a_table_of_another_module() -> None:
    found = {
        str(path.relative_to(PACKAGE)): [*changed_by_import(path.read_text("utf-8"))]
        for path in PACKAGE.rglob("*.py")
    }
    assert len(found) > 300
    assert {name: tables for name, tables in found.items() if tables} == {}


def test_whatever_starts_jobs_makes_the_same_checks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(
        check, "require_launchable", lambda chain, stages, say, more: made.append([*more])
    )

    def started(*_: Any, precheck: Any, **__: Any) -> None:
        precheck(None, [], print)

    for module, name in (
        (run, "run_stages"),
        (run, "run_list"),
        (run, "launch_stage"),
        (pipeline, "make_pipeline"),
    ):
        monkeypatch.setattr(module, name, started)
    config = {
        "model": {"path": "s3://bucket/Llama-3.2-1B/"},
        "data": {"prepared": "s3://bucket/data/"},
    }
    sections = {
        "train": {"steps": 1},
        "compute": {"instance_type": "ml.trn1.32xlarge", "region": "us-east-1"},
    }
    smtrain.run(config | sections, target="aws")
    smtrain.run([config | sections], target="aws")
    smtrain.launch(config | sections, target="aws")
    smtrain.pipeline(config | sections, target="aws")
    assert vars(tune)["look_first"] is check.look_first
    assert made == [["documents", "pairs", "conversations"]] * 4 == [[*check.RECORD_CHECKS]] * 4
