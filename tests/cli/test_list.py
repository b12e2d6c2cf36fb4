"""`smtrain list` says what it does not show."""

from __future__ import annotations

from pathlib import Path

import pytest

from smtrain.cli import list_jobs
from smtrain.testing.switches import plane


@pytest.fixture(scope="module")
def jobs(local_home: Path) -> list[str]:
    """Three jobs of this name."""
    control = plane(local_home)
    return [control.synthetic_job(hosts=1, lines=1, name=f"listed-{n}").name for n in range(3)]


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    list_jobs.app(args=["--target", "local", "--name", "listed-", *arguments], standalone_mode=False)
    return capsys.readouterr().out.splitlines()


def test_how_many_more_there_are_and_how_to_see_them(jobs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = listed(capsys, "--limit", "2")
    assert [line.split()[0] for line in lines[:-1]] == [jobs[2], jobs[1]]
    assert lines[-1].startswith("1 more: `--limit 3` shows them too")
    assert [line.split()[0] for line in listed(capsys, "--limit", "3")] == jobs[::-1]


def test_beyond_what_is_counted_it_says_at_least(
    jobs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(list_jobs, "COUNTED", 1)
    assert listed(capsys, "--limit", "1")[-1].startswith("at least 1 more: ")
