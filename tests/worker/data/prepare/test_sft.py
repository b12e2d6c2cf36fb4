from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from smtrain.core.errors import DataError
from smtrain.worker.data import resumable
from smtrain.worker.data.clean.holdout import HoldOut
from smtrain.worker.data.indexed import IndexedDataset
from smtrain.worker.data.load.loader import TokenLoader
from smtrain.worker.data.load.order import Packing
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.pack.exchange import export_blocks
from smtrain.worker.data.part_uploads import PartUploads
from smtrain.worker.data.prepare import sft as sft_module
from smtrain.worker.data.prepare.progress import DataProgress
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.data.read import blocks
from smtrain.worker.data.resumable import Journal
from smtrain.worker.data.summary import inspect
from tests.typed import typed as smtrain
from tests.worker.data.chats import talk, tokenizer, write
from tests.worker.data.interruptions import resumes_after_every_block
from tests.worker.data.quiet import prepare_sft

SEQ_LEN = 63


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: tokenizer(tmp_path_factory.mktemp("tok"), name)
        for name in ("chatml", "marked", "thinking")
    }


def prepared(
    source: Path, output: Path, folder: Path, said: list[str] | None = None, **more: Any
) -> DatasetManifest:
    say = (said if said is not None else []).append
    return prepare_sft(source, output, folder, **{"seq_len": SEQ_LEN, "say": say, **more})


def read(output: Path, folder: Path) -> list[tuple[str, str]]:
    """The text of each sample, and of its learned part."""
    from transformers import AutoTokenizer

    words: Any = AutoTokenizer.from_pretrained(folder)
    tokens, mask = IndexedDataset(output / "tokens"), IndexedDataset(output / "tokens_mask")
    assert len(tokens) == len(mask)
    assert tokens.lengths.tolist() == mask.lengths.tolist()
    return [
        (words.decode(tokens[i]), words.decode(tokens[i][mask[i] == 1])) for i in range(len(tokens))
    ]


def test_samples_lie_beside_what_is_learned_of_them(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    rows = [
        {"messages": talk("hi", "ho", "and?", "so.")},
        {"instruction": "what", "output": "this"},
    ]
    manifest = prepared(write(tmp_path / "in/a.jsonl", rows), tmp_path / "out", folders["chatml"])
    assert read(tmp_path / "out", folders["chatml"]) == [
        (
            (
                "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n"
                "<|im_start|>assistant\nso.<|im_end|>\n"
            ),
            "ho<|im_end|>so.<|im_end|>",
        ),
        (
            "<|im_start|>user\nwhat<|im_end|>\n<|im_start|>assistant\nthis<|im_end|>\n",
            "this<|im_end|>",
        ),
    ]
    assert manifest == DatasetManifest.load(tmp_path / "out")
    assert (manifest.objective, manifest.samples, manifest.documents) == ("sft", 2, 2)
    names = [
        f"{name}{end}" for name in ("tokens", "tokens_mask") for end in (".bin", ".idx", ".sums")
    ]
    assert sorted(manifest.files) == names
    assert IndexedDataset(tmp_path / "out/tokens_mask").dtype == np.uint8


def test_what_is_learned_is_what_transformers_masks(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    from transformers import AutoTokenizer

    chats = [
        talk("what is it", "the answer"),
        talk("hi", " the  question", "so", "user?\n", system="assist"),
    ]
    prepared(
        write(tmp_path / "a.jsonl", [{"messages": c} for c in chats]),
        tmp_path / "out",
        folders["marked"],
    )
    tokens, mask = (IndexedDataset(tmp_path / "out" / name) for name in ("tokens", "tokens_mask"))
    theirs: Any = AutoTokenizer.from_pretrained(folders["marked"])
    for i, chat in enumerate(chats):
        expected = theirs.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True
        )
        assert tokens[i].tolist() == expected["input_ids"]
        assert mask[i].tolist() == expected["assistant_masks"]


def test_parquet_arrow_and_gzip_say_the_same_as_jsonl(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"conversations": [{"from": "human", "value": f"q {i}"}, {"from": "gpt", "value": "a"}]}
        for i in range(9)
    ]
    table = pa.Table.from_pylist(rows)
    plain = write(tmp_path / "jsonl/a.jsonl", rows)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=4)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    made = []
    for name in ("jsonl/a.jsonl", "a.parquet", "a.arrow", "b.jsonl.gz"):
        prepared(tmp_path / name, tmp_path / "out", folders["chatml"], format="messages")
        made.append(
            [
                (tmp_path / "out" / f).read_bytes()
                for f in ("tokens.bin", "tokens.idx", "tokens_mask.bin")
            ]
        )
    assert made[0][0]
    assert made == [made[0]] * 4


def test_what_a_killed_run_left_is_cleared_and_two_runs_do_not_write_one_folder(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    source = write(tmp_path / "a.jsonl", [{"messages": talk("a", "b")}] * 9)
    prepared(source, tmp_path / "out", folders["chatml"])
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    journal = Journal(tmp_path / "out/.tokens.partial")
    (journal.folder / "tokens.bin").write_bytes(b"half a token")
    with pytest.raises(DataError, match="is being written by another process"):
        prepared(source, tmp_path / "out", folders["chatml"])
    journal.close(remove=False)
    prepared(source, tmp_path / "out", folders["chatml"])
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == wanted


@pytest.mark.full
def test_the_bytes_are_the_same_whatever_the_number_of_workers(
    tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (blocks, sft_module):
        monkeypatch.setattr(module, "BLOCK_BYTES", 4096)
    rows: list[Any] = [
        {"messages": talk(f"question {i}", "x" * (i % 90), "more", "so")} for i in range(150)
    ]
    rows[70] = {"messages": "none"}
    made = []
    for workers in (1, 2):
        prepared(
            write(tmp_path / "in/a.jsonl", rows),
            tmp_path / "out",
            folders["chatml"],
            workers=workers,
            max_bad=1,
        )
        made.append({p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()})
    assert made[0] == made[1]
    assert DatasetManifest.load(tmp_path / "out").bad_lines == [
        "a.jsonl, line 71: 'messages' is not a list of objects"
    ]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "from parts"])
def test_interrupted_after_any_block_it_goes_on_to_the_same_bytes(
    tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """Interrupt at every mark, with bad records, dropped samples and a second file before and after
    it.
    """
    for module in (blocks, sft_module):
        monkeypatch.setattr(module, "BLOCK_BYTES", 512)
    monkeypatch.setattr(resumable, "MARK_BYTES", 1)
    rows: list[Any] = [
        {"messages": talk(f"question {i}", "answer " * (i % 40))} for i in range(1, 12)
    ]
    for name in ("a", "b"):
        write(tmp_path / f"in/{name}.jsonl", [*rows, {"messages": "none"}, *rows[:4]])

    def run(out: Path, progress: Callable[[DataProgress], None]) -> None:
        copies = PartUploads(tmp_path / "parts", 1) if elsewhere else None
        options: dict[str, Any] = {
            "overlong": "drop",
            "max_bad": 2,
            "workers": 1,
            "progress": progress,
            "parts": copies,
        }
        prepared(tmp_path / "in", out, folders["chatml"], **options)

    def lost() -> None:
        if elsewhere:
            shutil.rmtree(tmp_path / "out")

    resumes_after_every_block(run, tmp_path, 4, lost)
    assert not list(tmp_path.glob("parts/*"))


def test_bad_records_are_told_with_file_and_line(tmp_path: Path, folders: dict[str, Path]) -> None:
    good = {"messages": talk("a", "b")}
    write(tmp_path / "in/a.jsonl", [good, {"text": "x"}, good])
    write(tmp_path / "in/b.jsonl", [good, {"messages": talk("unanswered")}])
    with pytest.raises(
        DataError, match=r"a\.jsonl, line 2: no column .*; 1 bad record so far and max_bad is 0"
    ):
        prepared(tmp_path / "in", tmp_path / "out", folders["chatml"])
    assert not (tmp_path / "out").exists()
    manifest = prepared(tmp_path / "in", tmp_path / "out", folders["chatml"], max_bad=2)
    assert (manifest.samples, manifest.bad_line_count) == (3, 2)
    assert manifest.bad_lines[1] == "b.jsonl, line 2: no answer of the assistant to a user"
    assert [(s["name"], s["documents"]) for s in manifest.sources] == [
        ("a.jsonl", 2),
        ("b.jsonl", 1),
    ]


def test_what_is_too_long_is_cut_or_dropped_and_said(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    rows = [
        {"messages": talk("short", "one")},
        {"messages": talk("short", "long " * 90)},
        {"messages": talk("long " * 90, "unseen")},
    ]
    source = write(tmp_path / "a.jsonl", rows)
    said: list[str] = []
    manifest = prepared(source, tmp_path / "out", folders["chatml"], said)
    assert IndexedDataset(tmp_path / "out/tokens").lengths[1] == SEQ_LEN + 1
    assert manifest.samples == 2
    assert manifest.dropped == {"samples without an answer in seq_len + 1 tokens": 1}
    assert "prepare: 2 samples cut to seq_len + 1 tokens" in said
    said.clear()
    manifest = prepared(source, tmp_path / "out", folders["chatml"], said, overlong="drop")
    assert (manifest.samples, manifest.dropped) == (
        1,
        {"samples longer than seq_len + 1 tokens": 2},
    )
    assert "prepare: 2 samples longer than seq_len + 1 tokens" in said
    with pytest.raises(
        DataError, match=r"gives no sample \(1 samples longer than seq_len \+ 1 tokens\); give"
    ):
        prepared(
            write(tmp_path / "b.jsonl", rows[1:2]),
            tmp_path / "none",
            folders["chatml"],
            overlong="drop",
        )


def test_a_conversation_that_became_several_samples_is_said(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    source = write(tmp_path / "a.jsonl", [{"messages": talk("a", "b", "c", "d")}])
    said: list[str] = []
    manifest = prepared(source, tmp_path / "out", folders["thinking"], said)
    assert "prepare: 1 conversations that became a sample for each answer" in said
    assert manifest.samples == 2


def test_text_without_records_is_refused(tmp_path: Path, folders: dict[str, Path]) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(
        DataError, match=r"notes\.txt is plain text, and train\.objective: sft learns from records"
    ):
        prepared(tmp_path, tmp_path / "out", folders["chatml"])


# Loading


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    rows = [
        {"messages": talk(f"what is {i}", "so " * (i * 7 % 23), "and", str(i))} for i in range(40)
    ]
    prepared(write(folder / "a.jsonl", rows), folder / "out", folders["chatml"])
    return folder / "out"


def load(data: Path, batch: int, rank: int = 0, size: int = 1, **more: int) -> TokenLoader:
    options: dict[str, Any] = {"seq_len": SEQ_LEN, "seed": 5, "vocab_size": 512, **more}
    return TokenLoader(data, global_batch_size=batch, dp_rank=rank, dp_size=size, **options)


def samples_in(batch: tuple[torch.Tensor, ...]) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of every sample, without padding."""
    rows = []
    for ids, labels, segments in zip(*batch, strict=True):
        for number in segments.unique().tolist():
            at = segments == number
            if (labels[at] != -100).any():
                rows.append((ids[at].tolist(), labels[at].tolist()))
    return rows


def test_a_row_is_whole_samples_whose_answers_are_labels(data: Path) -> None:
    loader = load(data, 4)
    batch = loader.batch(0)
    tokens, mask = IndexedDataset(data / "tokens"), IndexedDataset(data / "tokens_mask")
    packing = Packing(5, np.array(tokens.lengths) - 1, SEQ_LEN)
    wanted = []
    for row in range(4):
        for sample in packing.row(row):
            ids, learned = tokens[sample].astype(int), mask[sample]
            wanted.append((ids[:-1].tolist(), np.where(learned[1:] == 1, ids[1:], -100).tolist()))
    assert samples_in(batch) == wanted
    assert all(x.shape == (4, SEQ_LEN) and x.dtype == torch.int64 for x in batch)
    for ids, labels, segments in zip(*batch, strict=True):
        used = sum(len(i) for i, _ in samples_in((ids[None], labels[None], segments[None])))
        assert (labels[used:] == -100).all()
        assert (ids[used:] == loader.manifest.eos_id).all()
        assert used == SEQ_LEN or len(segments[used:].unique()) == 1
        assert (segments.diff() >= 0).all()
    loader.close()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_all_ranks_over_an_epoch_see_every_sample_once(data: Path, size: int) -> None:
    loaders = [load(data, size * 2, rank, size) for rank in range(size)]
    total = loaders[0].manifest.samples
    seen: list[Any] = []
    consumed = 0
    while len(seen) < 2 * total:
        for loader in loaders:
            seen += samples_in(loader.batch(consumed))
        consumed += size * 2
    one = sorted(seen[:total])
    assert one == sorted(seen[total : 2 * total])
    assert len({str(sample) for sample in one}) == total
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("start", [0, 17, 100])
def test_another_number_of_ranks_continues_exactly(data: Path, start: int) -> None:
    consumed = start
    for size in (1, 8, 3, 4, 6, 2, 12):
        loaders = [load(data, 24, rank, size) for rank in range(size)]
        whole = load(data, 24)
        for _ in range(2):  # through the read-ahead
            parts = [loader.batch(consumed) for loader in loaders]
            for ours, theirs in zip(zip(*parts, strict=True), whole.batch(consumed), strict=True):
                assert torch.equal(torch.cat(ours), theirs)
            consumed += 24
        for loader in [*loaders, whole]:
            loader.close()


def test_what_does_not_fit_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"seq_len {SEQ_LEN} and train\.seq_len is 64"):
        load(data, 2, seq_len=64)
    with pytest.raises(
        DataError, match=r"prepared for train\.objective: sft and it is pretrain here"
    ):
        DatasetManifest.load(data).check_objective(data, "pretrain")
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in data.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    loader = load(copy, 24)
    os.truncate(copy / "tokens_mask.bin", 9)
    with pytest.raises(DataError, match=r"tokens_mask\.bin became shorter"):
        loader.batch(0)
    loader.close()
    with pytest.raises(DataError, match=r"tokens_mask\.bin has 9 bytes"):
        load(copy, 2)
    shutil.copy(data / "tokens_mask.bin", copy)
    os.truncate(copy / "tokens.idx", 50)
    with pytest.raises(DataError, match=r"tokens\.idx has 50 bytes and its checksums are of"):
        load(copy, 2)


def test_it_is_described_and_not_taken_apart(data: Path, tmp_path: Path) -> None:
    tokens, mask = IndexedDataset(data / "tokens"), IndexedDataset(data / "tokens_mask")
    facts = inspect(data).facts
    packing, rows = Packing(0, np.array(tokens.lengths) - 1, SEQ_LEN), facts["rows_an_epoch"]
    assert sorted(s for row in range(rows) for s in packing.row(row)) == list(range(len(tokens)))
    assert facts["rows_filled"] == round((len(tokens.tokens) - len(tokens)) / (rows * SEQ_LEN), 4)
    assert facts["learned_tokens"] == mask.tokens.sum()
    with pytest.raises(DataError, match="marked in separate files"):
        export_blocks(data, tmp_path / "blocks", 16)


def test_in_a_shell(tmp_path: Path, folders: dict[str, Path]) -> None:
    source = write(
        tmp_path / "a.jsonl",
        [{"messages": talk("a", "b " * 90)}, {"instruction": "a", "output": "b"}],
    )
    common = ("--model", str(folders["chatml"]), "--objective", "sft", "--seq-len", "32")
    done = smtrain("data", "prepare", str(source), str(tmp_path / "cut"), *common)
    assert done.returncode == 0, done.stderr
    assert "2 documents" in done.stdout
    done = smtrain(
        "data", "prepare", str(source), str(tmp_path / "fit"), *common, "--overlong", "drop"
    )
    assert "left out: 1 samples longer than seq_len + 1 tokens" in done.stdout
    assert "rows filled" in smtrain("data", "inspect", str(tmp_path / "fit")).stdout
    done = smtrain(
        "data", "prepare", str(source), str(tmp_path / "x"), *common, "--objective", "rl"
    )
    assert done.stderr.startswith(
        "smtrain: --objective: got 'rl'; it is 'pretrain', 'sft' or 'dpo'"
    )


def test_a_file_may_be_given_twice(tmp_path: Path, folders: dict[str, Path]) -> None:
    source = write(tmp_path / "a.jsonl", [{"messages": talk("a", "b")}] * 9)
    options, said = PrepareOptions(seq_len=SEQ_LEN), list[str]()
    twice = sft_module.prepare_sft(
        [source, source], tmp_path / "twice", folders["chatml"], options, say=said.append
    )
    assert [row["documents"] for row in twice.sources] == [9, 9]
    held = prepared(source, tmp_path / "held", folders["chatml"], holdout=HoldOut(path=source))
    assert held.validation
    assert (held.samples, held.validation["samples"]) == (9, 9)
