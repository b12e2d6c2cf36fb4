"""`smtrain generate` and `chat` with training checkpoints, and with models over several
processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.core.errors import CheckpointError, ConfigError
from tests import warm

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 6}
PROMPTS = ["hello", "a longer prompt than that"]


@pytest.fixture(scope="module")
def native(folder: Path) -> Path:
    """A checkpoint of engine native, with the tokenizer that `convert` carries along."""
    smtrain.convert(folder, folder.parent / "native", to=smtrain.Native(tp=2, pp=2))
    return folder.parent / "native"


@pytest.fixture(scope="module")
def nxd(folder: Path) -> Path:
    """Shards of engine nxd as the library writes them, with no config.json and no tokenizer."""
    made = folder.parent / "nxd"
    smtrain.convert(folder, made, to=smtrain.Nxd(tp=2))
    for file in (*made.glob("*.json"), *made.glob("*.jinja")):
        file.unlink()
    return made


def texts(model: Path | str, **options: Any) -> list[str]:
    return [
        record["completion"] for record in smtrain.generate(model, PROMPTS, **{**GREEDY, **options})
    ]


@pytest.mark.full  # the gate has tests/worker/engine/test_kv_cache.py
def test_a_checkpoint_answers_as_the_model_that_is_exported_from_it(
    folder: Path, native: Path, nxd: Path
) -> None:
    theirs = texts(folder)
    said: list[str] = []
    assert texts(native, say=said.append) == theirs
    assert said[0].startswith(f"{native}: one process, loaded in ")
    assert texts(nxd, config=folder, batch=2) == texts(folder, batch=2)
    with smtrain.chat(native / "step_00000000", **GREEDY) as talk:
        assert talk.ask("hello") == smtrain.chat(folder, **GREEDY).ask("hello")


@pytest.fixture(scope="module")
def bucket(local_home: Path, folder: Path, native: Path, nxd: Path) -> str:
    """A bucket of the local control plane with both checkpoints, the first as a run leaves it, and
    the model.
    """
    s3 = SageMakerBackend("local").s3
    s3.create_bucket(
        Bucket="trained", CreateBucketConfiguration={"LocationConstraint": "us-west-2"}
    )
    for name, root in (("native", native), ("nxd", nxd), ("model", folder)):
        for path in root.rglob("*"):
            if path.is_file():
                s3.upload_file(str(path), "trained", f"{name}/{path.relative_to(root)}")
    s3.put_object(
        Bucket="trained",
        Key="native/step_00000000/optim/dp000_tp000_pp000.safetensors",
        Body=b"state",
    )
    return "s3://trained"


def test_a_checkpoint_in_s3_answers_without_its_optimizer_s_files(
    folder: Path, bucket: str
) -> None:
    said: list[str] = []
    assert texts(f"{bucket}/native", target="local", say=said.append) == texts(folder)
    assert said[0].startswith("fetching 0.00 GB from s3://trained/native/step_00000000/ into ")
    fetched = Path(said[0].partition(" into ")[2])
    names = [path.name for path in fetched.rglob("*")]
    assert "manifest.json" in names
    assert "optim" not in names
    with pytest.raises(
        CheckpointError,
        match=r"s3://trained/nxd has no config.json; .* or name its folder with --conf",
    ):
        texts(f"{bucket}/nxd", target="local")


@pytest.mark.full  # the gate has one process
def test_processes_share_a_checkpoint_in_s3(folder: Path, bucket: str) -> None:
    shared = texts(folder, batch=2)
    for model, more in (
        ("native/step_00000000", {}),
        ("nxd", {"config": folder}),
        ("nxd", {"config": "s3://trained/model"}),
    ):
        assert texts(f"{bucket}/{model}", target="local", processes=2, batch=2, **more) == shared


def test_what_a_checkpoint_cannot_do_is_refused_by_name(
    folder: Path, native: Path, nxd: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        CheckpointError, match=r"has no config.json; .* or name its folder with --config"
    ):
        texts(nxd)
    shutil.copytree(native, tmp_path / "native")
    for file in (tmp_path / "native/step_00000000").glob("*token*"):
        file.unlink()
    with pytest.raises(
        CheckpointError, match=r"is a checkpoint, and has no tokenizer; name the model .* --config"
    ):
        texts(tmp_path / "native")
    with pytest.raises(
        CheckpointError, match=r"config: .* is not a checkpoint, .*; leave this out"
    ):
        texts(folder, config=folder)
    with pytest.raises(ConfigError, match="processes: got 0; at least 1 is needed"):
        texts(native, processes=0)
    with pytest.raises(ConfigError, match=r"processes: 7 cannot share this model .*; 6 can"):
        texts(native, processes=7)
    with pytest.raises(CheckpointError, match="is not a Hugging Face folder; `smtrain convert"):
        smtrain.chat(folder, compare=native, **GREEDY)


# the gate has tests/worker/engine/test_kv_cache.py, without the processes' start
@pytest.mark.full
def test_processes_of_the_command_share_a_model(folder: Path, native: Path, nxd: Path) -> None:
    assert texts(folder, processes=1) == texts(folder), "a Hugging Face folder can be divided too"
    words = ["--prompt", "hello", "--max-new-tokens", "6", "--json"]
    runs = [
        subprocess.run(
            [warm.smtrain(), "generate", *map(str, more), *words],
            capture_output=True,
            text=True,
            check=False,
        )
        for more in (
            [folder],
            [native, "--processes", 4],
            [nxd, "--config", folder, "--processes", 2],
        )
    ]
    assert [run.returncode for run in runs] == [0, 0, 0], runs
    assert runs[1].stdout == runs[2].stdout == runs[0].stdout
    assert "4 processes, tp 4 x pp 1, loaded in" in runs[1].stderr
    asked = subprocess.run(
        [
            warm.smtrain(),
            "chat",
            str(native),
            "--processes",
            "2",
            "--temperature",
            "0",
            "--max-new-tokens",
            "6",
        ],
        input="one\ntwo\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    talk = smtrain.chat(folder, **GREEDY)
    assert str(talk.ask("one")) in asked.stdout


@pytest.mark.full  # it needs processes, which a test of the gate cannot pay
def test_a_rank_that_dies_ends_the_text_with_the_reason(native: Path) -> None:
    talk = smtrain.chat(native, processes=2, **{**GREEDY, "max_new_tokens": 200})
    (rank,) = children()
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(
        CheckpointError,
        match=r"process 1 of the model was ended by signal 9.*; load the model again",
    ):
        talk.ask("hello")
    with pytest.raises(CheckpointError, match="interrupted in the middle of a text; load it again"):
        talk.ask("hello")
    talk.close()
    assert not children()
    again = smtrain.chat(native, processes=2, **GREEDY)
    assert again.ask("hello")
    again.close()
    time.sleep(0.1)
    assert not children()


def children() -> list[int]:
    """Processes of ranks that this one has started."""
    found = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "smtrain.worker.generation.ranks"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [int(line) for line in found.stdout.split()]
