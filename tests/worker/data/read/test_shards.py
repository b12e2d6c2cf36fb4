"""A large corpus is a set of pairs of files that reads as the one pair of a small one."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from smtrain.cli.data import app
from smtrain.core.errors import DataError, SmtrainError
from smtrain.worker.data import summary
from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.clean.holdout import HoldOut
from smtrain.worker.data.load.heldout import HeldOut
from smtrain.worker.data.load.loader import TokenLoader
from smtrain.worker.data.load.rows import SampleRows, rows_of
from smtrain.worker.data.manifest import DatasetManifest, shards_of
from smtrain.worker.data.pack.exchange import export_blocks, import_tokens, merge, prefixes, split
from smtrain.worker.data.prepare.prepare import prepare
from smtrain.worker.data.prepare.progress import DataProgress
from smtrain.worker.data.prepare.sft import prepare_sft
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.data.read import blocks
from tests.worker.data.corpora import conversations, corpus, digest
from tests.worker.data.interruptions import resumes_after_every_block

OPTIONS = PrepareOptions(
    seq_len=8,
    cleaning=Cleaning(deduplicate=True, min_characters=2),
    workers=2,
    holdout=HoldOut(fraction=0.2),
    max_bad=999,
    shard_bytes=1 << 20,
)


def ignore(_: object) -> None:
    pass


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """The same text and instruction data in one pair and in shards of 1 and 3 blocks."""
    folder = tmp_path_factory.mktemp("shards")
    sources = corpus(folder / "text", random.Random(4))
    model, talk = conversations(folder, tokenizer_folder)
    patch = pytest.MonkeyPatch()
    patch.setattr(blocks, "BLOCK_BYTES", 256)
    for name, size in (("one", 1 << 20), ("small", 512), ("large", 3000)):
        options = dataclasses.replace(OPTIONS, shard_bytes=size)
        prepare(sources, folder / name, tokenizer_folder, options, progress=ignore, say=ignore)
        options = dataclasses.replace(options, seq_len=24, workers=1, cleaning=Cleaning())
        prepare_sft(talk, folder / f"sft-{name}", model, options, progress=ignore, say=ignore)
    patch.undo()
    return folder


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_set_merges_to_the_bytes_of_one_pair(made: Path, size: str, tmp_path: Path) -> None:
    one, many = DatasetManifest.load(made / "one"), DatasetManifest.load(made / size)
    assert one.validation
    assert many.validation
    rows = [*zip(one.parts, many.parts, strict=True), (one.validation, many.validation)]
    for row, shards in rows:
        names = shards_of(shards)
        assert len(names) > 1
        assert [shard.prefix for shard in shards_of(row)] == [row["prefix"]]
        merge([made / size / shard.prefix for shard in names], tmp_path / row["prefix"])
        for end in (".bin", ".idx", ".sums"):
            assert (tmp_path / f"{row['prefix']}{end}").read_bytes() == (
                made / "one" / f"{row['prefix']}{end}"
            ).read_bytes()
        assert {key: value for key, value in shards.items() if key != "shards"} == row
    shared = [dataclasses.replace(it, files={}, parts=[], validation=None) for it in (one, many)]
    assert shared[0] == shared[1]
    assert set(many.files) == {path.name for path in (made / size).iterdir()} - {"manifest.json"}


def run(*words: object) -> str:
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("size", ["small", "large"])
def test_merge_keeps_marks_of_answers_and_what_is_held_out(
    made: Path, size: str, tmp_path: Path
) -> None:
    assert "held out for validation" in run("merge", made / f"sft-{size}", tmp_path / "sft")
    assert contents(tmp_path / "sft") == contents(made / "sft-one")
    run("merge", made / size, tmp_path / "text")
    for end in (".bin", ".idx", ".sums"):
        assert (tmp_path / f"text_validation{end}").read_bytes() == (
            made / f"one/validation{end}"
        ).read_bytes()


def test_merged_instruction_data_trains_as_the_parts_one_after_another(
    made: Path, tmp_path: Path
) -> None:
    run("merge", made / "sft-small", made / "sft-one", tmp_path / "both")
    one, both = DatasetManifest.load(made / "sft-one"), DatasetManifest.load(tmp_path / "both")
    assert both.validation
    assert one.validation
    assert (both.samples, both.validation["samples"]) == (
        2 * one.samples,
        2 * one.validation["samples"],
    )
    assert both.bad_line_count == 2 * one.bad_line_count > 0
    assert summary.inspect(tmp_path / "both").facts["learned_tokens"] == (
        2 * summary.inspect(made / "sft-one").facts["learned_tokens"]
    )
    rows = [
        rows_of(folder, about, 24, 0)
        for folder, about in ((made / "sft-one", one), (tmp_path / "both", both))
    ]
    assert isinstance(rows[0], SampleRows)
    assert isinstance(rows[1], SampleRows)
    for number in range(one.samples):
        wanted = rows[0].samples.sample(number)
        for copy in (number, one.samples + number):
            tokens, learned = rows[1].samples.sample(copy)
            assert np.array_equal(tokens, wanted[0])
            assert np.array_equal(learned, wanted[1])
    for row in rows:
        row.close()
    held = HeldOut(tmp_path / "both", seq_len=24, global_batch_size=4, dp_rank=0, dp_size=1)
    held.batch(0)
    held.close()


def test_marks_and_held_out_documents_are_not_lost_without_a_word(
    made: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    for source in (made / "sft-small", made / "sft-small/tokens", made / "sft-one/tokens"):
        with pytest.raises(DataError, match="answers are marked in separate files"):
            split(prefixes(source)[0], tmp_path / "part", [1, 1])
        with pytest.raises(DataError, match="answers are marked in separate files"):
            export_blocks(source, tmp_path / "blocks", 8)
        if source.name == "tokens":
            with pytest.raises(DataError, match="answers are marked in separate files"):
                import_tokens(source, tmp_path / "import", tokenizer_folder, 8)
    for words, why in (
        ((made / "sft-one", made / "sft-small/tokens", tmp_path / "x"), "name folders that"),
        (
            (made / "sft-one", made / "one", tmp_path / "x"),
            "was prepared with objective sft and .* with pretrain",
        ),
        (
            (made / "sft-one", made / "sft-small", made / "sft-one"),
            "is one of the folders to merge",
        ),
    ):
        result = CliRunner().invoke(app, ["merge", *map(str, words)])
        assert isinstance(result.exception, SmtrainError)
        assert re.search(why, str(result.exception))
    assert not (tmp_path / "x").exists()
    for name, documents in (("one", "documents"), ("small", "documents"), ("sft-large", "samples")):
        said: list[str] = []
        manifest = DatasetManifest.load(made / name)
        read = prepare(
            made / name,
            tmp_path / name,
            tokenizer_folder,
            PrepareOptions(seq_len=8),
            progress=ignore,
            say=said.append,
        )
        assert read.documents == getattr(manifest, documents), "no masks, no validation"
        assert any("held out for validation" in line for line in said)
        assert ("sequences with marks of their answers" in read.unread) is name.startswith("sft")


def test_every_loader_reads_a_set_as_one_dataset(made: Path) -> None:
    def loader(folder: Path, masked: bool = False) -> TokenLoader:
        return TokenLoader(
            folder,
            seq_len=8,
            global_batch_size=6,
            dp_rank=1,
            dp_size=2,
            seed=3,
            vocab_size=512,
            weights=(1, 2),
            document_mask=masked,
        )

    for name in ("small", "large"):
        folders = (made / "one", made / name)
        same([loader(folder) for folder in folders], [0, 6, 12, 600])
        same([loader(folder, masked=True) for folder in folders], [0, 6, 12, 600])
        packed = [
            TokenLoader(
                made / f,
                seq_len=24,
                global_batch_size=4,
                dp_rank=0,
                dp_size=1,
                seed=3,
                vocab_size=512,
            )
            for f in ("sft-one", f"sft-{name}")
        ]
        same(packed, [0, 4, 40])
        for masked, kind, length in ((False, "", 8), (True, "", 8), (False, "sft-", 24)):
            held = [
                HeldOut(
                    made / f,
                    seq_len=length,
                    global_batch_size=4,
                    dp_rank=0,
                    dp_size=1,
                    document_mask=masked,
                )
                for f in (f"{kind}one", f"{kind}{name}")
            ]
            assert held[0].batches == held[1].batches > 1
            same(held, range(held[0].batches))


def same(readers: Sequence[Any], places: Iterable[int]) -> None:
    for place in places:
        for first, second in zip(readers[0].batch(place), readers[1].batch(place), strict=True):
            assert torch.equal(first, second)
    for reader in readers:
        reader.close()


def test_the_commands_read_a_set_as_one_dataset(
    made: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    for name in ("small", "large"):
        for kind in ("", "sft-"):
            one, many = (
                summary.inspect(made / f"{kind}one"),
                summary.inspect(made / f"{kind}{name}"),
            )
            assert many.facts.pop("shards") > 2
            assert many.facts == one.facts
            assert np.array_equal(one.counts, many.counts)
        export_blocks(made / "one", tmp_path / name / "one", 8)
        export_blocks(made / name, tmp_path / name / "many", 8)
        assert digest(tmp_path / name / "one") == digest(tmp_path / name / "many")
        for number in range(2):
            pairs, whole = prefixes(made / name)[number], made / "one" / f"tokens_{number}"
            assert prefixes(made / name / f"tokens_{number}") == [pairs], "without the manifest too"
            split(whole, tmp_path / name / "a" / "x", [2, 1])
            split(pairs, tmp_path / name / "b" / "x", [2, 1], overwrite=True)
            assert digest(tmp_path / name / "a") == digest(tmp_path / name / "b")
            for path in (tmp_path / name / "a").iterdir():
                path.unlink()
            imported = [
                import_tokens(
                    source, tmp_path / name / f"import-{i}", tokenizer_folder, 8, overwrite=True
                )
                for i, source in enumerate((whole, made / name / f"tokens_{number}"))
            ]
            assert imported[0].files == imported[1].files


def test_a_set_resumes_after_every_block(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 256)
    monkeypatch.setattr("smtrain.worker.data.resumable.MARK_BYTES", 1)
    rows = "".join(
        f'{{"text": "the words of text {i % 40} and more of them"}}\n' for i in range(60)
    )
    (tmp_path / "a.jsonl").write_text(rows)
    options = dataclasses.replace(OPTIONS, shard_bytes=600, workers=1)

    def run(out: Path, progress: Callable[[DataProgress], None]) -> None:
        prepare(tmp_path / "a.jsonl", out, tokenizer_folder, options, progress=progress, say=ignore)

    resumes_after_every_block(run, tmp_path / "runs", 8)


def test_another_shard_size_leaves_no_file_of_the_set_before(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 256)
    (tmp_path / "a.jsonl").write_text('{"text": "the words of a small text"}\n' * 80)
    for size, count in ((2000, 2), (1 << 30, 1), (1100, 3)):
        options = PrepareOptions(seq_len=8, shard_bytes=size, workers=2)
        made = prepare(
            tmp_path / "a.jsonl",
            tmp_path / "out",
            tokenizer_folder,
            options,
            progress=ignore,
            say=ignore,
        )
        assert {path.name for path in (tmp_path / "out").iterdir()} == {
            *made.files,
            "manifest.json",
        }
        assert len(shards_of(made.parts[0])) == count


def test_a_damaged_or_missing_shard_is_named(made: Path, tmp_path: Path) -> None:
    for path in (made / "large").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    last = tmp_path / f"{shards_of(DatasetManifest.load(tmp_path).parts[1])[-1].prefix}.bin"
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)

    def read() -> None:
        loader = TokenLoader(
            tmp_path, seq_len=8, global_batch_size=8, dp_rank=0, dp_size=1, seed=3, vocab_size=512
        )
        try:
            for place in range(0, loader.samples, 8):
                loader.batch(place)
        finally:
            loader.close()

    with pytest.raises(DataError, match=rf"{last.name} is damaged"):
        read()
    with pytest.raises(DataError, match=rf"{last.name} is damaged"):
        merge(prefixes(tmp_path)[1], tmp_path / "merged")
    last.unlink()
    with pytest.raises(DataError, match=rf"{last.name} cannot be read"):
        read()
