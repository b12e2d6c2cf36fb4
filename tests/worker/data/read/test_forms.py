"""Every format of text gives its documents in order, and bad ones are named with their place."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smtrain.core.errors import DataError
from smtrain.worker.data.read import blocks
from smtrain.worker.data.read.reading import BadLine, read_block
from smtrain.worker.data.read.sources import find_files
from smtrain.worker.data.read.split_files import cut_file
from tests.worker.data.quiet import prepare, prepare_sft

TEXTS = ["the first", "", 'a "quoted", one\nover two lines', "數 é 🙂", "the last " * 90]


def read(
    path: Path, column: str = "text", encoding: str | None = None
) -> tuple[list[str], list[BadLine]]:
    texts, bad = [], []
    for file in find_files(path, encoding=encoding):
        sizes = []
        for block in cut_file(file, column):
            documents = read_block(block, column)
            texts += documents.texts.to_pylist()
            bad += documents.bad
            sizes.append(block.size)
        assert (
            sum(sizes) == file.bytes
            if file.compression or file.kind == "json"
            else sum(sizes) <= file.bytes
        )
    return texts, bad


@pytest.fixture(autouse=True, params=[1 << 22, 100])
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", request.param)


def lz4(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "lz4") as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


def plain(data: bytes) -> bytes:
    return data


PACKED = [
    ("", plain),
    (".gz", gzip.compress),
    (".bz2", bz2.compress),
    (".xz", lzma.compress),
    (".lz4", lz4),
]


@pytest.mark.parametrize(("ending", "packed"), PACKED)
def test_an_array_of_objects(tmp_path: Path, ending: str, packed: Callable[[bytes], bytes]) -> None:
    for indent in (None, 2):
        path = tmp_path / f"a{indent}.json{ending}"
        path.write_bytes(
            packed(json.dumps([{"n": 1.5, "text": text} for text in TEXTS], indent=indent).encode())
        )
        if ending == ".lz4":  # the standard library does not read it
            file = find_files(path, "json")[0]
            assert [t for b in cut_file(file) for t in read_block(b).texts.to_pylist()] == TEXTS
        else:
            assert read(path) == (TEXTS, [])


def test_arrays_that_are_none(tmp_path: Path) -> None:
    for number, (text, why) in enumerate(
        {
            '[{"text": "a"}': "it ends early, at byte 14",
            '[{"text": "a"} {"text": "b"}]': "a comma is missing, at byte 15",
            '[{"text": "a"}, nonsense]': "Expecting value",
        }.items()
    ):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        with pytest.raises(DataError, match=why):
            read(path)
    (tmp_path / "odd.json").write_text(
        '[{"text": "a"}, 5, {"no": 1}, {"text": null}, {"text": "b"}]'
    )
    texts, bad = read(tmp_path / "odd.json")
    assert texts == ["a", "b"]
    assert [(b.line, b.reason) for b in bad] == [
        (2, "a JSON int, not an object"),
        (3, "no column 'text', only 'no'"),
        (4, "'text' is null, not a string"),
    ]


@pytest.mark.parametrize(("ending", "packed"), PACKED)
def test_tables_of_text(tmp_path: Path, ending: str, packed: Callable[[bytes], bytes]) -> None:
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        sink = io.StringIO()
        rows = csv.writer(sink, delimiter=delimiter)
        rows.writerows([["id", "content"], *([i, text] for i, text in enumerate(TEXTS))])
        (tmp_path / f"{name}{ending}").write_bytes(
            packed(b"\xef\xbb\xbf" + sink.getvalue().encode())
        )
        assert read(tmp_path / f"{name}{ending}", "content") == (TEXTS, [])
        with pytest.raises(DataError, match="no column 'text' but id, content"):
            read(tmp_path / f"{name}{ending}")


def test_a_row_that_is_too_short_and_a_table_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,n\none,1\ntwo\nthree,3\n")
    texts, bad = read(tmp_path / "a.csv")
    assert (texts, [str(b) for b in bad]) == (
        ["one", "three"],
        ["a.csv, line 3: 1 fields, but the first line has 2"],
    )
    (tmp_path / "b.csv").write_bytes(b"text\nfine\ncaf\xe9\n")
    with pytest.raises(DataError, match="not UTF-8 after line"):
        read(tmp_path / "b.csv")
    assert read(tmp_path / "b.csv", encoding="latin-1") == (["fine", "café"], [])


DUMP = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="de">
<siteinfo><sitename>W</sitename><namespaces><namespace key="0" /><namespace key="6">Datei</namespace>
<namespace key="14">Kategorie</namespace></namespaces></siteinfo>
<page><title>Paris</title><ns>0</ns><id>1</id><revision><text xml:space="preserve">{{Infobox|a=b|c={{d}}}}
'''Paris''' is the [[capital]] of [[France|the French Republic]].&lt;ref name="x"&gt;{{cite}}&lt;/ref&gt;
== History ==
It is old &amp;amp; large.
{| class="wikitable"
|-
! a !! b
|-
| 1 || 2
|}
[[Datei:x.jpg|thumb|a [[caption]] text]]&lt;!-- hidden --&gt;
[[Kategorie:Cities]]</text></revision></page>
<page><title>Old</title><ns>0</ns><redirect title="Paris" /><revision><text>#REDIRECT [[Paris]]</text></revision></page>
<page><title>Talk:Paris</title><ns>1</ns><revision><text>words</text></revision></page>
<page><title>Rome</title><ns>0</ns><revision><text>Rome, [https://x.y a city].</text></revision></page>
</mediawiki>
"""


@pytest.mark.parametrize("parts", [1, 3])
def test_a_dump_of_wikipedia(tmp_path: Path, parts: int) -> None:
    pytest.importorskip("mwparserfromhell")
    data = DUMP.encode()
    at = [len(data) * i // parts for i in range(parts + 1)]
    packed = b"".join(bz2.compress(data[a:b]) for a, b in pairwise(at))  # like multistream dumps
    (tmp_path / "dewiki-pages-articles.xml.bz2").write_bytes(packed)
    assert read(tmp_path) == (
        [
            "Paris\n\nParis is the capital of the French Republic.\nHistory\nIt is old & large.",
            "Rome\n\nRome, a city.",
        ],
        [],
    )


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("It's ''so'' '''bold'''''.<ref>a ''b</ref> On.<ref name=x/>", "It's so bold. On."),
        ("One <ref>{{cite|a=[[b]]<!-- c --></ref>two.", "One two."),  # its template has no end
        ("a\n{| class=x\n! h\n|-\n| 1\n{|\n| in\n|}\n|}\nb", "a\n\nb"),
        ("a\n{| class=x\n| 1\n|-\n| ''2\nb", "a\nb"),  # a table without an end
        ("line<br />next<br>last", "line\nnext\nlast"),
        (
            "Berlin ({{IPA|x}}; {{lang|y}}) is, {{z}}, a city ({{q}}; since 1237).",
            "Berlin is,, a city (since 1237).",
        ),
        (
            (
                "[[A (b)|A]]s and [[:Category:C|c]], [[2001: A"
                " Space]]\n[[fr:Titre]]\n[[File:a.png|thumb|[[x]] y]]"
            ),
            "As and c, 2001: A Space",
        ),
        ("call main() with f ()", "call main() with f"),
        ("[http://a.b said] [http://a.b] http://a.b", "said http://a.b"),
        ("{{{1|default}}} &nbsp;&amp; &lt;b&gt;", "default & <b>"),
        ("<math>x</math><gallery>\nA.png|b\n</gallery><nowiki>[[no]]</nowiki> __TOC__", "no"),
        ("== Head ==\n* one\n* ''two''\n: three", "Head\none\ntwo\nthree"),
    ],
)
def test_wikitext_becomes_what_a_reader_sees(wikitext: str, text: str) -> None:
    pytest.importorskip("mwparserfromhell")
    from smtrain.worker.data.read.forms.wiki import plain

    assert plain(wikitext, {"file", "category"}) == text


def test_xml_that_is_no_dump(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text("<feed><entry/></feed>")
    (tmp_path / "b.txt").write_text("a text")
    assert [file.name for file in find_files(tmp_path)] == ["b.txt"]
    with pytest.raises(DataError, match="not a MediaWiki dump"):
        read(tmp_path / "a.xml")
    pytest.importorskip("mwparserfromhell")
    (tmp_path / "c.xml").write_text(DUMP[:900])
    with pytest.raises(DataError, match="not a whole XML file"):
        read(tmp_path / "c.xml")


def test_what_wikiextractor_writes(tmp_path: Path) -> None:
    folder = tmp_path / "AA"
    folder.mkdir()
    doc = '<doc id="{}" url="u" title="T">\n{}\n\n</doc>\n'
    (folder / "wiki_00").write_text(
        doc.format(1, "Title\n\nthe text of one") + doc.format(2, "Two\n\nwords")
    )
    (folder / "wiki_01.bz2").write_bytes(bz2.compress(doc.format(3, "Three").encode()))
    assert read(tmp_path) == (["Title\n\nthe text of one", "Two\n\nwords", "Three"], [])
    (folder / "wiki_02").write_text("something else\n")
    with pytest.raises(DataError, match="not what WikiExtractor writes"):
        read(tmp_path)


def record(kind: str, media: str, body: bytes) -> bytes:
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Type: {media}\r\nContent-Length:"
        f" {len(body)}\r\n\r\n"
    )
    return head.encode() + body + b"\r\n\r\n"


def test_archives_of_the_web(tmp_path: Path) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/%s; charset=utf-8\r\n\r\n%s"
    records = [
        record("warcinfo", "application/warc-fields", b"software: x\r\n"),
        record("conversion", "text/plain", "the first page é\nof two lines\n".encode()),
        record("conversion", "text/plain", b"caf\xe9"),
        record(
            "response",
            "application/http; msgtype=response",
            answer % (b"plain", b"robots and text"),
        ),
        record("response", "application/http; msgtype=response", answer % (b"html", b"<html/>")),
        record("conversion", "text/plain", b"WARC/1.0\r\n\r\nwithin a text"),
    ]
    (tmp_path / "a.warc.wet.gz").write_bytes(
        b"".join(map(gzip.compress, records))
    )  # one member per record
    texts, bad = read(tmp_path)
    assert texts == [
        "the first page é\nof two lines",
        "robots and text",
        "WARC/1.0\r\n\r\nwithin a text",
    ]
    assert [(b.line, b.reason) for b in bad] == [(3, "not UTF-8 at byte 4 of the record")]
    (tmp_path / "b.warc").write_bytes(records[4])
    with pytest.raises(DataError, match="1 web pages and no text; give the WET files"):
        read(tmp_path / "b.warc")
    (tmp_path / "b.warc").write_bytes(records[1][:-20])
    with pytest.raises(DataError, match="ends within record 1"):
        read(tmp_path / "b.warc")


def test_archives_of_files(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for name, data in {
            "b/one.txt": b"a text",
            "b/two.jsonl": b'{"text": "x"}\n\n{"text": "y"}\n{"no": 1}',
            "c.png": b"\x89PNG",
            "bad.md": b"ab\xff",
        }.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
    texts, bad = read(tmp_path)
    assert texts == ["a text", "x", "y"]
    assert [str(b) for b in bad] == [
        "a.tar.gz/b/two.jsonl, line 4: no column 'text', only 'no'",
        "a.tar.gz/bad.md, line 1: not UTF-8 at byte 2",
    ]
    whole = bytearray((tmp_path / "a.tar.gz").read_bytes())
    whole[-8] ^= 1  # of the checksum, behind the end of the archive
    (tmp_path / "c").mkdir()
    (tmp_path / "c/a.tar.gz").write_bytes(whole)
    with pytest.raises(DataError, match="is not a whole gzip file"):
        read(tmp_path / "c")
    (tmp_path / "b.tar").write_bytes(b"no archive" * 100)
    with pytest.raises(DataError, match="not a whole tar archive"):
        read(tmp_path / "b.tar")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "cp1252", "shift_jis"])
def test_text_in_other_encodings(tmp_path: Path, encoding: str) -> None:
    text = "日本語 text\n" * 50 if encoding != "cp1252" else "café – œuvre\n" * 50
    rows = "".join(
        json.dumps({"text": text + str(i)}, ensure_ascii=False) + "\n" for i in range(20)
    )
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    (tmp_path / "b.jsonl").write_bytes(rows.encode(encoding))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(rows.encode(encoding)))
    wanted = [text, *(text + str(i) for i in [*range(20), *range(20)])]
    named = None if encoding in ("utf-16", "utf-32") else encoding  # marked by a byte order mark
    texts, bad = read(tmp_path, encoding=named)
    assert ([t.replace("\r\n", "\n") for t in texts], bad) == (wanted, [])


def test_what_is_in_no_known_encoding_is_refused_with_its_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one caf\xe9")
    assert [b.reason for b in read(tmp_path / "a.txt")[1]] == [
        "not UTF-8 at byte 7; it looks like ISO-8859-1: set data.encoding to iso-8859-1, or convert"
        " it, `iconv -f ISO-8859-1 -t UTF-8 a.txt > NEW`"
    ]
    (tmp_path / "b.txt").write_bytes("日本".encode("utf-16") + b"\x00\xd8\x41\x00")
    with pytest.raises(DataError, match="not utf-16 at byte 6"):
        read(tmp_path / "b.txt")


def test_nested_fields_and_templates(tmp_path: Path) -> None:
    rows = [
        {"title": f"T{i}", "meta": {"text": text, "n": i}, "n": 5} for i, text in enumerate(TEXTS)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=2)
    with pa.ipc.new_stream(str(tmp_path / "c.arrow"), table.schema) as stream:
        stream.write_table(table)
    for name in ("a.jsonl", "b.parquet", "c.arrow"):
        assert read(tmp_path / name, "meta.text") == (TEXTS, []), name
        wanted = [f"{{T{i}}}: {text} 5" for i, text in enumerate(TEXTS)]
        assert read(tmp_path / name, "{{{title}}}: {meta.text} {n}") == (wanted, []), name
    for name in ("b.parquet", "c.arrow"):
        with pytest.raises(DataError, match="no column 'no' but title, meta, n"):
            read(tmp_path / name, "{no}")
    (tmp_path / "d.jsonl").write_text(
        '{"meta": {"text": "x"}}\n{"meta": 1}\n{"meta.text": "literal"}\n'
    )
    texts, bad = read(tmp_path / "d.jsonl", "meta.text")
    assert (texts, [(b.line, b.reason) for b in bad]) == (
        ["x", "literal"],
        [(2, "no column 'meta.text', only 'meta'")],
    )


def test_they_become_tokens_like_lines(tmp_path: Path, tokenizer_folder: Path) -> None:
    rows = [{"text": f"the words of text {i} "} for i in range(40)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("a.json", "b.jsonl"):
        prepare(tmp_path / name, tmp_path / f"{name}-out", tokenizer_folder, seq_len=8)
    assert (tmp_path / "a.json-out/tokens.bin").read_bytes() == (
        tmp_path / "b.jsonl-out/tokens.bin"
    ).read_bytes()


def test_conversations_in_one_array(tmp_path: Path, tokenizer_folder: Path) -> None:
    import shutil

    model = tmp_path / "model"
    shutil.copytree(tokenizer_folder, model)
    about = json.loads((model / "tokenizer_config.json").read_text())
    about["chat_template"] = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    )
    (model / "tokenizer_config.json").write_text(json.dumps(about))
    rows = [{"instruction": f"say {i}", "output": f"words {i}"} for i in range(30)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("a.json", "b.jsonl"):
        prepare_sft(tmp_path / name, tmp_path / f"{name}-out", model, seq_len=32, workers=1)
    assert (tmp_path / "a.json-out/tokens.bin").read_bytes() == (
        tmp_path / "b.jsonl-out/tokens.bin"
    ).read_bytes()
