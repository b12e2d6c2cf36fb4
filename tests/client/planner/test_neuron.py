"""Plans of engine native on Neuron cores: what is unknown is wide and says why, and a run of one's
own narrows it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import smtrain
from smtrain.cli.plan import app
from smtrain.client.planner.calibration import spread_of
from smtrain.client.planner.machines import GIB, Machine, Mesh, Work, named_shape
from smtrain.client.planner.memory import core_memory, saved_per_token
from smtrain.client.planner.workload import shape_of, work_of
from smtrain.core.errors import ConfigError

TRN2 = "ml.trn2.48xlarge"
BOX = {"kind": "neuron", "devices": 4, "memory_gib": 24, "tflops": 90, "host_memory_gib": 128}


@pytest.fixture(autouse=True)
def empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path / "home"))


def raw(
    model: str = "llama-3.1-8b", kind: str = TRN2, data: dict[str, Any] | None = None, **train: Any
) -> dict[str, Any]:
    return {
        "model": {"path": f"s3://models/{model}"},
        "data": {"path": "s3://texts/t/", **(data or {})},
        "train": {"steps": 100, **train},
        "compute": {"instance_type": kind},
    }


def warned(plan: smtrain.Plan, begin: str) -> list[str]:
    return [text for text in plan.warnings if text.startswith(begin)]


def width(plan: smtrain.Plan) -> tuple[float, float]:
    assert plan.sequences_per_s is not None
    rate = plan.sequences_per_s
    return log(rate["value"] / rate["low"]), log(rate["high"] / rate["value"])


@pytest.mark.parametrize(
    ("seq_len", "shard"),
    [(8192, "full"), (4096, "optimizer")],  # activations of 8192 leave no room for whole weights
)
def test_an_8b_gets_tensor_parallelism_inside_chips_and_shards_between(
    seq_len: int, shard: str
) -> None:
    """The layout that AWS has for models of this size: tp 4 x shard 16."""
    given = {**raw(seq_len=seq_len, global_batch_size=256), "parallel": "auto"}
    config = smtrain.load_config(given, target="aws")
    assert (config.parallel.tp, config.parallel.pp, config.shards) == (4, 1, 16)
    assert config.parallel.shard == shard
    plan = smtrain.plan(config)
    assert plan.fits
    assert bool(warned(plan, "parallel.shard: full has run on an imitation")) == (shard == "full")


def test_without_any_figure_the_interval_is_wide_and_says_why() -> None:
    plan = smtrain.plan(raw(), target="aws")
    below, above = width(plan)
    assert below == pytest.approx(2.3), "4 % of peak, as beta users reported, is inside"
    assert plan.mfu is not None
    assert plan.mfu / 10 < 0.045
    assert above == pytest.approx(log(1 / plan.mfu)), "more than the peak is impossible"
    assert not plan.calibrated
    assert "UNCALIBRATED" in str(plan)
    (told,) = warned(plan, "uncalibrated")
    assert told.endswith("off by up to 10.0 times")
    assert warned(plan, "AWS published no throughput of training with TorchNeuron")
    (peak,) = warned(plan, "the share of peak is of 166.8 TF a core (AWS's data sheet")
    assert "torchtitan divides by 158 TF" in peak
    for kind in ("ml.trn1.32xlarge", "ml.p5.48xlarge"):
        other = smtrain.plan(raw(kind=kind), target="aws")
        assert not [w for w in other.warnings if "TorchNeuron" in w or "share of peak" in w]
        assert width(other)[0] < 0.7


def test_the_first_step_compiles_in_the_train_job_and_no_stage_does() -> None:
    plan = smtrain.plan(raw(), target="aws")
    assert plan.hours is not None
    assert "compile" not in plan.hours_by_stage
    assert plan.hours > (15 + 10) / 60
    (told,) = warned(plan, "the first step compiles every graph, 15 min 00 s by assumption")
    assert "stages" not in told
    deep = smtrain.plan({**raw(), "parallel": {"tp": 4, "pp": 4}}, target="aws")
    assert (
        "each of the 4 stages compiles its own while all other stages wait"
        in warned(deep, "the first step")[0]
    )
    assert "compile" not in smtrain.plan(raw(kind="ml.trn1.32xlarge"), target="aws").hours_by_stage


def test_a_measured_run_narrows_it(tmp_path: Path) -> None:
    plain = smtrain.plan(raw(), target="aws")
    assert plain.tokens_per_s is not None
    made = smtrain.plan(raw(), target="aws", measured=plain.tokens_per_s / 8)
    assert made.tokens_per_s == pytest.approx(plain.tokens_per_s / 8)
    assert width(made)[0] == pytest.approx(2.13 * spread_of(Machine.of(TRN2, 1)))
    assert width(made)[0] < 0.6
    assert made.calibrated
    assert "UNCALIBRATED" not in str(made)
    assert ", by your own run" in str(made)
    assert not warned(made, "uncalibrated")
    assert not warned(made, "AWS published no throughput")
    other = smtrain.plan(
        raw(), target="aws", machines=[("ml.trn2u.48xlarge", 4)], measured=plain.tokens_per_s / 8
    )
    assert other.calibrated, "the same chip"
    apart = smtrain.plan(
        raw(), target="aws", machines=[("trn3-gen1", 1)], measured=plain.tokens_per_s / 8
    )
    assert not apart.calibrated
    assert warned(apart, "your own run was on another chip")
    assert warned(apart, "trn3-gen1 is for a Slurm cluster on EC2")
    # The same from the numbers that a job writes.
    file, lines = tmp_path / "metrics.jsonl", []
    rate = plain.tokens_per_s / 8
    for step in range(1, 31):
        lines.append({"step": step, "loss": 3.0, "tokens_per_s": rate, "tokens": int(step * 65536)})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = tmp_path / "trn2.yaml"
    config.write_text(json.dumps(raw()))
    result = CliRunner().invoke(
        app, [str(config), "--target", "aws", "--measured", str(file), "--json"]
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["by_own_run"]
    assert told["tokens_per_s"] == pytest.approx(rate, rel=0.01)


def test_a_probed_machine_of_neuron_cores_is_planned_as_one() -> None:
    given = {**raw("llama-3.2-1b"), "machines": {"box": BOX}}
    plan = smtrain.plan(given, machines=[("box", 1)])
    assert plan.fits
    assert warned(plan, "the first step compiles")
    assert not warned(plan, "the share of peak"), "its peak was measured"
    machine = Machine.from_entry("box", 1, smtrain.load_config(given, target="aws").machines["box"])
    known = replace(machine, type=TRN2, core_flops=166.75e12)
    assert machine.neuron
    assert known.neuron
    assert not Machine.of("ml.p5.48xlarge", 1).neuron
    slurm = {**given, "cluster": {"shared": "/fsx/x"}, "compute": {"instance_type": "box"}}
    with pytest.raises(ConfigError, match="fp16 is for GPUs"):
        smtrain.load_config({**slurm, "train": {"precision": "fp16"}}, target="slurm")


@pytest.mark.parametrize(
    ("model", "data", "train", "reason", "remedy"),
    [
        (
            "llama-3.1-8b",
            {},
            {"seq_len": 4000},
            "a multiple of 512, and train.seq_len is 4000",
            {"seq_len": 4096},
        ),
        (
            "llama-3.1-8b",
            {},
            {"seq_len": 1024, "compile": True},
            "a multiple of 2048 with train.compile",
            {"seq_len": 2048},
        ),
        ("llama-2-7b", {}, {"seq_len": 4001}, "a multiple of 512", {"seq_len": 4096}),
        ("pythia-1.4b", {}, {"seq_len": 2000}, "a multiple of 512", {"seq_len": 2048}),
        (
            "llama-3.1-8b",
            {"document_mask": True},
            {},
            "the kernel takes no mask",
            {"document_mask": None},
        ),
        ("llama-3.1-8b", {}, {"objective": "sft"}, "the kernel takes no mask", None),
        ("gpt-neox-20b", {}, {}, None, None),
        ("llama-3.1-8b", {}, {}, None, None),
        ("llama-3.1-8b", {}, {"compile": True}, None, None),
    ],
)
def test_what_leaves_the_flash_kernel_is_said_with_its_memory_and_what_brings_it_back(
    model: str,
    data: dict[str, Any],
    train: dict[str, Any],
    reason: str | None,
    remedy: dict[str, Any] | None,
) -> None:
    given = raw(model, data=data, **train)
    config = smtrain.load_config(given, target="aws")
    plan = smtrain.plan(config)
    assert plan.fits
    told = warned(plan, "attention runs without its flash kernel")
    work = work_of(config, shape_of(config))[0]
    assert work.fused_attention == (reason is None) == (not told)
    if reason is None:
        return
    assert reason in told[0]
    scores = 2 * 2 * work.shape.heads / plan.mesh.tp * work.seq_len**2 * plan.mesh.micro_batch / GIB
    assert f"Its scores take {scores:.2g} GiB of a core" in told[0]
    if remedy is None:
        assert ";" not in told[0]
        return
    for key, value in remedy.items():
        if key == "seq_len":
            assert told[0].endswith(f"set train.seq_len: {value}")
            given["train"][key] = value
        else:
            assert "leave out data.document_mask if" in told[0]
            del given["data"][key]
    assert not warned(smtrain.plan(given, target="aws"), "attention")
    gpu = {**raw(model, "ml.p5.48xlarge", data, **train)}
    assert not warned(smtrain.plan(gpu, target="aws"), "attention"), "another kernel"


def test_scores_are_counted_layer_by_layer() -> None:
    """S x S of each head of a rank, as scores and as their softmax: in all layers, or in one that
    is computed again.
    """
    shape = named_shape("llama-3.1-8b")
    assert shape is not None
    machine, s, heads = Machine.of(TRN2, 1), 4096, 8
    for recompute, layers in (("none", 32), ("full", 1)):
        mesh = Mesh(4, 1, 16, 1, recompute, True)  # type: ignore[arg-type]
        works = [
            Work(shape, s, 64, fused_attention=fused, separates_documents=True)
            for fused in (True, False)
        ]
        held = [core_memory(work, machine, mesh, 0).activations for work in works]
        if recompute == "none":  # torch's fused kernels keep their mask as numbers
            saved = [s * layers * saved_per_token(work, mesh) for work in works]
            assert saved[1] - saved[0] == pytest.approx(2 * (2 * heads - 1) * s * s * layers)
            assert held[1] - held[0] == pytest.approx(
                saved[1] - saved[0], rel=0.01
            )  # the peak may be another moment
        else:
            assert held[1] > held[0] + heads * s * s
    mask = [
        core_memory(
            Work(shape, s, 64, separates_documents=apart), machine, Mesh(4, 1, 16), 0
        ).buffers
        for apart in (False, True)
    ]
    assert mask[1] - mask[0] == pytest.approx(s * s)
    assert not Machine.of("ml.trn1.32xlarge", 1).torus_chip


def test_where_no_run_is_known_the_interval_is_shown_and_no_single_number_of_dollars() -> None:
    compute = {"image": "2.14.0-neuronx-py314-sdk2.33.0-ubuntu26.04", "region": "us-east-2"}
    given = {
        "model": {"path": "s3://models/llama-3.1-8b"},
        "data": {"prepared": "s3://texts/t/"},
        "train": {"steps": 1000, "seq_len": 4096},
        "compute": {"instance_type": "ml.trn2.48xlarge", **compute},
    }
    plan = smtrain.plan(given, target="aws")
    text = str(plan).splitlines()
    speed, time, money, total = (
        next(line for line in text if line.startswith(word))
        for word in ("throughput", "time", "cost", "total")
    )
    s, train = plan.sequences_per_s, plan.dollars_by_item["train"]
    assert s is not None
    assert plan.dollars is not None
    least, most = (plan.dollars + train * (s["value"] / s[end] - 1) for end in ("high", "low"))
    assert money.startswith(
        f"cost        ${least:,.2f} to ${most:,.2f}; the middle is ${plan.dollars:,.2f}"
    )
    assert total.startswith(f"total       ${least:,.2f} to ${most:,.2f}, ")
    assert " to " in speed.partition(" sequences/s")[0]
    assert speed.endswith("UNCALIBRATED")
    assert " to " in time
    known = {**given, "compute": {"instance_type": "ml.p5.48xlarge", "region": "us-east-1"}}
    assert str(smtrain.plan(known, target="aws")).count("the middle") == 0
