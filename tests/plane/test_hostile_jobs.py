"""A job's odd output or file affects only that line, file or job."""

from __future__ import annotations

import datetime
import gzip
import io
import os
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from smtrain.plane.client import shut_down
from tests.processes import wait_for

from .conftest import GROUP, Client, StartServer, channel


def metric(regex: str, name: str = "loss") -> dict[str, Any]:
    return {"MetricDefinitions": [{"Name": name, "Regex": regex}]}


def points(client: Client, job: dict[str, Any], name: str = "loss") -> tuple[float, float, float]:
    """Minimum, maximum and count of all points of a job's metric."""
    now = datetime.datetime.now(datetime.timezone.utc)
    answer = client.cloudwatch.get_metric_statistics(
        Namespace=GROUP,
        MetricName=name,
        Dimensions=[{"Name": "TrainingJobName", "Value": job["TrainingJobName"]}],
        StartTime=now - datetime.timedelta(hours=1),
        EndTime=now + datetime.timedelta(hours=1),
        Period=7200,
        Statistics=["Minimum", "Maximum", "SampleCount"],
    )["Datapoints"]
    lowest, highest = (
        how(p[key] for p in answer) for how, key in ((min, "Minimum"), (max, "Maximum"))
    )
    return lowest, highest, sum(p["SampleCount"] for p in answer)


SPELLED = [
    "nan",
    "NaN",
    "inf",
    "-inf",
    "Infinity",
    "1e999",
    "1e200",
    "0x10",
    "1_000",
    "",
    "٣",
    "1,5",
    "--1",
    "e5",
]


def test_a_metric_that_is_no_number_is_left_out_and_the_log_goes_on(
    start_server: StartServer,
) -> None:
    client = Client(start_server())
    program = (
        f"for word in {SPELLED!r}: print('loss=' + word, flush=True)\n"
        "print('loss=2.5 loss=1e-3 loss=-.5')\nfor i in range(20000): print('further', i)\n"
    )
    job = client.completed(["python", "-c", program], algorithm=metric(r"loss=(\S*)"))
    assert len(list(client.keys("out/"))) == 0
    last = {m["MetricName"]: m["Value"] for m in job["FinalMetricDataList"]}
    assert (last, points(client, job)) == ({"loss": -0.5}, (-0.5, 2.5, 3))
    shut_down(client.endpoint.home)
    client = Client(start_server())
    assert points(client, job) == (-0.5, 2.5, 3)
    assert client.lines(job)[: len(SPELLED)] == [f"loss={word}" for word in SPELLED]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("regex", "line"),
    [("((a+)+)$", "a" * 41 + "!"), ("(a|aa)+$", "a" * 60 + "!"), ("(?:(.*)*)*x", "y" * 5000)],
    ids=["nested", "alternatives", "stars"],
)
def test_an_expression_that_would_run_for_ever_is_given_up(
    client: Client, regex: str, line: str
) -> None:
    both = [
        *metric(regex, "slow")["MetricDefinitions"],
        *metric(r"loss=(\S+)")["MetricDefinitions"],
    ]
    name = client.start(
        f"echo '{line}'; echo loss=1.5; for i in 1 2 3; do echo '{line}'; done",
        algorithm={
            "MetricDefinitions": both,
        },
    )
    job = client.wait(name)
    assert job["TrainingJobStatus"] == "Completed"
    assert {m["MetricName"]: m["Value"] for m in job["FinalMetricDataList"]} == {"loss": 1.5}
    lines = client.lines(job)
    assert lines.count(line) == 4
    (text,) = (line for line in lines if line.startswith("smtrain: "))
    assert (
        text
        == "smtrain: metric slow is not looked for any more: of its Regex, it takes too long for"
        " some lines"
    )


@pytest.mark.parametrize("regex", ["no group", "(optional)?x", "(a)(b)", "(?P<name>x=(.))"])
def test_groups_may_be_missing_or_many(client: Client, regex: str) -> None:
    job = client.completed("echo no group; echo x; echo ab; echo x=1", algorithm=metric(regex))
    assert job["FinalMetricDataList"] == []


def unpacked(body: bytes) -> dict[str, bytes]:
    with tarfile.open(
        fileobj=io.BytesIO(gzip.decompress(body)), encoding="utf-8", errors="surrogateescape"
    ) as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]


DEEP = """
import os
for folder in ("model", "checkpoints", "output/data"):
    os.chdir("/opt/ml/" + folder)
    open("good", "w").write("good")
    for _ in range(1500):
        os.mkdir("d"); os.chdir("d")
    open("deep", "w").write("deep")
"""


def test_a_tree_deeper_than_python_recurses_goes_up_and_away(client: Client) -> None:
    job = client.completed(
        ["python", "-c", DEEP], CheckpointConfig={"S3Uri": f"s3://{client.bucket}/deep"}
    )
    name = job["TrainingJobName"]
    members = unpacked(client.get(f"out/{name}/output/model.tar.gz"))
    assert members == {"good": b"good", "d/" * 1500 + "deep": b"deep"}
    assert client.keys("deep/") == ["deep/good"]
    text = (
        "smtrain: files whose keys would be longer than S3's 1,024 bytes are not uploaded from"
        " /opt/ml/checkpoints"
    )
    assert any(line.startswith(text) for line in client.lines(job))
    folder = client.endpoint.home / "local/jobs" / name
    wait_for(lambda: not (folder / "hosts").exists())
    wait_for(lambda: client.sagemaker.delete_training_job(TrainingJobName=name))
    assert not folder.exists()


ODD = r"""
import os, socket
for folder in (b"model", b"checkpoints", b"output/data"):
    os.chdir(b"/opt/ml/" + folder)
    for name in (b"good", b"\xff\xfe", b"two\nlines", b"-rf", b" ", b"\x01", b"caf\xc3\xa9", b"a" * 255):
        open(name, "wb").write(name)
    os.mkfifo("pipe")
    socket.socket(socket.AF_UNIX).bind("socket")
    os.mkdir("closed"); open("closed/in", "w").write("x"); os.chmod("closed", 0)
    with open("sparse", "wb") as file: file.truncate(1 << 20)
"""
KEPT = [b"good", b"two\nlines", b"-rf", b" ", b"\x01", b"caf\xc3\xa9", b"a" * 255]


def test_what_s3_cannot_have_is_named_and_all_else_goes_up(client: Client) -> None:
    job = client.completed(
        ["python", "-c", ODD], CheckpointConfig={"S3Uri": f"s3://{client.bucket}/odd"}
    )
    kept = (
        {name.decode() for name in KEPT}
        | {"sparse"}
        | ({"closed/in"} if os.geteuid() == 0 else set())
    )
    assert {key.removeprefix("odd/") for key in client.keys("odd/")} == kept
    assert client.get("odd/caf\xe9") == b"caf\xc3\xa9"
    packed = unpacked(client.get(f"out/{job['TrainingJobName']}/output/model.tar.gz"))
    assert packed.keys() == kept | {"\udcff\udcfe"}, "an archive can have it"
    text = [line for line in client.lines(job) if "/opt/ml/checkpoints" in line]
    assert (
        "smtrain: files whose names are not UTF-8 are not uploaded from /opt/ml/checkpoints:"
        " \\udcff\\udcfe" in text
    )
    assert any(
        "(pipes, sockets, devices) are not uploaded" in line and "pipe, socket" in line
        for line in text
    )


@pytest.mark.parametrize("target", ["/etc", "/", "code"])
def test_a_link_in_a_folders_place_leads_no_further_than_the_jobs_own(
    client: Client, target: str
) -> None:
    job = client.completed(
        f"echo mine > /opt/ml/code/mine; rm -r /opt/ml/model; ln -s {target} /opt/ml/model",
        OutputDataConfig={
            "S3OutputPath": f"s3://{client.bucket}/linked-root",
            "CompressionType": "NONE",
        },
    )
    keys = client.keys(f"linked-root/{job['TrainingJobName']}/")
    assert [key.rpartition("/")[2] for key in keys] == (["mine"] if target == "code" else [])
    text = (
        "smtrain: links that lead to no file below /opt/ml are not uploaded from /opt/ml/model: ."
    )
    assert (client.lines(job) == [text]) == (target != "code")


def test_a_file_larger_than_the_disk_fails_its_job_and_keeps_back_nothing_else(
    client: Client,
) -> None:
    program = """cd /opt/ml; echo good | tee checkpoints/good model/good output/data/good
    truncate -s 8T checkpoints/a-sparse-one"""
    uri = f"s3://{client.bucket}/huge"
    job = client.run(program, CheckpointConfig={"S3Uri": uri}, hosts=2)
    assert job["TrainingJobStatus"] == "Failed"
    assert "Artifact upload failed: no space left on" in job["FailureReason"]
    assert client.get("huge/good") == b"good\n"
    for archive in ("model", "output"):
        assert unpacked(client.get(f"out/{job['TrainingJobName']}/output/{archive}.tar.gz")) == {
            "good": b"good\n"
        }
    assert client.completed("echo well")["TrainingJobStatus"] == "Completed"


FAILURES = {
    "mkfifo /opt/ml/output/failure; echo last; exit 3": "last",
    "mkdir /opt/ml/output/failure; echo last; exit 3": "last",
    "truncate -s 2G /opt/ml/output/failure; echo last; exit 3": "last",
    "ln -s /etc/passwd /opt/ml/output/failure; echo last; exit 3": "last",
    "ln -s ../code/why /opt/ml/output/failure; echo because > /opt/ml/code/why; exit 3": "because",
    "printf '\\xff\\0why' > /opt/ml/output/failure; exit 3": "\ufffd\0why",
}


@pytest.mark.parametrize("script", FAILURES)
def test_a_reason_is_read_from_a_file_of_the_jobs_own(client: Client, script: str) -> None:
    job = client.run(script)
    assert (job["TrainingJobStatus"], job["FailureReason"]) == (
        "Failed",
        f"AlgorithmError: {FAILURES[script]}, exit code: 3",
    )


def test_one_line_of_many_megabytes_is_cut_and_said(client: Client) -> None:
    started = time.monotonic()
    job = client.completed("head -c 5000000 /dev/zero | tr '\\0' x; echo; echo done")
    lines: list[str] = []
    token: dict[str, Any] = {}
    stream = client.logs.describe_log_streams(
        logGroupName=GROUP, logStreamNamePrefix=job["TrainingJobName"]
    )
    while True:
        page = client.logs.get_log_events(
            logGroupName=GROUP,
            logStreamName=stream["logStreams"][0]["logStreamName"],
            startFromHead=True,
            **token,
        )
        lines += [event["message"] for event in page["events"]]
        if token == (token := {"nextToken": page["nextForwardToken"]}):
            break
    *pieces, text, last = lines
    assert ("".join(pieces), last) == ("x" * 5_000_000, "done")
    assert max(map(len, pieces)) == 262_118
    assert (
        text
        == "smtrain: the line above has 5,000,000 bytes; it was cut every 262,118, as CloudWatch"
        " does"
    )
    assert time.monotonic() > started


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("../up", "the key 'KEYS/../up' points outside of the checkpoints"),
        ("a/b", "'a/b' of the checkpoints is a file and a folder at once"),
        ("n" * 300, f"the name '{'n' * 300}' of the checkpoints is too long for a file"),
    ],
    ids=["up", "file and folder", "long"],
)
def test_keys_that_no_folder_can_have_are_the_requests_fault(
    client: Client, key: str, text: str
) -> None:
    prefix = f"keys-{time.time_ns()}"
    client.put(f"{prefix}/a")
    client.put(f"{prefix}/{key}")
    text = text.replace("KEYS", prefix)
    job = client.run("true", CheckpointConfig={"S3Uri": f"s3://{client.bucket}/{prefix}"})
    assert (job["TrainingJobStatus"], job["FailureReason"]) == (
        "Failed",
        f"ClientError: Data download failed: {text}",
    )
    job = client.run("true", InputDataConfig=[channel("in", f"s3://{client.bucket}/{prefix}")])
    assert (
        job["FailureReason"].startswith("ClientError: Data download failed: the ")
        or "at once" in text
    )
    assert str(client.endpoint.home) not in job["FailureReason"]


def test_every_job_says_where_its_model_would_be(client: Client) -> None:
    running = client.start("sleep 600")
    uri = f"s3://{client.bucket}/out/{running}/output/model.tar.gz"
    assert client.describe(running)["ModelArtifacts"] == {"S3ModelArtifacts": uri}
    client.sagemaker.stop_training_job(TrainingJobName=running)
    assert client.wait(running)["ModelArtifacts"] == {"S3ModelArtifacts": uri}


def test_the_files_of_this_machine_are_not_read_for_a_job(client: Client, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    job = client.run(f"ln -s {secret} /opt/ml/output/failure; exit 1")
    assert "hunter2" not in job["FailureReason"]
