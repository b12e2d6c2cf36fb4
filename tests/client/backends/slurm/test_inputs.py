"""Inputs in place: in S3, copied once; on the cluster, named from a laptop; on the shared
folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.choose import backend_of
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.backends.slurm.backend import SlurmBackend
from smtrain.client.backends.slurm.checks import inputs_in_place
from smtrain.client.backends.slurm.paths import path_of
from smtrain.client.backends.slurm.script import sbatch_script
from smtrain.client.jobs.job import Job
from smtrain.client.launch.stages import Chain
from smtrain.client.planner.resolve import load_config
from smtrain.core.config import JobConfig
from smtrain.core.config.cluster import Cluster
from smtrain.core.errors import ConfigError
from tests import as_told
from tests.client.backends.slurm.conftest import ROOT, Bench
from tests.client.backends.slurm.test_script import mounted

BUCKET = "smtrain-local"
SHOWS = """
import os, pathlib
root = pathlib.Path(os.environ["SMTRAIN_ML_ROOT"], "input/data/text")
for path in sorted(path for path in root.rglob("*") if path.is_file()):
    print(path.relative_to(root).as_posix(), path.read_text(), flush=True)
"""


@pytest.fixture
def bucket(bench: Bench, local_home: Path, monkeypatch: pytest.MonkeyPatch) -> SageMakerBackend:
    """The S3 of the control plane, which jobs of the cluster can reach."""
    monkeypatch.setenv("SMTRAIN_HOME", str(local_home))
    as_told.tell(monkeypatch)
    target = SageMakerBackend("local")
    target.s3.create_bucket(Bucket=BUCKET)
    return target


def put(target: SageMakerBackend, prefix: str, **objects: str) -> str:
    for name, text in objects.items():
        target.s3.put_object(
            Bucket=BUCKET, Key=f"{prefix}/{name.replace('__', '/')}", Body=text.encode()
        )
    return f"s3://{BUCKET}/{prefix}"


def reading(bench: Bench, uri: str, hosts: int = 1) -> tuple[Job, dict[str, Any]]:
    """Run a job with a channel `text` under this URI; returns its result."""
    request = bench.request(SHOWS, stage="prepare", hosts=hosts)
    source = {"S3DataType": "S3Prefix", "S3Uri": uri}
    request["InputDataConfig"].append(
        {"ChannelName": "text", "DataSource": {"S3DataSource": source}}
    )
    # The stand-in for S3 is reached by variables of the shell, which a job only gets if the config
    # names them.
    place = bench.place(venv=sys.prefix, sbatch=[f"--export={','.join(as_told.variables())}"])
    assert place.submit(request)
    job = Job(request["TrainingJobName"], place)
    return job, bench.ended(job)


def said(job: Job) -> list[str]:
    return [line.text for line in job.lines()]


def test_a_prefix_of_s3_is_copied_once_and_every_node_reads_it(
    bench: Bench, bucket: SageMakerBackend
) -> None:
    uri = put(bucket, "once", a="one", deeper__b="two")
    job, description = reading(bench, uri, hosts=2)
    assert description["TrainingJobStatus"] == "Completed", said(job)
    assert [line for line in said(job) if not line.startswith("copying")] == [
        "a one",
        "deeper/b two",
    ] * 2
    (manifest,) = bench.shared.glob("s3/*/manifest.json")
    rows = json.loads(manifest.read_text())
    assert rows["uri"] == uri
    assert [(row["key"], row["size"]) for row in rows["objects"]] == [
        ("once/a", 3),
        ("once/deeper/b", 3),
    ]
    before = {path: path.stat().st_mtime_ns for path in bench.shared.glob("s3/**/*")}
    again, _ = reading(bench, uri)
    assert any("since an earlier job" in line for line in said(again))
    assert {path: path.stat().st_mtime_ns for path in bench.shared.glob("s3/**/*")} == before
    put(bucket, "once", a="new")
    changed, _ = reading(bench, uri)
    assert "a new" in said(changed)
    assert len(list(bench.shared.glob("s3/*/manifest.json"))) == 2


def test_a_copy_that_was_killed_is_finished_by_the_next_job_and_nothing_is_copied_twice(
    bucket: SageMakerBackend, tmp_path: Path
) -> None:
    texts = {f"n{number}": f"{number} " * 300 for number in range(48)}
    uri = put(bucket, "killed", **texts)
    (tmp_path / "job/logs").mkdir(parents=True)
    source = {"S3DataType": "S3Prefix", "S3Uri": uri}
    channel = {"ChannelName": "text", "DataSource": {"S3DataSource": source}}
    (tmp_path / "job/request.json").write_text(json.dumps({"InputDataConfig": [channel]}))
    command = [
        sys.executable,
        str(ROOT / "entrypoints/s3_inputs.py"),
        str(tmp_path / "job"),
        str(tmp_path),
    ]

    def there() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.glob("s3/*/data/*")}

    with subprocess.Popen(command) as first:
        while not there() and first.poll() is None:
            time.sleep(0.002)
        first.kill()
    before = there()
    assert 0 < len(before) < len(texts)
    assert not list(tmp_path.glob("s3/*/manifest.json"))
    subprocess.run(command, check=True)
    after = there()
    assert {path.name: path.read_text() for path in after} == texts
    assert {path: at for path, at in after.items() if path in before} == before
    assert [path.name for path in next(tmp_path.glob("s3/*")).iterdir() if path.name != "data"] == [
        "manifest.json"
    ]


def test_what_is_not_in_s3_is_the_jobs_own_failure(bench: Bench, bucket: SageMakerBackend) -> None:
    _, description = reading(bench, f"s3://{BUCKET}/nothing-here")
    assert description["TrainingJobStatus"] == "Failed"
    assert "there is no object under it" in description["FailureReason"]
    _, description = reading(bench, "s3://no-such-bucket-of-ours/text")
    assert "inputs in S3 cannot be read" in description["FailureReason"]


def config(raw: dict[str, Any], shared: Path, **changes: Any) -> JobConfig:
    cluster = {"shared": str(shared), **changes.pop("cluster", {})}
    compute = {"instance_type": "ml.c5.xlarge", "instance_count": 2, "processes_per_instance": 2}
    train = {**raw["train"], "engine": "native"}
    return load_config(
        {
            **raw,
            "target": "slurm",
            "cluster": cluster,
            "compute": compute,
            "train": train,
            **changes,
        }
    )


def test_a_path_of_the_cluster_is_named_from_a_laptop(raw: dict[str, Any], tmp_path: Path) -> None:
    text = {"path": "/fsx/of-the-cluster/text"}
    settings = config(raw, tmp_path, data=text, cluster={"host": "head"})
    assert settings.data.path == "file:///fsx/of-the-cluster/text"
    chain = Chain(settings, backend_of(settings), look=False)
    copied = [upload.uri for upload in chain.resolved.uploads]
    assert inputs_in_place(chain.config, copied) == ["/fsx/of-the-cluster/text"]
    assert copied == [chain.config.model.path]  # the model is the laptop's
    with pytest.raises(
        ConfigError, match="does not exist"
    ):  # on the head node itself it cannot be on another machine
        config(raw, tmp_path, data=text)


def test_what_lies_on_the_shared_file_system_is_used_in_place(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    chain_config = config(raw, tmp_path)
    chain = Chain(chain_config, backend_of(chain_config), look=False)
    assert inputs_in_place(chain.config) == [raw["model"]["path"], raw["data"]["path"]]
    assert not chain.resolved.uploads


@pytest.mark.parametrize("image", ["nvcr.io#nvidia/pytorch:25.01-py3", "/fsx/torch.sif"])
def test_a_container_sees_what_each_stage_reads(
    raw: dict[str, Any], tmp_path: Path, image: str
) -> None:
    """Model, text and held-out text lie next to cluster.shared, a snapshot's files behind links."""
    (tmp_path / "shared").mkdir()
    held_out = shutil.copytree(raw["data"]["path"], tmp_path / "held-out")
    raw["train"]["validation"] = {"path": str(held_out)}
    settings = config(raw, tmp_path / "shared", cluster={"container": image})
    chain = Chain(settings, backend_of(settings), look=False)
    assert not chain.resolved.uploads
    for stage in ("prepare", "train"):
        request = chain.plan(stage).request
        folders = mounted(sbatch_script(request, settings.cluster))
        for channel in request["InputDataConfig"]:
            path = Path(path_of(channel["DataSource"]["S3DataSource"]["S3Uri"]))
            assert any(path.is_relative_to(folder) for folder in folders), (stage, path)


@pytest.mark.parametrize("container", [None, "/fsx/torch.sif"])
def test_files_behind_links_are_used_in_place_if_a_stage_sees_them(
    tmp_path: Path, container: str | None
) -> None:
    shared = tmp_path / "shared"
    place = SlurmBackend(Cluster(shared=str(shared), container=container))
    for folder in ("shared/blobs", "hub/blobs", "hub/snapshots/1", "plain"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a").write_text("x")
    snapshot, linked = tmp_path / "hub/snapshots/1", tmp_path / "linked"
    (snapshot / "b").symlink_to("../../blobs/a")
    linked.mkdir()
    (linked / "a").symlink_to(shared / "blobs/a")
    assert place.in_place(tmp_path / "plain") == f"file://{tmp_path}/plain"
    assert place.in_place(linked) == f"file://{linked}"
    assert place.in_place(tmp_path / "hub") == f"file://{tmp_path}/hub", (
        "the links stay in the folder"
    )
    assert place.in_place(snapshot) == (None if container else f"file://{snapshot}")
    (linked / "elsewhere").symlink_to(
        "/proc/version"
    )  # another file system, which the nodes do not have
    assert place.in_place(linked) is None
    (tmp_path / "plain/lost").symlink_to("nothing")
    assert place.in_place(tmp_path / "plain"), "broken here and there"


@pytest.mark.skipif(
    "SMTRAIN_SLURM_LARGE" not in os.environ,
    reason="SMTRAIN_SLURM_LARGE is not set: it takes a minute",
)
def test_a_model_of_two_gib_on_the_shared_folder_is_not_copied(
    bench: Bench, trained_inputs: dict[str, Path], tmp_path: Path
) -> None:
    model = bench.shared / "model"
    shutil.copytree(trained_inputs["model"], model)
    with open(model / "more.safetensors", "wb") as weights:
        weights.truncate(2 << 30)  # reads as zeros, takes no room
    # Bytes that a task and its finished children have written, as the kernel counts them for
    # slurmstepd.
    epilog = tmp_path / "epilog"
    epilog.write_text(f"#!/bin/sh\ncat /proc/$PPID/io >{tmp_path}/io-$SLURM_NODEID\n")
    epilog.chmod(0o755)
    settings = {
        "target": "slurm",
        "cluster": {
            "shared": str(bench.shared),
            "venv": sys.prefix,
            "srun": [f"--task-epilog={epilog}"],
        },
        "model": {"path": str(model), "init": "scratch"},
        "data": {"path": str(shutil.copytree(trained_inputs["text"], bench.shared / "text"))},
        "train": {"engine": "native", "steps": 2, "global_batch_size": 4, "seq_len": 32},
        "compute": {
            "instance_type": "ml.c5.xlarge",
            "instance_count": 1,
            "processes_per_instance": 1,
        },
    }
    before, by_stages = written(Path("/proc/self/io")), 0
    for stage in ("prepare", "train"):
        job = smtrain.launch(settings, stage=stage, say=lambda _: None)  # type: ignore[arg-type]
        assert job.status == "Completed"
        by_stages += written(tmp_path / "io-0")
    by_client = written(Path("/proc/self/io")) - before
    print(f"bytes written: {by_client} by the client, {by_stages} by the stages on their node")
    assert (
        0 < by_stages < 64 << 20
    )  # tokens, a checkpoint of a tiny model, logs, unpacked code and Python's caches
    assert by_client < 64 << 20
    assert (
        sum(
            f.stat().st_size
            for f in bench.shared.rglob("*")
            if f.is_file() and model not in f.parents
        )
        < 32 << 20
    )


def written(io: Path) -> int:
    """Bytes that a process and its finished children wrote to a disk."""
    return int(
        next(
            line.split()[1]
            for line in io.read_text().splitlines()
            if line.startswith("write_bytes:")
        )
    )
