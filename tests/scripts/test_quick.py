"""The quick tests include some of every package."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.conftest import TOGETHER

ROOT = Path(__file__).parents[2]


def files() -> list[Path]:
    """The test files that `scripts/test --quick` runs."""
    lines = (ROOT / "tests/quick.txt").read_text().splitlines()
    paths = [ROOT / line for line in lines if line and not line.startswith("#")]
    return [
        file for path in paths for file in ([path] if path.is_file() else path.glob("test_*.py"))
    ]


def imported(file: Path) -> set[str]:
    """The packages of smtrain that a file names in its imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {part for name in names if name.startswith("smtrain.") for part in _packages_of(name)}


def _packages_of(name: str) -> set[str]:
    """The room of a module, and its package in the room."""
    parts = name.split(".")
    return {".".join(parts[1:end]) for end in (2, 3)}


def test_every_package_has_a_test_among_the_quick_ones() -> None:
    markers = [*ROOT.glob("smtrain/*/__init__.py"), *ROOT.glob("smtrain/*/*/__init__.py")]
    packages = {".".join(path.relative_to(ROOT / "smtrain").parts[:-1]) for path in markers}
    assert packages
    assert sorted(packages - set().union(*map(imported, files()))) == []


def test_what_is_listed_as_quick_is_there_and_in_order() -> None:
    listed = [
        line
        for line in (ROOT / "tests/quick.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert [line for line in listed if not (ROOT / line).exists()] == []
    assert listed == sorted(set(listed))
    assert "quick.txt" in (ROOT / "scripts/test").read_text()


def test_files_that_share_a_worker_are_there() -> None:
    assert [start for start, _ in TOGETHER if not [*ROOT.glob(f"{start}*")]] == []
