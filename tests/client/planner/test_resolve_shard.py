"""`parallel.shard: auto` in a config."""

from __future__ import annotations

from typing import Any

import pytest

import smtrain
from smtrain.client.planner.machines import Machine, Work, named_shape
from smtrain.client.planner.search import search
from smtrain.core.config import JobConfig
from smtrain.stages import keys_of
from tests.client.planner.test_plan import raw


def config(
    parallel: Any = None, *, kind: str = "ml.p4d.24xlarge", hosts: int = 2, **train: Any
) -> JobConfig:
    """An 8B model, by default on 16 GPUs of 40 GiB."""
    values = raw("llama-3.1-8b", hosts=hosts, **{"global_batch_size": 64, **train})
    values["compute"]["instance_type"] = kind
    if parallel is None:
        del values["parallel"]
    else:
        values["parallel"] = parallel
    return smtrain.load_config(values, target="aws")


WHOLE = {"activation_checkpointing": "full"}
"""dp 16, which does not fit with whole weights."""


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        (WHOLE, "full"),
        ({**WHOLE, "shard": "auto"}, "full"),
        ({**WHOLE, "shard": "optimizer"}, "optimizer"),
        ({**WHOLE, "tp": 4, "sequence_parallel": True}, "optimizer"),  # fits with whole weights
        ({**WHOLE, "micro_batch_size": 4, "activation_checkpointing": "none"}, "optimizer"),
    ],
)
def test_a_mesh_that_fits_only_with_full_sharding_gets_it(
    parallel: dict[str, Any], expected: str
) -> None:
    chosen = config(parallel)
    assert chosen.parallel.shard == expected
    plan = smtrain.plan(chosen)
    assert plan.shards_fully == (expected == "full") == ("shard: full" in str(plan))


@pytest.mark.parametrize(
    ("parallel", "train"),
    [
        (WHOLE, {"adapter": {"rank": 16, "quantize": "nf4"}}),
        ({**WHOLE, "pp": 16}, {}),
    ],
)
def test_nothing_is_divided_where_it_cannot_be(
    parallel: dict[str, Any], train: dict[str, Any]
) -> None:
    assert config(parallel, **train).parallel.shard == "optimizer"


def test_names_do_not_tell_apart_auto_and_the_optimizer() -> None:
    fitting = {**WHOLE, "tp": 4, "sequence_parallel": True}
    auto, explicit = config(fitting), config({**fitting, "shard": "optimizer"})
    assert keys_of(auto, "train") == keys_of(explicit, "train")
    assert "shard" not in keys_of(auto, "train")["parallel"]
    assert keys_of(config(WHOLE), "train")["parallel"]["shard"] == "full"


@pytest.mark.parametrize("parallel", [WHOLE, {**WHOLE, "shard": "auto"}])
def test_other_machines_decide_again(parallel: dict[str, Any]) -> None:
    small = config(parallel)
    assert small.parallel.shard == "full"
    large = smtrain.load_config(small, set_=["compute.instance_type=ml.p5e.48xlarge"])
    assert large.parallel.shard == "optimizer"
    back = smtrain.load_config(large, set_=["compute.instance_type=ml.p4d.24xlarge"])
    assert back.parallel.shard == "full"


def test_other_machines_are_proposed_without_it() -> None:
    """trn1 has engine nxd, which divides only the optimizer's state."""
    plan = smtrain.plan(config(WHOLE), machines=["ml.trn1.32xlarge:2"])
    assert plan.fits
    assert not plan.shards_fully


def test_a_search_takes_full_sharding_only_if_it_is_faster() -> None:
    """70B on 128 H100s is spared a pipeline; 8B on 8 would only pay for messages."""
    large = smtrain.load_config(
        raw("llama-3.1-70b", hosts=16, global_batch_size=512, seq_len=8192) | {"parallel": "auto"},
        set_=["compute.instance_type=ml.p5.48xlarge"],
        target="aws",
    )
    assert large.parallel.shard == "full"
    assert smtrain.plan(large).mesh.pp == 1
    assert config("auto", kind="ml.p5.48xlarge", hosts=1).parallel.shard == "optimizer"
    shape = named_shape("llama-3.1-70b")
    assert shape is not None
    (whole, *_), (part, *_) = (
        search(Work(shape, 8192, 512, shards_fully=full), [Machine.of("ml.p5.48xlarge", 16)])
        for full in (False, True)
    )
    assert part.step_s < whole.step_s
