"""Options that an engine does not support are refused before anything starts, with a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smtrain.client.planner.resolve import load_config
from smtrain.core.errors import ConfigError

FULL = {"instance_type": "ml.trn1.32xlarge", "processes_per_instance": 32}


def faults(raw: dict[str, Any], engine: str, **changes: Any) -> list[str]:
    train = {"engine": engine, "precision": "fp32", **changes.pop("train", {})}
    try:
        load_config(raw, train=train, **changes)
    except ConfigError as error:
        return error.faults
    return []


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": {"zero1": False}},
        {"parallel": {"virtual_stages": 2}},
        {
            "train": {"precision": "bf16", "stochastic_rounding": True},
            "parallel": {"sequence_parallel": True},
        },
        {"checkpoint": {"form": "xser"}},
        {"checkpoint": {"asynchronous": True}},
        {"compute": {"compile_ahead": True}},
    ],
)
def test_what_nxd_alone_does_is_refused_by_native(
    raw: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert faults(raw, "nxd", **changes) == []
    (fault,) = faults(raw, "native", **changes)
    assert fault.endswith("only engine nxd does this; leave it out")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"train": {"precision": "bf16"}, "parallel": {"sequence_parallel": False}},
            (
                "parallel.sequence_parallel: NxD's gradients are silently wrong with precision bf16"
                " and tp > 1 without it"
            ),
        ),
        (
            {
                "train": {"precision": "bf16"},
                "parallel": {"sequence_parallel": True, "zero1": False},
            },
            "parallel.zero1: NxD keeps the fp32 master weights of precision bf16 in ZeRO-1 only",
        ),
        (
            {"train": {"precision": "fp16"}},
            "train.precision: engine nxd trains in bf16 or fp32; set one of them",
        ),
        (
            {"train": {"compile": True}},
            "train.compile: engine nxd's steps are compiled graphs already; leave it out",
        ),
        (
            {"train": {"deterministic": False}},
            (
                "train.deterministic: engine nxd's graphs give the same bits each time anyway;"
                " leave it out"
            ),
        ),
        (
            {"train": {"stochastic_rounding": True}},
            "train.stochastic_rounding: has no effect unless train.precision is bf16",
        ),
        (
            {"parallel": {"tp": 4, "pp": 2, "dp": 4}, "compute": {**FULL, "instance_count": 1}},
            (
                "parallel.tp: on Trainium1 NxD lays groups of 4 across a host, so dp = 4 must be a"
                " multiple of 8"
            ),
        ),
        (
            {
                "parallel": {"virtual_stages": 2, "pp": 2, "tp": 1},
                "train": {"global_batch_size": 6},
            },
            (
                "parallel.virtual_stages: the interleaved schedule needs a multiple of pp = 2"
                " micro-batches a step"
            ),
        ),
        (
            {"parallel": {"virtual_stages": 2, "pp": 1}},
            "parallel.virtual_stages: has no effect unless pp > 1",
        ),
        ({"parallel": {"pipeline_cuts": [0, 1]}}, "parallel.pipeline_cuts: 2 cuts for 2 stages"),
        (
            {"compute": {"instance_type": "ml.trn2.48xlarge"}},
            (
                "train.engine: nxd is the engine of Trainium1, and ml.trn2.48xlarge is not; set"
                " train.engine: native"
            ),
        ),
        (
            {"train": {"objective": "sft", "validation": {"fraction": 0.1, "samples": 2}}},
            "train.validation.samples: engine nxd does not generate",
        ),
        (
            {"parallel": {"virtual_stages": 2}, "train": {"validation": {"fraction": 0.1}}},
            "train.validation: neuronx-distributed cannot evaluate interleaved stages",
        ),
        (
            {"compute": {"compile_ahead": True}, "network": {"isolation": True}},
            "compute.compile_ahead: keeps graphs in S3, and network.isolation keeps jobs from it",
        ),
        (
            {"model": {"config": {"model_type": "phimoe"}}},
            "model.path: config.json has model_type 'phimoe', which",
        ),
    ],
)
def test_what_nxd_cannot_do_is_refused(
    raw: dict[str, Any], changes: dict[str, Any], fault: str
) -> None:
    if described := changes.get("model", {}).get("config"):
        path = Path(raw["model"]["path"]) / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **described}))
    keys = {key: value for key, value in changes.items() if key != "model"}
    sentences = faults(raw, "nxd", **keys)
    assert any(text.startswith(fault) for text in sentences), sentences


@pytest.mark.parametrize(
    ("instance", "fault"),
    [
        ("ml.g5.xlarge", None),
        ("ml.g6.xlarge", None),
        (
            "ml.m5.4xlarge",
            "train.precision: fp16 is for GPUs, and ml.m5.4xlarge has none; set bf16 or fp32",
        ),
        (
            "ml.trn2.48xlarge",
            "train.precision: fp16 is for GPUs, and ml.trn2.48xlarge computes in bf16; set bf16",
        ),
    ],
)
def test_fp16_is_for_gpus(raw: dict[str, Any], instance: str, fault: str | None) -> None:
    for precision, expected in (("fp16", [fault] if fault else []), ("bf16", [])):
        train = {"precision": precision}
        assert faults(raw, "native", train=train, compute={"instance_type": instance}) == expected


BOX = {"devices": 4, "memory_gib": 24, "tflops": 80, "host_memory_gib": 256}


@pytest.mark.parametrize(
    ("machines", "target", "told"),
    [
        ({"box": BOX}, "slurm", None),
        (
            {},
            "slurm",
            (
                "box is no instance type; take one, such as ml.p5.48xlarge, or describe box under"
                " machines"
            ),
        ),
        (
            {"box": BOX},
            "aws",
            "box is a machine of yours, and AWS has no such type; name an instance type",
        ),
        ({"box": BOX}, "local", None),
    ],
)
def test_a_machine_of_ones_own_trains_on_a_slurm_cluster_and_here(
    raw: dict[str, Any], machines: dict[str, Any], target: str, told: str | None
) -> None:
    settings = {"target": target, "machines": machines, "compute": {"instance_type": "box"}}
    settings |= {"cluster": {"shared": "/fsx"}} if target == "slurm" else {}
    sentences = [fault for fault in faults(raw, "native", **settings) if "box" in fault]
    assert [fault.startswith(f"compute.instance_type: {told}") for fault in sentences] == (
        [True] if told else []
    )


def test_a_machine_of_ones_own_has_a_process_for_each_device_whatever_it_is_called(
    raw: dict[str, Any],
) -> None:
    for name in ("box", "trn1", "trn1-box"):
        settings = {
            **raw,
            "target": "slurm",
            "cluster": {"shared": "/fsx"},
            "machines": {name: BOX},
            "parallel": {},
            "compute": {},
        }
        made = load_config(
            settings,
            compute={"instance_type": name, "instance_count": 2},
            train={"global_batch_size": 8},
        )
        assert (made.train.engine, made.processes_per_instance, made.world_size) == ("native", 4, 8)
