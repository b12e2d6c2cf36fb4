"""Texts of a divided model and of transformers', for the processes of a world."""

from __future__ import annotations

from typing import Any

import torch

from smtrain.worker.engine.native import comm
from smtrain.worker.generation.ranks import DividedModel, Orders, build_rank_stage, serve
from tests.worker.engine import cases

PADDED = (0, 9, 28)
"""Tokens of padding before each text."""
LENGTH, NEW = 33, 12


def prompts(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Three texts of different length, with padding before them."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, config["vocab_size"], (len(PADDED), LENGTH), generator=generator)
    mask = torch.stack([torch.arange(LENGTH) >= more for more in PADDED]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def texts(
    rank: int,
    config: dict[str, Any],
    tp: int,
    pp: int,
    ways: list[dict[str, Any]],
    varlen: bool = False,
) -> list[Any]:
    """Generate with the divided model; rank 0 has the texts.

    `varlen`: prompts are documents, as on CUDA.
    """
    source: Any = cases.Memory(config, cases.weights(config))
    remembering = build_rank_stage(source, tp, pp, comm.current_device())
    remembering.stage.context.varlen = varlen
    if rank:
        serve(remembering, None)
        return []
    orders = Orders(None)
    made = [drawn(DividedModel(remembering, orders), config, way) for way in ways]
    assert orders.stop()
    return made


def plain_texts(rank: int, config: dict[str, Any], ways: list[dict[str, Any]]) -> list[Any]:
    """Generate with transformers' own model."""
    return [drawn(cases.transformers_model(config), config, way) for way in ways]


def drawn(model: Any, config: dict[str, Any], way: dict[str, Any]) -> list[list[int]]:
    torch.manual_seed(3)
    usual = {"max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": 2, "do_sample": False}
    out: list[list[int]] = model.generate(**prompts(config), **{**usual, **way}).tolist()
    return out
