"""Held-out documents are chosen from the text only, never trained on, and the same for every
mixture.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from smtrain.core.errors import DataError
from smtrain.core.model.footprint import IGNORED_LABEL
from smtrain.worker.data import resumable
from smtrain.worker.data.clean.holdout import HoldOut
from smtrain.worker.data.indexed import IndexedDataset
from smtrain.worker.data.load.heldout import HeldOut
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.read import blocks
from tests.worker.data.chats import tokenizer as chat_tokenizer
from tests.worker.data.interruptions import resumes_after_every_block
from tests.worker.data.quiet import prepare, prepare_sft
from tests.worker.data.writer import IndexedWriter

TENTH = HoldOut(fraction=0.1)


def documents(folder: Path, name: str, texts: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts(prefix: Path, tokenizer: Path) -> list[str]:
    words, data = Tokenizer.from_file(str(tokenizer / "tokenizer.json")), IndexedDataset(prefix)
    return [words.decode(data[i][:-1].tolist()) for i in range(len(data))]


def quietly(source: Any, output: Path, tokenizer: Path, **options: Any) -> DatasetManifest:
    return prepare(source, output, tokenizer, **{"seq_len": 32, **options})


@pytest.fixture
def many(tmp_path: Path) -> list[str]:
    return [f"the small text number {i} of words" for i in range(400)]


def test_a_share_of_the_documents_is_held_out_and_the_rest_is_trained_on(
    tmp_path: Path, many: list[str], tokenizer_folder: Path
) -> None:
    source = documents(tmp_path / "in", "a", many)
    manifest = quietly(source, tmp_path / "out", tokenizer_folder, holdout=TENTH)
    trained = texts(tmp_path / "out/tokens", tokenizer_folder)
    held_out = texts(tmp_path / "out/validation", tokenizer_folder)
    assert sorted(trained + held_out) == sorted(many)
    assert 20 <= len(held_out) <= 60
    assert manifest.validation is not None
    assert (manifest.documents, manifest.validation["documents"]) == (len(trained), len(held_out))
    assert manifest.tokens == len(IndexedDataset(tmp_path / "out/tokens").tokens)
    assert manifest == DatasetManifest.load(tmp_path / "out")
    assert "validation.bin" in manifest.files
    assert "validation.bin" not in manifest.content


def test_a_document_falls_on_the_same_side_whatever_stands_around_it(
    tmp_path: Path, many: list[str], tokenizer_folder: Path
) -> None:
    alone = documents(tmp_path / "in", "a", many)
    others = documents(
        tmp_path / "in", "b", [f"other words {i} of a text" for i in range(300)] + many[100:200]
    )
    turned = documents(tmp_path / "in", "c", many[::-1])
    quietly(alone, tmp_path / "alone", tokenizer_folder, holdout=TENTH)
    quietly(
        [others, turned], tmp_path / "mixed", tokenizer_folder, holdout=TENTH, seq_len=16, workers=1
    )
    held_out = set(texts(tmp_path / "alone/validation", tokenizer_folder))
    mixed = texts(tmp_path / "mixed/validation", tokenizer_folder)
    assert {text for text in mixed if text in set(many)} == held_out
    for part in ("tokens_0", "tokens_1"):
        assert not held_out & set(texts(tmp_path / "mixed" / part, tokenizer_folder))


def test_other_text_can_be_named_and_is_not_trained_on(
    tmp_path: Path, many: list[str], tokenizer_folder: Path
) -> None:
    sources = [
        documents(tmp_path / "in", "a", many[:200]),
        documents(tmp_path / "in", "b", many[200:]),
    ]
    other = documents(tmp_path / "other", "v", ["quite another text of words"] * 3)
    manifest = quietly(sources, tmp_path / "out", tokenizer_folder, holdout=HoldOut(path=other))
    assert (
        texts(tmp_path / "out/validation", tokenizer_folder) == ["quite another text of words"] * 3
    )
    assert [part["documents"] for part in manifest.parts] == [200, 200]
    plain = quietly(sources, tmp_path / "plain", tokenizer_folder)
    assert plain.content == manifest.content, "a resumed run may begin to validate"


@pytest.mark.parametrize("holdout", [TENTH, "path"])
def test_an_interrupted_preparation_holds_the_same_documents_out(
    tmp_path: Path,
    many: list[str],
    tokenizer_folder: Path,
    holdout: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(resumable, "MARK_BYTES", 1)
    source = documents(tmp_path / "in", "a", many)
    chosen = (
        holdout
        if isinstance(holdout, HoldOut)
        else HoldOut(path=documents(tmp_path / "v", "v", many[:150]))
    )

    def run(out: Path, progress: Any) -> None:
        quietly(source, out, tokenizer_folder, holdout=chosen, progress=progress, workers=1)

    resumes_after_every_block(run, tmp_path / "runs", least=3)


@pytest.mark.parametrize(
    ("fraction", "sentence"),
    [
        (1e-9, "holds out 0 of 400 documents"),
        (1 - 1e-9, "without 400 that train.validation.fraction holds out"),
    ],
)
def test_a_split_that_leaves_one_side_empty_is_refused_and_leaves_nothing(
    tmp_path: Path, many: list[str], tokenizer_folder: Path, fraction: float, sentence: str
) -> None:
    source = documents(tmp_path / "in", "a", many)
    with pytest.raises(DataError, match=sentence):
        quietly(source, tmp_path / "out", tokenizer_folder, holdout=HoldOut(fraction=fraction))
    assert not (tmp_path / "out").exists()


def test_megatrons_split_goes_by_the_order_of_the_documents(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    lengths = [5 + i % 7 for i in range(205)]
    with IndexedWriter(tmp_path / "theirs.bin", tmp_path / "theirs.idx", np.uint16) as writer:
        for number, length in enumerate(lengths):
            writer.add_document([np.full(length, number % 250, np.uint16)])
    shares = HoldOut(split=(0.8, 0.15, 0.05))
    manifest = quietly(
        tmp_path / "theirs.bin",
        tmp_path / "out",
        tokenizer_folder,
        holdout=shares,
        format="megatron",
    )
    # Megatron: int(round(share * documents)) of the cumulated shares
    first, second = round(0.8 * 205), round(0.95 * 205)
    data, held_out = (
        IndexedDataset(tmp_path / "out/tokens"),
        IndexedDataset(tmp_path / "out/validation"),
    )
    assert data.lengths.tolist() == lengths[:first]
    assert held_out.lengths.tolist() == lengths[first:second]
    assert int(held_out[0][0]) == first
    assert manifest.dropped == {"in the test part of train.validation.split": 205 - second}
    source = documents(tmp_path / "in", "a", ["a text of words " * 30])
    with pytest.raises(DataError, match="is no Megatron pair"):
        quietly(source, tmp_path / "text", tokenizer_folder, holdout=shares)


def test_conversations_are_held_out_whole(tmp_path: Path) -> None:
    words = chat_tokenizer(tmp_path / "tokenizer", "chatml")
    rows = [{"instruction": f"question {i}", "output": f"answer {i}"} for i in range(200)]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = prepare_sft(source, tmp_path / "out", words, seq_len=64, holdout=TENTH)
    assert manifest.validation is not None
    held_out, mask = (
        IndexedDataset(tmp_path / "out" / name) for name in ("validation", "validation_mask")
    )
    assert held_out.lengths.tolist() == mask.lengths.tolist()
    assert (manifest.samples, len(held_out)) == (
        200 - len(held_out),
        manifest.validation["samples"],
    )
    assert 5 <= len(held_out) <= 40
    every = prepare_sft(source, tmp_path / "all", words, seq_len=64)
    assert every.validation is None
    whole = IndexedDataset(tmp_path / "all/tokens")
    known = {tuple(whole[i].tolist()) for i in range(len(whole))}
    data = IndexedDataset(tmp_path / "out/tokens")
    sides = [{tuple(one[i].tolist()) for i in range(len(one))} for one in (data, held_out)]
    assert sides[0] | sides[1] == known
    assert not sides[0] & sides[1]
    for fraction, words_ in (
        (1e-9, "holds out 0 of 200 samples"),
        (1 - 1e-9, "holds out all 200 samples"),
    ):
        with pytest.raises(DataError, match=words_):
            prepare_sft(
                source, tmp_path / "none", words, seq_len=64, holdout=HoldOut(fraction=fraction)
            )


def rows_of(folder: Path, batch: int, ranks: int, **more: Any) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of every row with labels, of all ranks."""
    rows = []
    for rank in range(ranks):
        held_out = HeldOut(
            folder, seq_len=32, global_batch_size=batch, dp_rank=rank, dp_size=ranks, **more
        )
        for number in range(held_out.batches):
            ids, labels, *_ = held_out.batch(number)
            assert ids.shape == (batch // ranks, 32)
            rows += [
                (i.tolist(), one.tolist())
                for i, one in zip(ids, labels, strict=True)
                if (one != IGNORED_LABEL).any()
            ]
        held_out.close()
    return sorted(rows)


def test_every_held_out_token_is_judged_once_by_any_number_of_ranks(
    tmp_path: Path, many: list[str], tokenizer_folder: Path
) -> None:
    quietly(
        documents(tmp_path / "in", "a", many), tmp_path / "out", tokenizer_folder, holdout=TENTH
    )
    tokens = IndexedDataset(tmp_path / "out/validation").tokens
    rows = rows_of(tmp_path / "out", batch=8, ranks=1)
    assert (
        rows
        == rows_of(tmp_path / "out", batch=8, ranks=4)
        == rows_of(tmp_path / "out", batch=6, ranks=2)
    )
    counted = sum(label != IGNORED_LABEL for _, labels in rows for label in labels)
    assert counted == len(tokens) - 1
    assert sorted(
        label for _, labels in rows for label in labels if label != IGNORED_LABEL
    ) == sorted(tokens[1:].tolist())
    few = rows_of(tmp_path / "out", batch=4, ranks=2, count=2)
    assert len(few) == 8
    assert all(row in rows for row in few)


def test_documents_are_kept_apart_where_the_training_does(
    tmp_path: Path, many: list[str], tokenizer_folder: Path
) -> None:
    quietly(
        documents(tmp_path / "in", "a", many), tmp_path / "out", tokenizer_folder, holdout=TENTH
    )
    held_out = HeldOut(
        tmp_path / "out", seq_len=32, global_batch_size=2, dp_rank=0, dp_size=1, document_mask=True
    )
    end = DatasetManifest.load(tmp_path / "out").eos_id
    seen = 0
    for number in range(held_out.batches):
        ids, labels, segments = held_out.batch(number)
        after = torch.zeros_like(segments, dtype=torch.bool)
        after[:, 1:] = segments[:, 1:] != segments[:, :-1]
        real = labels != IGNORED_LABEL
        assert end is not None
        assert torch.all(ids[:, :-1][after[:, 1:] & real[:, 1:]] == end)
        assert torch.all(labels[ids == end] == IGNORED_LABEL)
        seen += int(after.sum())
    held_out.close()
    assert seen


def test_data_without_a_held_out_part_says_how_to_get_one(
    tmp_path: Path, many: list[str], tokenizer_folder: Path
) -> None:
    quietly(documents(tmp_path / "in", "a", many), tmp_path / "out", tokenizer_folder)
    with pytest.raises(DataError, match="was prepared without a held-out part"):
        HeldOut(tmp_path / "out", seq_len=32, global_batch_size=2, dp_rank=0, dp_size=1)
