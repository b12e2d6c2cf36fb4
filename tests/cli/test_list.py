"""`smtrain list` says how many jobs it leaves out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from smtrain.cli import list_jobs
from testing.plane import plane


@pytest.fixture(scope="module")
def jobs(local_home: Path) -> list[str]:
    """Three jobs of this name, the last one of a run."""
    control = plane(local_home)
    names = ("listed-0", "listed-1", "listed-run-train-0123abcd")
    return [control.synthetic_job(hosts=1, lines=1, name=name).name for name in names]


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    list_jobs.app(
        args=["--target", "local", "--name", "listed-", *arguments], standalone_mode=False
    )
    return capsys.readouterr().out.splitlines()


def test_how_many_more_there_are_and_how_to_see_them(
    jobs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = listed(capsys, "--limit", "2")
    assert [line.split()[-1] for line in lines[:-1]] == ["JOB", jobs[2], jobs[1]]
    assert lines[-1].startswith("1 more: `--limit 3` shows them too")
    assert [line.split()[-1] for line in listed(capsys, "--limit", "3")] == ["JOB", *jobs[::-1]]


def test_each_row_says_run_state_age_loss_and_place(
    jobs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    head, ours, foreign, _ = (line.split() for line in listed(capsys))
    assert head == ["RUN", "STAGE", "STATE", "AGE", "LOSS", "PLACE", "JOB"]
    assert ours[:3] == ["listed-run", "train", "Completed"]
    assert ours[4] in ("s", "min")
    assert ours[5:] == ["-", "here", jobs[2]]
    assert foreign[:2] == ["-", "-"], "a job that no run of ours made"


@pytest.mark.parametrize(
    ("columns", "head"),
    [
        (140, ["RUN", "STAGE", "STATE", "AGE", "LOSS", "PLACE", "JOB"]),
        (92, ["RUN", "STATE", "AGE", "LOSS", "JOB"]),
        (80, ["STATE", "AGE", "LOSS", "JOB"]),
    ],
)
def test_a_row_fits_a_narrow_terminal(
    jobs: list[str],
    columns: int,
    head: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    control = jobs[2].replace("listed-run", "listed-run-of-a-long-name")
    monkeypatch.setattr(
        list_jobs,
        "_rows",
        lambda found, where: [
            ("listed-run-of-a-long-name", "train", "Completed", "3 min", "4.9", where, control)
            for _ in found
        ],
    )
    monkeypatch.setattr(list_jobs, "room", lambda: columns)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = listed(capsys)
    assert lines[0].split() == head
    assert all(line.endswith(control) for line in lines[1:])
    assert max(map(len, lines)) <= columns


def test_beyond_what_is_counted_it_says_at_least(
    jobs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(list_jobs, "COUNT_LIMIT", 1)
    assert listed(capsys, "--limit", "1")[-1].startswith("at least 1 more: ")
