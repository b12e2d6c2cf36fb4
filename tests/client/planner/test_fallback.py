"""Fallback instance types: accepted if the mesh fits, else a fault of the config with the
reason.
"""

from __future__ import annotations

from typing import Any

import pytest

from smtrain.client.planner.resolve import load_config
from smtrain.core.errors import ConfigError

KEY = "compute.fallback_instance_types"


def faults(raw: dict[str, Any], **compute: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config({**raw, "compute": {**raw["compute"], **compute}})
    return [fault for fault in caught.value.faults if fault.startswith("compute.")]


def test_types_with_as_many_processes_are_taken_in_their_order(raw: dict[str, Any]) -> None:
    raw["compute"].update(
        fallback_instance_types=["ml.trn1.32xlarge", "ml.trn2.48xlarge"], capacity_wait="6h"
    )
    compute = load_config(raw).compute
    assert compute.fallback_instance_types == ("ml.trn1.32xlarge", "ml.trn2.48xlarge")
    assert compute.capacity_wait == 6 * 3600


def test_what_cannot_take_the_job_is_refused_with_the_reason(raw: dict[str, Any]) -> None:
    assert faults(raw, fallback_instance_types=["ml.nothing.large"])[0].startswith(
        f"{KEY}: ml.nothing.large cannot take this job: nothing is known about this type"
    )
    assert "named twice" in faults(raw, fallback_instance_types=["ml.trn1.2xlarge"])[0]
    assert "named twice" in faults(raw, fallback_instance_types=["ml.trn1.32xlarge"] * 2)[0]
    # tp 2 x pp 2 x dp 1 on two hosts: 64 processes ask for a global batch that 16 divides.
    by_cores = {"processes_per_instance": None, "fallback_instance_types": ["ml.trn1.32xlarge"]}
    assert (
        "train.global_batch_size = 4 is not a multiple of dp x micro-batch"
        in faults(raw, **by_cores)[0]
    )
    raw["parallel"]["dp"] = 1
    assert "tp x pp x dp = 4 is not the 2 x 32 = 64 cores" in faults(raw, **by_cores)[0]


def test_more_processes_than_cores_are_refused(raw: dict[str, Any]) -> None:
    raw["train"]["global_batch_size"] = 16
    more = {"instance_type": "ml.trn1.32xlarge", "processes_per_instance": 32}
    told = faults(raw, **more, fallback_instance_types=["ml.trn1.2xlarge"])[0]
    assert "compute.processes_per_instance is 32, and it has 2 cores" in told


def test_memory_is_counted_where_the_model_is_known(raw: dict[str, Any]) -> None:
    big = {
        "name": "big",
        "model": {"path": "s3://models/llama-2-70b"},
        "data": {"prepared": "s3://data/tokens/"},
        "parallel": {
            "tp": 16,
            "pp": 2,
            "activation_checkpointing": "full",
            "sequence_parallel": True,
        },
        "train": {"global_batch_size": 64, "seq_len": 4096},
        "compute": {
            "instance_type": "ml.trn2.48xlarge",
            "instance_count": 1,
            "processes_per_instance": 32,
        },
    }
    told = faults(big, fallback_instance_types=["ml.trn1.32xlarge"])
    assert len(told) == 1
    assert "ml.trn1.32xlarge cannot take this job: memory: a core of pipeline stage" in told[0]


def test_spot_waits_by_itself(raw: dict[str, Any]) -> None:
    told = faults(raw, spot=True, capacity_wait="1h", fallback_instance_types=["ml.trn1.32xlarge"])
    assert [fault.partition(":")[0] for fault in told] == ["compute.capacity_wait", KEY]
    assert "only a job with compute.keep_alive" in faults(raw, pool_wait="1h")[0]
