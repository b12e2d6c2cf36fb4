"""Forms of input: how to make a whole one, and what reads it.

A reader's answer of the whole input is the reference.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import smtrain
from testing.fuzz import records, world
from testing.fuzz.judge import Answer, broken_rule, command

Reader = Callable[[Path], "str | Answer"]
"""Reads a folder: the answer of a command, or the text of a result."""


@dataclass(frozen=True)
class Form:
    """A kind of input."""

    make: Callable[[Path], object]
    """Writes a whole one into an empty folder."""
    readers: tuple[Reader, ...]
    files: str = "*"
    """Pattern of the files that are damaged."""
    pipes: bool = True
    """Whether a named pipe is refused; a person may name one, such as that of <(command)."""
    exact: bool = False
    """Whether the form has checksums: another result than the reference is then a fault, not
    another input.
    """


def prepare(objective: str = "pretrain", *options: str) -> Reader:
    """Prepare a folder as text; the result is the digest of its tokens."""

    def read(folder: Path) -> str | Answer:
        out = folder.parent / "prepared"
        shutil.rmtree(out, ignore_errors=True)
        answer = command(
            "data",
            "prepare",
            str(folder),
            str(out),
            "--model",
            "model",
            "--seq-len",
            "32",
            "--workers",
            "1",
            "--objective",
            objective,
            *options,
        )
        if answer.status != 0 or broken_rule(answer):
            return answer
        return str(json.loads((out / "manifest.json").read_text())["files"])

    return read


def cli(*line: str) -> Reader:
    """A command; IN stands for the folder, OUT for a new one next to it."""

    def read(folder: Path) -> Answer:
        out = folder.parent / "out"
        shutil.rmtree(out, ignore_errors=True)
        for file in folder.parent.glob("out.*"):
            file.unlink()
        return command(*(word.replace("IN", str(folder)).replace("OUT", str(out)) for word in line))

    return read


def with_model(folder: Path) -> Answer:
    """The requests of a run that starts from a model."""
    return command("run", "run.yaml", "--dry-run", "--set", f"model.path={folder}")


def with_prepared(folder: Path) -> Answer:
    """The requests of a run with prepared tokens."""
    return command(
        "run",
        "run.yaml",
        "--dry-run",
        "--set",
        "data.path=null",
        "--set",
        f"data.prepared={folder}",
    )


def library(call: Callable[[Path], object]) -> Reader:
    """A function of the library: only how it ends is judged."""

    def read(folder: Path) -> str:
        call(folder)
        return ""

    return read


_WITH_IN = ("--model", "IN", "--seq-len", "32")
_REPORT = cli("data", "report", "IN")
_TEXT = (prepare(), _REPORT)


def _text(name: str, pack: Callable[[bytes], bytes] = bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(
        pack(world.lines(world.rows_of("pretrain")).encode())
    )


def _table(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.csv
        import pyarrow.parquet

        table = pa.table({"text": world.sentences(40), "id": list(range(40))})
        if name.endswith(".parquet"):
            pa.parquet.write_table(table, folder / name, row_group_size=10)
        elif name.endswith(".csv"):
            pa.csv.write_csv(table, folder / name)
        else:
            with (
                pa.OSFile(str(folder / name), "wb") as file,
                pa.ipc.new_file(file, table.schema) as out,
            ):
                out.write_table(table)

    return make


def _tar(name: str, mode: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        inner = folder / "a.jsonl"
        inner.write_text(world.lines(world.rows_of("pretrain")))
        with tarfile.open(folder / name, mode) as archive:
            archive.add(inner, "a/b.jsonl")
        inner.unlink()

    return make


def _zstd(data: bytes) -> bytes:
    import pyarrow as pa

    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


def _copy_prepared(folder: Path) -> None:
    shutil.copytree("whole-tokens", folder, dirs_exist_ok=True)


def _model(folder: Path) -> None:
    shutil.copytree("model", folder, dirs_exist_ok=True)


_WIKI = """<mediawiki><siteinfo/><page><title>A</title><ns>0</ns><id>1</id><revision><id>2</id>
<text xml:space="preserve">The '''model''' reads [[text|texts]] and {{learns}} more.</text>
</revision></page></mediawiki>"""
_WARC = (
    "WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\nContent-Length: 25\r\n\r\n"
    "the model reads the text.\r\n\r\n"
)
_METRICS = [
    {"step": n, "loss": 5 - n / 10, "grad_norm": 1.0, "lr": 1e-4, "tokens_per_s": 900.0}
    for n in range(1, 30)
]
_LOG = "".join(
    f"step={r['step']} of=30 loss={r['loss']} grad_norm=1 lr=1e-4 tokens_per_s=900 mfu=0.1\n"
    for r in _METRICS
)
_MEGATRON = "".join(
    f" iteration {n:8}/ 30 | consumed samples: {n * 8} | elapsed time per iteration (ms): 12.5 |"
    f" learning rate: 1E-4 | global batch size: 8 | lm loss: {5 - n / 10:E} | grad norm: 1.0 |\n"
    for n in range(1, 30)
)


def _logs(name: str, text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for number in range(2):
            (folder / f"{number}{name}").write_text(text)

    return make


def _series(name: str) -> Reader:
    def read(folder: Path) -> str:
        from smtrain.tools.compare.sources import read as of_path

        of_path(folder / f"0{name}")
        return ""

    return read


def _csv_log(folder: Path) -> None:
    _logs(".csv", "step,loss\n" + "".join(f"{r['step']},{r['loss']}\n" for r in _METRICS))(folder)


def _tables(folder: Path) -> None:
    shutil.copy(Path(smtrain.__file__).with_name("core") / "facts/prices.toml", folder)
    (folder / "machines.yaml").write_text(
        "box: {devices: 4, memory_gib: 24, tflops: 80, host_memory_gib: 256}\n"
    )


LIGHT: dict[str, Form] = {
    "jsonl": Form(_text("a.jsonl"), _TEXT),
    "txt": Form(_text("a.txt"), (prepare(),)),
    "json": Form(
        lambda folder: (folder / "a.json").write_text(json.dumps(world.rows_of("pretrain"))), _TEXT
    ),
    "gz": Form(_text("a.jsonl.gz", gzip.compress), _TEXT, exact=True),
    "bz2": Form(_text("a.jsonl.bz2", bz2.compress), _TEXT, exact=True),
    "xz": Form(_text("a.jsonl.xz", lzma.compress), _TEXT, exact=True),
    "zst": Form(_text("a.jsonl.zst", _zstd), _TEXT),
    "parquet": Form(_table("a.parquet"), _TEXT),
    "arrow": Form(_table("a.arrow"), _TEXT),
    "csv": Form(_table("a.csv"), _TEXT),
    "tar": Form(_tar("a.tar", "w"), _TEXT),
    "tar.gz": Form(_tar("a.tar.gz", "w:gz"), _TEXT, exact=True),
    "mediawiki": Form(lambda folder: (folder / "a.xml").write_text(_WIKI), _TEXT),
    "warc": Form(
        lambda folder: (folder / "a.warc.gz").write_bytes(gzip.compress(_WARC.encode())),
        _TEXT,
        exact=True,
    ),
    "alpaca": Form(
        lambda folder: (folder / "a.jsonl").write_text(world.lines(world.rows_of("sft"))),
        (prepare("sft", "--format", "alpaca"), _REPORT),
    ),
    "dpo": Form(
        lambda folder: (folder / "a.jsonl").write_text(world.lines(world.rows_of("dpo"))),
        (prepare("dpo"),),
    ),
    "model config": Form(
        _model,
        (with_model, cli("checkpoint", "inspect", "IN"), cli("plan", "run.yaml", "--model", "IN")),
        "*config.json",
    ),
    "tokenizer": Form(
        _model,
        (
            with_model,
            cli("data", "prepare", "pretrain", "OUT", *_WITH_IN),
            cli(
                "data",
                "prepare",
                "sft",
                "OUT",
                *_WITH_IN,
                "--objective",
                "sft",
                "--format",
                "alpaca",
            ),
        ),
        "*t*",
    ),
    "prepared": Form(
        _copy_prepared,
        (
            cli("data", "inspect", "IN"),
            cli("data", "export", "IN", "OUT"),
            with_prepared,
            cli("data", "split", "IN", "OUT", "1", "1"),
            cli("data", "merge", "IN", "OUT"),
        ),
    ),
    "metrics.jsonl": Form(
        _logs(".jsonl", world.lines(_METRICS)),
        (_series(".jsonl"), cli("plan", "run.yaml", "--measured", "IN/0.jsonl")),
        "0*",
    ),
    "log": Form(_logs(".log", _LOG), (_series(".log"),), "0*"),
    "megatron log": Form(_logs(".txt", _MEGATRON), (_series(".txt"),), "0*"),
    "csv log": Form(_csv_log, (_series(".csv"),), "0*"),
    "stage": Form(
        records.channels, (records.read_stage, records.read_uploads), "input/*/**/*.json"
    ),
    "records": Form(records.records, (records.read_records,), "**/*.json*"),
    "tables": Form(
        _tables,
        (
            cli("plan", "run.yaml", "--prices", "IN/prices.toml"),
            cli("plan", "run.yaml", "--machine-file", "IN/machines.yaml", "--machines", "box:1"),
        ),
        pipes=False,
    ),
    "task": Form(
        lambda folder: shutil.copytree("task", folder, dirs_exist_ok=True),
        (
            cli(
                "run",
                "run.yaml",
                "--dry-run",
                "--set",
                "evaluate.tasks=[own]",
                "--set",
                "evaluate.data=IN",
            ),
        ),
    ),
    "questions": Form(records.questions, (records.read_questions,)),
}
"""Forms whose readers import no torch."""
