"""Instruction data, from records to losses: what is learned is the answers, each as if its sample
were alone.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from smtrain.worker.data.checksums import fingerprints
from smtrain.worker.data.indexed import IndexedDataset
from smtrain.worker.data.load.loader import TokenLoader
from smtrain.worker.data.load.order import Packing
from smtrain.worker.data.prepare.sft import prepare_sft
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.native.load_balancing import find_padding
from tests.worker.data.chats import talk, tokenizer, write
from tests.worker.engine.cases import CONFIGS, engine, mesh, transformers_model
from tests.worker.engine.world import World

SEQ_LEN, ROWS, SEED = 64, 8, 3


def packed(
    rank: int, data: Path, config: dict[str, Any], options: ParallelOptions, batches: int
) -> list[float]:
    """The losses of global batches of ROWS rows, before any training."""
    e = engine(config, options)
    loader = TokenLoader(
        data,
        seq_len=SEQ_LEN,
        global_batch_size=ROWS,
        dp_rank=e.dp_rank,
        dp_size=e.dp_size,
        seed=SEED,
        vocab_size=config["vocab_size"],
    )
    losses = [e.evaluate(*loader.batch(i * ROWS)).loss for i in range(batches)]
    loader.close()
    return losses


def alone(rank: int, data: Path, config: dict[str, Any], batches: int) -> list[float]:
    """The same from the files themselves: every sample in a separate forward pass.

    Only tokens of an answer are the sample's; the targets elsewhere are random.
    """
    model = transformers_model(config)
    tokens, mask = IndexedDataset(data / "tokens"), IndexedDataset(data / "tokens_mask")
    packing = Packing(SEED, np.asarray(tokens.lengths) - 1, SEQ_LEN)
    generator = torch.Generator().manual_seed(1)
    out = []
    for i in range(batches):
        total, count = 0.0, 0
        for sample in [s for row in range(i * ROWS, (i + 1) * ROWS) for s in packing.row(row)]:
            ids = torch.from_numpy(tokens[sample].astype(np.int64))
            learned = torch.from_numpy(mask[sample][1:] == 1)
            anything = torch.randint(0, config["vocab_size"], learned.shape, generator=generator)
            targets = torch.where(learned, ids[1:], anything)
            with torch.no_grad():
                logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
            losses = F.cross_entropy(logits, targets, reduction="none")
            total, count = total + float(losses[learned].sum()), count + int(learned.sum())
        out.append(total / count)
    return out


BATCHES = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    rows: list[dict[str, Any]] = [
        {"messages": talk(f"q {i}", "a " * (i % 5 + 1), "why", "s" * (i % 9 + 1))}
        for i in range(60)
    ]
    rows += [{"instruction": f"say {i}", "output": str(i)} for i in range(60)]
    source = write(folder / "a.jsonl", rows)
    prepare_sft(
        [source],
        folder / "out",
        tokenizer(folder / "tokenizer", "chatml"),
        PrepareOptions(seq_len=SEQ_LEN),
        progress=lambda _: None,
        say=lambda _: None,
    )
    return folder / "out"


def test_the_padding_of_global_batches_is_counted_on_the_rank_that_logs(data: Path) -> None:
    options: Any = {"seq_len": SEQ_LEN, "global_batch_size": ROWS, "dp_size": 2, "seed": SEED}
    loaders = [TokenLoader(data, dp_rank=rank, vocab_size=512, **options) for rank in range(2)]
    expected = 0
    for batch in range(BATCHES):
        for loader in loaders:
            _, labels, segments = loader.batch(batch * ROWS)
            padding = find_padding(labels, segments)
            expected += 0 if padding is None else int(padding.sum())
        assert loaders[0].padding == expected > 0
    assert loaders[1].padding is None
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_packed_rows_lose_what_their_samples_lose_alone(name: str, data: Path, solo: World) -> None:
    tokens = IndexedDataset(data / "tokens")
    packing = Packing(SEED, np.asarray(tokens.lengths) - 1, SEQ_LEN)
    assert max(len(packing.row(i)) for i in range(BATCHES * ROWS)) > 2
    expected = np.array(solo.run(alone, data, CONFIGS[name], BATCHES)[0])
    losses = np.array(solo.run(packed, data, CONFIGS[name], mesh("111"), BATCHES)[0])
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["212 sp m1", "122 m2", "114 m1"])
def test_every_mesh_sees_the_same_rows(text: str, data: Path, four: World, solo: World) -> None:
    expected = np.array(solo.run(packed, data, CONFIGS["llama"], mesh("111"), BATCHES)[0])
    for losses in four.run(packed, data, CONFIGS["llama"], mesh(text), BATCHES):
        np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_a_token_that_is_no_answer_and_that_no_answer_follows_changes_nothing(
    data: Path, tmp_path: Path, solo: World
) -> None:
    """The line break behind an answer is a target only, and a masked one; the end token before it
    is learned.
    """
    changed, learned = (shutil.copytree(data, tmp_path / name) for name in ("changed", "learned"))
    tokens, mask = IndexedDataset(data / "tokens"), IndexedDataset(data / "tokens_mask")
    ends = np.cumsum(tokens.lengths)
    assert not mask.tokens[ends - 1].any()
    assert mask.tokens[ends - 2].all()
    for folder, at in ((changed, ends - 1), (learned, ends - 2)):
        ids = np.array(tokens.tokens)
        ids[at] = (ids[at] + 7) % 300
        ids.tofile(folder / "tokens.bin")
        fingerprints(folder / "tokens")
    losses = [
        solo.run(packed, d, CONFIGS["llama"], mesh("111"), 1)[0] for d in (data, changed, learned)
    ]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
