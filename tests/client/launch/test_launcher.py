"""The container's first process sees to the libraries, over no network, and becomes the stage."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from smtrain.core.protocol import log_lines
from smtrain.core.protocol.entrypoints import entrypoints_folder


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(entrypoints_folder()))
    yield importlib.import_module("launch")
    sys.modules.pop("launch", None)


def test_a_stage_asks_for_what_it_needs(launcher: Any, tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text(
        "# a heading\npytest>=1\n\nno-such-distribution>=2  # train export\npytest<1 \\\n    #"
        " prepare\n"
    )
    assert launcher.stage_requirements(file, "train") == ["pytest>=1", "no-such-distribution>=2"]
    assert launcher.stage_requirements(file, "prepare") == ["pytest>=1", "pytest<1"]
    assert launcher.missing_requirements(["pytest>=1", "no-such-distribution>=2", "pytest<1"]) == [
        "no-such-distribution>=2",
        "pytest<1",
    ]
    for stage in ("train", "prepare", "convert", "export", "generate", "fetch", "compile"):
        pinned = [
            line.split("==")[0]
            for line in launcher.stage_requirements(entrypoints_folder() / "wheels.txt", stage)
        ]
        assert ("gigatoken" in pinned) == (stage == "prepare")
        assert launcher.stage_requirements(entrypoints_folder() / "requirements.txt", stage)


@pytest.fixture
def container(tmp_path: Path) -> Path:
    """A container with the launcher, which wants nothing yet, and a stage that shows its importable
    modules.
    """
    code = tmp_path / "code/entrypoints"
    code.mkdir(parents=True)
    shutil.copy(entrypoints_folder() / "launch.py", code)
    (code / "requirements.txt").write_text("")
    (code / "wheels.txt").write_text("")
    (code / "export.py").write_text(
        "import smtrain_probe; print('probe', smtrain_probe.__file__)\n"
    )
    return tmp_path


def launched(container: Path, stage: str = "export") -> subprocess.CompletedProcess[str]:
    """Run the launcher as a job does, with no index to ask."""
    environment = {
        **os.environ,
        "SMTRAIN_ML_ROOT": str(container),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    }
    command = [sys.executable, str(container / "code/entrypoints/launch.py"), stage]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def wheel(folder: Path) -> str:
    """A wheel of one module; gives the line that pins it."""
    folder.mkdir(parents=True)
    path = folder / "smtrain_probe-1.0-py3-none-any.whl"
    about = "smtrain_probe-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("smtrain_probe.py", "")
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: smtrain-probe\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    return f"smtrain-probe==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def test_what_travels_with_the_code_is_installed_into_a_folder_of_the_job(container: Path) -> None:
    """Without an index and without touching this Python; only the pinned wheel is installed."""
    line = wheel(container / "input/data/code/wheels")
    (container / "code/entrypoints/wheels.txt").write_text(f"{line}  # export\n")
    done = launched(container)
    assert done.returncode == 0, done.stderr
    told, probe = done.stdout.splitlines()
    what, seconds = log_lines.parse_install(told) or ("", -1)
    assert what == "smtrain-probe"
    assert 0 < seconds < 600
    assert probe == f"probe {container}/code/libraries/smtrain_probe.py"
    assert importlib.util.find_spec("smtrain_probe") is None
    shutil.rmtree(container / "code/libraries")
    (container / "code/entrypoints/wheels.txt").write_text(f"{line[:-4]}0000\n")
    done = launched(container)
    assert done.returncode == 1
    assert done.stdout.startswith("without smtrain-probe (")
    assert "No module named 'smtrain_probe'" in done.stderr
    assert not (container / "code/libraries").exists()


def test_a_container_that_lacks_what_a_stage_needs_says_so_at_once(container: Path) -> None:
    (container / "code/entrypoints/requirements.txt").write_text(
        "no-such-distribution>=2  # export\npydantic\n"
    )
    done = launched(container)
    assert done.returncode == 1
    failure = (container / "output/failure").read_text()
    assert failure.startswith(
        f"{sys.executable} has no no-such-distribution>=2, which stage export needs; "
    )
    assert done.stderr.strip() == failure
    assert done.stdout == ""


def test_what_the_data_asks_for_must_be_there_before_the_stage_begins(container: Path) -> None:
    (container / "code/entrypoints/requirements.txt").write_text(
        "pydantic\nno-such-distribution  # prepare+pii\n"
    )
    (container / "code/entrypoints/prepare.py").write_text("print('prepared')\n")
    config = container / "input/data/config/config.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps({"data": {"path": "s3://b/text/", "pii": "mask"}}))
    done = launched(container, "prepare")
    assert done.returncode == 1
    assert done.stdout == ""
    said = done.stderr.strip()
    assert said == (container / "output/failure").read_text()
    assert (
        "has no no-such-distribution, which data.pii needs; build it into the image (`smtrain image"
        " build`)" in said
    )
    config.write_text(json.dumps({"data": {"path": "s3://b/text/", "pii": None}}))
    assert launched(container, "prepare").stdout == "prepared\n"


def test_training_becomes_torchrun_over_the_hosts_and_other_stages_a_script(
    launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "kept")
    monkeypatch.delenv("SMTRAIN_MASTER_PORT", raising=False)
    for path, content in {
        "input/config/resourceconfig.json": {
            "hosts": ["algo-1", "algo-2"],
            "current_host": "algo-2",
        },
        "input/data/config/config.json": {"compute": {"processes_per_instance": 32}},
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(json.dumps(content))
    argv = launcher.command("train", tmp_path)
    assert argv[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert argv[3:8] == [
        "--nnodes=2",
        "--nproc_per_node=32",
        "--node_rank=1",
        "--master_addr=algo-1",
        "--master_port=7777",
    ]
    assert argv[-1].endswith("entrypoints/train.py")
    forked, started = (
        [str(entrypoints_folder() / name)] for name in ("forking.py", "rendezvous.py")
    )
    assert launcher.torchrun("localhost", "nxd") == started
    monkeypatch.setattr(launcher, "accelerator", lambda: False)
    assert launcher.torchrun("localhost", "native") == (
        forked if sys.platform == "linux" else started
    )
    monkeypatch.setattr(launcher, "accelerator", lambda: True)
    assert launcher.torchrun("localhost", "native") == started
    assert launcher.torchrun("algo-1", "native") == ["-m", "torch.distributed.run"]
    assert launcher.command("export", tmp_path)[1].endswith("entrypoints/export.py")


@pytest.mark.parametrize(("first", "threads"), [("algo-1", "4"), ("localhost", "2")])
def test_the_cores_of_this_machine_are_shared_by_the_hosts_that_are_on_it(
    first: str, threads: str, launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "cores", lambda: 8)
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "before")
    monkeypatch.delenv("OMP_NUM_THREADS")
    for path, content in {
        "input/config/resourceconfig.json": {"hosts": [first, "algo-2"], "current_host": "algo-2"},
        "input/data/config/config.json": {"compute": {"processes_per_instance": 2}},
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(json.dumps(content))
    launcher.command("train", tmp_path)
    assert os.environ["OMP_NUM_THREADS"] == threads
