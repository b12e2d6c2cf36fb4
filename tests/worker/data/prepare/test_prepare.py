from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from smtrain.core.errors import DataError
from smtrain.worker.data import resumable
from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.clean.dedup import SeenDocuments
from smtrain.worker.data.indexed import IndexedDataset
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.prepare import prepare as prepare_module
from smtrain.worker.data.prepare import progress as progress_module
from smtrain.worker.data.prepare.progress import DataProgress
from smtrain.worker.data.read import blocks
from smtrain.worker.data.resumable import Journal
from smtrain.worker.data.tokenize import encoder
from smtrain.worker.data.workers import read_ahead
from tests.worker.data.interruptions import resumes_after_every_block
from tests.worker.data.quiet import prepare


def lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    lines(folder / "a.jsonl", [{"text": f"the words of text {i} " * (i % 7)} for i in range(200)])
    (folder / "b.txt").write_text("a small text\n")
    return folder


@pytest.mark.parametrize(("append", "name"), [(True, "corpus"), (False, "corpus_noeod")])
def test_writes_what_megatron_preprocessing_writes(
    golden: Path, tmp_path: Path, append: bool, name: str
) -> None:
    manifest = prepare(
        golden / "corpus.jsonl",
        tmp_path / "out",
        golden / "tokenizer",
        seq_len=16,
        append_eod=append,
    )
    for end in ("bin", "idx"):
        ours = (tmp_path / "out" / f"tokens.{end}").read_bytes()
        assert ours == (golden / f"{name}_text_document.{end}").read_bytes()
    expected = json.loads((golden / "expected.json").read_text())[f"{name}_text_document"]
    assert manifest.files["tokens.bin"] == {
        "bytes": expected["bytes_bin"],
        "sha256": expected["sha256_bin"],
    }
    assert (manifest.documents, manifest.tokens) == (expected["documents"], len(expected["tokens"]))


def ignore(progress: DataProgress) -> None:
    pass


def test_every_document_is_there_with_its_end(
    text: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    seen: list[DataProgress] = []
    manifest = prepare(text, tmp_path / "out", tokenizer_folder, seq_len=32, progress=seen.append)
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    data = IndexedDataset(tmp_path / "out" / "tokens")
    documents = [tokenizer.decode(data[i][:-1].tolist()) for i in range(len(data))]
    wanted = [f"the words of text {i} " * (i % 7) for i in range(200)]
    assert documents == [w for w in wanted if w] + ["a small text\n"]
    assert {int(data[i][-1]) for i in range(len(data))} == {manifest.eos_id}
    assert manifest == DatasetManifest.load(tmp_path / "out")
    assert manifest.samples == (len(data.tokens) - 1) // 32
    assert [(s["name"], s["documents"]) for s in manifest.sources] == [
        ("a.jsonl", 200),
        ("b.txt", 1),
    ]
    assert (seen[-1].done_bytes, seen[-1].tokens) == (seen[-1].total_bytes, manifest.tokens)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "tokens.bin",
        "tokens.idx",
        "tokens.sums",
    ]


def test_the_bytes_are_the_same_whatever_the_number_of_workers(
    text: Path, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4096)  # several tasks per worker from a small text
    rows: list[dict[str, Any]] = [{"text": "good words"}, {"no": 1}]
    lines(text / "c.jsonl", rows * 300)
    made = []
    for workers in (1, 2):
        prepare(text, tmp_path / "out", tokenizer_folder, seq_len=32, workers=workers, max_bad=300)
        made.append({p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()})
    assert made[0] == made[1]
    manifest = DatasetManifest.load(tmp_path / "out")
    assert manifest.bad_line_count == 300
    assert manifest.bad_lines[1] == "c.jsonl, line 4: no column 'text', only 'no'"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_stops_and_leaves_what_was_there(
    text: Path,
    tmp_path: Path,
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4096)
    out = tmp_path / "out"
    prepare(text, out, tokenizer_folder, seq_len=32)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with (text / "a.jsonl").open("a") as handle:
        handle.write("{broken\n{again\n")
    sentence = (
        r"a\.jsonl, lines 201 and 202: not JSON .* 2 bad lines so far and max_bad is 1, .* raise"
        r" data\.max_bad"
    )
    with pytest.raises(DataError, match=sentence):
        prepare(text, out, tokenizer_folder, seq_len=32, max_bad=1, workers=workers)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    with pytest.raises(DataError):
        prepare(text, tmp_path / "new", tokenizer_folder, seq_len=32, max_bad=1, workers=workers)
    assert not (tmp_path / "new").exists()
    assert prepare(text, out, tokenizer_folder, seq_len=32, max_bad=2).bad_line_count == 2


def test_too_little_text_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "a.txt").write_text("two words")
    with pytest.raises(
        DataError, match=r"gives \d+ tokens in 1 document, and one sample needs seq_len \+ 1 = 65"
    ):
        prepare(tmp_path / "a.txt", tmp_path / "out", tokenizer_folder, seq_len=64)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="gives 0 tokens in 0 documents"):
        prepare(tmp_path / "empty.jsonl", tmp_path / "out", tokenizer_folder, seq_len=4)


def test_the_folder_of_the_text_does_not_become_that_of_the_tokens(
    text: Path, tokenizer_folder: Path
) -> None:
    folder = text if text.is_dir() else text.parent
    before = sorted(folder.rglob("*"))
    for source in (text, next(one for one in before if one.is_file())):
        with pytest.raises(
            DataError,
            match=r"is the output and holds .* of the input; name another folder, such as",
        ):
            prepare(source, folder, tokenizer_folder, seq_len=8)
    assert sorted(folder.rglob("*")) == before


def test_text_without_one_good_line_is_said_to_be_bad_and_not_short(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"txt": 1}\nnot json\n')
    with pytest.raises(
        DataError,
        match=r"all 2 lines are bad, beginning with a\.jsonl, line 1: no column 'text'.*correct",
    ):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer_folder, seq_len=4, max_bad=5)


def test_what_the_tokenizer_folder_must_say(
    text: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    def attempt(folder: Path, **more: Any) -> DatasetManifest:
        return prepare(text, tmp_path / "out", folder, seq_len=8, **more)

    folder = tmp_path / "model"
    with pytest.raises(DataError, match="does not exist; give the folder of a model"):
        attempt(folder)
    folder.mkdir()
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        attempt(folder)
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 320, "eos_token_id": [0, 3]}))
    assert attempt(folder).model_vocab_size == 320
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    assert attempt(folder).eos_id == 0
    (folder / "tokenizer_config.json").unlink()
    assert attempt(folder).eos_id == 0
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match="names no eos_token"):
        attempt(folder)
    assert attempt(folder, append_eod=False).append_eod is False
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer"):
        attempt(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(
        DataError, match=r"tokenizer\.json is no regular file; copy this file again"
    ):
        attempt(folder)


def test_a_truncating_tokenizer_file_does_not_truncate(
    text: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_folder, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = [
        prepare(text, tmp_path / f"out{i}", f, seq_len=8).tokens
        for i, f in enumerate((folder, tokenizer_folder))
    ]
    assert tokens[0] == tokens[1]


def test_a_large_vocabulary_takes_four_bytes(
    text: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_folder, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["unreached"] = 70_000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    wide = prepare(text, tmp_path / "wide", folder, seq_len=8)
    prepare(text, tmp_path / "narrow", tokenizer_folder, seq_len=8)
    assert (wide.dtype, wide.vocab_size) == ("int32", 70_001)
    np.testing.assert_array_equal(
        IndexedDataset(tmp_path / "wide" / "tokens").tokens,
        IndexedDataset(tmp_path / "narrow" / "tokens").tokens,
    )


def test_progress_is_a_line_where_there_is_no_terminal(
    text: Path,
    tmp_path: Path,
    tokenizer_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare(text, tmp_path / "out", tokenizer_folder, seq_len=8, progress=None, say=None)
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert "MB/s" in err[0]
    assert "201 documents" in err[0]
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 0.0)
    prepare(text, tmp_path / "out", tokenizer_folder, seq_len=8, progress=None, say=None)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_gigatoken_and_tokenizers_write_the_same_bytes(
    text: Path, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with (text / "a.jsonl").open("a") as handle:
        for line in (
            "naïve 東京 🙂\u200d🙂 \\ud83d",
            " <|end|> in <|end|>the text",
            "\t\n  \r\n",
            "e\u0301" * 40,
        ):
            handle.write(json.dumps({"text": line}) + "\n")
    fast = prepare(text, tmp_path / "fast", tokenizer_folder, seq_len=32, say=said.append)
    assert (fast.tokenized_by.split()[0], said) == ("gigatoken", [])
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    plain = prepare(text, tmp_path / "plain", tokenizer_folder, seq_len=32, say=said.append)
    assert plain.tokenized_by.split()[0] == "tokenizers"
    assert "gigatoken is not installed" in said[0]
    assert plain.files == fast.files


def test_one_id_that_differs_ends_the_use_of_gigatoken(
    text: Path, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4096)
    wanted = prepare(text, tmp_path / "right", tokenizer_folder, seq_len=32)
    right, calls = encoder._giga, []

    def wrong(*arguments: Any) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = right(*arguments)
        calls.append(1)
        return (
            ids + 1 if len(calls) > 2 else ids
        ), lengths  # like a bug that only some text triggers

    monkeypatch.setattr(encoder, "_giga", wrong)
    said: list[str] = []
    made = prepare(text, tmp_path / "out", tokenizer_folder, seq_len=32, say=said.append)
    assert "beginning again with tokenizers: gigatoken" in said[0]
    assert made.tokenized_by.startswith("tokenizers")
    assert made.files == wanted.files


def test_a_tokenizer_that_gigatoken_does_not_take(text: Path, tmp_path: Path) -> None:
    from tokenizers import models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"the": 0, "words": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    said: list[str] = []
    made = prepare(
        text, tmp_path / "out", tmp_path / "model", seq_len=8, append_eod=False, say=said.append
    )
    assert made.tokenized_by.startswith("tokenizers")
    assert "does not take this tokenizer" in said[0]


def test_several_sources_are_a_part_each(
    text: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    alone = prepare(text / "a.jsonl", tmp_path / "alone", tokenizer_folder, seq_len=32)
    lines(tmp_path / "more.jsonl", [{"text": "more words of another source " * 9}] * 20)
    both = prepare(
        [text / "a.jsonl", tmp_path / "more.jsonl"], tmp_path / "both", tokenizer_folder, seq_len=32
    )
    assert [part["prefix"] for part in both.parts] == ["tokens_0", "tokens_1"]
    assert both.files["tokens_0.bin"] == alone.files["tokens.bin"]
    assert both.samples == sum(part["samples"] for part in both.parts)
    assert len(IndexedDataset(tmp_path / "both/tokens_1")) == 20


def test_cleaning_and_duplicates(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 100)
    texts = [
        "cafe\u0301 \x07bell\r\n",
        "short",
        "a longer text of words",
        "a longer text of words",
        "caf\u00e9 bell\n",
    ]
    lines(tmp_path / "a.jsonl", [{"text": t} for t in texts * 2])
    how = Cleaning(unicode="nfc", strip_control=True, min_characters=6, deduplicate=True)
    made = prepare(
        tmp_path / "a.jsonl", tmp_path / "out", tokenizer_folder, seq_len=4, cleaning=how
    )
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    data = IndexedDataset(tmp_path / "out/tokens")
    assert [tokenizer.decode(data[i][:-1].tolist()) for i in range(len(data))] == [
        texts[4],
        texts[2],
    ]
    assert made.dropped == {"too short": 2, "duplicates": 6}


@given(st.lists(st.lists(st.integers(0, 40), max_size=30), max_size=6))
@settings(deadline=None)
def test_each_document_is_new_once(batches: list[list[int]]) -> None:
    seen, met = SeenDocuments(slots=64), set()
    for batch in batches:
        kept = seen.new(np.array(batch, np.uint64))
        for value, new in zip(batch, kept, strict=True):
            assert new == ((value or 1) not in met)
            met.add(value or 1)


def test_beyond_its_size_the_filter_keeps_and_counts() -> None:
    seen = SeenDocuments(slots=8)
    assert seen.new(np.arange(1, 11, dtype=np.uint64)).all()
    assert seen.forgotten == 4
    assert seen.new(np.arange(1, 11, dtype=np.uint64)).sum() == 4


def test_two_runs_do_not_write_one_folder(
    text: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    held = Journal(tmp_path / "out/.tokens.partial")
    with pytest.raises(DataError, match="is being written by another process"):
        prepare(text, tmp_path / "out", tokenizer_folder, seq_len=32)
    held.close(remove=True)
    prepare(text, tmp_path / "out", tokenizer_folder, seq_len=32)


RUN = """
import sys
from pathlib import Path
from typing import Any
from smtrain.worker.data.workers import read_ahead
from smtrain.worker.data.read import blocks
from smtrain.worker.data import resumable
from smtrain.worker.data.prepare import prepare
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.data.clean.cleaning import Cleaning

if __name__ == "__main__":
    blocks.BLOCK_BYTES, resumable.MARK_BYTES = 4096, 8192
    print("begun", flush=True)
    prepare.prepare(
        sys.argv[3:], Path(sys.argv[1]), Path(sys.argv[2]), 
        PrepareOptions(seq_len=32, max_bad=9, cleaning=Cleaning(deduplicate=True), workers=2),
        progress=lambda p: print(p.done_bytes, flush=True),
    )
"""


@pytest.mark.parametrize(
    "kills", [1, pytest.param(int(os.environ.get("SMTRAIN_KILLS", "4")), marks=pytest.mark.full)]
)
def test_killed_at_any_moment_a_rerun_writes_the_same_bytes(
    tmp_path: Path, tokenizer_folder: Path, kills: int
) -> None:
    """$SMTRAIN_KILLS sets the number of kills at random places; no marked block is repeated."""
    draw = random.Random(int(os.environ.get("SMTRAIN_KILLS_SEED", "7")))
    words = [f"word{i}" for i in range(40)]
    for name in ("a", "b"):
        rows = [{"text": " ".join(draw.choices(words, k=draw.randint(0, 200)))} for _ in range(150)]
        content = "".join(json.dumps(row) + "\n" for row in [*rows[:100], {"no": 1}, *rows[50:]])
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    lines(tmp_path / "c.jsonl", [{"text": " ".join(draw.choices(words, k=90))} for _ in range(150)])
    sources = [tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz", tmp_path / "c.jsonl"]
    script = tmp_path / "run.py"
    script.write_text(RUN)
    command = [sys.executable, str(script), "OUT", str(tokenizer_folder), *map(str, sources)]
    environment = os.environ | {"PYTHONPATH": str(Path(prepare_module.__file__).parents[4])}

    def run(out: Path, after: int | None) -> list[int]:
        """The progress of a run killed after so many lines; [] if it ends before."""
        seen = []
        arguments = [str(out) if a == "OUT" else a for a in command]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                seen.append(int(line) if line.strip().isdigit() else 0)
                if after is not None and len(seen) > after:
                    time.sleep(draw.random() * 0.003)
                    process.kill()
                    break
            process.stdout.read()
        return seen

    undisturbed = run(tmp_path / "undisturbed", None)
    wanted = {p.name: p.read_bytes() for p in (tmp_path / "undisturbed").iterdir()}
    assert set(wanted) == {
        f"tokens_{i}.{end}" for i in range(3) for end in ("bin", "idx", "sums")
    } | {"manifest.json"}
    out, went_on = tmp_path / "out", 0
    for _ in range(kills):
        seen = run(out, draw.randrange(len(undisturbed)))
        went_on += len(seen) > 1 and seen[1] > undisturbed[1]
        if (out / "manifest.json").exists():
            assert {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()} == wanted
            shutil.rmtree(out)
    run(out, None)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == wanted
    assert went_on or kills < 4


def test_interrupted_after_any_block_it_goes_on_to_the_same_bytes(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt at every mark, with duplicates, bad lines and a second source before and after
    it.
    """
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 256)
    monkeypatch.setattr(resumable, "MARK_BYTES", 1)
    rows = [{"text": f"words of text {i} " * 3} for i in range(10)]
    lines(tmp_path / "a.jsonl", [*rows, {"no": 1}, *rows[4:]])
    lines(
        tmp_path / "b.jsonl",
        [{"no": 2}, *rows[:2], {"text": "quite another one " * 9}, *rows, {"no": 3}],
    )

    def run(out: Path, progress: Callable[[DataProgress], None]) -> None:
        sources = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
        prepare(
            sources,
            out,
            tokenizer_folder,
            seq_len=8,
            max_bad=3,
            cleaning=Cleaning(deduplicate=True),
            workers=2,
            progress=progress,
        )

    resumes_after_every_block(run, tmp_path, 8)


def test_reading_ahead_keeps_order_and_errors_and_takes_few_items_early() -> None:
    taken: list[int] = []

    def items(stop: int) -> Iterator[int]:
        for number in range(stop):
            taken.append(number)
            yield number
        if stop == 9:
            raise OSError("no more")

    assert list(read_ahead(items(50), 4)) == list(range(50))
    taken.clear()
    ahead: Any = read_ahead(items(50), 4)
    assert [next(ahead) for _ in range(10)] == list(range(10))
    ahead.close()
    assert 10 <= len(taken) <= 14
    got: list[int] = []
    with pytest.raises(OSError, match="no more"):
        got.extend(read_ahead(items(9), 4))
    assert got == list(range(9))


def test_a_script_that_its_processes_would_run_again_is_told_what_it_lacks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from smtrain.worker.data.clean.refiner import open_refiner\n"
        "from smtrain.worker.data.clean.cleaning import Cleaning\n"
        "with open_refiner(Cleaning(pii='mask'), 2, 1 << 40) as refine:\n"
        "    refine(['some text'])\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert 'lacks `if __name__ == "__main__":`.' in done.stderr.splitlines()[-1]
