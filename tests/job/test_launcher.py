"""The container's first process installs what is lacking and nothing else, and becomes the stage."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from smtrain.job.bundle import entrypoints_folder


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(entrypoints_folder()))
    yield importlib.import_module("launch")
    sys.modules.pop("launch", None)


def test_only_what_is_lacking_is_installed(launcher: Any, tmp_path: Path) -> None:
    """An image that has everything starts without asking a package index."""
    wanted = tmp_path / "requirements.txt"
    wanted.write_text("pytest>=1\n\nno-such-distribution>=2\npytest<1\n")
    assert launcher.missing(wanted) == ["no-such-distribution>=2", "pytest<1"]


def test_training_becomes_torchrun_over_the_hosts_and_other_stages_a_script(
    launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "kept")
    monkeypatch.delenv("SMTRAIN_MASTER_PORT", raising=False)
    for path, content in {
        "input/config/resourceconfig.json": {"hosts": ["localhost", "algo-2"], "current_host": "algo-2"},
        "input/data/config/config.json": {"compute": {"processes_per_instance": 32}},
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(json.dumps(content))
    argv = launcher.command("train", tmp_path)
    assert argv[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert argv[3:8] == [
        "--nnodes=2", "--nproc_per_node=32", "--node_rank=1", "--master_addr=localhost", "--master_port=7777",
    ]  # fmt: skip
    assert argv[-1].endswith("entrypoints/train.py")
    assert launcher.command("export", tmp_path)[1].endswith("entrypoints/export.py")
