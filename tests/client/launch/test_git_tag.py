"""The commit of the folder that a run was started from: in the tags of its jobs, and nowhere
else.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import smtrain
from smtrain.client.backends.choose import backend_of
from smtrain.client.launch.stages import Chain
from smtrain.client.runs.launch import with_commit_tag
from smtrain.core.git import TAG, describe_commit
from smtrain.stages import keys_of
from tests.cli.test_cli import smtrain as command


def git(folder: Path, *words: str) -> str:
    told = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    named = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    return subprocess.run(
        ["git", *named, *words],
        cwd=folder,
        env=os.environ | told,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "notes").write_text("one")
    git(folder, "add", "notes")
    git(folder, "commit", "-qm", "one")
    return folder


def test_a_commit_and_whether_files_have_changed(repository: Path, tmp_path: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    assert describe_commit(repository) == commit
    (repository / "new").write_text("git does not know it")
    assert describe_commit(repository) == commit
    (repository / "notes").write_text("two")
    assert describe_commit(repository) == f"{commit} with changes"
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init", "-q")
    assert describe_commit(empty) is None, "it has no commit"
    assert describe_commit(tmp_path) is None


def test_without_git_nothing_is_said(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert describe_commit(repository) is None


def test_the_tag_changes_no_stage_and_one_of_the_users_stays(
    raw: dict[str, Any], repository: Path
) -> None:
    config = smtrain.load_config(raw)
    with_tag = with_commit_tag(config, repository)
    assert with_tag.tags[TAG] == describe_commit(repository)
    assert keys_of(with_tag, "train") == keys_of(config, "train")
    place = backend_of(config)
    assert Chain(with_tag, place, look=False).base_name("train") == Chain(
        config, place, look=False
    ).base_name("train")
    mine = smtrain.load_config(raw | {"tags": {TAG: "mine"}})
    assert with_commit_tag(mine, repository) is mine
    assert with_commit_tag(config, repository.parent) is config


def test_a_dry_run_shows_the_tag_that_a_run_sends(
    raw: dict[str, Any], repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    Path("run.yaml").write_text(yaml.safe_dump(raw))
    request = json.loads(command("launch", "run.yaml", "--dry-run").stdout)
    assert {"Key": TAG, "Value": describe_commit(repository)} in request["Tags"]
    assert TAG not in json.dumps(smtrain.request("run.yaml")), (
        "the request is a function of config and bundle alone"
    )
