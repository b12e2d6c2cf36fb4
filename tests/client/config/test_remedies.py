"""The remedy in each fault of a config or of text is enough: no second fault about the same thing
follows.

Each case breaks one thing, reads the one sentence that the command says, follows it (taking
names and numbers from the sentence), and runs the command again.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from smtrain import ConfigError, load_config
from smtrain.cli.dispatch import call


@dataclass
class Desk:
    """A folder with a config, its model and text, and the words of `smtrain data prepare` over
    them.
    """

    folder: Path
    model: Path
    raw: dict[str, Any]
    set_: list[str] = field(default_factory=list)
    words: dict[str, str | None] = field(default_factory=dict)
    """Options of `data prepare`; None: a switch."""
    text: str = "text"

    @property
    def config(self) -> Path:
        return self.folder / "run.yaml"

    @property
    def file(self) -> Path:
        return self.folder / "text/a.jsonl"

    def write(self, text: str | None = None) -> None:
        """Write the config: as YAML of `raw`, with more lines behind it."""
        self.config.write_text(yaml.safe_dump(self.raw, sort_keys=False) + (text or ""), "utf-8")

    def change(self, old: str, new: str) -> None:
        self.config.write_text(self.config.read_text("utf-8").replace(old, new), "utf-8")

    def loaded(self) -> list[str]:
        """The faults of the config; none if it can be run."""
        try:
            load_config(self.config, set_=self.set_)
        except ConfigError as error:
            return error.faults
        return []

    def prepared(self, capsys: pytest.CaptureFixture[str]) -> list[str]:
        """The message of `smtrain data prepare` if it fails, else empty."""
        options = [
            word for name, value in self.words.items() for word in (name, value) if word is not None
        ]
        words = [
            "prepare",
            str(self.folder / self.text),
            str(self.folder / "out"),
            "--model",
            str(self.model),
        ]
        capsys.readouterr()
        status = call(
            "data", "smtrain.cli.data", [*words, "--seq-len", "32", "--workers", "1", *options]
        )
        sentences = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("smtrain: ")
        ]
        return sentences if status else []


SENTENCES = " ".join(
    f"The {colour} fox of the wood has seen this garden."
    for colour in ("red", "old", "shy", "sly", "big")
)
Do = Callable[[Desk], object]
Mend = Callable[[Desk, str], object]


@pytest.fixture
def desk(tmp_path: Path, raw: dict[str, Any], trained_inputs: dict[str, Path]) -> Desk:
    (tmp_path / "text").mkdir(exist_ok=True)
    made = Desk(
        tmp_path, trained_inputs["model"], {**raw, "data": {"path": str(tmp_path / "text")}}
    )
    made.file.write_text(
        "".join(json.dumps({"text": SENTENCES + f" It is number {n}."}) + "\n" for n in range(400))
    )
    made.write()
    return made


def group_in(pattern: str, told: str) -> str:
    """The part of a sentence that says what to write."""
    match = re.search(pattern, told)
    assert match, told
    return match[1]


def key(way: str, value: Any) -> Do:
    """Write a value into the config."""

    def do(desk: Desk) -> None:
        *sections, last = way.split(".")
        here = desk.raw
        for section in sections:
            here = here.setdefault(section, {})
        here[last] = value
        desk.write()

    return do


def lines(text: str) -> Do:
    """Write more lines behind the config."""
    return lambda desk: desk.write(text)


def written(change: Callable[[str], str]) -> Mend:
    """Change the text of the config."""
    return lambda desk, _: desk.config.write_text(change(desk.config.read_text("utf-8")), "utf-8")


def renamed(desk: Desk, told: str) -> None:
    wrong, right = group_in(r"^([\w.]+): unknown", told), group_in(r"did you mean ([\w.]+)\?", told)
    desk.change(f"{wrong.rpartition('.')[2]}:", f"{right.rpartition('.')[2]}:")


def set_to(way: str, pattern: str, read: Callable[[str], Any] = str) -> Mend:
    """Write the value that the sentence names."""
    return lambda desk, told: key(way, read(group_in(pattern, told)))(desk)


def set_again(pattern: str, form: str) -> Mend:
    """Give `--set` as the sentence says."""
    return lambda desk, told: desk.set_.__setitem__(0, form.format(group_in(pattern, told)))


def instead(old: str, new: str) -> Mend:
    return lambda desk, _: desk.change(old, new)


def value(way: str, right: Any) -> Mend:
    return lambda desk, _: key(way, right)(desk)


def rewritten(desk: Desk, _: str) -> None:
    desk.write()


def encoded(name: str) -> Do:
    return lambda desk: desk.config.write_bytes(
        (desk.config.read_text("utf-8") + "# ä\n").encode(name)
    )


def as_utf8(name: str) -> Mend:
    return lambda desk, _: desk.config.write_text(desk.config.read_bytes().decode(name), "utf-8")


LAUGHS = "tags: &a {k: v}\n" + "".join(
    f"x{n}: &x{n} [{', '.join([f'*x{n - 1}' if n else '*a'] * 12)}]\n" for n in range(8)
)


def before_laughs(desk: Desk, told: str) -> None:
    text = desk.config.read_text("utf-8")
    desk.config.write_text(text[: text.index("x0:")])


CONFIGS: dict[str, tuple[Do, str, Mend]] = {
    "unknown key": (key("train.lrr", 1e-4), "train.lrr: unknown key", renamed),
    "unknown section": (
        key("modle", {}),
        "modle: unknown key",
        lambda desk, told: (desk.raw.pop("modle"), desk.write()),
    ),
    "no number": (key("train.steps", "many"), "a whole number is needed", value("train.steps", 4)),
    "no duration": (
        key("compute.max_run", "10 parsecs"),
        "a duration looks like",
        set_to("compute.max_run", r"'(\d+m)'"),
    ),
    "no count": (
        key("train.tokens", "3 zillion"),
        "train.tokens: got",
        lambda d, t: (
            d.raw["train"].pop("steps"),
            key("train.tokens", group_in(r"'?(\d+[kMBG])'?", t))(d),
        ),
    ),
    "infinite": (
        key("train.lr", float("inf")),
        "a finite number is needed",
        value("train.lr", 1e-4),
    ),
    "number for text": (key("name", 123), "write it in quotes", value("name", "123")),
    "list for text": (
        key("name", ["a", "b"]),
        "one text is needed, not a list",
        value("name", "a"),
    ),
    "section for value": (
        key("train", 5),
        "it is a section with keys",
        value("train", {"steps": 4, "global_batch_size": 4, "seq_len": 32, "precision": "fp32"}),
    ),
    "wrong name": (
        key("name", "my run"),
        "use letters, digits and single hyphens",
        value("name", "my-run"),
    ),
    "no URI": (
        key("output.s3_uri", "bucket/x"),
        "give an s3://bucket/prefix",
        set_to("output.s3_uri", r"(s3://\S+)"),
    ),
    "batch": (
        key("parallel.micro_batch_size", 3),
        "is not a multiple of dp",
        set_to("train.global_batch_size", r"(\d+) would do", int),
    ),
    "warmup": (
        key("train.warmup_steps", 9),
        "train.warmup_steps: 9 is more than train.steps",
        value("train.warmup_steps", 4),
    ),
    "min_lr": (key("train.min_lr", 1.0), "train.min_lr: 1.0 is above", value("train.min_lr", 1e-5)),
    "hub name": (
        key("model.path", "meta-llama/Llama-3.2-1B"),
        "is not a folder",
        set_to("model.path", r"(hf://[\w/.-]+)"),
    ),
    "no text": (
        key("data.path", "nowhere"),
        "does not exist",
        lambda d, _: (
            (d.folder / "nowhere").mkdir() or (d.folder / "nowhere/a.txt").write_text("text")
        ),
    ),
    "placeholder": (
        lines("tags: {a: {{ who }}}\n"),
        "is a placeholder",
        lambda d, t: d.change(group_in(r"(\{\{.*?\}\})", t), "me"),
    ),
    "list as key": (
        lines("tags: {[a]: b}\n"),
        "put a value that begins with a bracket in quotes",
        instead("[a]", "'[a]'"),
    ),
    "empty key": (lines("tags: {'': b}\n"), "a key is empty", instead("''", "who")),
    "twice": (
        lines("name: again\n"),
        "is written twice (first at line 1)",
        instead("name: again\n", ""),
    ),
    "no date": (
        lines("tags: {a: 2026-02-30}\n"),
        "put it in quotes",
        instead("2026-02-30", "'2026-02-30'"),
    ),
    "many digits": (
        lines(f"tags: {{a: {'9' * 150}}}\n"),
        "put it in quotes",
        written(lambda text: text.replace("9" * 150, f"'{'9' * 150}'")),
    ),
    "no anchor": (lines("tags: {a: *b}\n"), "in quotes for text", instead("*b", '"*b"')),
    "itself": (lines("tags: &t {a: *t}\n"), "write the value out", instead("*t", "t")),
    "laughs": (lines(LAUGHS), "more than 10,000 values", before_laughs),
    "tag": (
        lines("tags: {a: !!set x}\n"),
        "leave it out",
        lambda d, t: d.change(f"{group_in('the tag (!!set)', t)} ", ""),
    ),
    "merge": (lines("tags: {<<: b}\n"), "put << in quotes", instead("<<", "'<<'")),
    "second document": (
        lines("---\nname: b\n"),
        "keep one",
        written(lambda text: text.partition("---")[0]),
    ),
    "tab": (lines("tags:\n\ta: b\n"), "indent with spaces", instead("\t", "  ")),
    "bracket": (lines("tags: {a: b\n"), "close the bracket", instead("{a: b", "{a: b}")),
    "colon": (
        lines("tags:\n  a: b: c\n"),
        "put a value that holds `: ` in quotes",
        instead("b: c", "'b: c'"),
    ),
    "escape": (lines('tags: {a: "C:\\q"}\n'), "use single quotes", instead('"', "'")),
    "control": (lines("tags: {a: x\x07}\n"), "take it out", instead("\x07", "")),
    "latin-1": (encoded("latin-1"), "save it as UTF-8", as_utf8("latin-1")),
    "utf-16": (encoded("utf-16"), "save it as UTF-8", as_utf8("utf-16")),
    "empty": (lambda d: d.config.write_text(""), "needs at least model.path", rewritten),
    "list at the top": (
        lambda d: d.config.write_text("- a\n"),
        "must hold keys and values",
        rewritten,
    ),
    "other file": (
        lambda d: d.config.write_text("a: 1\n"),
        "is this the file you meant?",
        rewritten,
    ),
    "no file": (lambda d: d.config.unlink(), "no such config file", rewritten),
    "set": (
        lambda d: d.set_.append("train.lr"),
        "must look like",
        set_again(r"look like (\S+)", "{}"),
    ),
    "set into a value": (
        lambda d: d.set_.append("name.x=1"),
        "holds a value, not keys",
        set_again(r"set (\w+) itself", "{}=x"),
    ),
    "set placeholder": (
        lambda d: d.set_.append("train.lr={{ lr }}"),
        "is a placeholder",
        set_again(r"--set (train.lr)=", "{}=1e-4"),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_config_is_told_to_do_is_enough(desk: Desk, name: str) -> None:
    do, says, mend = CONFIGS[name]
    do(desk)
    (sentence,) = desk.loaded()
    assert says in sentence
    mend(desk, sentence)
    assert desk.loaded() == []


def gz(content: bytes) -> Do:
    def do(desk: Desk) -> None:
        desk.file.rename(desk.folder / "good")
        (desk.folder / "text/a.jsonl.gz").write_bytes(content)

    return do


def zipped(desk: Desk, _: str) -> None:
    (desk.folder / "text/a.jsonl.gz").write_bytes(
        gzip.compress((desk.folder / "good").read_bytes())
    )


def as_parquet(desk: Desk) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["the red fox"] * 400}), desk.file)


def option(name: str, pattern: str) -> Mend:
    """Give the option with the value that the sentence names."""
    return lambda desk, told: desk.words.__setitem__(name, group_in(pattern, told))


def with_value(name: str, value: str | None) -> Do:
    return lambda desk: desk.words.__setitem__(name, value)


def content(text: str | bytes, name: str = "a.jsonl") -> Do:
    def do(desk: Desk) -> None:
        desk.file.unlink()
        (desk.folder / "text" / name).write_bytes(
            text if isinstance(text, bytes) else text.encode()
        )

    return do


RECORDS = "".join(json.dumps({"body": f"the red fox {n}", "n": n}) + "\n" for n in range(400))
DATA: dict[str, tuple[Do, str, Mend]] = {
    "no file": (
        lambda d: setattr(d, "text", "nowhere"),
        "nowhere does not exist",
        lambda d, _: setattr(d, "text", "text"),
    ),
    "wrong glob": (
        lambda d: setattr(d, "text", "text/*.parquet"),
        "*.parquet",
        lambda d, _: setattr(d, "text", "text/*.jsonl"),
    ),
    "empty file": (content(""), "a.jsonl", lambda d, _: content('{"text": "a"}\n' * 400)(d)),
    "empty folder": (
        lambda d: d.file.unlink(),
        "holds no file",
        lambda d, _: d.file.write_text('{"text": "a"}\n' * 400),
    ),
    "wrong column": (content(RECORDS), "body", option("--text-column", r"(body)")),
    "column of numbers": (
        lambda d: (content(RECORDS)(d), with_value("--text-column", "n")(d)),
        "n",
        option("--text-column", r"(body)"),
    ),
    "not gzip": (gz(b"not gzip"), "a.jsonl.gz", zipped),
    "cut gzip": (gz(gzip.compress(b'{"text": "a"}\n' * 4000)[:40]), "a.jsonl.gz", zipped),
    "parquet named jsonl": (
        as_parquet,
        "by its first bytes",
        lambda d, t: d.file.rename(group_in(r"rename it to (\S+)\.$", t)),
    ),
    "gzip named jsonl": (
        lambda d: d.file.write_bytes(gzip.compress(d.file.read_bytes())),
        "by its first bytes",
        lambda d, t: d.file.rename(group_in(r"rename it to (\S+)\.$", t)),
    ),
    "not UTF-8": (
        content(f"{SENTENCES} caf\xe9\n".encode("latin-1") * 400, "a.txt"),
        "set --encoding to iso-8859-1, or convert it",
        option("--encoding", r"set --encoding to (\S+),"),
    ),
    "lines not UTF-8": (
        content(
            json.dumps({"text": f"{SENTENCES} caf\xe9"}, ensure_ascii=False).encode("latin-1")
            + b"\n"
        ),
        "set --encoding to iso-8859-1, or convert it",
        option("--encoding", r"set --encoding to (\S+),"),
    ),
    "broken line": (
        lambda d: d.file.write_text(d.file.read_text() + "{broken\n"),
        "raise --max-bad",
        option("--max-bad", r"(\d+) bad line"),
    ),
    "unknown ending": (
        content(SENTENCES * 9, "a.dat"),
        "--format",
        option("--format", r"--format to (text)"),
    ),
    "unknown format": (with_value("--format", "word"), "--format", option("--format", r"(jsonl)")),
    "unknown encoding": (
        with_value("--encoding", "utf-99"),
        "--encoding: got 'utf-99'",
        option("--encoding", r"did you mean (\S+)\?"),
    ),
    "fraction": (
        with_value("--validation-fraction", "2"),
        "--validation-fraction: got 2.0",
        lambda d, told: d.words.update(
            {"--validation-fraction": str(int(group_in(r"below (1)", told)) / 100)}
        ),
    ),
    "unknown filter": (with_value("--filter", "gophers"), "--filter", option("--filter", r"(c4)")),
    "unknown objective": (
        with_value("--objective", "rl"),
        "got 'rl'",
        option("--objective", r"it is '(pretrain)'"),
    ),
    "no tokenizer": (
        lambda d: setattr(d, "model", d.folder),
        "tokenizer",
        lambda d, _: setattr(d, "model", d.raw["good"]),
    ),
    "csv column": (
        content("title,body\nx,the red fox\n" * 400, "a.csv"),
        "body",
        option("--text-column", r"(body)"),
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_what_text_is_told_to_be_is_enough(
    desk: Desk, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    do, says, mend = DATA[name]
    desk.raw["good"] = desk.model
    do(desk)
    (sentence,) = desk.prepared(capsys)
    print(sentence)
    assert says in sentence
    mend(desk, sentence)
    assert desk.prepared(capsys) == []
