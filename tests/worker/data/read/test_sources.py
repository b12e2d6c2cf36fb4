from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smtrain.core.errors import DataError
from smtrain.worker.data.read import blocks, sources
from smtrain.worker.data.read.reading import BadLine, read_block
from smtrain.worker.data.read.records import RecordColumns, record_blocks
from smtrain.worker.data.read.sources import find_files
from smtrain.worker.data.read.split_files import cut_file
from smtrain.worker.object_store import StorageError


def read(
    path: Path, column: str = "text", format: sources.Format = "auto", separator: str | None = None
) -> tuple[list[str], list[BadLine]]:
    texts, bad = [], []
    for file in find_files(path, format):
        lines = 0
        for block in cut_file(file, column, separator):
            documents = read_block(block, column, separator)
            texts += documents.texts.to_pylist()
            bad += [BadLine(b.file, b.line + lines, b.reason) for b in documents.bad]
            lines += documents.lines
    return texts, bad


def read_records(path: Path) -> None:
    for file in find_files(path):
        list(record_blocks(file, RecordColumns(("text",), lambda _: None)))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(st.lists(TEXT, max_size=12), st.integers(1, 60), st.booleans())
@settings(deadline=None)
def test_every_form_gives_the_documents_in_order_wherever_the_cuts_fall(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int, crlf: bool
) -> None:
    folder = tmp_path_factory.mktemp("forms")
    end = "\r\n" if crlf else "\n"
    lines = "".join(json.dumps({"id": 1, "text": text}, ensure_ascii=False) + end for text in texts)
    (folder / "a.jsonl").write_bytes(lines.encode())
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.removesuffix(end).encode()))
    with pa.CompressedOutputStream(str(folder / "a.jsonl.zst"), "zstd") as zst:
        zst.write(lines.encode())
    table = pa.table({"text": pa.array(texts, pa.string())})
    pq.write_table(table, folder / "a.parquet", row_group_size=3)
    with pa.ipc.new_stream(
        str(folder / "a.arrow"), table.schema
    ) as stream:  # like files of `datasets`
        stream.write_table(table, max_chunksize=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", size)
        for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"):
            assert read(folder / name) == (texts, [])
            file = find_files(folder / name)[0]
            assert sum(block.size for block in cut_file(file)) <= file.bytes  # never beyond the end


def test_each_fault_is_told_with_its_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 20)
    rows = [
        b'{"text": "good"}',
        b"",
        b"{broken",
        b'{"body": "x"}',
        b'{"text": 7}',
        b'{"text": null}',
        b'["text"]',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        b'{"text": "last"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(rows))
    texts, bad = read(tmp_path)
    assert texts == ["good", "last"]
    assert [b.line for b in bad] == [3, 4, 5, 6, 7, 8, 9, 10]
    assert [
        word in b.reason
        for b, word in zip(
            bad,
            ["not JSON", "'body'", "int", "null", "JSON list", "byte 11", "surrogate", "not JSON"],
            strict=True,
        )
    ] == [True] * 8
    assert str(bad[0]).startswith("a.jsonl, line 3: ")


def test_parquet_faults(tmp_path: Path) -> None:
    binary = pa.array([b"ok", b"\xff"]).view(pa.binary())
    pq.write_table(
        pa.table({"text": pa.array(["a", None, "b"]), "n": [1, 2, 3]}), tmp_path / "a.parquet"
    )
    pq.write_table(pa.table({"text": binary}), tmp_path / "b.parquet")
    texts, bad = read(tmp_path / "a.parquet")
    assert (texts, [(b.line, b.reason) for b in bad]) == (
        ["a", "b"],
        [(2, "'the text column' is null, not a string")],
    )
    with pytest.raises(DataError, match="no column 'body' but text, n"):
        read(tmp_path / "a.parquet", "body")
    texts, bad = read(tmp_path / "b.parquet")
    assert (texts, [str(b) for b in bad]) == (
        ["ok"],
        ["b.parquet, line 2: bytes that are not UTF-8"],
    )
    (tmp_path / "c.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:100])
    with pytest.raises(DataError, match=r"c\.parquet cannot be read as Parquet"):
        read(tmp_path / "c.parquet")


def test_a_cut_gzip_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(
        b"".join(json.dumps({"text": str(i) * 50}).encode() + b"\n" for i in range(500))
    )
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz is not a whole gzip file"):
        read(tmp_path)


def test_zero_bytes_after_a_gzip_file_are_ignored(tmp_path: Path) -> None:
    members = gzip.compress(b'{"text": "a"}\n') + gzip.compress(b'{"text": "b"}\n')
    (tmp_path / "a.jsonl.gz").write_bytes(members + bytes(700))
    assert read(tmp_path) == (["a", "b"], [])


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json"])
def test_a_compressed_file_that_cannot_be_read_has_the_remedy_of_its_cause(
    tmp_path: Path, name: str
) -> None:
    window = b"\x28\xb5\x2f\xfd\x04\xa8\x85\x17\x00"
    damaged = bytearray(gzip.compress(b"words of a text " * 40))
    damaged[14:18] = b"\xff" * 4
    for ending, content, said in (
        (
            ".zst",
            window,
            "compressed with a window of 2,048 MiB, and at most 128 MiB are read; write it again",
        ),
        (".gz", b"{} " * 9, "is not compressed by gzip"),
        (".gz", window, f"compressed by zstd, not by gzip; name it {name}.zst"),
        (".gz", bytes(damaged), "is not a whole gzip file (Error -3 while decompressing data"),
        (".gz", bytes(damaged[:30]), "is not a whole gzip file"),
        (".bz2", b"BZh9 no more", "is not a whole bz2 file"),
    ):
        (tmp_path / f"{name}{ending}").write_bytes(content)
        for reader in (read, read_records):
            with pytest.raises(DataError, match=re.escape(said)):
                reader(tmp_path)
        (tmp_path / f"{name}{ending}").unlink()


def test_a_file_that_may_not_be_read_is_not_to_be_written_again(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}'))
    (file,) = find_files(tmp_path)
    for error, said in (
        (
            PermissionError(13, "Permission denied"),
            "(permission denied); give this user the right to read it.",
        ),
        (
            FileNotFoundError(2, "No such file or directory"),
            "(no such file or directory); put it back.",
        ),
        (
            OSError("CRC check failed"),
            "gzip file (CRC check failed); copy the original again, or write it again.",
        ),
    ):
        assert str(sources.unreadable(file, error)).endswith(said)


def test_which_files_are_found(tmp_path: Path) -> None:
    for name in (
        "b.txt",
        "sub/a.txt",
        "code.py",
        ".hidden.txt",
        ".git/x.txt",
        "rows.jsonl",
        "out/made.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text('{"text": "x"}')
    names = lambda *a, **k: [f.name for f in find_files(tmp_path, *a, **k)]  # noqa: E731
    assert names() == ["b.txt", "out/made.txt", "rows.jsonl", "sub/a.txt"]
    assert names(exclude=tmp_path / "out") == ["b.txt", "rows.jsonl", "sub/a.txt"]
    assert names("jsonl") == ["rows.jsonl"]
    assert names("text") == ["b.txt", "code.py", "out/made.txt", "rows.jsonl", "sub/a.txt"]
    assert [f.kind for f in find_files(tmp_path / "code.py", "text")] == ["text"]
    assert [f.name for f in find_files(str(tmp_path / "**/*.txt"))] == [
        "b.txt",
        "out/made.txt",
        "sub/a.txt",
    ]
    with pytest.raises(DataError, match="holds no file"):
        find_files(str(tmp_path / "*.none"))
    with pytest.raises(DataError, match=r"code\.py has an ending"):
        find_files(tmp_path / "code.py")
    with pytest.raises(DataError, match=r"no file that ends in \.parquet"):
        find_files(tmp_path, "parquet")
    with pytest.raises(DataError, match="does not exist"):
        find_files(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"data\.format is 'docx'"):
        find_files(tmp_path, "docx")  # type: ignore[arg-type]


def test_a_text_that_is_not_utf8_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("naïve\n".encode())
    (tmp_path / "b.txt").write_bytes(b"one\ntwo\n\xe9\n")
    texts, (bad,) = read(tmp_path)
    assert texts == ["naïve\n"]
    assert (bad.file, bad.line) == ("b.txt", 3)
    assert bad.reason.startswith(
        "not UTF-8 at byte 8; it looks like ISO-8859-1: set data.encoding to iso-8859-1"
    )


@given(st.lists(TEXT.filter(lambda t: "<>" not in t and t), max_size=8), st.integers(1, 40))
@settings(deadline=None)
def test_a_text_is_cut_at_its_separator_wherever_the_blocks_end(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int
) -> None:
    folder = tmp_path_factory.mktemp("separated")
    (folder / "a.txt").write_bytes(("\n<>\n".join(texts) or "\n<>\n").encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", size)
        assert read(folder, separator="\n<>\n") == (texts, [])


def test_objects_of_one_line_are_a_fault_and_blank_lines_are_none(tmp_path: Path) -> None:
    """The fast reader misreads both; reading line by line does not."""
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a"}{"text": "b"}\n{"text": "c", "text": "d"}\n\n\n{"text": "e"}\n'
    )
    texts, bad = read(tmp_path)
    assert texts == ["d", "e"]
    assert [str(b).split(" (")[0] for b in bad] == ["a.jsonl, line 1: not JSON"]


def test_a_document_that_does_not_fit_in_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "LARGEST_DOCUMENT", 100)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 10)
    (tmp_path / "a.txt").write_text("x" * 101)
    (tmp_path / "a.jsonl").write_text("x" * 200)
    for name in ("a.txt", "a.jsonl"):
        with pytest.raises(DataError, match=r"more than 0 MiB.*set data\.separator"):
            read(tmp_path / name)


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (
        "huggingface_hub.constants",
        "datasets.config",
    ):  # otherwise it is retried for half a minute
        monkeypatch.setattr(pytest.importorskip(module), "HF_HUB_OFFLINE", True)
    said = r"^hf://unknown/nothing(: the hub could not be reached| needs the package).*give files"
    with pytest.raises((DataError, StorageError), match=said):
        find_files("hf://unknown/nothing")


@pytest.mark.parametrize("line", ["null", "7", "[]", '"x"', "true"])
def test_a_line_that_is_no_object_is_a_bad_line(tmp_path: Path, line: str) -> None:
    """Arrow's parser reads outside its memory for `null` only."""
    path = tmp_path / "a.jsonl"
    path.write_text(line)
    assert [len(one) for one in read(path)] == [0, 1]


@pytest.mark.parametrize("deep", ["[" * 50_000, '{"a":' * 50_000, "[" * 50_000 + "]" * 50_000])
def test_a_deeply_nested_line_is_a_bad_line(tmp_path: Path, deep: str) -> None:
    """Arrow's parser would recurse until the process ends."""
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "one"}\n{"text": "two", "more": ' + deep + '}\n{"text": "[[{", "x": [[1], [2]]}\n'
    )
    texts, bad = read(path)
    assert (texts, [one.line for one in bad]) == (["one", "[[{"], [2])


@pytest.mark.parametrize("stream", [False, True])
def test_an_arrow_file_with_a_changed_offset_is_refused(tmp_path: Path, stream: bool) -> None:
    """Arrow itself would read outside its memory, and the process would end."""
    table = pa.table({"text": ["abcdefgh"] * 40})
    path = tmp_path / "a.arrow"
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), table.schema) as out:
        out.write_table(table)
    offsets = [(n * 8).to_bytes(4, "little") for n in range(4)]
    content = path.read_bytes()
    assert content.count(b"".join(offsets)) == 1
    path.write_bytes(content.replace(b"".join(offsets), b"".join([*offsets[:3], b"\0\0\0\x40"])))
    with pytest.raises(DataError, match=r"(?i)cannot be read as arrow"):
        read(path)
    with pytest.raises(DataError, match=r"(?i)cannot be read as arrow"):
        list(record_blocks(find_files(path)[0], RecordColumns(("text",), lambda _: None)))
