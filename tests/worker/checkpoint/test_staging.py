"""A folder is whole or as it was, whenever the process that writes it is killed."""

from __future__ import annotations

import builtins
import fcntl
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint import staging
from smtrain.worker.checkpoint.staging import is_unfinished, staging_folder
from smtrain.worker.checkpoint.storage import refuse_overlap


def files(folder: Path) -> dict[str, str]:
    return {
        p.relative_to(folder).as_posix(): p.read_text()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def write(target: Path, content: str, fail: type[BaseException] | None = None) -> None:
    with staging_folder(target, content, "marker") as stage:
        for key in ("sub/a", f"part-{content}", "marker") if not stage.complete else ():
            if key not in stage.done:
                (stage.folder / key).parent.mkdir(exist_ok=True)
                handle = os.open(stage.folder / key, os.O_WRONLY | os.O_CREAT, 0o666)
                os.pwrite(handle, content.encode(), 0)
                os.close(handle)
                stage.note(key, [len(content)])
        if fail is not None:
            raise fail("the writer failed")
        stage.publish(replaces=("part-*",))


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


def test_the_marker_is_never_beside_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out", "one")
    (tmp_path / "out" / "mine").write_text("")
    seen = []
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        if not Path(target).name.startswith("."):
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
    with staging_folder(tmp_path / "out", "one", "marker") as stage:
        assert stage.done == {"sub/a": [3], "part-one": [3], "marker": [3]}
        assert files(stage.folder)["sub/a"] == "one"
        with pytest.raises(CheckpointError, match="another process is writing"):
            write(tmp_path / "out", "one")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", "one", fail=KeyboardInterrupt)
    with staging_folder(tmp_path / "out", "two", "marker") as stage:
        assert stage.done == {}
        assert "sub/a" not in files(stage.folder)


def test_what_is_in_the_way_is_named_and_stays(tmp_path: Path) -> None:
    for name, way in (("a", "sub"), ("b", "marker/mine")):
        write(tmp_path / name, "one")
        (tmp_path / name / "marker").unlink()
        shutil.rmtree(tmp_path / name / "sub")
        (tmp_path / name / way).parent.mkdir(exist_ok=True)
        (tmp_path / name / way).write_text("mine")
        before = files(tmp_path / name)
        with pytest.raises(CheckpointError, match="in the way"):
            write(tmp_path / name, "two")
        assert files(tmp_path / name) == before


def test_two_runs_at_once_do_not_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process ends and removes its journal after the second opened it and before it locks
    it.
    """
    lock = fcntl.flock

    def late(handle: int, how: int) -> None:
        (tmp_path / ".out.partial" / staging.JOURNAL).unlink()
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(CheckpointError, match="another process is writing"):
        write(tmp_path / "out", "one")


class Killed(BaseException):
    pass


@contextmanager
def killed(after: int, half: bool = False) -> Iterator[list[str]]:
    """Stop all file operations after `after` of them, as if the process was gone; `half`: after
    half of a write.

    Yields the names of those that were done.
    """
    seen: list[str] = []
    dead = False

    def counted(module: Any, name: str) -> Callable[..., Any]:
        real = getattr(module, name)

        def operation(*args: Any, **kwargs: Any) -> Any:
            nonlocal dead
            if name == "open" and module is builtins and args[1:] != ("w",):
                return real(*args, **kwargs)
            if len(seen) == after or dead:
                if half and not dead and "write" in name:
                    real(args[0], args[1][: len(args[1]) // 2], *args[2:])
                if half and not dead and name == "open":
                    made = real(*args, **kwargs)
                    os.close(made) if isinstance(made, int) else made.close()
                dead = True
                raise Killed
            seen.append(name)
            return real(*args, **kwargs)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "open",
            "mkdir",
            "rename",
            "replace",
            "unlink",
            "rmdir",
            "ftruncate",
            "write",
            "pwrite",
        ):
            patch.setattr(os, name, counted(os, name))
        patch.setattr(builtins, "open", counted(builtins, "open"))
        yield seen


WHOLE = {
    name: {"sub/a": name, f"part-{name}": name, "marker": name} for name in ("old", "one", "two")
}
MINE = {"mine": "kept"}


def visible(target: Path) -> dict[str, str]:
    return {
        k: v for k, v in files(target).items() if not k.startswith((".partial/", staging.JOURNAL))
    }


def nothing(_: Path) -> None: ...


def a_folder(target: Path) -> None:
    target.mkdir()
    (target / "mine").write_text("kept")


def an_output(target: Path) -> None:
    a_folder(target)
    write(target, "old")


def killed_run(target: Path, content: str, after: str) -> None:
    """Write `content`, killed after its last operation named `after`."""
    copy = target.with_name("copy")
    if target.exists():
        shutil.copytree(target, copy)
    with killed(10_000) as seen:
        write(copy, content)
    shutil.rmtree(copy)
    with pytest.raises(Killed), killed(len(seen) - seen[::-1].index(after)):
        write(target, content)


BEFORE: dict[str, Callable[[Path], None]] = {
    "a new folder": nothing,
    "a folder that exists": a_folder,
    "over an older output": an_output,
    "resumed": lambda target: killed_run(target, "one", "pwrite"),
    "resumed in a folder": lambda target: (a_folder(target), killed_run(target, "one", "pwrite"))[
        0
    ],
    "after another's": lambda target: killed_run(target, "two", "pwrite"),
    "after another's, in a folder": lambda target: (
        an_output(target),
        killed_run(target, "two", "pwrite"),
    )[0],
    "after another's, almost done": lambda target: (
        a_folder(target),
        killed_run(target, "two", "replace"),
    )[0],
}


def sound(target: Path, before: dict[str, str] | None) -> None:
    """Check that the target is a whole output, as before, or marked as unfinished."""
    if not target.exists():
        assert before is None
        return
    mine = MINE if "mine" in (before or {}) else {}
    files = visible(target)
    if files == before or files in [mine | whole for whole in WHOLE.values()]:
        return
    assert is_unfinished(target, "marker")


def completes(target: Path, content: str, before: dict[str, str] | None) -> None:
    write(target, content)
    there = visible(target)
    assert there.pop("mine", None) == (before or {}).get("mine")
    assert there == WHOLE[content]
    assert set(files(target)) == set(visible(target))  # nothing of the work stays
    assert [p.name for p in target.parent.iterdir()] == [target.name]


@pytest.mark.pairwise
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("fails", [None, RuntimeError])
@pytest.mark.parametrize("scenario", BEFORE)
def test_any_operation_may_be_the_last(
    tmp_path: Path, scenario: str, fails: type[BaseException] | None, half: bool
) -> None:
    (tmp_path / "start").mkdir()
    BEFORE[scenario](tmp_path / "start" / "out")
    before = visible(tmp_path / "start" / "out") if (tmp_path / "start" / "out").exists() else None
    for after in itertools.count():
        root = tmp_path / str(after)
        shutil.copytree(tmp_path / "start", root)
        with suppress(Killed, RuntimeError), killed(after, half) as seen:
            write(root / "out", "one", fails)
        ended = len(seen) < after
        sound(root / "out", before)
        if ended:
            files = visible(root / "out") if (root / "out").exists() else None
            assert files == (
                before if fails else ({} if "mine" not in (before or {}) else MINE) | WHOLE["one"]
            )
            break
        again, other = tmp_path / f"{after} again", tmp_path / f"{after} other"
        for copy in (again, other):
            shutil.copytree(root, copy)
        completes(again / "out", "one", before)
        with suppress(CheckpointError):  # it may be half of the other
            write(other / "out", "two")
            assert visible(other / "out")["marker"] == "two"
        sound(other / "out", before)
    assert after > 8


def lose(target: Path) -> None:
    """Lose what was just written, as a power cut does: sizes are right, bytes are not."""
    marker = target / "marker"
    if marker.exists() and marker.read_text() == "one":
        return  # only sizes and hashes can tell, as with cp
    for file, content in files(target).items():
        if content == "one":
            (target / file).write_text("\0" * len(content))


def test_a_rerun_may_be_killed_too_and_the_machine_start_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "start").mkdir()
    an_output(tmp_path / "start" / "out")
    before = visible(tmp_path / "start" / "out")
    for first in itertools.count():
        once = tmp_path / str(first)
        shutil.copytree(tmp_path / "start", once)
        with suppress(Killed), killed(first) as seen:
            write(once / "out", "one")
        if len(seen) < first:
            break
        with monkeypatch.context() as patch:
            if first % 2:
                patch.setattr(staging, "_boot", lambda: "another")
                lose(once / "out")
            for second in itertools.count(first % 7, 7):
                twice = tmp_path / f"{first} {second}"
                shutil.copytree(once, twice)
                with suppress(Killed), killed(second) as seen:
                    write(twice / "out", "one")
                sound(twice / "out", before)
                if len(seen) < second:
                    break
                completes(twice / "out", "one", before)
                shutil.rmtree(twice)


def test_a_run_killed_while_files_move_is_noticed_and_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write(out, "one")
    replace = os.replace

    def stops(source: Path, target: Path) -> None:
        if Path(target).name == "marker":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stops)
    with pytest.raises(KeyboardInterrupt):
        write(out, "two")
    monkeypatch.setattr(os, "replace", replace)
    assert is_unfinished(out, "marker")
    with pytest.raises(CheckpointError, match="left over from another conversion"):
        write(out, "three")
    shutil.copytree(out, tmp_path / "emptied")
    for file in visible(tmp_path / "emptied"):  # as `rm -r emptied/*` does
        (tmp_path / "emptied" / file).unlink()
    write(tmp_path / "emptied", "two")
    assert files(tmp_path / "emptied") == WHOLE["two"]
    with staging_folder(out, "two", "marker") as stage:
        assert stage.complete
        stage.publish(replaces=("part-*",))
    assert files(out) == WHOLE["two"]


def test_a_journal_that_a_full_disk_cut_counts_up_to_the_cut(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", "one", fail=KeyboardInterrupt)
    journal = tmp_path / ".out.partial" / staging.JOURNAL
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([lines[0], lines[1], lines[2][:5] + lines[3], ""]))
    with staging_folder(tmp_path / "out", "one", "marker") as stage:
        assert stage.done == {"sub/a": [3]}
        stage.note("part-one", [3])
        assert journal.read_text().splitlines() == lines[:3]
