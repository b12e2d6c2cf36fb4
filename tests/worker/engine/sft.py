"""Prepared instruction data through the engine, and its samples one by one through transformers; for a world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from smtrain.worker.data.load.packed import PackedLoader
from smtrain.worker.data.pack.indexed import IndexedDataset
from smtrain.worker.data.pack.packing import Packing
from smtrain.worker.engine.base import ParallelOptions
from tests.worker.engine.cases import engine, transformers_model

SEQ_LEN, ROWS, SEED = 64, 8, 3


def packed(rank: int, data: Path, config: dict[str, Any], options: ParallelOptions, batches: int) -> list[float]:
    """The losses of global batches of ROWS rows, before any training."""
    e = engine(config, options)
    loader = PackedLoader(
        data, seq_len=SEQ_LEN, global_batch_size=ROWS, dp_rank=e.dp_rank, dp_size=e.dp_size, seed=SEED,
        vocab_size=config["vocab_size"],
    )  # fmt: skip
    losses = [e.evaluate(*loader.batch(i * ROWS)).loss for i in range(batches)]
    loader.close()
    return losses


def alone(rank: int, data: Path, config: dict[str, Any], batches: int) -> list[float]:
    """The same from the files themselves: every sample in a forward pass of its own.

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
