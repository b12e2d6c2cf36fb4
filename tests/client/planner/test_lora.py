"""A model that does not fit whole and fits with LoRA is told so, and its plan counts the
adapters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import smtrain
from smtrain.client.planner.machines import (
    Machine,
    Mesh,
    Work,
    named_shape,
    optimizer_share,
    trained_numbers,
)
from smtrain.client.planner.memory import checkpoint_bytes
from smtrain.client.planner.throughput import Coefficients, slot_time
from smtrain.core.errors import ConfigError
from smtrain.core.model.lora import STACKED_EXPERTS, Lora


def planned(
    adapter: dict[str, Any] | None, instance: str = "ml.trn2.48xlarge", **parallel: Any
) -> smtrain.Plan:
    return smtrain.plan(
        model="llama-3.1-8b",
        data={"path": "s3://bucket/text"},
        output={"s3_uri": "s3://bucket/out"},
        train={
            "global_batch_size": 64,
            "seq_len": 4096,
            **({"adapter": adapter} if adapter is not None else {}),
        },
        parallel={"tp": 2, "activation_checkpointing": "full", **parallel},
        compute={"instance_type": instance},
    )


def test_8b_does_not_fit_whole_and_fits_with_lora() -> None:
    whole, adapted = planned(None, shard="optimizer"), planned({}, shard="optimizer")
    assert not whole.fits
    assert planned(None).fits, "with full sharding, which parallel.shard: auto takes"
    assert (
        f"or train.adapter: LoRA of rank 16 needs {adapted.memory_gib['total']:.1f} GiB"
        in whole.faults[0]
    )
    assert adapted.fits
    # 8.03 G parameters in bf16 over tp 2, and 41.9 M of adapters (rank 16, all linears) in fp32
    # with two moments.
    assert adapted.memory_gib["weights"] == pytest.approx(
        (8.03e9 * 2 / 2 + 4 * 41.9e6) / 2**30, rel=0.02
    )
    assert adapted.checkpoint_gib == pytest.approx(41.9e6 * 12 / 2**30, rel=0.01)
    assert adapted.step_s is not None
    assert whole.checkpoint_gib > 100


def test_engine_nxd_is_told_so_too() -> None:
    asked: tuple[dict[str, Any] | None, ...] = (None, {})
    whole, adapted = (planned(told, "ml.trn1.32xlarge", sequence_parallel=True) for told in asked)
    assert not whole.fits
    assert "or train.adapter: LoRA of rank 16 needs" in whole.faults[0]
    assert adapted.fits
    assert adapted.checkpoint_gib == pytest.approx(41.9e6 * 12 / 2**30, rel=0.01)


def test_one_gpu_is_told_the_mesh_in_which_it_fits_with_lora() -> None:
    """The mesh that such a config has otherwise keeps too much of each layer, with adapters too."""
    one: dict[str, Any] = {"tp": 1, "activation_checkpointing": "none"}
    whole = planned(None, "ml.g5.2xlarge", **one)
    assert not planned({}, "ml.g5.2xlarge", **one).fits
    assert "; or train.adapter: LoRA of rank 16 fits in " in whole.faults[0]
    assert "with tp 1 x pp 1 x dp 1" in whole.faults[0]
    assert whole.faults[0].endswith("full recomputation")
    assert planned({}, "ml.g5.2xlarge", **{**one, "activation_checkpointing": "full"}).fits


def test_adapters_of_experts_are_counted_and_divided() -> None:
    """Qwen3-30B-A3B: 48 layers of 128 experts, hidden size 2048, width 768; rank 8."""
    shape = named_shape("qwen3-30b-a3b")
    assert shape is not None
    work = Work(shape, 4096, 64, "bf16", lora=Lora(8, 16.0, targets=STACKED_EXPERTS))
    each = 8 * (2048 + 2 * 768) + 8 * (768 + 2048)
    assert checkpoint_bytes(work) == 48 * 128 * each * 12
    assert trained_numbers(work, Mesh(1, 1, 8), 0) == 48 * 128 * each
    # A rank of ep 4 has 32 of the experts; each of tp 2 has half of the rows of B for gate and up,
    # and of A for down.
    cut = 48 * 32 * (8 * (2048 + 768) + 8 * (384 + 2048))
    assert optimizer_share(work, Mesh(2, 1, 8, ep=4), 0) == (cut, cut // 2)
    machine = Machine("gpu", 1, 8, 1e15, 1e12, 1e12, 1e12)
    adapters = [Lora(64, 64.0, targets=targets) for targets in (("q_proj",), STACKED_EXPERTS)]
    times = [
        slot_time(
            replace(work, lora=one), machine, Mesh(1, 1, 8, ep=4), Coefficients.for_machine(machine)
        ).total
        for one in adapters
    ]
    assert 1.01 < times[1] / times[0] < 1.2


def test_a_mesh_that_nobody_chose_says_so_too() -> None:
    sections: dict[str, Any] = {
        "model": {"path": "s3://bucket/Llama-3.1-405B"},
        "data": {"path": "s3://bucket/text"},
        "output": {"s3_uri": "s3://bucket/out"},
        "compute": {"instance_type": "ml.trn2.48xlarge"},
        "target": "aws",
    }
    with pytest.raises(ConfigError, match="with LoRA of rank 16 it fits"):
        smtrain.load_config(
            **sections, parallel="auto", train={"seq_len": 4096, "global_batch_size": 64}
        )
