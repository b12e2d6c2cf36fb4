"""Plans on GPUs against what was measured of engine native on one H200 and one H100."""

from __future__ import annotations

import re
from dataclasses import replace
from math import log
from statistics import median
from typing import Any

import pytest

import smtrain
from smtrain.client.planner.kernels import Kernels, kernels_of
from smtrain.client.planner.machines import Machine, Mesh, Work, named_shape
from smtrain.client.planner.measured import MeasuredRun, measured_runs, residual, width_on_gpus
from smtrain.client.planner.memory import core_memory
from smtrain.client.planner.throughput import step_time
from smtrain.core.facts import table
from smtrain.core.model.shape import ModelShape

GIB = 2**30
H200 = replace(Machine.of("ml.p5e.48xlarge", 1), cores=1)
H100 = Machine.of("ml.p5.4xlarge", 1)


def speeds(machine: Machine = H200) -> Kernels:
    kernels = kernels_of(machine)
    assert kernels is not None
    return kernels


@pytest.mark.parametrize("run", measured_runs(), ids=lambda run: run.id)
def test_each_measured_run_is_planned_within_its_interval(run: MeasuredRun) -> None:
    error = log(run.predicted_speed / run.tokens_per_s)
    assert abs(error) <= width_on_gpus(run.work, run.machine, 0)
    assert abs(error) <= 0.07


def test_the_median_error_and_the_spread_are_those_that_the_table_states() -> None:
    """Profiles of the 1B gave the speeds of kernels, of which seven numbers were fitted to all
    runs.
    """
    errors = {run.id: abs(log(run.predicted_speed / run.tokens_per_s)) for run in measured_runs()}
    assert median(errors.values()) < 0.025
    assert residual() == pytest.approx(table("gpu_kernels")["residual"], abs=0.003)
    others = [errors[run.id] for run in measured_runs() if run.model != "llama-3.2-1b"]
    assert len(others) >= 10
    assert median(others) < 0.04


PEAKS = [run for run in measured_runs() if run.gib]


@pytest.mark.parametrize("run", PEAKS, ids=lambda run: run.id)
def test_measured_peaks_are_planned_within_three_percent(run: MeasuredRun) -> None:
    """The allocator's peak has no runtime in it."""
    need = core_memory(run.work, run.machine, run.mesh, 0)
    assert (need.total - need.runtime) / GIB == pytest.approx(run.gib, rel=0.03)


# rows, tokens, head, then ms: cuDNN, FlashAttention 2 deterministic, by documents, deterministic
ATTENTION = [
    (2, 4096, 64, 1.33, 2.65, 1.13, 1.67),
    (1, 8192, 64, 2.37, 5.48, 1.18, 1.54),
    (1, 32768, 64, 35.5, 79.8, 4.05, 4.48),
    (1, 8192, 128, 3.51, 9.59, 1.92, 2.53),
]


@pytest.mark.parametrize(
    ("rows", "tokens", "head", "cudnn", "flash", "varlen", "varlen_fixed"), ATTENTION
)
def test_attention_takes_what_its_kernel_took(
    rows: int,
    tokens: int,
    head: int,
    cudnn: float,
    flash: float,
    varlen: float,
    varlen_fixed: float,
) -> None:
    config: dict[str, Any] = table("gpu_kernels")["models"]["llama-0.3b"]
    shape = ModelShape.from_config({**config, "head_dim": head})

    def milliseconds(document: float | None, *, deterministic: bool) -> float:
        work = Work(
            shape,
            tokens,
            rows,
            separates_documents=document is not None,
            document=document,
            deterministic=deterministic,
        )
        seconds = speeds().layer(work, Mesh(1, 1, 1, rows), rows * tokens)[1]
        return 1000 * seconds * table("gpu_kernels")["rates"]["busy"]

    # In a step cuDNN's kernel for heads of 64 is 5 % slower than alone.
    assert milliseconds(None, deterministic=False) == pytest.approx(cudnn, rel=0.07)
    assert milliseconds(None, deterministic=True) == pytest.approx(flash, rel=0.07)
    assert milliseconds(1384, deterministic=False) == pytest.approx(varlen, rel=0.15)
    assert milliseconds(1384, deterministic=True) == pytest.approx(varlen_fixed, rel=0.25)


def test_documents_apart_are_less_work_than_whole_rows_and_windows_than_both() -> None:
    shape = named_shape("llama-3.2-1b")
    assert shape is not None
    mesh = Mesh(1, 1, 1, 1)
    whole = step_time(Work(shape, 32768, 1), H200, mesh)
    apart = step_time(Work(shape, 32768, 1, separates_documents=True, document=2048.0), H200, mesh)
    window = step_time(Work(replace(shape, sliding_window=512), 32768, 1), H200, mesh)
    assert window.attention < apart.attention < whole.attention / 5
    assert apart.compute == whole.compute


def test_a_step_is_as_slow_as_the_slower_of_device_and_host() -> None:
    shape = named_shape("llama-3.2-1b")
    assert shape is not None
    short, long = (
        step_time(Work(shape, length, 8), H200, Mesh(1, 1, 1, 1)) for length in (256, 4096)
    )
    assert short.overhead > short.compute, "launches take longer than so few tokens"
    assert long.overhead == 0
    fused = step_time(Work(shape, 256, 8, is_compiled=True), H200, Mesh(1, 1, 1, 1))
    assert fused.total < short.total / 2


def test_h100_has_the_same_products_and_slower_memory() -> None:
    assert speeds(H100).products == speeds().products
    assert speeds(H100).copies / speeds().copies == pytest.approx(3350 / 4800)
    assert 3350 / 4800 < speeds(H100).elementwise / speeds().elementwise < 1
    assert kernels_of(Machine.of("ml.p4d.24xlarge", 1)) is None


def test_llama_2_7b_with_all_its_weights_fits_one_h200() -> None:
    """115.6 GiB were measured; a plan that counted terms of an unfused Adam refused it."""
    shape = named_shape("llama-2-7b")
    assert shape is not None
    need = core_memory(Work(shape, 4096, 2, deterministic=True), H200, Mesh(1, 1, 1, 1, "full"), 0)
    assert need.total < 0.95 * H200.core_bytes


def test_a_plan_says_what_its_speed_rests_on() -> None:
    raw = {
        "model": {"path": "s3://models/llama-3.2-1b"},
        "data": {"prepared": "s3://texts/t/", "document_mask": True},
        "train": {"steps": 1000, "seq_len": 4096},
        "compute": {"instance_type": "ml.p5.48xlarge"},
    }
    plan = smtrain.plan(smtrain.load_config(raw, target="aws"))
    [basis] = [
        warning
        for warning in plan.warnings
        if warning.startswith("speed: from engine native's kernels")
    ]
    assert "on one H100" in basis
    assert "messages between GPUs" in basis
    assert "taken to have 1,024, an assumption, tokens each" in basis
    assert plan.calibrated


def prices(steps: int, **train: Any) -> smtrain.Plan:
    raw = {
        "model": {"path": "s3://models/llama-3.2-1b"}, "data": {"prepared": "s3://texts/t/"},
        "train": {"steps": steps, "seq_len": 4096, "global_batch_size": 8, **train},
        "compute": {"instance_type": "ml.p5.4xlarge", "region": "us-east-1"},
    }  # fmt: skip
    return smtrain.plan(smtrain.load_config(raw, target="aws"))


def test_a_plan_shows_both_prices_of_compiling_and_of_the_same_bits() -> None:
    plan = prices(1000)
    options = plan.gpu_options
    assert options is not None
    assert (options.compile, options.deterministic) == (True, False)
    assert plan.step_s is not None
    assert plan.step_s["total"] == options.compiled.step_s == options.other_bits.step_s
    assert options.uncompiled.step_s > 1.1 * options.compiled.step_s
    assert options.same_bits.step_s > 1.02 * options.other_bits.step_s
    assert options.compile_earns_from is not None
    saved = options.uncompiled.step_s - options.compiled.step_s
    assert 10 <= options.compile_earns_from * saved <= 10 + saved
    assert (plan.hours, plan.dollars) == (options.other_bits.hours, options.other_bits.dollars)
    lines = str(plan).splitlines()
    assert f"; pays from {options.compile_earns_from} steps on" in next(
        li for li in lines if li.startswith("compile ")
    )
    bits = next(line for line in lines if line.startswith("bits "))
    assert re.fullmatch(
        r"bits +not deterministic: .* s a step, .*, \$[\d.,]+; deterministic: .*, \$[\d.,]+", bits
    )
    assert plan.to_dict()["gpu_options"]["same_bits"]["dollars"] == options.same_bits.dollars


def test_a_plan_compiles_layers_with_experts() -> None:
    raw = {
        "model": {"path": "s3://models/gpt-oss-20b"}, "data": {"prepared": "s3://texts/t/"},
        "train": {"steps": 1000, "seq_len": 4096, "global_batch_size": 64},
        "compute": {"instance_type": "ml.p5.48xlarge", "region": "us-east-1"},
    }  # fmt: skip
    line = next(
        li
        for li in str(smtrain.plan(smtrain.load_config(raw, target="aws"))).splitlines()
        if "compile " in li
    )
    assert line.startswith("compile     on")


def test_a_run_too_short_to_earn_the_compilation_is_not_compiled() -> None:
    long = prices(1000).gpu_options
    assert long is not None
    assert long.compile_earns_from is not None
    short = prices(long.compile_earns_from - 2)
    assert short.gpu_options is not None
    assert not short.gpu_options.compile
    assert short.step_s is not None
    assert short.step_s["total"] == short.gpu_options.uncompiled.step_s
    asked = prices(5, compile=True, deterministic=True).gpu_options
    assert asked is not None
    assert (asked.compile, asked.deterministic) == (True, True)


def test_no_price_is_made_up_for_a_chip_whose_kernels_are_not_known() -> None:
    raw = {
        "model": {"path": "s3://models/llama-3.2-1b"}, "data": {"prepared": "s3://texts/t/"},
        "train": {"steps": 1000}, "compute": {"instance_type": "ml.p4d.24xlarge"},
    }  # fmt: skip
    assert smtrain.plan(smtrain.load_config(raw, target="aws")).gpu_options is None
