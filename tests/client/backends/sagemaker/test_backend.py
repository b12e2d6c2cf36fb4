"""Objects of S3 whose content is cut off on its way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.jobs.copies import StoreCopy
from smtrain.core.errors import JobError
from tests.worker.data.tiny_s3 import FAULTS, TinyS3, tiny_s3


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyS3]:
    monkeypatch.setattr("time.sleep", lambda _: None)
    with tiny_s3(monkeypatch.setenv) as store:
        store.objects["a"] = b"the words" * 1000
        yield store


def test_content_that_is_cut_off_is_read_again(store: TinyS3, tmp_path: Path) -> None:
    target, cuts = SageMakerBackend("aws", "us-east-1"), iter(range(8))
    store.fault = lambda called: (
        "truncated" if called == "GetObject" and next(cuts, 8) % 4 < 3 else None
    )
    assert target.read("s3://b/a") == store.objects["a"]
    target.fetch("b", "a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == store.objects["a"]
    assert store.faults["GetObject", "truncated"] == 6


def test_content_that_is_always_cut_off_is_named(store: TinyS3) -> None:
    store.fault = lambda called: "truncated" if called == "GetObject" else None
    with pytest.raises(JobError, match=r"s3://b/a was cut off 4 times; check the network"):
        SageMakerBackend("aws", "us-east-1").read("s3://b/a")


def test_a_model_is_fetched_whole_though_a_quarter_of_all_calls_fails(
    store: TinyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As chat, generate, evaluate, serve and push fetch it."""
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path))
    draw = random.Random(5)
    for number in range(10):
        store.objects[f"m/{number}"] = draw.randbytes(3000)
    store.fault = lambda _: draw.choice(FAULTS) if draw.random() < 0.25 else None
    folder = StoreCopy(SageMakerBackend("aws", "us-east-1"), "s3://b/m").fetch()
    assert {f"m/{path.name}": path.read_bytes() for path in folder.iterdir()} == {
        key: content for key, content in store.objects.items() if key != "a"
    }
    assert {operation for operation, _ in store.faults} >= {"ListObjectsV2", "GetObject"}
