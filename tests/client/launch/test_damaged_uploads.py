"""A byte that changes after its upload is found before a stage reads it, and by the next launch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import smtrain
from smtrain import JobError
from smtrain.client.launch import submit
from smtrain.client.launch.digests import UPLOADS, upload_digests
from smtrain.client.launch.inputs import Upload, _content_addressed
from smtrain.core.protocol.entrypoints import entrypoints_folder
from smtrain.core.protocol.uris import split_uri
from smtrain.plane.client import ensure_running


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The container's module."""
    monkeypatch.syspath_prepend(str(entrypoints_folder()))
    yield importlib.import_module("uploads")
    sys.modules.pop("uploads", None)


FILES = {
    "data/a.txt": b"text " * 40,
    "data/deeper/b.txt": b"b",
    "model/config.json": b"{}",
    "config/config.json": b"{}",
}


def container(folder: Path) -> Path:
    """The input channels of a job, as a launch has uploaded them."""
    inputs = folder / "input/data"
    for name, body in FILES.items():
        (inputs / name).parent.mkdir(parents=True, exist_ok=True)
        (inputs / name).write_bytes(body)
    found = [
        _content_addressed(inputs / channel, f"s3://b/{channel}") for channel in ("data", "model")
    ]
    channels = {"data": found[0].uri, "model": found[1].uri, "shards": "s3://mine/"}
    config = Upload("s3://b/configs/0/", (("config.json", b"{}"),))
    (inputs / "config" / UPLOADS).write_bytes(upload_digests(channels, found, config))
    (inputs / "shards").mkdir(exist_ok=True)
    (inputs / "shards/of the user").write_bytes(b"x")
    return folder


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_changed_byte_of_an_upload_is_found_and_named(
    uploads: Any, tmp_path: Path, data: st.DataObject
) -> None:
    ml = container(tmp_path)
    hosts = [f"algo-{number}" for number in range(1, 4)]
    assert [uploads.damage(ml, hosts, host) for host in hosts] == [None] * 3
    name = data.draw(st.sampled_from(sorted(FILES)))
    file = ml / "input/data" / name
    body = bytearray(file.read_bytes())
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(body)
    said = [why for host in hosts if (why := uploads.damage(ml, hosts, host))]
    assert len(said) == 1, "one host reads it"
    assert said[0].endswith(
        f"{name.partition('/')[2]} has other bytes than were uploaded; delete it, then launch again"
        " to upload it again"
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', '{"a": {"uri": 1, "files": {"b": 7}}}'])
def test_a_damaged_list_is_written_again_by_a_launch(
    uploads: Any, tmp_path: Path, text: str
) -> None:
    ml = container(tmp_path)
    (ml / "input/data/config" / UPLOADS).write_text(text)
    assert uploads.damage(ml).endswith(
        "uploads.json is damaged; launch again, which writes it again"
    )


def test_lacking_longer_and_no_lists(uploads: Any, tmp_path: Path) -> None:
    ml = container(tmp_path)
    (ml / "input/data/data/a.txt").write_bytes(b"short")
    assert "a.txt has 5 bytes, and 200 were uploaded" in uploads.damage(ml)
    (ml / "input/data/data/a.txt").unlink()
    assert "a.txt cannot be read (No such file or directory)" in uploads.damage(ml)
    (ml / "input/data/config" / UPLOADS).unlink()
    assert uploads.damage(ml) is None, "a launch of an earlier version wrote none"


@pytest.mark.full  # the gate compares every kind of upload above, without the job
def test_a_job_reads_no_changed_upload_and_the_next_launch_sends_it_again(
    local_home: Path, trained_inputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "name": "bytes",
        "target": "local",
        "model": {"path": str(trained_inputs["model"])},
        "data": {"path": str(trained_inputs["text"])},
        "train": {"steps": 2, "global_batch_size": 2, "seq_len": 32, "precision": "fp32"},
        "compute": {"instance_type": "ml.c5.xlarge"},
    }
    s3, upload, changed = ensure_running().session().client("s3"), submit.upload, list[str]()

    def change_after(*arguments: Any) -> None:
        """Upload, then change a byte of one file in S3."""
        upload(*arguments)
        found = next(one for one in arguments[1].uploads if "/inputs/text/" in one.uri)
        bucket, prefix = split_uri(found.uri)
        key = prefix + found.files[-1][0]
        body = bytearray(s3.get_object(Bucket=bucket, Key=key)["Body"].read())
        body[-2] ^= 1
        s3.put_object(Bucket=bucket, Key=key, Body=bytes(body))
        changed.append(f"s3://{bucket}/{key}")

    launch: Callable[[], smtrain.Job] = lambda: smtrain.launch(  # noqa: E731
        config, stage="prepare", say=lambda _: None
    )
    monkeypatch.setattr(submit, "upload", change_after)
    with pytest.raises(JobError) as refused:
        launch()
    assert f"{changed[0]} has other bytes than were uploaded; delete it, then launch again" in str(
        refused.value
    )
    monkeypatch.setattr(submit, "upload", upload)
    assert launch().status == "Completed"
