"""Runs of engine native that were measured on a GPU, and the interval that they give plans on such
GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import log, log2, sqrt
from typing import Any

from smtrain.client.planner.machines import DOCUMENT, Machine, Mesh, Work, named_shape
from smtrain.client.planner.throughput import step_time
from smtrain.core.facts import table
from smtrain.core.model.lora import Lora, linears
from smtrain.core.model.shape import ModelShape

# Half-widths in log of the 90 % interval for what has not been measured in whole steps.
# Assumptions.
# messages between GPUs, fitted to other libraries' runs: on H100 published ones of llm-foundry and
# torchtitan are 1.07 to 1.45 times slower than their plans
_SEVERAL = 0.3
# rows of documents of mostly assumed lengths; if only half has labels, a step is 5 to 11 % faster
_DOCUMENTS = 0.15
# on one GPU, by one model; all-to-alls between several have published speeds that differ by 2.3
# times
_EXPERTS = 0.15
# doublings from the nearest run, beyond which the interval grows no more: each kernel has its own
# term
_FARTHEST = 4.0
_TYPES = {"H200": "ml.p5e.48xlarge", "H100": "ml.p5.48xlarge"}


@dataclass(frozen=True)
class MeasuredRun:
    """A row of core/facts/gpu_kernels.toml."""

    id: str
    model: str
    work: Work
    machine: Machine
    mesh: Mesh
    tokens_per_s: float
    gib: float | None
    """Peak of torch's allocator."""
    more_s: float
    """Seconds of a step that the engine of that day took longer than the present one."""

    @classmethod
    def of(cls, row: dict[str, Any]) -> MeasuredRun:
        config = table("gpu_kernels")["models"].get(row["model"])
        shape = ModelShape.from_config(config) if config else named_shape(row["model"])
        assert shape is not None, row["model"]
        lora = (
            Lora(
                row["lora"],
                2.0 * row["lora"],
                targets=linears(shape),
                quantize=row.get("quantize"),
            )
            if "lora" in row
            else None
        )
        return cls(
            id=row["id"],
            model=row["model"],
            work=Work(
                shape,
                row["seq_len"],
                row["rows"],
                lora=lora,
                is_compiled=row.get("compiled", False),
                deterministic=row.get("deterministic", False),
                loss=row.get("loss", ""),
                separates_documents="document" in row,
                document=row.get("document"),
                varlen="loss" not in row,
            ),
            machine=replace(Machine.of(_TYPES[row.get("chip", "H200")], 1), cores=1),
            mesh=Mesh(1, 1, 1, row["micro_batch"], row.get("recompute", "none")),
            tokens_per_s=row["tokens_per_s"],
            gib=row.get("gib"),
            more_s=row.get("more_ms", 0.0) / 1000,
        )

    @property
    def predicted_speed(self) -> float:
        """Tokens a second by the planner's model, with the engine of that day."""
        step = step_time(self.work, self.machine, self.mesh).total + self.more_s
        return self.work.global_batch * self.work.seq_len / step

    def __str__(self) -> str:
        lora = ", LoRA" if self.work.lora else ""
        return (
            f"{self.model}{lora}, {self.work.seq_len} tokens, on one {self.machine.chip},"
            f" {table('gpu_kernels')['date']}"
        )


@cache
def measured_runs() -> tuple[MeasuredRun, ...]:
    """All rows of the table."""
    return tuple(MeasuredRun.of(row) for row in table("gpu_kernels")["runs"])


def nearest_measured(work: Work, mesh: Mesh) -> tuple[MeasuredRun, float]:
    """The most similar measured run, and the doublings of the feature that differs most."""
    features = _features(work, mesh)
    distances = (
        (max(abs(a - b) for a, b in zip(features, _features(run.work, run.mesh), strict=True)), run)
        for run in measured_runs()
        if bool(run.work.lora) == bool(work.lora)
    )
    distance, run = min(distances, key=lambda pair: pair[0])
    return run, distance


def _features(work: Work, mesh: Mesh) -> tuple[float, ...]:
    """Logs of what a rank computes: its weights, the tokens of a micro-batch, and the length of its
    rows.
    """
    numbers = work.shape.active_parameters() / mesh.tp / mesh.pp
    return log2(numbers), log2(work.seq_len / mesh.cp * mesh.micro_batch) / 2, log2(work.seq_len)


def width_on_gpus(work: Work, machine: Machine, distance: float) -> float:
    """Half-width in log of a plan's 90 % interval, `distance` doublings from the nearest measured
    run.

    2.13 as in `calibration.half_width`; the parts are independent of each other.
    """
    spread: float = table("gpu_kernels")["residual"]
    experts = (
        2.13 * table("throughput_gpu")["experts"]["residual"] if machine.world > 1 else _EXPERTS
    )
    parts = [
        2.13 * spread * sqrt(1 + min(distance, _FARTHEST) ** 2),
        _SEVERAL * (machine.world > 1),
        _DOCUMENTS * work.has_mask,
        experts * (work.shape.experts is not None),
    ]
    return sqrt(sum(part * part for part in parts))


def residual() -> float:
    """Standard deviation of the logs of predicted over measured speed."""
    errors = [log(run.predicted_speed / run.tokens_per_s) for run in measured_runs()]
    return sqrt(sum(error * error for error in errors) / len(errors))


def speed_basis(work: Work, machine: Machine) -> list[str]:
    """Say what a plan's speed rests on, and what of it was not measured."""
    lacks = []
    if machine.world > 1:
        libraries = (
            "NeMo AutoModel's and Megatron-core's"
            if work.shape.experts
            else "llm-foundry's and torchtitan's"
        )
        lacks.append(f"messages between GPUs, which are fitted to {libraries} runs on H100")
    if work.separates_documents:
        length = f"{work.document:,.0f}" if work.document else f"{DOCUMENT:,}, an assumption,"
        lacks.append(f"rows of documents or samples apart, taken to have {length} tokens each")
    but = f"; not measured: {'; '.join(lacks)}" if lacks else ""
    return [
        f"speed: from engine native's kernels on one {machine.chip} ({table('gpu_kernels')['date']}){but}"
    ]
