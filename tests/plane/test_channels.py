"""Input channels: File, FastFile, shards, and missing objects."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import pytest

from .conftest import Client, channel, gone, processes

LIST = "cd /opt/ml/input/data/train && find . -type f | sort | tr '\\n' ' '"


def listed(client: Client, uri: str, **changes: Any) -> list[str]:
    job = client.completed(LIST, InputDataConfig=[channel("train", uri, **changes)])
    return client.lines(job)[-1].split()


@pytest.mark.parametrize("mode", ["File", "FastFile"])
def test_a_prefix_matches_keys_and_only_a_slash_makes_it_a_folder(
    client: Client, mode: str
) -> None:
    for key in ("folder/a", "folder/sub/b", "folder/", "folder-2/c"):
        client.put(f"{mode}/{key}")
    base = f"s3://{client.bucket}/{mode}"
    assert listed(client, f"{base}/folder", mode=mode) == [
        "./a",
        "./folder-2/c",
        "./sub/b",
    ], "as on SageMaker"
    assert listed(client, f"{base}/folder/", mode=mode) == ["./a", "./sub/b"]
    assert listed(client, f"{base}/folder/sub/b", mode=mode) == ["./b"]
    assert listed(client, f"{base}/folder-", mode=mode) == ["./folder-2/c"]


@pytest.mark.parametrize("mode", ["File", "FastFile"])
def test_each_host_gets_its_shard_of_the_keys(client: Client, mode: str) -> None:
    for i in range(5):
        uri = client.put(f"shards-{mode}/{i}")
    sharded = channel("train", uri, mode, "ShardedByS3Key")
    job = client.completed(LIST, hosts=2, InputDataConfig=[sharded])
    shards = [client.lines(job, host)[-1].split() for host in ("algo-1", "algo-2")]
    assert shards == [["./0", "./2", "./4"], ["./1", "./3"]]


def test_a_prefix_without_objects_fails_the_job(client: Client) -> None:
    job = client.run("true", InputDataConfig=[channel("train", f"s3://{client.bucket}/not/there")])
    assert job["TrainingJobStatus"] == "Failed"
    assert job["FailureReason"].startswith("ClientError: Data download failed: ")
    assert "No S3 objects found under S3 URL" in job["FailureReason"]
    assert f"s3://{client.bucket}/not/there" in job["FailureReason"]
    assert "TrainingStartTime" not in job


def test_a_bucket_that_is_not_there_fails_the_job(client: Client) -> None:
    job = client.run("true", InputDataConfig=[channel("train", "s3://no-such-bucket/x")])
    assert job["FailureReason"].startswith("ClientError: Data download failed: NoSuchBucket")


def test_a_key_cannot_leave_its_channel(client: Client) -> None:
    uri = client.put("evil/../../../../escaped")
    job = client.run("true", InputDataConfig=[channel("train", f"s3://{client.bucket}/evil/")])
    assert "points outside its channel" in job["FailureReason"], uri


READ = """
import hashlib, json, mmap, os, random, sys
path = "/opt/ml/input/data/train/big"
digest = hashlib.sha256()
with open(path, "rb") as f:
    while chunk := f.read(1 << 20):
        digest.update(chunk)
found = {"sequential": digest.hexdigest(), "size": os.path.getsize(path)}
with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as view:
    picks = json.loads(sys.argv[1])
    found["picks"] = [hashlib.sha256(view[a : a + 5000]).hexdigest() for a in picks]
try:
    open(path, "ab")
    found["writable"] = True
except OSError:
    found["writable"] = False
found["kind"] = next(line.split()[2] for line in open("/proc/mounts") if "/data/train " in line)
print(json.dumps(found))
"""


def test_fastfile_is_a_lazy_read_only_mount(client: Client) -> None:
    if not os.path.exists("/dev/fuse"):
        pytest.skip("this machine has no /dev/fuse, so FastFile is a download")
    body = os.urandom(9_000_001)
    uri = client.put("fast/big", body)
    picks = [8_995_000, 0, 4_000_000, 123_457]
    program = ["python", "-c", READ, json.dumps(picks)]
    job = client.completed(program, InputDataConfig=[channel("train", uri, "FastFile")])
    seen = json.loads(client.lines(job)[-1])
    assert seen == {
        "sequential": hashlib.sha256(body).hexdigest(),
        "size": len(body),
        "picks": [hashlib.sha256(body[a : a + 5000]).hexdigest() for a in picks],
        "writable": False,
        "kind": "fuse",
    }
    assert client.lines(job) == [client.lines(job)[-1]], "a mount that works says nothing"


def test_all_mounts_of_a_host_come_from_one_process(client: Client) -> None:
    """The process imports boto3 once; the mounts end with the job."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("this machine has no /dev/fuse, so FastFile is a download")
    inputs = [
        channel(name, client.put(f"several/{name}/x", f"of {name}\n"), "FastFile") for name in "abc"
    ]
    name = client.start("cat /opt/ml/input/data/*/x; echo ready; sleep 600", InputDataConfig=inputs)
    client.wait_for_line(name, "ready")
    assert client.lines(name) == ["of a", "of b", "of c", "ready"]
    assert len(
        [line for line in processes(name) if "smtrain.plane.server.fastfile" in line]
    ) == 1 + len(inputs)
    client.sagemaker.stop_training_job(TrainingJobName=name)
    assert client.wait(name)["TrainingJobStatus"] == "Stopped"
    assert gone(name)
