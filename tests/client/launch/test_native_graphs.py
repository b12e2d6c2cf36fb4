"""Compiled graphs of engine native: in S3 between jobs, on the host's disk or in its warm pool
while one runs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from smtrain.core.protocol.entrypoints import entrypoints_folder
from smtrain.plane.client import ensure_running

# torchrun's stand-in: it does what TorchNeuron does with the variables, and takes a while to end.
TORCHRUN = """\
import os, pathlib, signal, sys, time
neff = pathlib.Path(os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"])
print("found", sorted(p.name for p in neff.rglob("*.neff")), flush=True)
for name in ("TORCH_NEURONX_HLO_CACHE_DIR", "NKI_COMPILE_CACHE_URL", "TORCHINDUCTOR_CACHE_DIR"):
    assert pathlib.Path(os.environ[name]).is_dir(), name
for name in ("TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR", "TORCH_NEURONX_DEBUG_DIR"):
    path = pathlib.Path(os.environ[name], "own.neff")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"of this host")
graph = neff / "v1" / os.environ["MAKES"] / "graph.neff"
graph.parent.mkdir(parents=True, exist_ok=True)
graph.write_bytes(b"compiled " + os.environ["MAKES"].encode())
(neff / "v1/busy.lock").touch()
old = time.time() - 60
os.utime(graph, (old, old))
print("ready", flush=True)
if os.environ.get("WAITS"):
    signal.signal(signal.SIGTERM, lambda *_: ((neff / "v1/half.neff").write_bytes(b"half"), sys.exit(0)))
    time.sleep(60)
"""


@pytest.fixture
def bucket(local_home: Path, tmp_path: Path) -> str:
    name = f"graphs-{os.getpid()}-{time.time_ns() % 10**9}"
    ensure_running().session().client("s3").create_bucket(Bucket=name)
    return name


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """The /opt/ml of a host, with the code of a job whose torchrun is the stand-in."""
    ml = tmp_path / "ml"
    shutil.copytree(entrypoints_folder(), ml / "code/entrypoints")
    (ml / "code/smtrain").symlink_to(entrypoints_folder().parent / "smtrain")
    for name in ("requirements.txt", "wheels.txt"):
        (ml / "code/entrypoints" / name).write_text("")
    for name in ("forking.py", "rendezvous.py"):
        (ml / "code/entrypoints" / name).write_text(TORCHRUN)
    for path, content in {
        "input/config/resourceconfig.json": {"hosts": ["algo-1"], "current_host": "algo-1"},
        "input/data/config/config.json": {
            "compute": {"processes_per_instance": 1},
            "train": {"engine": "nxd"},
        },
    }.items():
        (ml / path).parent.mkdir(parents=True)
        (ml / path).write_text(json.dumps(content))
    return ml


def environment(host: Path, uri: str, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        **ensure_running().environment(),
        "SMTRAIN_ML_ROOT": str(host),
        "SMTRAIN_GRAPHS": uri,
        "SMTRAIN_MASTER_ADDR": "127.0.0.1",
        "SMTRAIN_MASTER_PORT": "7777",
        "MAKES": "a",
        **more,
    }


def trained(host: Path, uri: str, **more: str) -> list[str]:
    """The lines of a job on a host."""
    command = [sys.executable, str(host / "code/entrypoints/launch.py"), "train"]
    done = subprocess.run(
        command, env=environment(host, uri, **more), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition(" in ")[0] for line in done.stdout.splitlines()]


def kept(bucket: str) -> dict[str, bytes]:
    s3 = ensure_running().session().client("s3")
    names = [item["Key"] for item in s3.list_objects_v2(Bucket=bucket).get("Contents", [])]
    return {name: s3.get_object(Bucket=bucket, Key=name)["Body"].read() for name in names}


def test_the_next_job_finds_the_graphs_of_the_last_and_stores_only_new_ones(
    bucket: str, host: Path
) -> None:
    uri = f"s3://{bucket}/out/neuron-cache/0123"
    assert trained(host, uri) == [
        f"graphs: 0 files from {uri}",
        "found []",
        "ready",
        f"graphs: 1 files new ones to {uri}",
    ]
    assert kept(bucket) == {"out/neuron-cache/0123/neff/v1/a/graph.neff": b"compiled a"}
    shutil.rmtree(host / "graphs")
    assert trained(host, uri, MAKES="b")[1:] == [
        "found ['graph.neff']",
        "ready",
        f"graphs: 1 files new ones to {uri}",
    ]
    assert kept(bucket).keys() == {
        f"out/neuron-cache/0123/neff/v1/{name}/graph.neff" for name in "ab"
    }
    assert "own.neff" not in str(kept(bucket)), "what is only of a host stays there"


def test_a_warm_pool_keeps_them_on_its_machines(bucket: str, host: Path) -> None:
    uri, pool = f"s3://{bucket}/warm", "/opt/ml/sagemaker/warmpoolcache/neuron"
    trained(host, uri, SMTRAIN_GRAPHS_FOLDER=pool)
    assert (host / "sagemaker/warmpoolcache/neuron/neff/v1/a/graph.neff").is_file()
    told = trained(host, uri, SMTRAIN_GRAPHS_FOLDER=pool)
    assert told[:2] == [f"graphs: 0 files from {uri}", "found ['graph.neff']"]


def test_a_stopped_job_stores_them_too(bucket: str, host: Path) -> None:
    uri = f"s3://{bucket}/stopped"
    command = [sys.executable, str(host / "code/entrypoints/launch.py"), "train"]
    with subprocess.Popen(
        command,
        env=environment(host, uri, WAITS="1"),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout
        while "ready" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert f"graphs: 1 files new ones to {uri}" in rest
    assert kept(bucket).keys() == {"stopped/neff/v1/a/graph.neff"}


@pytest.mark.parametrize("uri", ["s3://no-such-bucket-of-smtrain/x", "/dev/null/x"])
def test_a_cache_that_cannot_be_used_costs_only_time(bucket: str, host: Path, uri: str) -> None:
    told = trained(host, uri)
    assert "ready" in told
    assert any(
        line.startswith("graphs: store failed, so graphs may be compiled again (") for line in told
    ), told


def test_a_shared_folder_keeps_them_on_a_cluster(bucket: str, host: Path, tmp_path: Path) -> None:
    trained(host, f"file://{tmp_path}/shared")
    assert (tmp_path / "shared/neff/v1/a/graph.neff").read_bytes() == b"compiled a"
    shutil.rmtree(host / "graphs")
    assert "found ['graph.neff']" in trained(host, f"{tmp_path}/shared")


def test_what_the_config_names_wins_and_without_a_cache_nothing_is_set(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(entrypoints_folder()))
    import launch as launcher

    names = (*launcher.GRAPH_FOLDERS, *launcher.OF_THIS_HOST)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("SMTRAIN_GRAPHS", raising=False)
    assert launcher.graph_folder(host) is None
    assert not set(names) & os.environ.keys()
    monkeypatch.setenv("SMTRAIN_GRAPHS", "s3://b/x")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    given: dict[str, Any] = dict.fromkeys(names)
    assert launcher.graph_folder(host) == host / "graphs"
    given |= {name: os.environ[name] for name in names}
    for name in names:
        monkeypatch.delenv(name)
    assert given.pop("TORCHINDUCTOR_CACHE_DIR") == "/mine"
    assert all(str(value).startswith(str(host)) for value in given.values())
    sys.modules.pop("launch", None)
