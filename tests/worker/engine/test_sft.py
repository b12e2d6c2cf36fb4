"""Instruction data, from records to losses: what is learned is the answers, each as if its sample were alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smtrain.worker.data.checksums import fingerprints
from smtrain.worker.data.pack.indexed import IndexedDataset
from smtrain.worker.data.pack.packing import Packing
from smtrain.worker.data.prepare.prepare_options import PrepareOptions
from smtrain.worker.data.prepare.sft import prepare_sft
from tests.worker.data.chats import talk, tokenizer, write
from tests.worker.engine import sft
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World

BATCHES = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    rows: list[dict[str, Any]] = [
        {"messages": talk(f"q {i}", "a " * (i % 5 + 1), "why", "s" * (i % 9 + 1))} for i in range(60)
    ]
    rows += [{"instruction": f"say {i}", "output": str(i)} for i in range(60)]
    source = write(folder / "a.jsonl", rows)
    prepare_sft(
        [source],
        folder / "out",
        tokenizer(folder / "tokenizer", "chatml"),
        PrepareOptions(seq_len=sft.SEQ_LEN),
        progress=lambda _: None,
        say=lambda _: None,
    )
    return folder / "out"


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_packed_rows_lose_what_their_samples_lose_alone(name: str, data: Path, solo: World) -> None:
    tokens = IndexedDataset(data / "tokens")
    packing = Packing(sft.SEED, np.asarray(tokens.lengths) - 1, sft.SEQ_LEN)
    assert max(len(packing.row(i)) for i in range(BATCHES * sft.ROWS)) > 2
    expected = np.array(solo.run(sft.alone, data, CONFIGS[name], BATCHES)[0])
    losses = np.array(solo.run(sft.packed, data, CONFIGS[name], mesh("111"), BATCHES)[0])
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["212 sp m1", "122 m2", "114 m1"])
def test_every_mesh_sees_the_same_rows(text: str, data: Path, four: World, solo: World) -> None:
    expected = np.array(solo.run(sft.packed, data, CONFIGS["llama"], mesh("111"), BATCHES)[0])
    for losses in four.run(sft.packed, data, CONFIGS["llama"], mesh(text), BATCHES):
        np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_a_token_that_is_no_answer_and_that_no_answer_follows_changes_nothing(
    data: Path, tmp_path: Path, solo: World
) -> None:
    """The line break behind an answer is a target only, and a masked one; the end token before it is learned."""
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
    losses = [solo.run(sft.packed, d, CONFIGS["llama"], mesh("111"), 1)[0] for d in (data, changed, learned)]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
