"""Text that no reader takes is counted, in every kind of file."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smtrain.core.errors import DataError
from smtrain.worker.data.clean.holdout import HoldOut
from smtrain.worker.data.indexed import write_index
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.pack.exchange import import_tokens
from smtrain.worker.data.read import blocks
from smtrain.worker.data.read.ignored_fields import (
    IgnoredText,
    count_ignored_columns,
    holds_text,
    ignored_fields,
    ignored_text_sentence,
)
from smtrain.worker.data.read.reading import read_block
from smtrain.worker.data.read.sources import find_files
from smtrain.worker.data.read.split_files import cut_file
from tests.typed import typed as smtrain
from tests.worker.data.quiet import prepare

TEXT = "words of a small text " * 9
ROWS: list[dict[str, Any]] = [
    {
        "text": TEXT,
        "title": "a title",
        "when": "2026-01-01T00:00:00",
        "n": 3,
        "meta": {"url": "u", "tags": ["a"]},
    },
    {
        "text": TEXT,
        "title": "another",
        "when": "2026-01-02T00:00:00",
        "n": 4,
        "meta": {"url": "", "tags": []},
    },
    {"text": TEXT, "title": None, "when": "2026-01-02T00:00:00", "n": None, "meta": None},
]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    table = pa.Table.from_pylist(ROWS)
    match path.suffixes:
        case [".jsonl"]:
            path.write_text(lines)
        case [".jsonl", ".gz"]:
            path.write_bytes(gzip.compress(lines.encode()))
        case [".json"]:
            path.write_text(json.dumps(rows))
        case [".parquet"]:
            pq.write_table(table, path, row_group_size=2)
        case [".arrow"]:
            with pa.ipc.new_file(path, table.schema) as file:
                file.write_table(table, max_chunksize=2)
        case [".tar"]:
            with tarfile.open(path, "w") as archive:
                for name, content in (
                    ("in/a.jsonl", lines.encode()),
                    ("in/b.png", b"?"),
                    ("in/c.png", b"?"),
                ):
                    about = tarfile.TarInfo(name)
                    about.size = len(content)
                    archive.addfile(about, io.BytesIO(content))
    return path


def unread(path: Path, column: str = "text") -> dict[str, int]:
    counts = IgnoredText()
    for file in find_files(path):
        for block in cut_file(file, column):
            counts.count(read_block(block, column).ignored_text)
    return counts


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "a.arrow"])
def test_fields_with_text_are_counted_by_their_records(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name)
    nested = 2 if name == "a.parquet" else 1  # its footer does not show empty values
    assert unread(path) == {"title": 2, "when": 3, "meta": nested}
    assert unread(path, "{text} {when}") == {"title": 2, "meta": nested}
    others = unread(path, "meta.url")
    records = (
        2 if name in ("a.jsonl", "a.jsonl.gz", "a.json") else 3
    )  # the third has no meta.url, and is a fault
    assert others == {"meta.tags": 1, "text": records, "title": 2, "when": records}


def test_a_field_of_several_types_is_counted_too(tmp_path: Path) -> None:
    rows = [
        {"text": TEXT, "extra": extra, "title": "t"}
        for extra in ("text", 3, {"a": "text"}, {"a": 3}, ["x"], [])
    ]
    assert unread(write(tmp_path / "a.jsonl", rows)) == {"extra": 3, "title": 6}
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text() + "no json\n")
    assert unread(tmp_path / "a.jsonl") == {"extra": 3, "title": 6}


def test_csv_tar_and_archives(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text,title,empty\n"a","b",\n"c",,\n')
    assert unread(tmp_path / "a.csv") == {"title": 1}
    counts = unread(write(tmp_path / "a.tar"))
    assert counts == {"title": 2, "when": 3, "meta": 1, "files of a tar that end in .png": 2}
    records = [
        ("conversion", "text/plain", b"some text"), ("resource", "image/png", b"?"),
        ("response", "application/http", b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>"),
        ("warcinfo", "application/warc-fields", b"by: a crawl"),
    ]  # fmt: skip
    (tmp_path / "a.warc").write_bytes(
        b"".join(
            f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Type: {media}\r\nContent-Length:"
            f" {len(body)}\r\n\r\n".encode()
            + body
            + b"\r\n\r\n"
            for kind, media, body in records
        )
    )
    assert unread(tmp_path / "a.warc") == {"records of image/png": 1, "records of text/html": 1}


def test_pages_of_a_dump_that_are_no_articles(tmp_path: Path) -> None:
    pytest.importorskip("mwparserfromhell")
    pages = "".join(
        f"<page><title>{title}</title><ns>{ns}</ns>{more}<revision><text>words</text></revision></page>"
        for title, ns, more in (
            ("A", 0, ""),
            ("B", 1, ""),
            ("C", 0, '<redirect title="A"/>'),
            ("D", 1, ""),
        )
    )
    (tmp_path / "a.xml").write_text(f"<mediawiki>{pages}</mediawiki>")
    assert unread(tmp_path / "a.xml") == {"pages of namespace 1": 2, "redirects": 1}


def test_it_is_said_before_anything_is_trained(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = smtrain(
        "data",
        "prepare",
        str(write(tmp_path / "a.jsonl")),
        str(tmp_path / "out"),
        "--model",
        str(tokenizer_folder),
        "--seq-len",
        "8",
    )
    assert done.returncode == 0, done.stderr
    for text in (done.stdout, done.stderr):
        assert "not read: when 3, title 2, meta 1" in text
    assert "data.text_column" in done.stderr
    shown = smtrain("data", "inspect", str(tmp_path / "out"))
    assert "not read         meta 1, title 2, when 3" in shown.stdout
    assert DatasetManifest.load(tmp_path / "out").unread == {"title": 2, "when": 3, "meta": 1}
    # whatever the blocks are
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    said: list[str] = []
    made = prepare(
        tmp_path / "a.jsonl", tmp_path / "small", tokenizer_folder, seq_len=8, say=said.append
    )
    assert made.unread == {"title": 2, "when": 3, "meta": 1}
    made = prepare(
        write(tmp_path / "only.jsonl", [{"text": TEXT, "n": 3}]),
        tmp_path / "only",
        tokenizer_folder,
        seq_len=8,
        say=said.append,
    )
    assert made.unread == {}
    assert "unread" not in (tmp_path / "only/manifest.json").read_text()


def test_a_record_with_names_of_its_own_does_not_fill_the_memory() -> None:
    counts = IgnoredText()
    for number in range(900):
        counts.count([f"name {number}", "title"])
    assert len(counts) == 201
    assert counts["title"] == 900
    assert sum(counts.values()) == 1800
    assert ignored_text_sentence(counts).startswith(
        "not read: title 900, other fields 701, name 0 1"
    )
    assert ignored_text_sentence(counts).endswith(" and 181 more in manifest.json")


def test_arrow_counts_what_python_counts() -> None:
    values: list[Any] = [
        None,
        {"a": "x", "b": [], "c": 1},
        {"a": "", "b": ["", "y"], "c": 2},
        {"a": None, "b": [None], "c": None},
    ]
    table = pa.table(
        {"v": values, "d": pa.array(["a", "", None, "b"]).dictionary_encode(), "n": [1, 2, 3, 4]}
    )
    rows = table.to_pylist()
    for read in ((), ("v.a",), ("v.a", "d"), ("v",)):
        wanted = IgnoredText()
        for row in rows:
            wanted.count(ignored_fields(row, read))
        assert count_ignored_columns(table, read) == wanted
    assert not holds_text(b"bytes")


def test_what_follows_an_array_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for after in ("", "\n", " \n" * (1 << 20)):
        path.write_text(json.dumps(ROWS[:1]) + after)
        assert unread(path) == {"title": 1, "when": 1, "meta": 1}
        path.write_text(json.dumps(ROWS[:1]) + after + json.dumps(ROWS[1:]))
        with pytest.raises(DataError, match=r"not a whole JSON array \(more follows after its end"):
            unread(path)


def test_links_and_earlier_revisions_are_counted(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, link in (("a.txt", ""), ("b.txt", "a.txt")):
            about = tarfile.TarInfo(name)
            about.type, about.linkname = (tarfile.LNKTYPE, link) if link else (tarfile.REGTYPE, "")
            archive.addfile(about, io.BytesIO(b""))
    assert unread(tmp_path / "a.tar") == {"links of a tar": 1}
    pytest.importorskip("mwparserfromhell")
    revisions = "".join(f"<revision><text>words {i}</text></revision>" for i in range(3))
    page = f"<page><title>A</title><ns>0</ns>{revisions}</page>"
    (tmp_path / "a.xml").write_text(f"<mediawiki>{page}</mediawiki>")
    assert unread(tmp_path / "a.xml") == {"earlier revisions": 2}


def test_modes_and_held_out_documents_are_named(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "a.bin").open("wb") as out:
        out.write(np.arange(40, dtype="<u2").tobytes())
    lengths = np.full(4, 10, np.int32)
    write_index(tmp_path / "a.idx", np.dtype("<u2"), lengths, np.arange(5), np.zeros(4, np.int8))
    said: list[str] = []
    made = prepare(tmp_path, tmp_path / "out", tokenizer_folder, seq_len=8, say=said.append)
    assert made.unread == {"modes of a multimodal dataset": 4}
    assert import_tokens(tmp_path / "a", tmp_path / "in", tokenizer_folder, 8).unread == made.unread
    rows = [{"text": f"{i} {TEXT}"} for i in range(40)]
    prepare(
        write(tmp_path / "a.jsonl", rows),
        tmp_path / "held",
        tokenizer_folder,
        seq_len=8,
        holdout=HoldOut(0.3),
        say=said.append,
    )
    monkeypatch.chdir(tmp_path)
    absent, there = "documents held out for validation are not in it", "held out for validation: "
    for line, words in (
        ("export held blocks --seq-len 8", absent),
        ("merge held all", there),
        ("split held part 1 1", absent),
    ):
        done = smtrain("data", *line.split())
        assert done.returncode == 0, done.stderr
        assert words in done.stdout
