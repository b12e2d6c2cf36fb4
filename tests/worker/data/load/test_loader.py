from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smtrain.core.config.training import Train
from smtrain.core.errors import DataError
from smtrain.worker.data.indexed import IndexedDataset
from smtrain.worker.data.load import loader as loader_module
from smtrain.worker.data.load.loader import TokenLoader
from smtrain.worker.data.load.order import Order, epoch_order
from smtrain.worker.data.load.rows import TextRows
from smtrain.worker.data.manifest import DatasetManifest
from tests.tiers import examples
from tests.worker.data.writer import IndexedWriter, save_manifest

SEQ_LEN = 4


def make(folder: Path, tokens: int, model_vocab_size: int | None = 512) -> Path:
    """A prepared dataset whose tokens count up, so that a window shows its own place."""
    folder.mkdir(exist_ok=True)
    with IndexedWriter(folder / "tokens.bin", folder / "tokens.idx", "uint16") as writer:
        writer.add_documents(np.arange(tokens) % 500, np.array([tokens // 3, tokens - tokens // 3]))
    save_manifest(folder, {"tokens": (2, tokens)}, SEQ_LEN, model_vocab_size)
    return folder


def load(
    folder: Path, batch: int, rank: int = 0, size: int = 1, seed: int = 7, **more: Any
) -> TokenLoader:
    arguments = {"seq_len": SEQ_LEN, "vocab_size": 512} | more
    return TokenLoader(
        folder, global_batch_size=batch, dp_rank=rank, dp_size=size, seed=seed, **arguments
    )


def windows(loader: TokenLoader, consumed: int) -> list[Any]:
    """Part and number of each window of a batch."""
    assert isinstance(loader.rows, TextRows)
    return loader.rows.windows(loader.deal.rank_samples(consumed))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("loader") / "data", 43 * SEQ_LEN + 3)


def global_batch(
    folder: Path, consumed: int, batch: int, size: int, seed: int = 7
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = []
    for rank in range(size):
        loader = load(folder, batch, rank, size, seed)
        parts.append(loader.batch(consumed))
        loader.close()
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def test_a_batch_is_windows_of_the_file_and_the_same_shifted_by_one(folder: Path) -> None:
    loader = load(folder, 6, rank=1, size=2)
    inputs, labels = loader.batch(12)
    loader.close()
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs.shape == labels.shape == (3, SEQ_LEN)
    tokens = IndexedDataset(folder / "tokens").tokens.astype(np.int64)
    for row, sample in enumerate(epoch_order(7, 0, 43)[12 + 3 : 12 + 6]):
        start = sample * SEQ_LEN
        assert inputs[row].tolist() == tokens[start : start + SEQ_LEN].tolist()
        assert labels[row].tolist() == tokens[start + 1 : start + SEQ_LEN + 1].tolist()


@given(
    size=st.integers(1, 8),
    share=st.integers(1, 5),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 2**63),
)
@settings(deadline=None)
def test_all_ranks_over_an_epoch_see_every_sample_once(
    folder: Path, size: int, share: int, epoch: int, seed: int
) -> None:
    batch = size * share
    loaders = [load(folder, batch, rank, size, seed) for rank in range(size)]
    samples = loaders[0].samples
    stream = [
        (consumed + rank * share + i, sample)
        for consumed in range(0, (epoch + 1) * samples, batch)
        for rank, loader in enumerate(loaders)
        for i, sample in enumerate(windows(loader, consumed))
    ]
    assert [index for index, _ in stream] == list(range(len(stream)))
    for e in range(epoch + 1):
        assert sorted(s for _, (_, s) in stream[e * samples : (e + 1) * samples]) == list(
            range(samples)
        )
    for loader in loaders:
        loader.close()


@given(
    size=st.integers(1, 8),
    share=st.integers(1, 5),
    epoch=st.integers(0, 2),
    seed=st.integers(0, 2**63),
)
@settings(deadline=None, max_examples=examples(25))
def test_what_all_ranks_read_over_an_epoch_is_the_dataset_exactly_once(
    folder: Path, size: int, share: int, epoch: int, seed: int
) -> None:
    tokens = IndexedDataset(folder / "tokens").tokens.tolist()
    windows = [tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(43)]
    batch, read = size * share, []
    first = epoch * 43 // batch * batch
    loaders = [load(folder, batch, rank, size, seed) for rank in range(size)]
    for consumed in range(first, (epoch + 1) * 43, batch):
        for loader in loaders:
            inputs, labels = loader.batch(consumed)
            read += torch.cat([inputs, labels[:, -1:]], 1).tolist()
    for loader in loaders:
        loader.close()
    skipped = epoch * 43 - first
    assert sorted(read[skipped : skipped + 43]) == windows


@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    steps=st.integers(1, 3),
    start=st.integers(0, 200),
)
@settings(
    deadline=None,
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_another_number_of_ranks_continues_exactly(
    folder: Path, sizes: list[int], steps: int, start: int
) -> None:
    batch, consumed = math.lcm(*sizes), start
    for size in sizes:
        loaders = [load(folder, batch, rank, size) for rank in range(size)]
        for _ in range(steps):  # through the read-ahead
            parts = [loader.batch(consumed) for loader in loaders]
            whole = global_batch(folder, consumed, batch, 1)
            assert torch.equal(torch.cat([p[0] for p in parts]), whole[0])
            assert torch.equal(torch.cat([p[1] for p in parts]), whole[1])
            consumed += batch
        for loader in loaders:
            loader.close()


def test_batches_that_grow_read_the_samples_in_the_same_order(folder: Path) -> None:
    train = Train(global_batch_size=12, batch_ramp={"start": 4, "increment": 4, "samples": 20})  # type: ignore[arg-type]
    same = load(folder, 4)
    expected = [windows(same, at)[i] for at in range(0, 60, 4) for i in range(4)]
    found, at, sizes = [], 0, []
    ranks = [load(folder, 12, rank, 2, batch_at=train.batch_at) for rank in (0, 1)]
    while at < 48:
        both = [windows(rank, at) for rank in ranks]
        assert [len(rank.batch(at)[0]) for rank in ranks] == [len(one) for one in both]
        found += [sample for one in both for sample in one]
        sizes.append(len(both[0]) * 2)
        at += sizes[-1]
    assert sizes == [4, 4, 4, 8, 12, 12, 12]
    assert found == expected[: len(found)]
    for loader in (same, *ranks):
        loader.close()


def test_the_order_is_frozen() -> None:
    """If this changes, every interrupted run resumes with other samples."""
    assert epoch_order(1234, 0, 10).tolist() == FIRST
    assert epoch_order(1234, 1, 10).tolist() == SECOND
    assert epoch_order(-1, 0, 10).tolist() == epoch_order(2**64 - 1, 0, 10).tolist()


FIRST = [4, 1, 6, 8, 5, 3, 7, 2, 9, 0]
SECOND = [9, 2, 1, 3, 7, 8, 4, 0, 5, 6]


def test_seeds_and_epochs_differ() -> None:
    orders = {
        tuple(epoch_order(seed, epoch, 50).tolist()) for seed in range(4) for epoch in range(4)
    }
    assert len(orders) == 16


def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"seq_len 4 and train\.seq_len is 8"):
        load(folder, 2, seq_len=8)
    with pytest.raises(DataError, match="a model of vocab_size 512 with another tokenizer"):
        load(folder, 2, vocab_size=1000)
    free = make(tmp_path / "free", 100, model_vocab_size=None)
    load(free, 2, vocab_size=1000).close()
    with pytest.raises(DataError, match="token ids up to 499, and the model's vocabulary is 499"):
        load(free, 2, vocab_size=499)


def test_models_that_pad_the_vocabulary_of_one_tokenizer_share_data(tmp_path: Path) -> None:
    """Qwen 2.5 has 151,936 embeddings up to 3B and 152,064 from 7B on."""
    folder, model = make(tmp_path / "data", 100), tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    replace(DatasetManifest.load(folder), tokenizer_sha256=digest).save(folder)
    for size in (500, 512, 1000):
        load(folder, 2, vocab_size=size, model=model).close()
    with pytest.raises(DataError, match="token ids up to 499, and the model's vocabulary is 499"):
        load(folder, 2, vocab_size=499, model=model)
    (model / "tokenizer.json").write_text("{ }")
    with pytest.raises(DataError, match="vocab_size 512 with another tokenizer"):
        load(folder, 2, vocab_size=1000, model=model)


def test_what_is_no_prepared_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a prepared dataset"):
        load(tmp_path, 2)
    folder = make(tmp_path / "data", 100)
    (folder / "tokens.bin").write_bytes(b"12")
    with pytest.raises(DataError, match="has 2 bytes and its manifest says 200"):
        load(folder, 2)
    (folder / "tokens.bin").unlink()
    with pytest.raises(DataError, match=r"tokens\.bin cannot be read"):
        load(folder, 2)
    for content, words in [
        ("{", "cannot be read"),
        ("[]", "holds a list"),
        ('{"format_version": 9}', "9"),
    ]:
        (folder / "manifest.json").write_text(content)
        with pytest.raises(DataError, match=words):
            load(folder, 2)
    (folder / "manifest.json").write_text(json.dumps({"format_version": 1}))
    with pytest.raises(DataError, match="lacks append_eod"):
        load(folder, 2)


def test_a_file_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    folder = make(tmp_path / "data", 100)
    loader = load(folder, 24)
    os.truncate(folder / "tokens.bin", 10)
    with pytest.raises(DataError, match="became shorter"):
        loader.batch(0)
    loader.close()


def mixed(folder: Path, sizes: list[int]) -> Path:
    """A dataset of several parts; token 0 of a window is 100 * part + its number (below 100)."""
    folder.mkdir()
    parts = {}
    for i, samples in enumerate(sizes):
        tokens = np.repeat(np.arange(samples + 1), SEQ_LEN)[: samples * SEQ_LEN + 1] + 100 * i
        with IndexedWriter(
            folder / f"tokens_{i}.bin", folder / f"tokens_{i}.idx", "uint16"
        ) as writer:
            writer.add_documents(tokens, np.array([len(tokens)]))
        parts[f"tokens_{i}"] = (1, len(tokens))
    save_manifest(folder, parts, SEQ_LEN, 512)
    return folder


def test_several_parts_without_weights_are_one_dataset(tmp_path: Path) -> None:
    folder = mixed(tmp_path / "data", [7, 5, 20])
    loader = load(folder, 8)
    firsts = [int(row[0]) for consumed in range(0, 32, 8) for row in loader.batch(consumed)[0]]
    loader.close()
    assert sorted(firsts) == [*range(7), *range(100, 105), *range(200, 220)]


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.05, 10), min_size=4, max_size=4),
    seed=st.integers(0, 2**64),
)
@settings(deadline=None)
def test_weights_deal_the_samples_and_no_part_repeats_before_it_is_through(
    sizes: list[int], weights: list[float], seed: int
) -> None:
    weights = weights[: len(sizes)]
    order, epochs = Order(seed, sizes, weights), 3
    total = sum(sizes)
    drawn = [order.sample(i) for i in range(epochs * total)]
    for part, size in enumerate(sizes):
        share = weights[part] / sum(weights) * total
        counts = [0] * size
        for epoch in range(epochs):
            here = [s for p, s in drawn[epoch * total : (epoch + 1) * total] if p == part]
            assert abs(len(here) - share) < 1
            for sample in here:
                counts[sample] += 1
        assert max(counts) - min(counts) <= 1


def test_a_weighted_mixture_continues_exactly_on_other_ranks(tmp_path: Path) -> None:
    folder = mixed(tmp_path / "data", [7, 5, 20])
    weights = [5.0, 1.0, 1.0]
    streams = []
    for sizes in ([1, 1, 1, 1], [4, 2, 8, 1]):
        stream: list[int] = []
        for step, size in enumerate(sizes):
            for rank in range(size):
                loader = load(folder, 16, rank, size, weights=weights)
                stream += [int(row[0]) for row in loader.batch(step * 16)[0]]
                loader.close()
        streams.append(stream)
    assert streams[0] == streams[1]
    assert 40 < sum(first < 100 for first in streams[0]) < 51
    with pytest.raises(DataError, match=r"2 weights and .* 3 parts"):
        load(folder, 16, weights=[1.0, 2.0])


def test_the_order_of_a_mixture_is_frozen() -> None:
    order = Order(1234, [4, 3], [3.0, 1.0])
    assert [order.sample(i) for i in range(14)] == MIXTURE


MIXTURE = [
    (1, 2),
    (0, 1),
    (0, 0),
    (0, 2),
    (0, 2),
    (1, 1),
    (0, 3),
    (0, 0),
    (0, 3),
    (0, 1),
    (1, 0),
    (1, 0),
    (0, 0),
    (0, 3),
]


def test_a_channel_of_fuse_is_read_once_through_ahead_of_the_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "data", 43 * SEQ_LEN + 3)
    plain = load(folder, 6)
    monkeypatch.setattr(loader_module, "kind_of_mount", lambda path: "fuse")
    warmed = load(folder, 6)
    assert torch.equal(warmed.batch(12)[0], plain.batch(12)[0])
    warmed._warmer.join(10)
    assert not warmed._warmer.is_alive()
    for loader in (plain, warmed):
        loader.close()
