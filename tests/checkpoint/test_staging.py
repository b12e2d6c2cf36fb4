from __future__ import annotations

import os
from pathlib import Path

import pytest

from smtrain.checkpoint.staging import refuse_overlap, refuse_unfinished, staged
from smtrain.errors import CheckpointError


def files(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def write(target: Path, content: str, fail: type[BaseException] | None = None) -> None:
    with staged(target, content) as stage:
        folder = stage.folder
        (folder / "sub").mkdir(exist_ok=True)
        (folder / "sub" / "a").write_text(content)
        (folder / f"part-{content}").write_text(content)
        (folder / "marker").write_text(content)
        stage.note("sub/a", [len(content)])
        if fail is not None:
            raise fail("the writer failed")
        stage.publish("marker", replaces=("part-*",))


@pytest.mark.parametrize("exists", [False, True])
def test_the_folder_is_whole_or_as_it_was(tmp_path: Path, exists: bool) -> None:
    target = tmp_path / "deep" / "out"
    before: dict[str, str] = {}
    if exists:
        target.mkdir(parents=True)
        (target / "mine").write_text("kept")
        before = {"mine": "kept"}
    with pytest.raises(RuntimeError):
        write(target, "one", fail=RuntimeError)
    assert target.exists() == exists
    assert files(tmp_path / "deep") == {f"out/{k}": v for k, v in before.items()}
    write(target, "one")
    first = before | {"marker": "one", "part-one": "one", "sub/a": "one"}
    assert files(target) == first
    with pytest.raises(RuntimeError):
        write(target, "two", fail=RuntimeError)
    assert files(target) == first
    write(target, "two")  # what an earlier run wrote goes, what is not ours stays
    assert files(target) == before | {"marker": "two", "part-two": "two", "sub/a": "two"}
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["out"]


def test_leftovers_of_a_killed_run_do_not_come_along(tmp_path: Path) -> None:
    for partial in (tmp_path / ".out.partial", tmp_path / "there" / ".partial"):
        partial.mkdir(parents=True)
        (partial / "stale").write_text("stale")
    for name in ("out", "there"):
        write(tmp_path / name, "new")
        assert files(tmp_path / name) == {"marker": "new", "part-new": "new", "sub/a": "new"}


def test_the_marker_is_never_beside_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "out", "one")
    (tmp_path / "out" / "mine").write_text("")
    seen = []
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        seen.append((Path(target).name, (tmp_path / "out" / "marker").exists()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    write(tmp_path / "out", "two")
    assert seen == [("part-two", False), ("a", False), ("marker", False)]


def test_a_target_that_is_a_file_or_the_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        write(tmp_path / "file", "one")
    assert files(tmp_path) == {"file": "mine"}
    for source, target in (("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a", "c/../a")):
        with pytest.raises(CheckpointError, match="overlap"):
            refuse_overlap(tmp_path / source, tmp_path / target)
    refuse_overlap(tmp_path / "a", tmp_path / "ab")


@pytest.mark.parametrize("exists", [False, True])
def test_an_interrupted_run_goes_on_and_another_begins_anew(tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "out").mkdir()
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", "one", fail=KeyboardInterrupt)
    with staged(tmp_path / "out", "one") as stage:
        assert stage.done == {"sub/a": [3]}
        assert files(stage.folder)["sub/a"] == "one"
        with pytest.raises(CheckpointError, match="another process is writing"):
            write(tmp_path / "out", "one")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", "one", fail=KeyboardInterrupt)
    with staged(tmp_path / "out", "two") as stage:
        assert stage.done == {}
        assert "sub/a" not in files(stage.folder)


def test_a_run_killed_while_files_move_is_noticed_and_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    write(out, "one")
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write(out, "two")
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(CheckpointError, match="half of a conversion that was interrupted"):
        refuse_unfinished(out, "marker")
    with pytest.raises(CheckpointError, match="half of another conversion"):
        write(out, "three")
    with staged(out, "two") as stage:
        assert stage.moving
        stage.publish("marker", replaces=("part-*",))
    assert files(out) == {"marker": "two", "part-two": "two", "sub/a": "two"}
