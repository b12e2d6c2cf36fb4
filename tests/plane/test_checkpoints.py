"""Checkpoint folders and S3: downloads at the start, uploads and deletions while running and at
every end.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smtrain.plane.server.sync import CheckpointSync
from tests import tiers
from tests.processes import wait_for, wait_for_end

from .conftest import Client, StartServer


def config(client: Client, name: str, **more: str) -> dict[str, Any]:
    return {"S3Uri": f"s3://{client.bucket}/ckpt/{name}", **more}


def test_checkpoints_come_down_go_up_and_are_deleted(on_hosts: Client) -> None:
    on_hosts.put(f"ckpt/{on_hosts.kind}/whole/old", "old")
    on_hosts.put(f"ckpt/{on_hosts.kind}/whole/step/kept", "kept")
    command = """
    cd /opt/ml/checkpoints; cat old; cat step/kept; rm old; mkdir new; echo hello > new/file; echo; echo ready
    trap 'exit 0' TERM; while true; do sleep 0.05; done
    """
    name = on_hosts.start(command, CheckpointConfig=config(on_hosts, f"{on_hosts.kind}/whole"))
    on_hosts.wait_for_line(name, "ready")
    wait_for(
        lambda: (
            on_hosts.keys(f"ckpt/{on_hosts.kind}/whole/")
            == [f"ckpt/{on_hosts.kind}/whole/new/file", f"ckpt/{on_hosts.kind}/whole/step/kept"]
        )
    )
    assert on_hosts.get(f"ckpt/{on_hosts.kind}/whole/new/file") == b"hello\n"
    assert on_hosts.describe(name)["TrainingJobStatus"] == "InProgress", (
        "the sync does not wait for the end"
    )
    on_hosts.sagemaker.stop_training_job(TrainingJobName=name)
    on_hosts.wait(name)
    assert on_hosts.lines(name)[0] == "oldkept"


def test_what_is_written_last_arrives_however_the_job_ends(client: Client) -> None:
    deaf = "trap '' TERM; echo ready; while true; do sleep 0.05; done"
    ends = {"fail": "exit 1", "finish": "exit 0", "limit": deaf}
    for name, end in ends.items():
        job = client.run(
            f"echo {name} > /opt/ml/checkpoints/last; {end}",
            CheckpointConfig=config(client, name),
            StoppingCondition={"MaxRuntimeInSeconds": 1 if name == "limit" else 600},
        )
        assert (
            job["TrainingJobStatus"]
            == {"fail": "Failed", "finish": "Completed", "limit": "Stopped"}[name]
        )
        assert client.get(f"ckpt/{name}/last").decode().strip() == name


def test_every_host_syncs_its_own_folder_to_the_one_prefix(on_hosts: Client) -> None:
    command = "echo $HOSTNAME > /opt/ml/checkpoints/here/$HOSTNAME; ls /opt/ml/checkpoints/here"
    checkpoints = config(on_hosts, f"{on_hosts.kind}/hosts", LocalPath="/opt/ml/checkpoints/here")
    job = on_hosts.completed(command, hosts=2, CheckpointConfig=checkpoints)
    assert on_hosts.keys(f"ckpt/{on_hosts.kind}/hosts/") == [
        f"ckpt/{on_hosts.kind}/hosts/algo-1",
        f"ckpt/{on_hosts.kind}/hosts/algo-2",
    ]
    assert on_hosts.lines(job, "algo-2") == ["algo-2"], "a host sees its own files only"
    again = on_hosts.completed(command, hosts=2, CheckpointConfig=checkpoints)
    assert on_hosts.lines(again, "algo-2") == ["algo-1", "algo-2"], "a new job sees all"


def test_a_checkpoint_bucket_that_is_not_there(client: Client) -> None:
    job = client.run("true", CheckpointConfig={"S3Uri": "s3://no-such-bucket/x"})
    assert job["TrainingJobStatus"] == "Failed"
    assert "NoSuchBucket" in job["FailureReason"]


class RecordedStore:
    """The three calls of the sync, on a dict; the tests check which calls it makes and when."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.order: list[str] = []

    def upload_fileobj(self, body: BinaryIO, bucket: str, key: str, Config: object) -> None:
        self.objects[key] = body.read()
        self.order.append(key)

    def delete_object(self, Bucket: str, Key: str) -> None:
        del self.objects[Key]


def test_what_another_job_deletes_while_it_comes_down_is_passed_over(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        client.put(f"ckpt/shared/{name}", name)
    sync = CheckpointSync(client.s3, f"s3://{client.bucket}/ckpt/shared", tmp_path)
    fetch = client.s3.download_file

    def delayed(bucket: str, key: str, path: str, Config: object) -> None:
        client.s3.delete_object(Bucket=bucket, Key="ckpt/shared/b")
        fetch(bucket, key, path, Config=Config)

    monkeypatch.setattr(client.s3, "download_file", delayed)
    sync.pull()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]
    sync.push(is_settled=True)
    assert client.keys("ckpt/shared/") == ["ckpt/shared/a", "ckpt/shared/c"]


def test_a_file_still_being_written_waits_and_so_does_what_follows(tmp_path: Path) -> None:
    store = RecordedStore()
    sync = CheckpointSync(store, "s3://b/p", tmp_path)
    shard, manifest = tmp_path / "shard", tmp_path / "manifest"
    shard.write_text("half")
    os.utime(shard, ns=(1, 1))
    sync.push(is_settled=False)
    assert store.order == []
    shard.write_text("whole")
    os.utime(shard, ns=(2, 2))
    manifest.write_text("{}")
    os.utime(manifest, ns=(3, 3))
    sync.push(is_settled=False)
    assert store.order == []
    sync.push(is_settled=False)
    assert store.order == ["p/shard", "p/manifest"]
    assert store.objects == {"p/shard": b"whole", "p/manifest": b"{}"}


names = st.sampled_from(["a", "b", "c/d", "c/e"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), names, st.binary(max_size=20)),
        st.tuples(st.just("remove"), names, st.none()),
    ),
    max_size=12,
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=tiers.examples(40),
    deadline=None,
)
@given(rounds=st.lists(steps, max_size=5))
def test_after_the_last_push_the_prefix_equals_the_folder(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[list[tuple[str, str, bytes]]]
) -> None:
    folder = tmp_path_factory.mktemp("sync")
    store = RecordedStore()
    sync = CheckpointSync(store, "s3://b/p/", folder)
    for moves in rounds:
        for move, name, body in moves:
            path = folder / name
            if move == "write":
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(body)
            else:
                path.unlink(missing_ok=True)
        sync.push(is_settled=False)
    sync.push(is_settled=True)
    there = {
        f"p/{p.relative_to(folder).as_posix()}": p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file()
    }
    assert store.objects == there


def test_an_older_checkpoint_is_deleted_there_only_when_what_replaced_it_has_arrived_from_all_hosts(
    tmp_path: Path,
) -> None:
    store = RecordedStore()
    hosts: list[CheckpointSync] = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"old-{name}").write_text("old")
        hosts.append(CheckpointSync(store, "s3://b/p", tmp_path / name, hosts))
    for _ in range(2):
        for sync in hosts:
            sync.push(is_settled=False)
    assert sorted(store.objects) == ["p/old-one", "p/old-two"]
    for name in ("one", "two"):
        (tmp_path / name / f"new-{name}").write_text("new")
        (tmp_path / name / f"old-{name}").unlink()
    for _ in range(3):
        hosts[0].push(is_settled=False)
    assert sorted(store.objects) == [
        "p/new-one",
        "p/old-one",
        "p/old-two",
    ], "the other host has its half of it"
    for _ in range(2):
        hosts[1].push(is_settled=False)
        hosts[0].push(is_settled=False)
    assert sorted(store.objects) == ["p/new-one", "p/new-two"]


def test_while_what_replaces_it_goes_before_it_has_arrived_the_older_one_stays(
    tmp_path: Path,
) -> None:
    store = RecordedStore()
    sync = CheckpointSync(store, "s3://b/p", tmp_path)
    (tmp_path / "step-0").write_text("0")
    for _ in range(2):
        sync.push(is_settled=False)
    for step in range(1, 6):
        (tmp_path / f"step-{step}").write_text(str(step))
        (tmp_path / f"step-{step - 1}").unlink()
        sync.push(is_settled=False)
        assert store.objects == {"p/step-0": b"0"}, (
            "each is gone before two looks have seen it alike"
        )
    for _ in range(2):
        sync.push(is_settled=False)
    assert store.objects == {"p/step-5": b"5"}


class Saver:
    """A script that saves steps of two files and a manifest in each folder, and deletes the last
    step.
    """

    def __init__(self, folders: list[Path]) -> None:
        self.folders, self.step = folders, 0
        self.save()

    def save(self) -> None:
        self.step += 1
        for folder in self.folders:
            (folder / f"step-{self.step}").mkdir()
            for name in ("a", "b", "manifest"):
                (folder / f"step-{self.step}" / name).write_text(str(self.step))
        for folder in self.folders:
            for other in set(folder.iterdir()) - {folder / f"step-{self.step}"}:
                shutil.rmtree(other)


class SavingStore(RecordedStore):
    """A store whose script saves during uploads, as often as the next of `saves`."""

    def __init__(self) -> None:
        super().__init__()
        self.saves: list[int] = []
        self.saver: Saver | None = None

    def some_saves(self) -> None:
        for _ in range(self.saves.pop() if self.saves and self.saver else 0):
            assert self.saver
            self.saver.save()

    def upload_fileobj(self, body: BinaryIO, bucket: str, key: str, Config: object) -> None:
        self.some_saves()
        super().upload_fileobj(body, bucket, key, Config)

    def whole(self, hosts: int) -> bool:
        names = {f"{host}/{name}" for host in range(hosts) for name in ("a", "b", "manifest")}
        held: dict[str, set[str]] = {}
        for key, body in self.objects.items():
            _, host, step, name = key.split("/")
            if f"step-{body.decode()}" == step:
                held.setdefault(step, set()).add(f"{host}/{name}")
        return names in held.values()


@settings(
    max_examples=int(os.environ.get("SMTRAIN_SAVERS", str(tiers.examples(40)))), deadline=None
)
@given(hosts=st.integers(1, 2), saves=st.lists(st.integers(0, 3), max_size=60))
def test_however_saves_fall_between_looks_and_uploads_a_whole_checkpoint_stays(
    hosts: int, saves: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / str(host) for host in range(hosts)]
        for folder in folders:
            folder.mkdir()
        store = SavingStore()
        store.saver = saver = Saver(folders)
        syncs: list[CheckpointSync] = []
        for folder in folders:
            syncs.append(CheckpointSync(store, f"s3://b/p/{folder.name}", folder, syncs))
        for _ in range(3):
            for sync in syncs:
                sync.push(is_settled=False)
        assert store.whole(hosts)
        store.saves = list(saves)
        while store.saves:
            store.some_saves()
            for sync in syncs:
                sync.push(is_settled=False)
                assert store.whole(hosts), f"after step {saver.step}"
        for _ in range(3):
            for sync in syncs:
                sync.push(is_settled=False)
        assert {key.split("/")[2] for key in store.objects} == {f"step-{saver.step}"}, (
            "and older ones are gone"
        )


# Saves states of 24 MB, keeps only the newest, and prints when one is complete.
SAVING = """
import json, os, pathlib, shutil, time
root = pathlib.Path("/opt/ml/checkpoints")
for step in range(1, 1000):
    folder = root / f"step_{step:08d}"
    folder.mkdir()
    for part in range(3):
        (folder / f"part{part}").write_bytes(os.urandom(1 << 20) * 8)
    (folder / "manifest.json").write_text(json.dumps({f"part{part}": 8 << 20 for part in range(3)}))
    for other in set(root.iterdir()) - {folder}:
        shutil.rmtree(other)
    print("whole", step, flush=True)
    time.sleep({pause})
"""


def whole_steps(client: Client, prefix: str) -> list[str]:
    held: dict[str, dict[str, int]] = {}
    for item in client.s3.list_objects_v2(Bucket=client.bucket, Prefix=prefix).get("Contents", []):
        step, _, name = item["Key"].removeprefix(prefix).partition("/")
        held.setdefault(step, {})[name] = item["Size"]
    steps = []
    for step, files in held.items():
        if "manifest.json" in files:
            about = json.loads(client.get(f"{prefix}{step}/manifest.json"))
            if all(files.get(name) == size for name, size in about.items()):
                steps.append(step)
    return steps


@pytest.mark.slow
def test_killing_the_control_plane_at_any_moment_leaves_a_whole_checkpoint(
    start_server: StartServer,
) -> None:
    """Two kills, one in the gate, or SMTRAIN_KILLS.

    Half of the jobs save faster than files can arrive.
    """
    endpoint = start_server()
    for number in range(int(os.environ.get("SMTRAIN_KILLS", "2" if tiers.full() else "1"))):
        client, prefix = Client(endpoint), f"ckpt/killed{number}/"
        saving = SAVING.replace("{pause}", str((4, 0.2)[number % 2]))
        checkpoints = {"S3Uri": f"s3://{client.bucket}/{prefix}"}
        client.put(f"{prefix}step_00000000/manifest.json", "{}")
        job = client.start([sys.executable, "-c", saving], CheckpointConfig=checkpoints)
        client.wait_for_line(job, "whole 2")
        time.sleep(random.uniform(0, 4))
        os.kill(endpoint.pid, signal.SIGKILL)
        wait_for_end(endpoint.pid)
        endpoint = start_server()
        assert whole_steps(Client(endpoint), prefix), f"kill {number} left nothing whole"
