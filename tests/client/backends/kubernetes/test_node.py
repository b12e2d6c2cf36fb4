"""The programs of a pod: all begin and end together, and checkpoints reach S3 in their order."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.client.backends.kubernetes.conftest import wait_for
from tests.docs.pages import ROOT
from tests.ports import free_port


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of entrypoints/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "entrypoints"))
    for name in ("gang", "checkpoint_sync", "s3_inputs", "kubernetes_node"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


class Members:
    """The pods of a gang, each a thread; `losses` are those that have seen a loss."""

    def __init__(self, gang: Any, hosts: int) -> None:
        self.losses: dict[int, str] = {}
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.port, self.hosts, self.module = free_port(), hosts, gang
        self.gangs = [self.make(rank) for rank in range(hosts)]

    def make(self, rank: int) -> Any:
        place = ("127.0.0.1", self.port)
        gang = self.module.Gang(rank, self.hosts, place, lambda _text: None)
        gang.on_loss = lambda reason: self.losses.update({rank: reason})
        return gang

    def begin(self, *ranks: int) -> None:
        for rank in ranks:
            threading.Thread(target=self._begin, args=(rank,), daemon=True).start()

    def end(self, *ranks: int) -> None:
        for rank in ranks:
            threading.Thread(target=self._end, args=(rank,), daemon=True).start()

    def _begin(self, rank: int) -> None:
        self.gangs[rank].begin()
        self.begun.append(rank)

    def _end(self, rank: int) -> None:
        self.gangs[rank].end()
        self.ended.append(rank)


@pytest.fixture
def members(modules: Callable[[str], Any]) -> Members:
    return Members(modules("gang"), 3)


def test_pods_begin_and_end_together(members: Members) -> None:
    members.begin(0, 1)
    wait_for(lambda: members.gangs[0]._peers)
    assert members.begun == []
    members.begin(2)
    wait_for(lambda: sorted(members.begun) == [0, 1, 2])
    members.end(0, 1)
    wait_for(lambda: members.gangs[0]._done == {1})
    assert members.ended == []
    members.end(2)
    wait_for(lambda: sorted(members.ended) == [0, 1, 2])
    assert members.losses == {}


def test_a_lost_pod_ends_the_first_and_that_ends_all(members: Members) -> None:
    members.begin(0, 1, 2)
    wait_for(lambda: len(members.begun) == 3)
    members.gangs[2]._peers[0].shutdown(2)
    wait_for(lambda: members.losses.get(0) == "pod 2 is lost")
    for peer in members.gangs[0]._peers.values():  # as its process ends
        peer.shutdown(2)
    wait_for(lambda: members.losses.get(1) == "the first pod is lost")


def test_a_new_pod_of_a_rank_that_is_there_is_a_loss(members: Members) -> None:
    members.begin(0, 1, 2)
    wait_for(lambda: len(members.begun) == 3)
    new = members.make(1)
    threading.Thread(target=new.begin, daemon=True).start()
    wait_for(lambda: members.losses.get(0) == "pod 1 was replaced")


def test_a_single_pod_waits_for_no_one(modules: Callable[[str], Any]) -> None:
    gang = modules("gang").Gang(0, 1, ("127.0.0.1", 1), lambda _text: None)
    gang.begin()
    gang.end()


def keys() -> list[str]:
    contents = boto3.Session().client("s3").list_objects_v2(Bucket="bucket").get("Contents", [])
    return [item["Key"] for item in contents]


def test_checkpoints_arrive_in_their_order_and_are_deleted_and_pulled(
    s3: str, modules: Callable[[str], Any], tmp_path: Path
) -> None:
    module, client = modules("checkpoint_sync"), boto3.Session().client("s3")
    said: list[str] = []
    sync = module.CheckpointSync(
        client, "s3://bucket/run/checkpoints/", tmp_path / "a", said.append
    )
    sync.pull()
    (tmp_path / "a/step-1").mkdir()
    (tmp_path / "a/step-1/weights").write_bytes(b"12")
    sync.push(is_settled=False)
    assert keys() == []  # it may still be written
    sync.push(is_settled=False)
    assert keys() == ["run/checkpoints/step-1/weights"]
    (tmp_path / "a/step-1/manifest.json").write_text("{}")
    sync.push(is_settled=True)
    other = module.CheckpointSync(
        client, "s3://bucket/run/checkpoints", tmp_path / "b", said.append
    )
    other.pull()
    assert (tmp_path / "b/step-1/weights").read_bytes() == b"12"
    (tmp_path / "a/step-1/weights").unlink()
    sync.push(is_settled=False)
    assert keys() == ["run/checkpoints/step-1/manifest.json"]
    assert said == []


def test_a_key_outside_the_folder_is_refused(
    s3: str, modules: Callable[[str], Any], tmp_path: Path
) -> None:
    client = boto3.Session().client("s3")
    client.put_object(Bucket="bucket", Key="run/../../x", Body=b"")
    sync = modules("checkpoint_sync").CheckpointSync(client, "s3://bucket/run", tmp_path, print)
    with pytest.raises(SystemExit, match="points outside the folder of checkpoints"):
        sync.pull()


def test_another_attempt_in_the_same_pod_continues_its_log(
    s3: str, modules: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """HyperPod's agent starts the program again; until it ends, the log of the pod is read."""
    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, value in (
        ("SMTRAIN_JOB_FOLDER", "s3://bucket/job"),
        ("SMTRAIN_HOSTS", "2"),
        ("SMTRAIN_POD_UID", "0123456789"),
        ("GROUP_RANK", "1"),
        ("MASTER_ADDR", "10.0.0.1"),
    ):
        monkeypatch.setenv(name, value)
    module, client = modules("kubernetes_node"), boto3.Session().client("s3")
    for text in ("one", "two"):
        pod = module.Pod(client, "train")
        assert (pod.rank, pod.first) == (1, "10.0.0.1")
        pod.announce()
        assert keys() == ["job/hosts/algo-2-01234567"]
        pod.log.say(text)
        pod.leave_log()
        pod.log._file.close()
    log = client.get_object(Bucket="bucket", Key="job/logs/algo-2-01234567.log")["Body"].read()
    assert [line.split()[1] for line in log.decode().splitlines()] == ["one", "two"]
