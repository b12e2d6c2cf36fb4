"""Model and output artefacts of all hosts."""

from __future__ import annotations

import io
import tarfile
from typing import Any

from .conftest import Client

WRITE = """
cd /opt/ml/model; mkdir sub; echo $HOSTNAME > both; echo $HOSTNAME > sub/$HOSTNAME
echo data-$HOSTNAME > /opt/ml/output/data/$HOSTNAME.txt
"""


def unpacked(body: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        read: Any = tar.extractfile
        return {m.name: read(m).read().decode().strip() for m in tar if m.isfile()}


def test_archives_merge_the_hosts_and_the_first_wins(client: Client) -> None:
    job = client.completed(WRITE, hosts=2)
    base = f"out/{job['TrainingJobName']}/output"
    assert job["ModelArtifacts"]["S3ModelArtifacts"] == f"s3://{client.bucket}/{base}/model.tar.gz"
    model = unpacked(client.get(f"{base}/model.tar.gz"))
    assert model == {"both": "algo-1", "sub/algo-1": "algo-1", "sub/algo-2": "algo-2"}
    data = unpacked(client.get(f"{base}/output.tar.gz"))
    assert data == {"algo-1.txt": "data-algo-1", "algo-2.txt": "data-algo-2"}


def test_compression_none_leaves_plain_objects(client: Client) -> None:
    output = {"S3OutputPath": f"s3://{client.bucket}/plain/", "CompressionType": "NONE"}
    job = client.completed(WRITE, hosts=2, OutputDataConfig=output)
    base = f"plain/{job['TrainingJobName']}/output"
    assert job["ModelArtifacts"]["S3ModelArtifacts"] == f"s3://{client.bucket}/{base}/model/"
    assert client.keys(base) == [
        f"{base}/data/algo-1.txt",
        f"{base}/data/algo-2.txt",
        f"{base}/model/both",
        f"{base}/model/sub/algo-1",
        f"{base}/model/sub/algo-2",
    ]
    assert client.get(f"{base}/model/both") == b"algo-1\n"


def test_an_output_bucket_that_is_not_there_fails_the_job(client: Client) -> None:
    job = client.run(
        "echo x > /opt/ml/model/x", OutputDataConfig={"S3OutputPath": "s3://no-such-bucket/x"}
    )
    assert job["TrainingJobStatus"] == "Failed"
    assert "NoSuchBucket" in job["FailureReason"]


LINK = """
cd /opt/ml/FOLDER; mkdir step_2; echo two > step_2/file; ln -s step_2 latest; ln -s /opt/ml/FOLDER/step_2/file absolute
ln -s ../../opt/ml/code/made outside_it; echo made > /opt/ml/code/made; ln -s /opt/ml/code/made made
ln -s /etc/hostname machine; ln -s nothing broken; ln -s . circle; ln -s a b; ln -s b a; mkfifo pipe
ln -s ../../../../etc/hostname climbing; ln -s latest/file through; cat through absolute made
"""
LINKED = {
    "absolute": "two",
    "latest/file": "two",
    "made": "made",
    "step_2/file": "two",
    "through": "two",
}
NOWHERE = ("a", "b", "broken", "circle", "climbing and 2 more")  # and machine, outside_it


def test_links_are_uploaded_as_what_the_job_sees_there(client: Client) -> None:
    """The log names links that lead out of /opt/ml or to nothing."""
    job = client.completed(LINK.replace("FOLDER", "model"))
    assert unpacked(client.get(f"out/{job['TrainingJobName']}/output/model.tar.gz")) == LINKED
    outside = (
        "smtrain: links that lead to no file below /opt/ml are not uploaded from /opt/ml/model: "
        + ", ".join(NOWHERE)
    )
    special = (
        "smtrain: files that are not regular (pipes, sockets, devices) are not uploaded from"
        " /opt/ml/model: pipe"
    )
    assert client.lines(job) == ["two", "two", "made", outside, special]


def test_links_among_checkpoints_are_treated_alike(client: Client) -> None:
    uri = f"s3://{client.bucket}/linked"
    job = client.completed(LINK.replace("FOLDER", "checkpoints"), CheckpointConfig={"S3Uri": uri})
    assert {
        key.removeprefix("linked/"): client.get(key).decode().strip()
        for key in client.keys("linked/")
    } == LINKED
    assert client.lines(job)[-2].endswith(
        "not uploaded from /opt/ml/checkpoints: " + ", ".join(NOWHERE)
    )
