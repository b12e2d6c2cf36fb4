"""Every file of a source is read, or named with a reason."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smtrain.core.config.textfiles import choose_in
from smtrain.core.errors import DataError
from smtrain.core.files import files_below
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.read.sources import find_files
from tests.worker.data.quiet import prepare
from tests.worker.data.read.test_sources import read


def line(text: str) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


def listed(folder: Path, form: str = "auto") -> tuple[list[str], list[str]]:
    """Names that are read, and sentences about the rest; client and job must agree."""
    said: list[str] = []
    names = [file.name for file in find_files(folder, form, say=said.append)]  # type: ignore[arg-type]
    choice, _ = choose_in(folder, form)
    assert [name for name, _ in choice.read] == names
    assert [f"{folder}: {sentence}" for sentence in choice.sentences()] == said
    return names, [sentence.removeprefix(f"{folder}: ") for sentence in said]


def test_files_of_every_compression_are_read(tmp_path: Path) -> None:
    whole = line("a") + line("b")
    (tmp_path / "1.jsonl").write_bytes(whole)
    (tmp_path / "2.jsonl.bz2").write_bytes(
        bz2.compress(line("c")) + bz2.compress(line("d"))
    )  # as pbzip2 writes
    (tmp_path / "3.json.gz").write_bytes(gzip.compress(line("e")) + gzip.compress(line("f")))
    (tmp_path / "4.JSONL.XZ").write_bytes(lzma.compress(line("g")) + lzma.compress(line("h")))
    with pa.CompressedOutputStream(str(tmp_path / "5.json.zst"), "zstd") as zst:
        zst.write(line("i"))
    (tmp_path / "6.ndjson").write_bytes(line("j"))
    (tmp_path / "7.txt.bz2").write_bytes(bz2.compress(b"k"))
    assert listed(tmp_path)[1] == []
    assert read(tmp_path) == (list("abcdefghijk"), [])


@pytest.mark.parametrize(
    ("name", "pack"), [("a.jsonl.bz2", bz2.compress), ("a.jsonl.xz", lzma.compress)]
)
def test_a_cut_file_is_named(tmp_path: Path, name: str, pack) -> None:  # type: ignore[no-untyped-def]
    whole = pack(
        os.urandom(9).hex().encode() + b"".join(line(os.urandom(9).hex()) for _ in range(500))
    )
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=rf"{name} is not a whole (bz2|xz) file"):
        read(tmp_path)


def test_what_is_not_read_is_named_with_the_reason(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.jsonl").write_bytes(line("x"))
    folder = tmp_path / "in"
    for name in ("a.jsonl", "deep/er/b.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(line("a"))
    (folder / "c.docx").write_text("text\nc\n")
    (folder / "d.parquet.gz").write_bytes(b"?")
    (folder / "README").write_text("about")
    (folder / ".hidden.jsonl").write_bytes(line("h"))
    (folder / ".git").mkdir()
    (folder / ".git/x.jsonl").write_bytes(line("g"))
    (folder / "empty.jsonl").touch()
    (folder / "pretty.json").write_text('{\n "text": "a"\n}\n')
    (folder / "dataset_info.json").write_text("{}")
    (folder / "link.jsonl").symlink_to(outside / "x.jsonl")
    (folder / "linked").symlink_to(outside)
    (folder / "nowhere.jsonl").symlink_to(outside / "gone")
    os.mkfifo(folder / "pipe.jsonl")
    names, said = listed(folder)
    assert names == ["a.jsonl", "deep/er/b.jsonl", "link.jsonl"]
    by_name = {
        name: sentence
        for sentence in said
        for name in sentence.split(" left out")[0].replace(",", "").split()
    }
    for name, why in {
        "c.docx": "format",
        "d.parquet.gz": "format",
        "README": "format",
        ".hidden.jsonl": "hidden",
        ".git/": "hidden",
        "empty.jsonl": "empty",
        "pretty.json": "one JSON value",
        "linked/": "link",
        "dataset_info.json": "describes",
        "nowhere.jsonl": "link to nothing",
        "pipe.jsonl": "no ordinary file",
    }.items():
        assert why in by_name[name], name
    with pytest.raises(DataError, match=r"ends in \.parquet.*README.*left out"):
        find_files(folder, "parquet")


def test_named_formats_say_what_they_leave(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line("a"))
    (tmp_path / "b.txt").write_text("b")
    assert listed(tmp_path, "jsonl") == (["a.jsonl"], ["b.txt is left out: data.format is jsonl"])
    assert listed(tmp_path, "text") == (["a.jsonl", "b.txt"], [])


def test_a_dataset_dict_gives_its_train_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = lambda *texts: datasets.Dataset.from_dict({"text": list(texts)})  # noqa: E731
    whole = datasets.DatasetDict(
        {"train": rows("a", "b"), "test": rows("t"), "validation": rows("v")}
    )
    whole.save_to_disk(str(tmp_path / "dict"))
    # files that `datasets` keeps next to the data
    cached = tmp_path / "dict/train/cache-0123.arrow"
    cached.write_bytes((tmp_path / "dict/test/data-00000-of-00001.arrow").read_bytes())
    assert read(tmp_path / "dict") == (["a", "b"], [])
    _, said = listed(tmp_path / "dict")
    assert any(
        "test/data-00000-of-00001.arrow" in s and "another split than train" in s for s in said
    )
    assert any("cache-0123.arrow" in s and "state.json" in s for s in said)
    assert read(tmp_path / "dict/test") == (["t"], [])


def test_splits_by_the_hubs_names(tmp_path: Path) -> None:
    for split in ("train", "test"):
        pq.write_table(pa.table({"text": [split]}), tmp_path / f"{split}-00000-of-00001.parquet")
    assert read(tmp_path) == (["train"], [])
    assert "test-00000-of-00001.parquet is left out: by its name" in listed(tmp_path)[1][0]
    (tmp_path / "train-00000-of-00001.parquet").unlink()
    assert read(tmp_path) == (["test"], [])


@pytest.mark.parametrize(
    ("split", "wanted"),
    [("", range(9)), ("@train", range(9)), ("@train[:5]", range(5)), ("@train[6:]", range(6, 9))],
)
def test_a_part_of_a_split_is_that_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str, wanted: range
) -> None:
    monkeypatch.setattr(
        pytest.importorskip("datasets").config, "HF_DATASETS_CACHE", tmp_path / "cache"
    )
    (tmp_path / "set").mkdir()
    (tmp_path / "set/train.jsonl").write_bytes(b"".join(line(str(i)) for i in range(9)))
    (tmp_path / "set/test.jsonl").write_bytes(line("t"))
    said: list[str] = []
    for _ in range(2):  # the second time it is there
        uri = f"hf://{tmp_path / 'set'}{split}"
        files = find_files(uri, say=said.append)
        texts = [t for file in files for t in _texts(file)]
        assert texts == [str(i) for i in wanted]
    wanted_words = [] if split else [f"split test is left out; name it as {uri}@SPLIT"] * 2
    assert [s.split(": ", 1)[1] for s in said] == wanted_words


def _texts(file) -> list[str]:  # type: ignore[no-untyped-def]
    from smtrain.worker.data.read.reading import read_block
    from smtrain.worker.data.read.split_files import cut_file

    return [t for block in cut_file(file) for t in read_block(block).texts.to_pylist()]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_column_that_is_no_text_is_refused(tmp_path: Path, form: str) -> None:
    table = pa.table(
        {"text": [1, 2], "body": ["a", "b"], "d": pa.array(["x", "y"]).dictionary_encode()}
    )
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    with pytest.raises(
        DataError, match=r"column 'text' holds int64 and not text; set data\.text_column to body"
    ):
        read(path)
    assert read(path, "body") == (["a", "b"], [])
    assert read(path, "d") == (["x", "y"], [])


def test_a_column_with_a_dot(tmp_path: Path) -> None:
    table = pa.table({"meta": [{"text": "no"}], "meta.text": ["yes"], "a.b.c": ["dots"]})
    pq.write_table(table.drop_columns(["meta"]), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", "meta.text") == (["yes"], [])
    assert read(tmp_path / "a.parquet", "a.b.c") == (["dots"], [])
    with pytest.raises(DataError, match="no column 'meta'"):
        read(tmp_path / "a.parquet", "meta")


def test_prepare_says_it_and_keeps_it_in_the_manifest(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(line("words of text " * 20))
    (tmp_path / "in/b.docx").write_text("x")
    said: list[str] = []
    prepare(tmp_path / "in", tmp_path / "out", tokenizer_folder, seq_len=8, say=said.append)
    assert said[0].startswith(f"prepare: {tmp_path / 'in'}: b.docx is left out: ")
    assert DatasetManifest.load(tmp_path / "out").left_out == [said[0].removeprefix("prepare: ")]


@pytest.fixture
def nested(tmp_path: Path) -> Iterator[Path]:
    """1,200 nested folders, with a file at the depths 50, 100 and 101."""
    place, made = os.getcwd(), tmp_path / "text"
    made.mkdir()
    try:
        os.chdir(made)
        for depth in range(1200):  # the whole path is too long for some calls
            if depth in (50, 100, 101):
                Path(f"{depth}.txt").write_text("some text\n")
            os.mkdir("d")
            os.chdir("d")
        os.chdir(place)
        yield made
    finally:
        os.chdir(place)
        subprocess.run(["rm", "-rf", str(made)], check=True)  # shutil.rmtree recurses


def test_folders_are_entered_to_a_limit(nested: Path) -> None:
    choice, _ = choose_in(nested, "auto")
    assert [name.rpartition("/")[2] for name, _ in choice.read] == ["50.txt", "100.txt"]
    (left,) = choice.left_out
    assert left.name == "d/" * 101
    assert "below 100 folders" in left.reason
    with pytest.raises(DataError, match="below 100 folders"):
        find_files(nested / "**" / "*.txt")
    assert len(list(files_below(nested))) == 3
