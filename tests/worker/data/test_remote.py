"""Text in S3 (of the local control plane), read directly, and by a prepare job through its
channel.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.jobs.results import download
from smtrain.core.errors import DataError
from smtrain.plane.client import ensure_running
from smtrain.worker.data.clean.cleaning import Cleaning, NearDuplicates
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.read.sources import find_files
from tests import as_told
from tests.worker.data.quiet import prepare

pytestmark = pytest.mark.slow

BUCKET = "texts-of-a-test"


@pytest.fixture(scope="module")
def texts(local_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, also uploaded to s3://BUCKET/in."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("texts")
    (folder / "deep/er").mkdir(parents=True)
    rows = [
        "".join(json.dumps({"text": f"words of {n} {i} " * 9}) + "\n" for i in range(40))
        for n in ("a", "b")
    ]
    (folder / "a.jsonl").write_text(rows[0])
    (folder / "deep/b.jsonl.gz").write_bytes(gzip.compress(rows[1].encode()))
    pq.write_table(
        pa.table({"text": [f"the text {i}" for i in range(9)]}), folder / "deep/er/c.parquet"
    )
    client = ensure_running().session().client("s3")
    client.create_bucket(Bucket=BUCKET)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        client.upload_file(str(path), BUCKET, f"in/{path.relative_to(folder)}")
    client.put_object(Bucket=BUCKET, Key="in/.hidden.jsonl", Body=b"no JSON")
    client.put_object(Bucket=BUCKET, Key="in-other/d.jsonl", Body=b"no JSON")
    return folder


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, texts: Path) -> None:
    """Set the variables for an S3 outside AWS."""
    as_told.tell(monkeypatch)


def written(folder: Path) -> dict[str, bytes]:
    return {name: (folder / f"tokens.{name}").read_bytes() for name in ("bin", "idx")}


def prepared(source: Path | str, output: Path, tokenizer: Path) -> dict[str, bytes]:
    prepare(source, output, tokenizer, seq_len=8)
    return written(output)


def test_objects_are_read_where_they_lie(
    aws: None, texts: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    expected = prepared(texts, tmp_path / "here", tokenizer_folder)
    assert prepared(f"s3://{BUCKET}/in", tmp_path / "there", tokenizer_folder) == expected
    assert prepared(f"s3://{BUCKET}/in/", tmp_path / "there", tokenizer_folder) == expected
    one = prepared(texts / "deep/b.jsonl.gz", tmp_path / "one", tokenizer_folder)
    assert (
        prepared(f"s3://{BUCKET}/in/deep/b.jsonl.gz", tmp_path / "there", tokenizer_folder) == one
    )


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("in/*.jsonl", ["a.jsonl"]),
        ("in/*/?.*", ["deep/b.jsonl.gz"]),
        ("in/**/*.parquet", ["deep/er/c.parquet"]),
        ("in/**", ["a.jsonl", "deep/b.jsonl.gz", "deep/er/c.parquet"]),
        ("i*/a.jsonl", ["in/a.jsonl"]),
    ],
)
def test_a_pattern_means_what_it_means_in_a_folder(
    aws: None, pattern: str, names: list[str]
) -> None:
    assert [file.name for file in find_files(f"s3://{BUCKET}/{pattern}")] == names


def test_what_is_not_there_is_one_sentence(aws: None) -> None:
    for uri, words in [
        (f"s3://{BUCKET}/nothing/", r"/nothing/ (cannot be listed|holds no file)"),
        (f"s3://{BUCKET}/in/*.none", "holds no file"),
        ("s3://no-bucket-of-ours/x", "(cannot be listed|holds no file)"),
    ]:
        with pytest.raises(DataError, match=words):
            find_files(uri)


@pytest.mark.full
def test_a_job_reads_them_through_its_channel_and_refines_them(
    texts: Path, trained_inputs: dict[str, Path], tmp_path: Path
) -> None:
    like = [
        f"The {word} of the house went to the river, and then it came back."
        for word in ("cat", "dog", "owl")
    ]
    kept, masked = (
        " ".join(like * 3),
        f"{like[1]} Write to somebody@example.com about it, please, or do not write.",
    )
    client = ensure_running().session().client("s3")
    folder = tmp_path / "refined"
    (folder / "deep").mkdir(parents=True)
    rows = [
        kept,
        f"{kept} Once more.",
        masked,
        "No sentence",
        *(f"{like[2]} {n} times, not {n + 7}." for n in range(9)),
    ]
    (folder / "deep/d.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in rows)
    )
    client.upload_file(str(folder / "deep/d.jsonl"), BUCKET, "refined/deep/d.jsonl")
    client.put_object(Bucket=BUCKET, Key="refined/.hidden.jsonl", Body=b"no JSON")
    config: dict[str, Any] = {
        "name": "from-s3",
        "target": "local",
        "model": {"path": trained_inputs["model"]},
        "data": {
            "path": f"s3://{BUCKET}/refined/",
            "filters": ["fineweb"],
            "near_duplicates": {"similarity": 0.6},
            "pii": "mask",
        },
        "train": {"seq_len": 8},
        "compute": {"instance_type": "ml.trn1.2xlarge", "processes_per_instance": 1},
    }
    job = smtrain.launch(config, stage="prepare", say=lambda _: None)
    download(job.target, [(job.output, tmp_path / "there")])
    cleaning = Cleaning(filters=("fineweb",), pii="mask", near=NearDuplicates(0.6))
    here = prepare(folder, tmp_path / "here", trained_inputs["model"], seq_len=8, cleaning=cleaning)
    there = DatasetManifest.load(tmp_path / "there")
    assert there.content == here.content
    assert there.dropped == here.dropped
    assert there.dropped["near duplicates"] >= 1
    assert there.noted == {"e-mail addresses": 1}
    assert any(line.text.startswith("left out: ") for line in job.lines())
