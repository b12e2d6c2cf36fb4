"""Lines of checkpoints: which ones a job resumes from, and which it never mixes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from smtrain.core.protocol.checkpoints import Sizes
from smtrain.core.protocol.lineage import NAME, Lineage, LineagePart, Lines, Origin, lines_in
from smtrain.worker.checkpoint.native import pruning


def save(line: Lineage, *steps: int) -> None:
    for step in steps:
        (line.job_folder / f"step_{step:08d}").mkdir(parents=True)


def names(line: Lineage) -> list[str]:
    return [line.name(path) for _, path in line.checkpoints()]


def begin(root: Path, job: str, step: int | None = None, *steps: int) -> Lineage:
    line = Lineage.of(root, job).after_resume(step)
    line.record()
    save(line, *steps)
    return line


def test_a_run_of_several_jobs_is_one_line(tmp_path: Path) -> None:
    begin(tmp_path, "run-train-a", None, 2, 4)
    begin(tmp_path, "run-train-b", 4, 6)
    third = begin(tmp_path, "run-train-b-2", 6, 8)
    assert names(third) == [
        "run-train-a/step_00000002",
        "run-train-a/step_00000004",
        "run-train-b/step_00000006",
        "run-train-b-2/step_00000008",
    ]
    assert lines_in(tmp_path).number("run-train-b-2") == 3


def test_what_a_job_wrote_beyond_the_step_that_others_went_on_from_is_not_theirs(
    tmp_path: Path,
) -> None:
    begin(tmp_path, "run-train-a", None, 2, 4, 6)
    second = begin(tmp_path, "run-train-b", 4, 5)
    assert names(second) == [
        "run-train-a/step_00000002",
        "run-train-a/step_00000004",
        "run-train-b/step_00000005",
    ]
    third = Lineage.of(tmp_path, "run-train-c")
    assert names(third) == names(second), "although another line has a higher step"


def test_the_same_job_goes_on_with_its_own_line_whatever_came_after(tmp_path: Path) -> None:
    first = begin(tmp_path, "run-train-a", None, 2, 4)
    begin(tmp_path, "run-train-b", 4, 6)
    again = Lineage.of(tmp_path, "run-train-a")
    assert (
        names(again) == names(first) == ["run-train-a/step_00000002", "run-train-a/step_00000004"]
    )
    before = (again.job_folder / NAME).read_bytes()
    again.after_resume(4).record()
    assert (again.job_folder / NAME).read_bytes() == before, "it began once"


def test_two_that_began_from_one_step_never_see_each_other(tmp_path: Path) -> None:
    begin(tmp_path, "run-train-a", None, 2)
    one, two = Lineage.of(tmp_path, "run-train-b"), Lineage.of(tmp_path, "run-train-c")
    for line, steps in ((one, (4, 6)), (two, (4,))):
        save(line, *steps)
        (line.job_folder / NAME).write_text(
            Origin(2, "run-train-a", 2).to_json()
        )  # they did not see each other
    one, two = one.after_resume(2), two.after_resume(2)
    assert names(one) == [
        "run-train-a/step_00000002",
        "run-train-b/step_00000004",
        "run-train-b/step_00000006",
    ]
    assert names(two) == ["run-train-a/step_00000002", "run-train-c/step_00000004"]
    third = Lineage.of(tmp_path, "run-train-d")
    assert [part.job for part in third.parts] == [
        "run-train-d",
        "run-train-b",
        "run-train-a",
    ], "of two the further"


def test_a_run_of_an_older_version_goes_on(tmp_path: Path) -> None:
    for step in (2, 4):
        (tmp_path / f"step_{step:08d}").mkdir()
    line = begin(tmp_path, "run-train-a", 4, 6)
    assert names(line) == ["step_00000002", "step_00000004", "run-train-a/step_00000006"]
    assert names(Lineage.of(tmp_path, "run-train-a-2")) == names(line)


def test_without_a_job_name_files_lie_in_the_folder_itself(tmp_path: Path) -> None:
    line = begin(tmp_path, "", None, 2)
    assert line.job_folder == tmp_path
    assert names(Lineage.of(tmp_path, "")) == ["step_00000002"]
    begin(tmp_path, "run-train-a", 2, 4)
    unnamed = begin(tmp_path, "", 4, 6)
    assert names(unnamed)[-2:] == ["run-train-a/step_00000004", "unnamed/step_00000006"]
    assert names(Lineage.of(tmp_path, "")) == names(unnamed)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"format": "smtrain-line"}', "9" * 5000, "[" * 100_000]
)
def test_a_line_without_a_readable_record_is_the_newest_and_has_no_ancestors(
    tmp_path: Path, text: str
) -> None:
    begin(tmp_path, "run-train-a", None, 2)
    torn = begin(tmp_path, "run-train-b", 2, 4)
    (torn.job_folder / NAME).write_text(text)
    assert names(Lineage.of(tmp_path, "run-train-c")) == ["run-train-b/step_00000004"]
    again = Lineage.of(tmp_path, "run-train-b")
    again.after_resume(4).record()
    assert lines_in(tmp_path).folders["run-train-b"].origin == Origin(2, None, None)


def test_records_that_go_in_a_circle_end(tmp_path: Path) -> None:
    for one, other in (("a", "b"), ("b", "a")):
        (tmp_path / one / "step_00000002").mkdir(parents=True)
        (tmp_path / one / NAME).write_text(Origin(1, other, 2).to_json())
    assert lines_in(tmp_path).parts("a") == (LineagePart("a", None), LineagePart("b", 2))


def test_other_files_in_the_prefix_are_nobodys_line() -> None:
    paths = [
        "notes.txt",
        "step_00000002",
        "line.json",
        "-odd/step_00000002/a",
        "job/model/step_00000004/a",
        "a/b/line.json",
    ]
    assert Lines(paths, lambda _: b"").folders == {}


class Whole:
    """Checkpoints that are whole unless they hold a file `torn`."""

    def sizes(self, checkpoint: Path) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in checkpoint.iterdir()}

    def fault(self, _checkpoint: Path, present: Sizes | None = None) -> str | None:
        return "torn" if present is not None and "torn" in present else None

    def remove(self, checkpoint: Path) -> None:
        shutil.rmtree(checkpoint, ignore_errors=True)


def prune(line: Lineage, keep: int, arrived: pruning.ArrivalCheck | None = None) -> None:
    pruning.prune(line, keep, arrived, Whole(), pruning.RankGroup(lambda value: [value], 0, 0))


def left(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("step_*"))


def test_pruning_takes_what_the_line_has_passed_and_leaves_other_lines_alone(
    tmp_path: Path,
) -> None:
    begin(tmp_path, "run-train-a", None, 2, 4, 6, 9)
    other = begin(tmp_path, "run-train-x", 2, 3)
    (other.job_folder / NAME).write_text(Origin(1, None, None).to_json())
    line = Lineage.of(tmp_path, "run-train-b").after_resume(4)
    line.record()
    assert json.loads((line.job_folder / NAME).read_text())["from"] == {
        "job": "run-train-a",
        "step": 4,
    }
    line = Lineage.of(tmp_path, "run-train-b")
    save(line, 5, 7)
    prune(line, 2)
    assert left(tmp_path) == [
        "run-train-a/step_00000006",
        "run-train-a/step_00000009",
        "run-train-b/step_00000005",
        "run-train-b/step_00000007",
        "run-train-x/step_00000003",
    ]
    save(line, 10)
    prune(line, 1)
    assert left(tmp_path) == ["run-train-b/step_00000010", "run-train-x/step_00000003"]


def test_nothing_goes_before_enough_newer_ones_have_arrived(tmp_path: Path) -> None:
    line = begin(tmp_path, "run-train-a", None, 2, 4, 6)
    there: set[int] = set()
    prune(line, 1, lambda path: int(path.name[5:]) in there)
    assert len(left(tmp_path)) == 3
    there |= {2, 4}
    prune(line, 1, lambda path: int(path.name[5:]) in there)
    assert left(tmp_path) == ["run-train-a/step_00000004", "run-train-a/step_00000006"]
    (line.job_folder / "step_00000006" / "torn").touch()
    there.add(6)
    prune(line, 1, lambda path: int(path.name[5:]) in there)
    assert left(tmp_path) == [
        "run-train-a/step_00000004",
        "run-train-a/step_00000006",
    ], "the newest is not whole"
