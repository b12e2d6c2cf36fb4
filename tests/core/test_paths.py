"""Sentences about paths that cannot be read or written name the path of the user and the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from smtrain.core.config.textfiles import folder_fault
from smtrain.core.files import write_atomically
from smtrain.core.public_api import sentence
from smtrain.core.suggest import near_path


def test_a_write_into_a_missing_folder_names_that_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_atomically(tmp_path / "nowhere/r.html", "page")
    assert sentence(caught.value) == (
        f"{tmp_path}/nowhere: no such file or directory; name another file or folder"
    )


def test_a_path_that_does_not_exist_gets_the_reason(tmp_path: Path) -> None:
    (tmp_path / "x.txt").symlink_to("/nothing/there")
    assert near_path(tmp_path / "x.txt") == "it is a link to /nothing/there, which is missing; "
    assert near_path(tmp_path / "$HOME/m").startswith("$HOME is not expanded here")
    (tmp_path / "corpus").mkdir()
    assert near_path(tmp_path / "corpsu") == f"did you mean {tmp_path}/corpus? "


def test_a_folder_of_the_system_or_without_permission_is_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folder_fault(tmp_path) == ""
    assert folder_fault(Path("/proc")) == (
        "/proc holds the files of the whole system; give the folder of the text"
    )
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert folder_fault(tmp_path).endswith(
        "may not be read by this user; give this user the right to read it"
    )
