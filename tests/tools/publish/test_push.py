"""`smtrain push` to a stand-in for the hub: uploads, refusals, and resuming."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from smtrain.tools.publish.push import push as push_model

from .hub import TOKEN, Hub, hub

pytest.importorskip("huggingface_hub")


@pytest.fixture
def theirs() -> Iterator[Hub]:
    with hub() as held:
        yield held


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "README.md").write_text("---\ntags: [smtrain]\n---\n# mine\n")
    (folder / "LICENSE").write_text("free")
    for number in (1, 2, 3):
        (folder / f"model-0000{number}-of-00003.safetensors").write_bytes(bytes([number]) * 1000)
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / ".cache").mkdir()
    (folder / ".cache/left.bin").write_bytes(b"of this machine")
    return folder


def push(hub: Hub, *words: str, token: str | None = TOKEN, fails: bool = False) -> str:
    """The lines of a push."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": "/nonexistent",
        **({"HF_TOKEN": token} if token else {}),
    }
    done = subprocess.run(
        [sys.executable, "-m", "smtrain", "push", *words],
        env=environment,
        text=True,
        timeout=120,
        capture_output=True,
    )
    assert done.returncode == (2 if fails else 0), done.stderr
    if fails:
        work, sentence = done.stderr.splitlines()
        assert work == "reading the model"
        assert sentence.startswith("smtrain: "), "a sentence, not a traceback"
    assert TOKEN not in done.stdout + done.stderr
    return done.stderr if fails else done.stdout


def test_every_file_of_the_model_arrives_in_a_private_repository_and_nothing_else(
    theirs: Hub, model: Path
) -> None:
    assert f"pushed: {theirs.url}/me/llama" in push(theirs, str(model), "me/llama")
    files = theirs.files["me/llama"]
    assert {name: (model / name).read_bytes() for name in files} == files
    assert set(files) == {path.name for path in model.iterdir() if path.is_file()}
    assert theirs.private == {"me/llama": True}


def test_a_dry_run_lists_the_files_and_sends_nothing(theirs: Hub, model: Path) -> None:
    (model / "README.md").unlink()
    output = push(theirs, str(model), "me/llama", "--dry-run", token=None)
    assert f"would push 6 files, 0.00 GB, to {theirs.url}/me/llama" in output
    listed = {line.split()[-1] for line in output.splitlines()[1:]}
    assert listed == {path.name for path in model.iterdir() if path.is_file()} | {"README.md"}
    assert not theirs.files
    assert not theirs.private


def test_a_dry_run_of_a_model_in_a_store_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    files = dict.fromkeys(("out/config.json", "out/.lock", "log.txt"), SimpleNamespace(size=1500))
    copy = SimpleNamespace(folder=Path("/copies/files"), files=files)
    source = SimpleNamespace(store_copy=copy, folder=Path("/copies/files/out"))
    monkeypatch.setattr("smtrain.tools.publish.push.find", lambda model, target: source)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example/")
    lines: list[str] = []
    address = push_model("my-run", "me/llama", dry_run=True, say=lines.append)
    assert address == "https://hub.example/me/llama"
    assert lines[0].startswith(f"would push 1 files, 0.00 GB, to {address}, private if it is new")
    assert [line.split() for line in lines[1:]] == [["1,500", "config.json"], ["new", "README.md"]]


def test_a_folder_without_a_card_gets_one(theirs: Hub, model: Path) -> None:
    (model / "README.md").unlink()
    push(theirs, str(model), "me/llama", "--public")
    card = theirs.files["me/llama"]["README.md"].decode()
    assert 'AutoModelForCausalLM.from_pretrained("me/llama")' in card
    assert 'license_link: "LICENSE"' in card
    assert theirs.private == {"me/llama": False}
    assert not (model / "README.md").exists(), "the folder is left as it was"


def test_interrupted_it_goes_on_and_sends_nothing_twice(theirs: Hub, model: Path) -> None:
    theirs.breaks_after = 1
    assert "the same command resumes from there" in push(theirs, str(model), "me/llama", fails=True)
    theirs.breaks_after = None
    push(theirs, str(model), "me/llama")
    assert len(theirs.uploads) == len(set(theirs.uploads)) == 3
    assert len(theirs.files["me/llama"]) == 7


def test_another_model_in_the_repository_is_not_written_over_unasked(
    theirs: Hub, model: Path
) -> None:
    push(theirs, str(model), "me/llama")
    push(theirs, str(model), "me/llama")  # the same one is no other
    other = shutil.copytree(model, model.parent / "other")
    (other / "model-00002-of-00003.safetensors").write_bytes(b"another")
    sentence = push(theirs, str(other), "me/llama", fails=True)
    assert "me/llama holds another model (model-00002-of-00003.safetensors)" in sentence
    assert "--update" in sentence
    assert theirs.files["me/llama"]["model-00002-of-00003.safetensors"] == bytes([2]) * 1000
    push(theirs, str(other), "me/llama", "--update")
    assert theirs.files["me/llama"]["model-00002-of-00003.safetensors"] == b"another"


@pytest.mark.parametrize(
    ("words", "token", "said"),
    [
        (["{model}", "me/llama"], None, "there is no token for"),
        (["{model}", "me/llama"], "hf_wrong", "does not take the token"),
        (["{model}", "llama"], TOKEN, "it is organization/name"),
        (["{model}/nothing", "me/llama"], TOKEN, "there is no such folder"),
    ],
    ids=["no token", "wrong token", "no organization", "no model"],
)
def test_what_cannot_be_pushed_is_a_sentence(
    theirs: Hub, model: Path, words: list[str], token: str | None, said: str
) -> None:
    assert said in push(
        theirs, *(word.format(model=model) for word in words), token=token, fails=True
    )
    assert not theirs.files


def test_a_token_that_may_only_read_is_named(theirs: Hub, model: Path) -> None:
    theirs.read_only = True
    assert "the token may not write to" in push(theirs, str(model), "other/llama", fails=True)


def test_a_hub_that_cannot_be_reached_is_named(theirs: Hub, model: Path) -> None:
    theirs.url = "http://127.0.0.1:9"
    assert "could not be reached" in push(theirs, str(model), "me/llama", fails=True)
