"""`smtrain local clean` removes what only finished runs use, and keeps what running jobs and
unfinished runs need.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from smtrain.cli.dispatch import call
from smtrain.core.config.units import spell_bytes
from smtrain.plane.client import ensure_running, shut_down
from smtrain.plane.server.clean import usage
from tests.processes import wait_for

from .conftest import Client, channel

HASH = "0123456789abcdef"
KILOBYTES = b"x" * 50_000


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path / "home"))
    yield Client(ensure_running())
    shut_down()


def cli(*arguments: str) -> tuple[int, str]:
    """Status and output of `smtrain local ...` without a terminal."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            status = call("local", "smtrain.cli.local", list(arguments))
        except SystemExit as end:
            status = int(end.code or 0)
    return status, output.getvalue()


class Runs:
    """A finished, an unfinished and a running run, and a job without a run; all read the same
    text.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        for name in ("shared", "only"):
            client.put(f"inputs/{name}/{HASH}/a", KILOBYTES)
        client.put("mine/by-hand", b"mine")
        self.start("done-prepare-0a0a0a0a", ["shared", "only"])
        self.start("done-train-0a0a0a0a", [], checkpoints="done")
        self.start("done-export-0a0a0a0a", [])
        self.start("done-evaluate-0a0a0a0a", [])
        self.start("half-prepare-0b0b0b0b", ["shared"])
        self.start("half-train-0b0b0b0b", [], checkpoints="half", then="; exit 1")
        self.start("loose", [])
        for name in (
            "done-prepare-0a0a0a0a",
            "done-train-0a0a0a0a",
            "done-export-0a0a0a0a",
            "done-evaluate-0a0a0a0a",
            "half-prepare-0b0b0b0b",
            "half-train-0b0b0b0b",
            "loose",
        ):
            client.wait(name)
        self.start(
            "live-train-0c0c0c0c", ["shared"], checkpoints="live", then="; echo ready; sleep 600"
        )
        client.wait_for_line("live-train-0c0c0c0c", "ready")
        wait_for(lambda: client.keys("ckpt/live/"))

    def start(self, name: str, inputs: list[str], checkpoints: str = "", then: str = "") -> None:
        bucket = self.client.bucket
        changes = (
            {"CheckpointConfig": {"S3Uri": f"s3://{bucket}/ckpt/{checkpoints}/"}}
            if checkpoints
            else {}
        )
        command = "head -c 50000 /dev/zero | tee /opt/ml/model/w > /opt/ml/checkpoints/c"
        request = self.client.request(
            command + then,
            TrainingJobName=name,
            InputDataConfig=[channel(i, f"s3://{bucket}/inputs/{i}/{HASH}/") for i in inputs]
            or None,
            OutputDataConfig={"S3OutputPath": f"s3://{bucket}/out", "CompressionType": "NONE"},
            **changes,
        )
        self.client.sagemaker.create_training_job(**request)

    def jobs(self) -> set[str]:
        listed = self.client.sagemaker.list_training_jobs(MaxResults=100)["TrainingJobSummaries"]
        return {
            job["TrainingJobName"].rpartition("-")[0] or job["TrainingJobName"] for job in listed
        }

    def objects(self) -> set[str]:
        return {key.rpartition("/")[0].replace(f"/{HASH}", "") for key in self.client.keys("")}


@pytest.mark.full
def test_nothing_that_is_needed_goes_whatever_is_asked(client: Client) -> None:
    runs = Runs(client)
    jobs, objects = runs.jobs(), runs.objects()
    status, output = cli("clean")
    assert (status, runs.jobs(), runs.objects()) == (0, jobs, objects)
    assert "give --jobs, --older-than TIME, --run NAME or --all to remove something" in output
    assert "S3 objects" in output

    status, output = cli("clean", "--all")
    assert (status, runs.jobs()) == (2, jobs), "there is no terminal for the question"
    assert "confirm with --yes" in output
    assert "stays: live (live-train-0c0c0c0c runs)" in output
    assert "stays: half (unfinished: its stage train is Failed)" in output
    assert cli("clean", "--older-than", "1h", "--yes")[1].endswith("nothing to remove\n")
    assert cli("clean", "--older-than", "soon")[0] == 2
    assert "no run or job is called 'unknown'" in cli("clean", "--run", "unknown", "--yes")[1]
    assert (
        "live cannot be removed: live-train-0c0c0c0c runs"
        in cli("clean", "--run", "live", "--yes")[1]
    )
    assert (runs.jobs(), runs.objects()) == (jobs, objects)

    before = usage(client.endpoint.home).total
    status, output = cli("clean", "--jobs", "--yes")
    assert status == 0, output
    assert runs.jobs() == {"done-export", "half-prepare", "half-train", "live-train"}
    kept = {
        "inputs/shared",
        "mine",
        "ckpt/half",
        "ckpt/live",
        "out/done-export-0a0a0a0a/output/model",
    }
    kept |= {f"out/half-{stage}-0b0b0b0b/output/model" for stage in ("prepare", "train")}
    assert runs.objects() == kept
    assert usage(client.endpoint.home).total < before - 150_000, "bytes have left the disk"

    fetched = client.endpoint.home / "models/0a0a"
    fetched.mkdir(parents=True)
    (fetched / "config.json").write_text("{}")
    assert cli("clean", "--run", "half", "--yes")[0] == 0
    assert fetched.exists()
    assert runs.jobs() == {"done-export", "live-train"}
    assert cli("clean", "--all", "--yes")[0] == 0
    assert runs.jobs() == {"live-train"}
    assert runs.objects() == {"inputs/shared", "ckpt/live"}
    assert not fetched.exists()
    assert client.describe("live-train-0c0c0c0c")["TrainingJobStatus"] == "InProgress"
    status, output = cli("status")
    assert "disk use: " in output.splitlines()[0]
    assert " free; `smtrain local clean` says what can go" in output.splitlines()[0]


def test_kinds_and_sizes(tmp_path: Path) -> None:
    for name, size in (
        ("demo/text", 10_000),
        ("local/s3/blobs/ab/abc", 50_000),
        ("local/jobs/j/logs/a.jsonl", 1),
        ("local/jobs/j/hosts/algo-1/ml/x", 1),
        ("local/s3.damaged-1/x", 9),
        ("follow/local/j.json", 1),
        ("local/server.log", 1),
        ("models/0a0a/config.json", 2),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    (tmp_path / "local/s3/blobs/ab/copy").hardlink_to(tmp_path / "local/s3/blobs/ab/abc")
    kinds = usage(tmp_path).kinds
    assert 50_000 <= kinds["S3 objects"] < 60_000, "two names of one file are one file"
    assert {kind for kind, size in kinds.items() if size} == set(kinds) - {"warm pools"}
    sizes = [spell_bytes(n) for n in (512, 4100, 123_456, 1.2e9, 3e13)]
    assert sizes == ["512 B", "4.1 kB", "123 kB", "1.2 GB", "30.0 TB"]
