"""Damaged files in the control plane's state: each is set aside or left out and named; everything
else is there.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from smtrain.plane.client import Endpoint, ensure_running, shut_down

from .conftest import Client

NOT_OURS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"request": {}}',
    b"\xff\xfe\x00",
    b'{"request": {"TrainingJobName": 3}}',
]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"
    shut_down(tmp_path / "home")


def restarted(home: Path) -> Endpoint:
    return ensure_running(home)


def test_records_and_lines_are_set_aside_and_named(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    client = Client(ensure_running(home))
    damaged = [client.start("echo lost") for _ in NOT_OURS]
    kept = client.start("echo one; echo two; echo three")
    for name in (*damaged, kept):
        assert client.wait(name)["TrainingJobStatus"] == "Completed"
    client.put("whole/a", b"a")
    client.put("robbed/b", b"b")
    client.put("spoilt/c", b"c")
    shut_down(home)
    jobs = home / "local/jobs"
    for name, content in zip(damaged, NOT_OURS, strict=True):
        (jobs / name / "job.json").write_bytes(content)
    log = next((jobs / kept / "logs").glob("*.jsonl"))
    one, two, three = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(one + b"\xff not ours\n5\n[1, 2]\n" + two[:7] + b"\n" + three)
    database = sqlite3.connect(home / "local/s3/index.sqlite")
    database.execute("UPDATE objects SET record = '{' WHERE key = 'spoilt/c'")
    blob = json.loads(
        database.execute("SELECT record FROM objects WHERE key = 'robbed/b'").fetchone()[0]
    )["blob"]
    database.commit()
    database.close()
    (home / "local/s3/blobs" / blob[:2] / blob).unlink()

    capfd.readouterr()
    client = Client(ensure_running(home))
    output = capfd.readouterr().err
    for name in damaged:
        assert f"smtrain: warning: {jobs / name / 'job.json'} is damaged" in output
        assert (jobs / name / "job.json.damaged-1").exists()
    assert [f"line {n} of {log} is damaged" in output for n in (1, 2, 3, 4, 5, 6)] == [
        False,
        *[True] * 4,
        False,
    ]
    assert "s3://smtrain-local/robbed/b cannot be brought back" in output
    assert "s3://smtrain-local/spoilt/c cannot be brought back" in output
    assert client.lines(kept) == ["one", "three"]
    assert [
        job["TrainingJobName"]
        for job in client.sagemaker.list_training_jobs()["TrainingJobSummaries"]
    ] == [kept]
    assert client.get("whole/a") == b"a"
    assert {key for key in client.keys("") if not key.startswith("out/")} == {"whole/a"}
    request = client.request("echo again", TrainingJobName=damaged[0])
    client.sagemaker.create_training_job(**request)
    assert client.wait(damaged[0])["TrainingJobStatus"] == "Completed"
    assert client.lines(damaged[0])[-1] == "again"


def test_an_index_that_is_no_database_goes_aside_with_all_bodies(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    client = Client(ensure_running(home))
    client.put("a/a", b"precious")
    shut_down(home)
    (home / "local/s3/index.sqlite").write_bytes(b"no database" * 1000)
    client = Client(ensure_running(home))
    output = capfd.readouterr().err
    assert f"warning: {home / 'local/s3/index.sqlite'} is damaged" in output
    aside = next((home / "local").glob("s3.damaged-*"))
    assert str(aside) in output
    assert b"precious" in {
        blob.read_bytes() for blob in (aside / "blobs").rglob("*") if blob.is_file()
    }
    assert client.keys("") == []
    assert client.put("b/b", b"new")


ROWS = {
    "no UTF-8": ("key = CAST(x'ff' AS TEXT)", ()),
    "a deep record": ("record = ?", ("[" * 100_000,)),
    "a number": ("record = ?", (5,)),
    "another body": ("record = json_set(record, '$.blob', '../../../endpoint.json')", ()),
    "another size": ("record = json_set(record, '$.attributes.contentsize', 7)", ()),
    "a time of no zone": (
        "record = json_set(record, '$.modified', '9999-12-31T23:59:59+14:00')",
        (),
    ),
    "other metadata": ("record = json_set(record, '$.metadata', json('[5]'))", ()),
}


def test_damaged_rows_are_left_out_and_all_others_are_there(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    client = Client(ensure_running(home))
    for key in ("whole", *ROWS):
        client.put(f"a/{key}", b"a body")
    for bucket in ("other", "numbered", "climbing"):
        client.s3.create_bucket(Bucket=bucket)
    client.s3.put_bucket_versioning(Bucket="other", VersioningConfiguration={"Status": "Enabled"})
    old, _ = [
        client.s3.put_object(Bucket="other", Key="v", Body=body)["VersionId"]
        for body in (b"old", b"new")
    ]
    shut_down(home)
    (new,) = (
        file for file in (home / "local/s3/blobs").glob("??/*") if file.read_bytes() == b"new"
    )
    new.write_bytes(b"ne")
    with sqlite3.connect(home / "local/s3/index.sqlite") as database:
        for key, (change, values) in ROWS.items():
            database.execute(f"UPDATE objects SET {change} WHERE key = ?", (*values, f"a/{key}"))
        region = json.dumps({"region": 5, "created": "x", "versioning": None})
        database.execute("UPDATE buckets SET record = ? WHERE name = 'numbered'", (region,))
        database.execute("UPDATE buckets SET name = '../up' WHERE name = 'climbing'")
    database.close()
    capfd.readouterr()
    client = Client(ensure_running(home))
    output = capfd.readouterr().err
    assert output.count("cannot be brought back") == len(ROWS) + 1
    with pytest.raises(client.s3.exceptions.NoSuchKey):  # the older one would be taken for it
        client.s3.get_object(Bucket="other", Key="v")
    assert client.s3.get_object(Bucket="other", Key="v", VersionId=old)["Body"].read() == b"old"
    assert all(
        f"the record of bucket {name} is damaged" in output for name in ("numbered", "../up")
    )
    assert client.keys("") == ["a/whole"]
    assert {bucket["Name"] for bucket in client.s3.list_buckets()["Buckets"]} == {
        client.bucket,
        "other",
    }
    assert client.get("a/whole") == b"a body"


STATES = {
    "a time no clock shows": {"created": 1e300},
    "no transitions": {"transitions": [], "status": "InProgress"},
    "a status of another kind": {"status": "Sleeping"},
    "numbers that are words": {"attempt_start": "now", "status": "InProgress"},
    "a pool of nothing": {"pool": {}},
}


def test_a_state_that_no_job_can_have_goes_aside_alone(home: Path) -> None:
    client = Client(ensure_running(home))
    names = {what: client.start("echo lost") for what in STATES}
    kept, numbers = (
        client.start("echo kept"),
        client.start(
            "echo m=3",
            algorithm={
                "MetricDefinitions": [
                    {"Name": "m", "Regex": "m=(.)"},
                    {"Name": "n", "Regex": "n=(.)"},
                ],
            },
        ),
    )
    for name in (*names.values(), kept, numbers):
        client.wait(name)
    shut_down(home)
    jobs = home / "local/jobs"
    for what, name in names.items():
        record = json.loads((jobs / name / "job.json").read_text())
        record["state"].update(STATES[what])
        (jobs / name / "job.json").write_text(json.dumps(record))
    record = json.loads((jobs / numbers / "job.json").read_text())
    record["request"]["AlgorithmSpecification"]["MetricDefinitions"][1]["Regex"] = "(no longer one"
    record["state"]["metrics"]["old"] = [float("nan"), 1.0]
    (jobs / numbers / "job.json").write_text(json.dumps(record))
    (jobs / "stray").write_text("no folder")
    for name, make in (("folder", os.mkdir), ("pipe", os.mkfifo)):
        (jobs / name).mkdir()
        make(jobs / name / "job.json")
    (home / "local/s3/blobs/.DS_Store").write_text("stray")
    (home / "local/s3/blobs/00").mkdir(exist_ok=True)
    (home / "local/s3/blobs/00/.DS_Store").write_text("stray")
    os.mkfifo(jobs / kept / "logs/a-pipe.jsonl")
    (jobs / kept / "logs/a-folder.jsonl").mkdir()
    log = next((jobs / kept / "logs").glob("algo-1-*.jsonl"))
    log.write_bytes(b'[1000, "lone \\ud800"]\n' + log.read_bytes())
    client = Client(ensure_running(home))
    assert {
        job["TrainingJobName"]
        for job in client.sagemaker.list_training_jobs()["TrainingJobSummaries"]
    } == {
        kept,
        numbers,
    }
    assert {
        m["MetricName"]: m["Value"] for m in client.describe(numbers)["FinalMetricDataList"]
    } == {"m": 3}
    assert client.lines(kept) == ["lone ?", "kept"]
    for name in names.values():
        assert (jobs / name / "job.json.damaged-1").exists()


def test_a_folder_in_the_index_s_place_goes_aside(home: Path) -> None:
    client = Client(ensure_running(home))
    client.put("a/a")
    shut_down(home)
    for name in ("index.sqlite-wal", "index.sqlite-shm"):
        (home / "local/s3" / name).mkdir()
    client = Client(ensure_running(home))
    assert client.keys("") == ["a/a"]
    shut_down(home)
    (home / "local/s3/index.sqlite").unlink()
    (home / "local/s3/index.sqlite").mkdir()
    client = Client(ensure_running(home))
    assert client.keys("") == []
    client.put("b/b")
    shut_down(home)
    client = Client(ensure_running(home))
    assert client.keys("") == ["b/b"]
    (aside,) = (home / "local/s3").glob("blobs.damaged-*")
    assert [file.read_bytes() for file in aside.glob("??/*")] == [b"x"], "what the lost index named"
