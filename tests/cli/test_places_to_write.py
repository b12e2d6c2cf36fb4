"""Output onto a file, below one, into a read-only folder, onto a full disk, and over other
files.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import smtrain
from smtrain.core.demo.inputs import save_tokenizer
from smtrain.plane.client import ensure_running
from tests.cli.test_wrong_uses import tree
from tests.conftest import LLAMA
from tests.typed import typed
from tests.worker.checkpoint.folders import hf_folder

Sentence = Callable[[str, str], str]
OUT = {
    "data prepare": [
        "data",
        "prepare",
        "text.jsonl",
        "OUT",
        "--model",
        "tokenizer",
        "--seq-len",
        "8",
    ],
    "convert": ["convert", "model", "OUT", "--to", "nxd", "--tp", "2"],
    "download": ["download", "JOB", "OUT", "--target", "local"],
}


@pytest.fixture(scope="module")
def job(local_home: Path) -> str:
    """A job that left two files."""
    endpoint, name = ensure_running(), f"leaves-{time.time_ns()}"
    program = (
        "cd ${SMTRAIN_ML_ROOT:-/opt/ml}/model; for f in config.json tokens.bin; do head -c 300000"
        " /dev/zero >$f; done"
    )
    endpoint.session().client("sagemaker").create_training_job(
        TrainingJobName=name,
        RoleArn=endpoint.role,
        AlgorithmSpecification={
            "TrainingImage": "image",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["bash"],
            "ContainerArguments": ["-c", program],
        },
        OutputDataConfig={"S3OutputPath": f"s3://{endpoint.bucket}/out", "CompressionType": "NONE"},
        ResourceConfig={"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1},
        StoppingCondition={"MaxRuntimeInSeconds": 600},
    )
    made = smtrain.Job(name, "local")
    for _ in made.events(poll=0.05):
        pass
    made.check()
    return name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with text, a tokenizer, a model and a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "text.jsonl").write_text('{"text": "hello world, this is text"}\n' * 4000)
    save_tokenizer(
        ["hello world, this is text"] * 20, tmp_path / "tokenizer", vocabulary=300, end="<end>"
    )
    hf_folder(tmp_path / "model", LLAMA)
    return tmp_path


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    (tmp_path / "small").mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path / "small"], check=False
    ).returncode:
        pytest.skip("needs to mount a small disk (root, and a kernel that lets it)")
    yield tmp_path / "small"
    subprocess.run(["umount", "-l", tmp_path / "small"], check=True)


@pytest.fixture
def refusal(job: str, folder: Path) -> Sentence:
    """The sentence of a command that should write there."""
    return lambda name, out: sentence(
        [{"OUT": out, "JOB": job}.get(word, word) for word in OUT[name]]
    )


def sentence(words: list[str]) -> str:
    done = typed(*words)
    err = done.stderr
    lines = [line for line in err.splitlines() if not line.startswith("prepare: ")]
    assert (done.returncode, len(lines), "Errno" in err, "Traceback" in err) == (
        2,
        1,
        False,
        False,
    ), done.stdout + err
    return lines[0]


@pytest.mark.parametrize("name", OUT)
def test_a_file_is_no_folder(name: str, folder: Path, refusal: Sentence) -> None:
    before = tree(folder)
    assert "file" in refusal(name, "file")
    assert "file" in refusal(name, "file/below")
    assert tree(folder) == before


@pytest.mark.parametrize("name", OUT)
def test_a_disk_that_is_read_only_or_full(name: str, small: Path, refusal: Sentence) -> None:
    assert "no space left on" in (full := refusal(name, "small/full"))
    assert "free s" in full
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    for folder in ("small/new", "small"):
        assert re.search("is read-only: make|read-only file system; choose", refusal(name, folder))


@pytest.mark.parametrize("name", ["convert", "download"])
def test_other_files_of_the_same_names_stay(name: str, folder: Path, refusal: Sentence) -> None:
    (folder / "taken").mkdir()
    own = "config.json" if name == "download" else "manifest.json"
    (folder / "taken" / own).write_text("mine")
    assert f"taken holds other files of the same names ({own}" in refusal(name, "taken")
    assert (folder / "taken" / own).read_text() == "mine"
    assert "empty name" in refusal(name, "") or name == "convert"
