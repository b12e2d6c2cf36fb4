"""The runner of a pod (entrypoints/dlc_node.py): PAI-DLC's variables, the first pod's name, the
number of GPUs.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import ROOT


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "entrypoints"))
    for name in ("dlc_node", "cluster_host", "launch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("dlc_node")


OF_DLC = {
    "WORLD_SIZE": "2",
    "RANK": "1",
    "MASTER_ADDR": "dlc1-master-0",
    "MASTER_PORT": "23456",
    "NPROC_PER_NODE": "8",
}


def test_torchrun_gets_its_own_meaning_of_world_size_and_rank(
    node: ModuleType, tmp_path: Path
) -> None:
    given = node.variables(tmp_path, "train", {**OF_DLC, "PATH": "/bin"}, is_user_command=False)
    assert not given.keys() & OF_DLC.keys()
    assert (given["SMTRAIN_MASTER_ADDR"], given["SMTRAIN_MASTER_PORT"]) == (
        "dlc1-master-0",
        "23456",
    )
    assert given["SMTRAIN_ML_ROOT"] == str(tmp_path)


def test_a_command_of_the_users_gets_what_dlc_sets(node: ModuleType, tmp_path: Path) -> None:
    given = node.variables(tmp_path, "train", OF_DLC, is_user_command=True)
    assert OF_DLC.items() <= given.items()
    assert given["SMTRAIN_OUTPUT"] == str(tmp_path / "model")


def test_a_failure_is_read_from_a_regular_file_only(node: ModuleType, tmp_path: Path) -> None:
    import cluster_host

    failure = tmp_path / "output/failure"
    failure.parent.mkdir()
    assert not cluster_host.read_failure(tmp_path)
    failure.write_bytes(b"out of \xff memory\n")
    assert cluster_host.read_failure(tmp_path) == "out of \ufffd memory"
    failure.write_bytes(b"x" * 1_000_000)
    assert len(cluster_host.read_failure(tmp_path)) == cluster_host.FAILURE_BYTES
    failure.unlink()
    os.mkfifo(failure)
    assert not cluster_host.read_failure(tmp_path)
    failure.unlink()
    for target in ("/dev/zero", "/etc/passwd", "nothing"):
        failure.symlink_to(target)
        assert not cluster_host.read_failure(tmp_path)
        failure.unlink()
    failure.mkdir()
    assert not cluster_host.read_failure(tmp_path)


def test_results_are_files_of_the_pods_own_folder(node: ModuleType, tmp_path: Path) -> None:
    ml, job = tmp_path / "ml", tmp_path / "job"
    (ml / "model").mkdir(parents=True)
    (ml / "model/weights").write_text("w")
    (ml / "model/link").symlink_to("weights")
    (ml / "model/outside").symlink_to("/etc/passwd")
    os.mkfifo(ml / "model/pipe")
    node.store(ml, job)
    assert sorted(path.name for path in (job / "output/model").iterdir()) == ["link", "weights"]


def test_the_name_of_the_first_pod_is_waited_for(
    node: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([OSError("not yet"), OSError("not yet"), None])

    def ask(*_: object) -> None:
        if error := next(answers):
            raise error

    monkeypatch.setattr(node.socket, "getaddrinfo", ask)
    monkeypatch.setattr(node.time, "sleep", lambda _seconds: None)
    node.await_name("dlc1-master-0")
    assert next(answers, "all asked") == "all asked"
    answers = iter([OSError("unknown")] * 9)
    with pytest.raises(SystemExit, match="the first pod dlc1-master-0 cannot be found"):
        node.await_name("dlc1-master-0", -1)


@pytest.mark.parametrize(("gpus", "few"), [("4", True), ("8", False), ("16", False), ("", False)])
def test_fewer_gpus_than_processes_end_the_pod_at_once(
    node: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, few: bool
) -> None:
    config = tmp_path / "input/data/config/config.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps({"compute": {"processes_per_instance": 8}}))
    monkeypatch.setattr(node, "accelerator", lambda: True)
    assert bool(node.too_few(tmp_path, gpus)) == few
    monkeypatch.setattr(node, "accelerator", lambda: False)
    assert node.too_few(tmp_path, gpus) is None


def test_results_are_copied_file_by_file(node: ModuleType, tmp_path: Path) -> None:
    ml, job = tmp_path / "ml", tmp_path / "job"
    (ml / "model/a").mkdir(parents=True)
    (ml / "output/data").mkdir(parents=True)
    (ml / "model/a/x.bin").write_bytes(b"weights")
    (ml / "output/data/metrics.jsonl").write_text("{}\n")
    node.store(ml, job)
    assert (job / "output/model/a/x.bin").read_bytes() == b"weights"
    assert (job / "output/data/metrics.jsonl").exists()
