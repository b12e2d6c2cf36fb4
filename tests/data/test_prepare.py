from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from smtrain.data import prepare as prepare_module
from smtrain.data import progress as progress_module
from smtrain.data import sources
from smtrain.data.indexed import IndexedDataset
from smtrain.data.manifest import Manifest
from smtrain.data.prepare import prepare
from smtrain.data.progress import Progress
from smtrain.errors import DataError


def lines(path: Path, rows: list[dict]) -> Path:
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
def test_writes_what_megatron_preprocessing_writes(golden: Path, tmp_path: Path, append: bool, name: str) -> None:
    manifest = prepare(
        golden / "corpus.jsonl", tmp_path / "out", golden / "tokenizer", seq_len=16, append_eod=append, progress=ignore
    )
    for end in ("bin", "idx"):
        ours = (tmp_path / "out" / f"tokens.{end}").read_bytes()
        assert ours == (golden / f"{name}_text_document.{end}").read_bytes()
    expected = json.loads((golden / "expected.json").read_text())[f"{name}_text_document"]
    assert manifest.files["tokens.bin"] == {"bytes": expected["bytes_bin"], "sha256": expected["sha256_bin"]}
    assert (manifest.documents, manifest.tokens) == (expected["documents"], len(expected["tokens"]))


def ignore(progress: Progress) -> None:
    pass


def test_every_document_is_there_with_its_end(text: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    seen: list[Progress] = []
    manifest = prepare(text, tmp_path / "out", tokenizer_folder, seq_len=32, progress=seen.append)
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    data = IndexedDataset(tmp_path / "out" / "tokens")
    documents = [tokenizer.decode(data[i][:-1].tolist()) for i in range(len(data))]
    wanted = [f"the words of text {i} " * (i % 7) for i in range(200)]
    assert documents == [w for w in wanted if w] + ["a small text\n"]
    assert {int(data[i][-1]) for i in range(len(data))} == {manifest.eos_id}
    assert manifest == Manifest.load(tmp_path / "out")
    assert manifest.samples == (len(data.tokens) - 1) // 32
    assert [(s["name"], s["documents"]) for s in manifest.sources] == [("a.jsonl", 200), ("b.txt", 1)]
    assert (seen[-1].done_bytes, seen[-1].tokens) == (seen[-1].total_bytes, manifest.tokens)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["manifest.json", "tokens.bin", "tokens.idx"]


def test_the_bytes_are_the_same_whatever_the_number_of_workers(
    text: Path, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sources, prepare_module):
        monkeypatch.setattr(module, "BLOCK_BYTES", 4096)  # several tasks a worker out of a small text
    rows = [{"text": "good words"}, {"no": 1}]
    lines(text / "c.jsonl", rows * 300)
    made = []
    for workers in (1, 2):
        prepare(text, tmp_path / "out", tokenizer_folder, seq_len=32, workers=workers, max_bad=300, progress=ignore)
        made.append({p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()})
    assert made[0] == made[1]
    manifest = Manifest.load(tmp_path / "out")
    assert manifest.bad_line_count == 300
    assert manifest.bad_lines[1] == "c.jsonl, line 4: no column 'text', only 'no'"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_stops_and_leaves_what_was_there(
    text: Path, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    for module in (sources, prepare_module):
        monkeypatch.setattr(module, "BLOCK_BYTES", 4096)
    out = tmp_path / "out"
    prepare(text, out, tokenizer_folder, seq_len=32, progress=ignore)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with (text / "a.jsonl").open("a") as handle:
        handle.write("{broken\n{again\n")
    sentence = r"a\.jsonl, line 201: not JSON .* 2 bad lines so far and max_bad is 1, .* raise data\.max_bad"
    with pytest.raises(DataError, match=sentence):
        prepare(text, out, tokenizer_folder, seq_len=32, max_bad=1, workers=workers, progress=ignore)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    with pytest.raises(DataError):
        prepare(text, tmp_path / "new", tokenizer_folder, seq_len=32, max_bad=1, workers=workers, progress=ignore)
    assert not (tmp_path / "new").exists()
    assert prepare(text, out, tokenizer_folder, seq_len=32, max_bad=2, progress=ignore).bad_line_count == 2


def test_too_little_text_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "a.txt").write_text("two words")
    with pytest.raises(DataError, match=r"gives \d+ tokens in 1 documents, and one sample needs seq_len \+ 1 = 65"):
        prepare(tmp_path / "a.txt", tmp_path / "out", tokenizer_folder, seq_len=64, progress=ignore)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="gives 0 tokens in 0 documents"):
        prepare(tmp_path / "empty.jsonl", tmp_path / "out", tokenizer_folder, seq_len=4, progress=ignore)


def test_what_the_tokenizer_folder_must_say(text: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    def attempt(folder: Path, **more: bool) -> Manifest:
        return prepare(text, tmp_path / "out", folder, seq_len=8, progress=ignore, **more)

    folder = tmp_path / "model"
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        attempt(folder)
    shutil.copytree(tokenizer_folder, folder)
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    (folder / "config.json").write_text(json.dumps({"vocab_size": size - 1}))
    with pytest.raises(DataError, match=f"vocab_size {size - 1} .* ids up to {size - 1}"):
        attempt(folder)
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


def test_a_truncating_tokenizer_file_does_not_truncate(text: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_folder, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = [
        prepare(text, tmp_path / f"out{i}", f, seq_len=8, progress=ignore).tokens
        for i, f in enumerate((folder, tokenizer_folder))
    ]
    assert tokens[0] == tokens[1]


def test_a_large_vocabulary_takes_four_bytes(text: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_folder, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["unreached"] = 70_000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    wide = prepare(text, tmp_path / "wide", folder, seq_len=8, progress=ignore)
    prepare(text, tmp_path / "narrow", tokenizer_folder, seq_len=8, progress=ignore)
    assert (wide.dtype, wide.vocab_size) == ("int32", 70_001)
    np.testing.assert_array_equal(
        IndexedDataset(tmp_path / "wide" / "tokens").tokens, IndexedDataset(tmp_path / "narrow" / "tokens").tokens
    )


def test_progress_is_a_line_where_there_is_no_terminal(
    text: Path,
    tmp_path: Path,
    tokenizer_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare(text, tmp_path / "out", tokenizer_folder, seq_len=8)
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert "MB/s" in err[0]
    assert "201 documents" in err[0]
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 0.0)
    prepare(text, tmp_path / "out", tokenizer_folder, seq_len=8)
    assert len(capsys.readouterr().err.splitlines()) == 2


KILLED = """
import sys, time
from pathlib import Path
from smtrain.data import prepare, sources
from smtrain.data.prepare import prepare as run

def hang(progress):
    print("under way", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    prepare.BLOCK_BYTES = sources.BLOCK_BYTES = 4096
    run(*map(Path, sys.argv[1:]), seq_len=32, workers=2, progress=hang)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")
def test_a_killed_run_leaves_no_process_and_a_rerun_completes_it(
    text: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    out, script = tmp_path / "out", tmp_path / "killed.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(text), str(out), str(tokenizer_folder)]
    root = str(Path(prepare_module.__file__).parents[2])
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": root}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"under way\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    assert len(children) >= 2
    deadline = time.monotonic() + 60
    while any(_alive(child) for child in children):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
    assert not (out / "manifest.json").exists()
    prepare(text, out, tokenizer_folder, seq_len=32, progress=ignore)
    prepare(text, tmp_path / "undisturbed", tokenizer_folder, seq_len=32, progress=ignore)
    contents = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in (out, tmp_path / "undisturbed")]
    assert contents[0] == contents[1]


def _alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
