"""Files and folders that jobs have left are opened, removed and measured safely."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smtrain.core.files import open_regular_file
from smtrain.plane.files import make_folder, remove, safe_join
from smtrain.plane.server.clean import usage


def test_a_tree_deeper_than_python_recurses_is_measured_and_removed(tmp_path: Path) -> None:
    deep = tmp_path / "home/local/jobs/a/hosts/algo-1/ml"
    subprocess.run(["mkdir", "-p", str(deep / ("d/" * 1500))], check=True)
    (deep / ("d/" * 1500) / "file").write_bytes(bytes(100_000))
    assert usage(tmp_path / "home").kinds["jobs that run"] >= 100_000
    remove(tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_folders_without_permissions_are_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a/b/c").mkdir(parents=True)
    (tmp_path / "a/b/c/d").write_text("x")
    (tmp_path / "a/link").symlink_to("/")
    for folder in ("a/b/c", "a/b", "a"):
        (tmp_path / folder).chmod(0)
    remove(tmp_path / "a")
    remove(tmp_path / "a")
    assert (list(tmp_path.iterdir()), capsys.readouterr().out) == ([], "")


def test_only_regular_files_are_opened_and_nothing_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("file")
    with open_regular_file(tmp_path / "file") as file:
        assert file.read() == b"text"
    for name in ("pipe", "link", ".", "none"):
        with pytest.raises(OSError, match=r"."):
            open_regular_file(tmp_path / name, links=False)


def test_what_is_no_folder_goes_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "jobs").write_text("no folder")
    assert make_folder(tmp_path / "jobs").is_dir()
    assert (tmp_path / "jobs.damaged-1").read_text() == "no folder"
    assert "set aside as jobs.damaged-1" in capsys.readouterr().err


@given(st.lists(st.sampled_from(["a", "..", ".", "", "b c"]), min_size=1).map("/".join))
def test_a_name_leads_into_the_folder_or_is_refused(name: str) -> None:
    root = Path("/root/folder")
    if ".." in name.split("/"):
        with pytest.raises(ValueError, match="points outside"):
            safe_join(root, name)
    else:
        assert safe_join(root, name).is_relative_to(root)
