"""The report names a command that installs the same smtrain, or says that no index has it."""

from __future__ import annotations

import hashlib
import json
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from smtrain import __version__
from smtrain.tools.report import install_command
from smtrain.tools.report.install_command import commands


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the installer's record: the content of direct_url.json, or None for no such file."""

    def note(record: dict[str, Any] | None) -> None:
        class Distribution:
            def read_text(self, name: str) -> str | None:
                assert name == "direct_url.json"
                return None if record is None else json.dumps(record)

        monkeypatch.setattr(metadata, "distribution", lambda name: Distribution())

    return note


def repository(folder: Path, origin: str | None) -> str:
    folder.mkdir()
    (folder / "a").write_text("a")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "-q"], ["add", "a"], [*who, "commit", "-q", "-m", "a"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    if origin:
        subprocess.run(["git", "remote", "add", "origin", origin], cwd=folder, check=True)
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_from_git(noted: Any) -> None:
    noted(
        {
            "url": "https://git.example/smtrain.git",
            "vcs_info": {"vcs": "git", "commit_id": "1" * 40},
        }
    )
    assert commands() == [f"pip install 'smtrain @ git+https://git.example/smtrain.git@{'1' * 40}'"]


def test_from_a_wheel(noted: Any, tmp_path: Path) -> None:
    name = f"smtrain-{__version__}-py3-none-any.whl"
    noted({"url": f"file:///nowhere/{name}", "archive_info": {"hashes": {"sha256": "ab" * 32}}})
    assert commands() == [f"pip install {name}  # sha256 {'ab' * 32}"]
    (tmp_path / name).write_bytes(b"wheel")
    noted({"url": (tmp_path / name).as_uri(), "archive_info": {}})
    assert commands() == [f"pip install {name}  # sha256 {hashlib.sha256(b'wheel').hexdigest()}"]


@pytest.mark.parametrize(
    ("origin", "url"),
    [
        ("https://me:secret@git.example/smtrain.git", "https://git.example/smtrain.git"),
        ("git@git.example:me/smtrain.git", "ssh://git@git.example/me/smtrain.git"),
    ],
)
def test_from_a_checkout_with_an_origin(origin: str, url: str, noted: Any, tmp_path: Path) -> None:
    commit = repository(tmp_path / "checkout", origin)
    noted({"url": (tmp_path / "checkout").as_uri(), "dir_info": {"editable": True}})
    comment, command = commands()
    assert comment == f"# smtrain {__version__}, from a checkout at git commit {commit}"
    assert command == f"pip install 'smtrain @ git+{url}@{commit}'"


def test_from_a_checkout_that_lies_here_alone(noted: Any, tmp_path: Path) -> None:
    commit = repository(tmp_path / "checkout", None)
    (tmp_path / "checkout/a").write_text("b")
    noted({"url": (tmp_path / "checkout").as_uri(), "dir_info": {}})
    assert commands() == [
        f"# smtrain {__version__}, from a checkout at git commit {commit} with changes",
        f"git checkout {commit}",
        "pip install .",
    ]


def test_from_an_index(noted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    noted(None)
    monkeypatch.setattr(install_command, "_is_checkout", lambda: False)
    assert commands() == [f"pip install smtrain=={__version__}"]
