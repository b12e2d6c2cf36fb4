"""Local copies of prefixes: never a mixture of two contents, nothing copied twice, the old removed
when unused.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.jobs import copies, results
from smtrain.client.jobs.copies import StoreCopy
from smtrain.core.errors import JobError

BIG = 9 << 20  # boto3 sends it in parts, so its ETag is no MD5


class Bucket:
    """A bucket of the local control plane, whose downloads are counted."""

    def __init__(self, target: SageMakerBackend) -> None:
        self.name, self.target, self.fetched = f"copies-{time.time_ns()}", target, list[str]()
        region = target.region_name()
        place = (
            {}
            if region == "us-east-1"
            else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        )
        target.s3.create_bucket(Bucket=self.name, **place)
        self.uri = f"s3://{self.name}/m/"

    def put(self, file: str, body: bytes) -> None:
        from io import BytesIO

        self.target.s3.upload_fileobj(BytesIO(body), self.name, f"m/{file}")

    def remove(self, file: str) -> None:
        self.target.s3.delete_object(Bucket=self.name, Key=f"m/{file}")

    def listing(self, uri: str) -> list[dict[str, Any]]:
        return self.target.listing(uri)

    def fetch(self, bucket: str, key: str, path: Path) -> None:
        self.fetched.append(key.removeprefix("m/"))
        self.target.fetch(bucket, key, path)

    def copy(self) -> StoreCopy:
        return StoreCopy(self, self.uri)  # type: ignore[arg-type]


@pytest.fixture
def bucket(local_home: Path) -> Iterator[Bucket]:
    made = Bucket(SageMakerBackend("local"))
    made.put("config.json", b"{}")
    made.put("model.safetensors", b"a" * BIG)
    yield made
    end_process()


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()[:1]
        for path in folder.rglob("*")
        if path.is_file()
    }


def end_process() -> None:
    """Release the copies, as the end of a process does."""
    for lock in copies._in_use.values():
        os.close(lock)
    copies._in_use.clear()


def test_files_are_copied_once_also_if_they_were_sent_in_parts(bucket: Bucket) -> None:
    for _ in range(3):
        copy = bucket.copy()
        assert content(copy.fetch()) == {"config.json": b"{", "model.safetensors": b"a"}
        assert copy.fetch_file("model.safetensors").stat().st_size == BIG
    assert sorted(bucket.fetched) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    "change", ["other files", "fewer files", "same size", "same size in parts"]
)
def test_a_changed_prefix_is_another_copy(bucket: Bucket, change: str) -> None:
    bucket.put("old.safetensors", b"old")
    before = bucket.copy().fetch()
    bucket.fetched.clear()
    end_process()
    expected = {"config.json": b"{", "model.safetensors": b"a", "old.safetensors": b"o"}
    if change == "other files":
        bucket.remove("model.safetensors")
        bucket.put("model-1-of-1.safetensors", b"new")
        del expected["model.safetensors"]
        expected["model-1-of-1.safetensors"] = b"n"
    elif change == "fewer files":
        bucket.remove("old.safetensors")
        del expected["old.safetensors"]
    else:
        name, size = ("model.safetensors", BIG) if "parts" in change else ("old.safetensors", 3)
        bucket.put(name, b"z" * size)
        expected[name] = b"z"
    assert content(bucket.copy().fetch()) == expected
    assert len(bucket.fetched) == (change != "fewer files")  # unchanged files are linked
    assert not before.exists()


def test_a_copy_that_another_process_reads_stays(bucket: Bucket) -> None:
    context, reading, done = (
        multiprocessing.get_context("fork"),
        multiprocessing.Event(),
        multiprocessing.Event(),
    )
    before = bucket.copy().fetch()
    end_process()
    copy = bucket.copy()

    def read() -> None:
        copy.fetch_file("config.json")
        reading.set()
        done.wait(60)

    process = context.Process(target=read)
    process.start()
    assert reading.wait(60)
    bucket.put("config.json", b"[]")
    assert content(bucket.copy().fetch())["config.json"] == b"["
    assert content(before)["config.json"] == b"{"
    done.set()
    process.join()
    bucket.put("config.json", b"()")
    end_process()
    bucket.copy().fetch()
    assert not before.exists()


def test_a_prefix_that_changes_meanwhile_is_refused_and_nothing_is_mixed(bucket: Bucket) -> None:
    for size in (3, 2):  # of the same size and of another
        copy = bucket.copy()
        bucket.put("config.json", b"[" * size)
        with pytest.raises(
            JobError, match="changed while it was being copied; run the command again"
        ):
            copy.fetch()
    copy = bucket.copy()
    copy.fetch_file("config.json")
    bucket.put("model.safetensors", b"b" * BIG)
    with pytest.raises(JobError, match="changed while"):
        copy.fetch()
    assert content(bucket.copy().fetch())["model.safetensors"] == b"b"


def test_only_the_wanted_files_are_copied(bucket: Bucket) -> None:
    bucket.put("optim/state", b"s")
    copy = bucket.copy().restrict_to(lambda file: not file.startswith("optim/"))
    assert copy.missing_bytes == BIG + 2
    assert "optim/state" not in content(copy.fetch())
    assert copy.missing_bytes == 0
    assert set(content(bucket.copy().fetch())) == {
        "config.json",
        "model.safetensors",
        "optim/state",
    }


def test_an_empty_prefix_and_a_name_that_leads_out_are_refused(bucket: Bucket) -> None:
    with pytest.raises(JobError, match="is empty"):
        StoreCopy(bucket, f"s3://{bucket.name}/nothing").fetch()  # type: ignore[arg-type]
    bucket.put("../../x", b"")
    with pytest.raises(JobError, match="points outside"):
        bucket.copy()


def test_tokens_are_not_downloaded_among_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    job: Any = SimpleNamespace(name="first-prepare-01234567")
    with pytest.raises(
        JobError,
        match=r"holds text \(a\.txt\), and first-prepare-01234567 left tokens; name another",
    ):
        results._refuse_folder_of_text(job, tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    results._refuse_folder_of_text(job, tmp_path)
