"""`tests.parts`: each test file is in one part of `scripts/test --full`; a green run is recorded
with its commit.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import parts


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, which `tests.parts` takes for this one."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_one.py").write_text("")
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.setattr(parts, "RECORD", tmp_path / "tests/full-runs.json")
    git(tmp_path, "init", "-q")
    git(tmp_path, "config", "user.email", "a@b")
    git(tmp_path, "config", "user.name", "a")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True)


def test_every_file_and_every_environment_is_in_one_part() -> None:
    found = [file for part in range(1, parts.PARTS + 1) for file in parts.files(part)]
    assert len(found) == len(set(found)) > 300
    assert sorted(found) == sorted(
        str(p.relative_to(parts.ROOT)) for p in (parts.ROOT / "tests").rglob("test_*.py")
    )
    cases = parts.ROOT.joinpath("scripts/test").read_text()
    names = [name for part in parts.ENVIRONMENTS.values() for name in part]
    assert len(names) == len(set(names))
    assert all(f"{name}) part {name} " in cases or name.startswith("tf") for name in names)


def test_a_green_part_is_stale_after_many_commits(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(list(parts.stale())) == parts.PARTS
    for part in range(1, parts.PARTS + 1):
        parts.record(part)
    assert list(parts.stale()) == []
    monkeypatch.setattr(parts, "STALE", 1)
    for name in ("second", "third"):
        git(checkout, "commit", "-qm", name, "--allow-empty")
    assert all("2 commits ago; run scripts/test --full" in line for line in parts.stale())


def test_a_commit_that_is_not_here_is_said_and_a_clone_without_history_says_nothing(
    checkout: Path,
) -> None:
    parts.RECORD.write_text(
        '{"1": {"date": "2026-11-27", "commit": "0123456789012345678901234567890123456789"}}'
    )
    assert "at a commit missing here" in next(parts.stale())
    (checkout / ".git/shallow").write_text("0123456789012345678901234567890123456789\n")
    assert list(parts.stale()) == []


def test_a_run_of_changed_files_is_not_recorded(checkout: Path) -> None:
    (checkout / "tests/test_one.py").write_text("x = 1\n")
    with pytest.raises(SystemExit, match="commit them first"):
        parts.record(1)
    assert not parts.RECORD.exists()
