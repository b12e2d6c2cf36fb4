"""`smtrain.check` of 40 bad data sets, each named before a job that costs money, with the numbers
of its records.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import smtrain
from smtrain.client.backends.choose import backend_of
from smtrain.client.findings import Finding
from smtrain.client.launch.stages import Chain
from smtrain.client.preflight.context import Context
from smtrain.core.errors import ConfigError, DataError, JobError
from smtrain.plane.client import ensure_running
from smtrain.tools import check_hub
from smtrain.tools.check import RECORD_CHECKS, look_first
from smtrain.worker.data.prepare.sft import prepare_sft
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.data.read.reading import BadLine, BadLines
from tests.client.launch.hub import Hub
from tests.tools.test_check_conversations import TALK
from tests.worker.data.chats import talk

Files = dict[str, bytes]
GOOD = {"messages": talk("w1", "w2")}
WORDS = b"w1 w2 w3 w4 w5 w6 w7 w8 " * 8


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def turns(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "w1"} for role in roles]}


def parquet(**columns: list[Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def text(row: Any) -> bytes:
    """JSON lines of text with one bad line, the second."""
    return (
        lines({"text": WORDS.decode()})
        + (row if isinstance(row, bytes) else json.dumps(row).encode())
        + b"\n"
    )


MIXED = [GOOD] * 60
for _at in (5, 15, 25, 35, 45, 55):
    MIXED.insert(_at, {"messages": talk("w1")})

TEXT: dict[str, tuple[Files, str]] = {
    "two bytes": ({"a.txt": b"w1"}, "one sample needs seq_len + 1 = 33"),
    "one word a file": ({"a.txt": b"w1", "b.txt": b"w2"}, "one sample needs seq_len + 1 = 33"),
    "one short line": ({"a.jsonl": lines({"text": "w1"})}, "one sample needs seq_len + 1 = 33"),
    "a number": ({"a.jsonl": text(7)}, "line 2: a JSON int, not an object"),
    "null": ({"a.jsonl": text(None)}, "line 2: a JSON NoneType, not an object"),
    "a string": ({"a.jsonl": text("w1 w2")}, "line 2: a JSON str, not an object"),
    "true": ({"a.jsonl": text(True)}, "line 2: a JSON bool, not an object"),
    "no JSON": ({"a.jsonl": text(b"{text: w1}")}, "line 2: not JSON"),
    "a cut line": ({"a.jsonl": text(b'{"text": "w1')}, "line 2: not JSON"),
    "an array as lines": ({"a.jsonl": b'[{"text": "w1"}]'}, "line 1: a JSON list, not an object"),
    "an array over lines": (
        {"a.jsonl": b'[\n{"text": "w1"},\n{"text": "w2"}\n]'},
        "4 records are no text",
    ),
    "half a surrogate": (
        {"a.jsonl": text(b'{"text": "w1 \\ud83d"}')},
        "line 2: half a surrogate pair",
    ),
    "text is null": ({"a.jsonl": text({"text": None})}, "line 2: 'text' is null, not a string"),
    "text is a list": ({"a.jsonl": text({"text": ["w1"]})}, "line 2: 'text' is list, not a string"),
    "another field": ({"a.jsonl": text({"body": "w1"})}, "line 2: no column 'text', only 'body'"),
    "latin-1 in a line": ({"a.jsonl": text(b'{"text": "\xe9t\xe9"}')}, "UTF-8"),
    "latin-1 text": ({"a.txt": WORDS + b"\xe9t\xe9"}, "UTF-8"),
    "a zip as text": ({"a.txt": b"PK\x03\x04\x00\x00"}, "is not text"),
    "an empty file": ({"a.txt": b""}, "is empty"),
    "empty lines": ({"a.jsonl": b"\n\n\n"}, "0 tokens in 0 documents"),
    "a cut gzip": ({"a.txt.gz": gzip.compress(WORDS)[:-12]}, "gzip"),
    "parquet of another column": (
        {"a.parquet": parquet(body=["w1"])},
        "has no column 'text' but body",
    ),
    "parquet of numbers": ({"a.parquet": parquet(text=[1, 2])}, "holds int64 and not text"),
    "parquet with a null": (
        {"a.parquet": parquet(text=["w1", None])},
        "line 2: 'the text column' is null",
    ),
    "no parquet": ({"a.parquet": b"PAR1 and no more"}, "cannot be read as Parquet"),
    "CSV of another column": ({"a.csv": b"title,body\nw1,w2\n"}, "text"),
    "an object as JSON": ({"a.json": b'{"text": "w1"}'}, "a.json"),
}
SFT: dict[str, tuple[Files, str]] = {
    "6 bad of 66": (
        {"a.jsonl": lines(*MIXED)},
        (
            "6 of the first 66 records are no conversations: lines 6, 16, 26, 36, 46 and 56: no"
            " answer of the assistant to a user; correct them"
        ),
    ),
    "text": ({"a.txt": WORDS}, "a.txt is plain text"),
    "text among records": ({"a.jsonl": lines(GOOD), "b.txt": WORDS}, "b.txt is plain text"),
    "wrong role": ({"a.jsonl": lines(GOOD, turns("robot", "assistant"))}, "line 2: "),
    "no answer": ({"a.jsonl": lines(GOOD, turns("user"))}, "line 2: "),
    "no turns": ({"a.jsonl": lines(GOOD, {"messages": []})}, "line 2: "),
    "turns are text": ({"a.jsonl": lines(GOOD, {"messages": "w1"})}, "line 2: "),
    "a turn without content": (
        {"a.jsonl": lines(GOOD, {"messages": [{"role": "user"}]})},
        "line 2: ",
    ),
    "pairs": (
        {"a.jsonl": lines(GOOD, {"prompt": "w1", "chosen": "w2", "rejected": "w3"})},
        "pairs of preferences",
    ),
    "documents": ({"a.jsonl": lines({"text": "w1"})}, "line 1: "),
    "columns of a table": (
        {"a.parquet": parquet(question=["w1"], answer=["w2"])},
        "has the columns question, answer",
    ),
    "answers beyond seq_len": (
        {"a.jsonl": lines({"messages": talk("w1 " * 90, "w2")})},
        "no conversation of the fi",
    ),
    "the second file": (
        {"a.jsonl": lines(GOOD), "b.jsonl": lines(GOOD, 3)},
        "b.jsonl, line 2: a JSON int",
    ),
}


def about(
    path: str, folder: Path, objective: str, level: str | None = "fault", **data: Any
) -> list[str]:
    """The findings of a level (None: of all) about a config's data, before anything is started."""
    (folder / "chat_template.jinja").write_text(TALK)
    raw = {
        "name": "d", "target": "local", "model": {"path": folder}, "data": {"path": path, **data},
        "train": {"objective": objective, "seq_len": 32, "steps": 1, "precision": "fp32"},
    }  # fmt: skip
    try:
        config = smtrain.load_config(raw)
        context = Context(Chain(config, backend_of(config, "local")), ("prepare",))
    except ConfigError as error:
        return list(error.faults)
    found = [
        one
        for check in RECORD_CHECKS.values()
        for one in check(context)
        if isinstance(one, Finding)
    ]
    return [f"{one.text}; {one.remedy}" for one in found if level in (None, one.level)]


def write(folder: Path, files: Files) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(("objective", "cases"), [("pretrain", TEXT), ("sft", SFT)])
def test_bad_data_are_found_before_they_cost_money(
    objective: str,
    cases: dict[str, tuple[Files, str]],
    local_home: Path,
    tmp_path: Path,
    model: Path,
) -> None:
    wrong = {}
    for name, (files, words) in cases.items():
        faults = about(str(write(tmp_path / name, files)), model, objective)
        if not any(words in fault for fault in faults):
            wrong[name] = faults
    assert not wrong
    assert len(TEXT) + len(SFT) == 40


def test_good_data_have_no_fault(local_home: Path, tmp_path: Path, model: Path) -> None:
    assert about(str(write(tmp_path / "a", {"a.txt": WORDS})), model, "pretrain") == []
    assert (
        about(str(write(tmp_path / "b", {"b.jsonl": lines(*[GOOD] * 300, 7)})), model, "sft") == []
    )  # not the 301st
    assert (
        about(str(write(tmp_path / "c", {"c.jsonl": lines(*MIXED)})), model, "sft", max_bad=6) == []
    )


def test_the_preparation_names_all_bad_records(tmp_path: Path, model: Path) -> None:
    (model / "chat_template.jinja").write_text(TALK)
    folder = write(tmp_path / "a", {"a.jsonl": lines(*MIXED, *[3] * 20)})
    with pytest.raises(DataError) as failure:
        prepare_sft(
            [folder],
            tmp_path / "out",
            model,
            PrepareOptions(seq_len=32, workers=1),
            say=lambda _: None,
        )
    assert str(failure.value) == (
        "a.jsonl, lines 6, 16, 26, 36, 46 and 56: no answer of the assistant to a user; 26 bad"
        " records so far and max_bad is 0, so correct the data or raise data.max_bad. Also bad:"
        f" a.jsonl, lines {', '.join(map(str, range(67, 81)))} and 6 more: a JSON int, not an"
        " object."
    )


def test_bad_lines_are_named_by_reason_and_at_most_twenty() -> None:
    bad = BadLines()
    for file, reasons in enumerate((["x"] * 3, ["y"], [f"z{n}" for n in range(40)], ["x"] * 90)):
        rows = [BadLine(f"{file}.txt", at, reason) for at, reason in enumerate(reasons, 1)]
        bad.add(file, True, len(rows), rows, max_bad=1000)
    first, second, *numbered, rest = bad.describe("1.txt").split("; ")
    assert (first, second, rest) == ("0.txt, lines 1, 2 and 3: x", "line 1: y", "and 114 more")
    assert numbered == [f"2.txt, line {n + 1}: z{n}" for n in range(16)]
    few = BadLines()
    few.add(0, True, 50, [BadLine("0.txt", at, "x") for at in range(1, 51)], max_bad=1000)
    assert few.describe() == f"0.txt, lines {', '.join(map(str, range(1, 21)))} and 30 more: x"
    assert (bad.count, len(bad.kept), bad.kept[3]) == (134, 100, "1.txt, line 1: y")


def test_a_run_here_reads_the_first_records_before_it_starts_a_stage(
    local_home: Path, tmp_path: Path, model: Path
) -> None:
    folder = write(tmp_path / "a", {"a.jsonl": lines(*[{"instruction": "w1", "output": "w2"}] * 9)})
    train = {"seq_len": 32, "steps": 1, "precision": "fp32"}
    config = smtrain.load_config(
        name="d", target="local", model={"path": model}, data={"path": folder}, train=train
    )
    chain = Chain(config, backend_of(config, "local"))
    with pytest.raises(JobError) as refusal:
        look_first(chain, ("prepare", "train"), lambda _: None)
    assert (
        str(refusal.value)
        .splitlines()[0]
        .endswith(
            "a.jsonl: 9 of the first 9 records are no text: lines 1, 2, 3, 4, 5, 6, 7, 8 and 9: no"
            " column 'text', only 'instruction', 'output'; set train.objective: sft; correct them, or"
            " allow them with data.max_bad (`smtrain help data`)"
        )
    )
    look_first(chain, ("train",), lambda _: None)  # the text is prepared


def test_data_in_s3_are_read_by_ranges(local_home: Path, tmp_path: Path, model: Path) -> None:
    s3 = ensure_running().session().client("s3")
    s3.create_bucket(Bucket="bad-data")
    put = {
        "chat/a.jsonl": lines(*MIXED),
        "text/a.txt": b"w1",
        "more/a.parquet": parquet(body=["w1"]),
        "good/a.jsonl.gz": gzip.compress(lines(*[GOOD] * 300)),
        "good/b.jsonl": lines(*[GOOD] * 300),
    }
    for key, body in put.items():
        s3.put_object(Bucket="bad-data", Key=key, Body=body)
    (bad,) = about("s3://bad-data/chat", model, "sft")
    assert "a.jsonl: 6 of the first 66 records are no conversations: lines 6, 16, " in bad
    assert "one sample needs seq_len + 1" in about("s3://bad-data/text/", model, "pretrain")[0]
    assert (
        "has no column 'text' but body"
        in about("s3://bad-data/more/a.parquet", model, "pretrain")[0]
    )
    assert about("s3://bad-data/good/", model, "sft") == []


@pytest.mark.full  # the next test has the wiring; this one imports `datasets` in a new process
def test_a_data_set_of_the_hub_is_read_if_it_comes_soon(
    local_home: Path, tmp_path: Path, model: Path
) -> None:
    pytest.importorskip("datasets")
    (data := tmp_path / "set").mkdir()
    (data / "train.jsonl").write_bytes(lines(*MIXED))
    served = Hub(tmp_path, "org/set", data=data)
    code = (
        "import sys; from pathlib import Path; from tests.tools.test_check_data import about,"
        " check_hub\ncheck_hub.HUB_S = 600\n"
        "for uri in ('hf://org/set', 'hf://org/set@train[:50%]'):\n"
        "    for line in about(uri, Path(sys.argv[1]), 'sft', level=None): print(line)"
    )
    words = [sys.executable, "-c", code, str(model)]
    home = {"HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path / "home")}
    try:
        done = subprocess.run(words, env={**os.environ, **home}, capture_output=True, text=True)
    finally:
        served.close()
    read, *_, part = done.stdout.splitlines()
    assert "6 of the first 66 records are no conversations: lines 6, 16, " in read, done.stderr
    assert part.startswith(
        "data.path: hf://org/set@train[:50%] was not read here: `datasets` would"
    )


@pytest.mark.parametrize("path", ["hf://org/model", "modelscope://org/model"])
def test_a_model_that_comes_with_the_job_is_named_as_the_reason(
    path: str, local_home: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(*MIXED))
    sections: dict[str, Any] = {"model": {"path": path}, "data": {"path": tmp_path / "a.jsonl"}}
    config = smtrain.load_config({"name": "d", "target": "local", **sections})
    context = Context(Chain(config, backend_of(config, "local")), ("fetch", "prepare"))
    (found,) = RECORD_CHECKS["documents"](context)
    assert isinstance(found, Finding)
    assert found.level == "warning"
    assert found.text.startswith(f"the first documents were not read, as the tokenizer of {path}")
    assert "give its folder in model.path" in str(found.remedy)


def test_a_hub_that_does_not_answer_is_not_waited_for(
    local_home: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()
    monkeypatch.setattr(check_hub, "HUB_S", 0.01)
    monkeypatch.setattr("smtrain.worker.data.read.hub.commit_of", lambda _: end.wait())
    (found,) = check_hub.hub_findings("hf://a/b", "documents", "data.path", list)
    end.set()
    assert (found.level, found.check) == ("warning", "documents")
    assert (
        found.text == "data.path: hf://a/b was not read here: its records did not come within 0 s"
    )
    monkeypatch.setattr(check_hub, "present", lambda name: False)
    (told,) = about("hf://a/b", model, "pretrain", level=None)
    assert told.startswith("data.path: hf://a/b was not read here: this needs the package datasets")
    assert "; run `pip install" in told
