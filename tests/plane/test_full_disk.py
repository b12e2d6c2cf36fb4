"""A full disk of SMTRAIN_HOME: jobs fail with the reason, no new one starts, and deletions still
work.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.backends.sagemaker.retry import Backoff
from smtrain.client.launch.inputs import Upload, upload_all
from smtrain.core.errors import JobError
from smtrain.plane.client import shut_down
from tests import docker
from tests.faults.nthwrite import ALWAYS, FailingDisk

from .conftest import Client, client_of, gone, serve

MEGABYTE = b"x" * (1 << 20)


class Disk:
    """A disk that can be filled and freed: a small tmpfs, or, without one, a disk that fails all
    writes.
    """

    def __init__(self, root: Path) -> None:
        self.home = root / "disk"
        self.home.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(self.home)]
        self.mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        self.environment: dict[str, str] = {}
        if not self.mounted:
            self._failing = FailingDisk(root / "shim", [self.home])
            self.environment = self._failing.environment()

    def fill(self) -> None:
        if not self.mounted:
            self._failing.fail(errno.ENOSPC, 1, ALWAYS)
            return
        with open(self.home / "ballast", "ab", buffering=0) as file:
            for piece in (MEGABYTE, MEGABYTE[:4096], b"x"):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(piece)

    def free(self) -> None:
        if self.mounted:
            (self.home / "ballast").unlink()
        else:
            self._failing.heal()

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.home)], check=True)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    for name, value in disk.environment.items():
        monkeypatch.setenv(name, value)
    yield disk
    shut_down(disk.home)
    disk.close()


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ClientError) as caught:
        call()
    return str(caught.value)


def test_a_full_disk_is_named_by_all_and_freed_it_all_goes_on(disk: Disk, kind: str) -> None:
    client = client_of(kind, serve(disk.home))
    for name in ("a", "b", "c"):
        client.put(f"bodies/{name}", MEGABYTE)
    sentence = (
        f"no space left on {disk.home} (SMTRAIN_HOME): free some (`smtrain local clean` says what"
        " can go)"
    )
    talk = "echo ready; i=0; while true; do i=$((i+1)); echo line $i of many; done"
    mark = (  # a number, or sleep ends at once and its complaint may be the log's first line
        f"9{os.getpid()}.987"
    )
    name = client.start(f"sleep {mark} & {talk}")
    client.wait_for_line(name, "ready")
    disk.fill()

    job = client.wait(name)
    assert job["TrainingJobStatus"] == "Failed"
    assert job["FailureReason"].startswith(f"ClientError: {sentence}")
    assert gone(mark)
    if kind == "docker":
        assert not docker.left(disk.home)
    assert client.lines(name)[0] == "ready"
    disk.fill()  # what the job had is gone, and so is the room it took

    assert sentence in refused(lambda: client.start("true"))
    message = refused(lambda: client.put("bodies/d", MEGABYTE))
    assert "InsufficientStorage" in message
    assert sentence in message
    assert len(client.keys("bodies/")) == 3
    assert len(client.sagemaker.list_training_jobs()["TrainingJobSummaries"]) == 1
    if disk.mounted:
        client.s3.delete_objects(
            Bucket=client.bucket, Delete={"Objects": [{"Key": f"bodies/{n}"} for n in "ab"]}
        )
        client.s3.delete_object(Bucket=client.bucket, Key="bodies/c")
        assert client.put("bodies/e", MEGABYTE), "deleting has freed the space"
    disk.free()
    assert client.completed("echo on")["TrainingJobStatus"] == "Completed"

    shut_down(disk.home)
    again = client_of(kind, serve(disk.home))
    assert again.describe(name)["FailureReason"] == job["FailureReason"], (
        "also its end was written down"
    )
    if disk.mounted:
        assert again.keys("bodies/") == ["bodies/e"]


def test_the_plane_starts_on_a_full_disk_and_says_why_where_it_cannot(disk: Disk) -> None:
    from smtrain.core.errors import LocalError
    from smtrain.plane.client import ensure_running

    serve(disk.home)
    shut_down(disk.home)
    disk.fill()
    if disk.mounted:
        client = Client(ensure_running(disk.home))  # with its reserve
        assert client.sagemaker.list_training_jobs()["TrainingJobSummaries"] == []
        shut_down(disk.home)
        (disk.home / "local/reserve").unlink(missing_ok=True)
        disk.fill()
    # If it is not a real disk, this process does not see that it is full.
    why = (
        r"no space left on .*set SMTRAIN_HOME to a folder"
        if disk.mounted
        else "look whether its disk takes writes"
    )
    with pytest.raises(LocalError, match=why):
        ensure_running(disk.home)
    disk.free()
    assert ensure_running(disk.home)


def test_a_launch_does_not_wait_for_room(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads survive an outage of the network; a full disk stays full until space is freed."""

    def waits(_: Backoff) -> None:
        raise AssertionError("it waits, and tries again")

    client = Client(serve(disk.home))
    monkeypatch.setenv("SMTRAIN_HOME", str(disk.home))
    (tmp_path / "text.txt").write_bytes(MEGABYTE * 12)
    upload = Upload("s3://" + client.bucket + "/text/", (("text.txt", tmp_path / "text.txt"),))
    disk.fill()
    monkeypatch.setattr(Backoff, "pause", waits)
    with pytest.raises(JobError, match=f"no space left on {disk.home}"):
        upload_all(SageMakerBackend("local"), [upload], lambda _: None)
