"""The control plane's state after kill -9 and a restart."""

from __future__ import annotations

import os
import signal
import stat
import time

import pytest
from botocore.exceptions import ClientError

from smtrain.plane.client import Endpoint, running_endpoint
from tests.processes import wait_for, wait_for_end

from .conftest import GROUP, Client, StartServer


def killed(endpoint: Endpoint) -> None:
    os.kill(endpoint.pid, signal.SIGKILL)
    wait_for_end(endpoint.pid)


def test_jobs_logs_and_objects_are_there_again(start_server: StartServer) -> None:
    endpoint = start_server()
    client = Client(endpoint)
    s3, bucket = client.s3, client.bucket
    definitions = [{"Name": "m", "Regex": "m=([0-9]+)"}]
    done = client.completed(
        "echo m=7; echo bye; echo x > /opt/ml/model/x",
        algorithm={"MetricDefinitions": definitions},
        Tags=[{"Key": "k", "Value": "v"}],
    )
    lines = client.lines(done)
    # S3 in all its ways of writing.
    big = os.urandom(11 << 20)
    s3.put_object(Bucket=bucket, Key="put", Body=b"first")
    s3.put_object(
        Bucket=bucket, Key="put", Body=b"body", Metadata={"Who": "me"}, ContentType="text/plain"
    )
    s3.copy_object(Bucket=bucket, Key="copy", CopySource={"Bucket": bucket, "Key": "put"})
    upload = s3.create_multipart_upload(Bucket=bucket, Key="parts")["UploadId"]
    parts = []
    for number, piece in enumerate((big[: 6 << 20], big[6 << 20 :]), 1):
        sent = s3.upload_part(
            Bucket=bucket, Key="parts", UploadId=upload, PartNumber=number, Body=piece
        )
        parts.append({"PartNumber": number, "ETag": sent["ETag"]})
    s3.complete_multipart_upload(
        Bucket=bucket, Key="parts", UploadId=upload, MultipartUpload={"Parts": parts}
    )
    s3.copy({"Bucket": bucket, "Key": "parts"}, bucket, "parts-copy")
    for key in ("gone", "gone-too", "gone-three"):
        s3.put_object(Bucket=bucket, Key=key, Body=b"x")
    s3.delete_object(Bucket=bucket, Key="gone")
    s3.delete_objects(
        Bucket=bucket, Delete={"Objects": [{"Key": "gone-too"}, {"Key": "gone-three"}]}
    )
    s3.create_bucket(Bucket="versions")
    s3.put_bucket_versioning(Bucket="versions", VersioningConfiguration={"Status": "Enabled"})
    s3.create_bucket(Bucket="removed")
    s3.delete_bucket(Bucket="removed")
    old = s3.put_object(Bucket="versions", Key="v", Body=b"one")["VersionId"]
    s3.put_object(Bucket="versions", Key="v", Body=b"two")
    s3.put_object(Bucket="versions", Key="hidden", Body=b"three")
    s3.delete_object(Bucket="versions", Key="hidden")
    listing = s3.list_objects_v2(Bucket=bucket)["Contents"]
    running_job = client.start(
        "echo half > /opt/ml/checkpoints/c; echo ready; sleep 600",
        CheckpointConfig={"S3Uri": f"s3://{bucket}/ckpt"},
    )
    client.wait_for_line(running_job, "ready")
    wait_for(lambda: client.keys("ckpt/"))

    killed(endpoint)
    ended = time.time() * 1000
    assert running_endpoint(endpoint.home) is None, (
        "an endpoint.json of a dead process is seen through"
    )
    again = start_server()
    assert again.url == endpoint.url, "a client made before the restart works on"
    after = client.describe(done["TrainingJobName"])
    drop = "ResponseMetadata"
    assert {k: v for k, v in after.items() if k != drop} == {
        k: v for k, v in done.items() if k != drop
    }
    assert client.lines(done) == lines == ["m=7", "bye"]
    of_it = {"logGroupName": GROUP, "logStreamNamePrefix": done["TrainingJobName"]}
    for stream in client.logs.describe_log_streams(**of_it)["logStreams"]:
        assert stream["lastIngestionTime"] < ended, (
            "old lines are no new arrivals, for which a follower would wait"
        )
    tags = client.sagemaker.list_tags(ResourceArn=done["TrainingJobArn"])["Tags"]
    assert tags == [{"Key": "k", "Value": "v"}]
    lost = client.describe(running_job)
    assert lost["TrainingJobStatus"] == "Failed"
    assert (
        lost["FailureReason"]
        == "InternalServerError: the local control plane was restarted while the job ran"
    )
    assert client.lines(running_job) == ["ready"]
    assert client.get("ckpt/c") == b"half\n"
    with pytest.raises(ClientError):
        client.sagemaker.create_training_job(
            **client.request("true", TrainingJobName=done["TrainingJobName"])
        )

    now = [
        item for item in s3.list_objects_v2(Bucket=bucket)["Contents"] if item["Key"] != "ckpt/c"
    ]
    assert now == listing
    head = s3.head_object(Bucket=bucket, Key="put")
    assert (head["Metadata"], head["ContentType"]) == ({"who": "me"}, "text/plain")
    assert client.get("put") == client.get("copy") == b"body"
    assert client.get("parts") == client.get("parts-copy") == big
    part = s3.get_object(Bucket=bucket, Key="parts", Range="bytes=6291455-6291460")["Body"].read()
    assert part == big[6291455:6291461]
    assert {b["Name"] for b in s3.list_buckets()["Buckets"]} == {bucket, "versions"}
    assert s3.get_object(Bucket="versions", Key="v")["Body"].read() == b"two"
    assert s3.get_object(Bucket="versions", Key="v", VersionId=old)["Body"].read() == b"one"
    with pytest.raises(ClientError):
        s3.get_object(Bucket="versions", Key="hidden")
    assert client.completed("echo works")["TrainingJobStatus"] == "Completed"
    assert client.logs.describe_log_groups()["logGroups"][0]["logGroupName"] == GROUP


def test_the_bodies_of_what_was_deleted_or_replaced_leave_the_disk(
    start_server: StartServer,
) -> None:
    endpoint = start_server()
    client = Client(endpoint)
    for body in (b"a", b"b", b"c"):
        client.put("same", body)
    client.put("other", b"d")
    client.s3.delete_object(Bucket=client.bucket, Key="other")
    upload = client.s3.create_multipart_upload(Bucket=client.bucket, Key="m")["UploadId"]
    client.s3.upload_part(Bucket=client.bucket, Key="m", UploadId=upload, PartNumber=1, Body=b"e")
    client.s3.abort_multipart_upload(Bucket=client.bucket, Key="m", UploadId=upload)
    blobs = [p for p in (endpoint.home / "local/s3/blobs").rglob("*") if p.is_file()]
    assert [p.read_bytes() for p in blobs] == [b"c"]


def test_state_is_the_users_alone(endpoint: Endpoint) -> None:
    state = endpoint.home / "local"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert stat.S_IMODE((state / "endpoint.json").stat().st_mode) == 0o600
