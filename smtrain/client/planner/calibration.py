"""Fit the throughput model to published runs, estimate its error, and correct it by a run of one's
own.

Least squares on log throughput with weak priors, in plain Python: seven numbers and fifty runs are
few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log, log2, sqrt
from typing import Any

from smtrain.client.planner.kernels import kernels_of
from smtrain.client.planner.machines import Machine, Mesh, Recompute, Work, named_shape
from smtrain.client.planner.measured import MeasuredRun, nearest_measured, width_on_gpus
from smtrain.client.planner.search import refusals
from smtrain.client.planner.throughput import (
    DENSE,
    EXPERTS,
    MATURE,
    Coefficients,
    reference_chip,
    step_time,
)
from smtrain.core.errors import ConfigError
from smtrain.core.facts import table
from smtrain.core.model.shape import ModelShape

_SPREAD = 0.1  # of log throughput, as the priors weigh against the runs
# Median of each coefficient and spread of its log before any run is seen, in the order of
# `Coefficients`. They keep a coefficient that the runs hardly determine, such as slot_seconds, near
# a plausible value.
_PRIORS = ((0.45, 0.3), (1e-3, 0.7), (0.5, 0.7), (0.01, 1.0), (1.5, 0.5), (1.5, 0.5), (0.03, 0.7))
# The same for GPUs; the second is relative to the link of each chip
# (core/facts/throughput_gpu.toml).
_GPU_PRIORS = (
    (0.65, 0.3),
    (4e-4, 0.7),
    (0.8, 0.7),
    (0.01, 1.0),
    (1.5, 0.5),
    (3.0, 0.5),
    (0.03, 0.7),
)
# The same for experts: products at most as fast as large ones; four reads and writes of a row in
# H100's 3.35 TB/s; all-to-alls as fast as other collectives.
_EXPERT_PRIORS = ((1.5, 0.5), (8e-4, 0.7), (1.0, 0.5))
Priors = tuple[tuple[float, float], ...]
# the same for TorchNeuron: 0.1 to 10 times, as beta users reported 1 to 4 % of peak
# (docs/trainium.md)
UNPUBLISHED_ENGINE_WIDTH = 2.3
NEAR_DOUBLINGS = 1.5  # doublings up to which a published run counts as near
MIN_UNCALIBRATED_WIDTH = (
    0.6  # half-width in log of the interval if no published run is near: 0.55 to 1.8 times
)


@dataclass(frozen=True)
class PublishedRun:
    """A training run whose throughput was published."""

    id: str
    model: str
    release: int
    work: Work
    machine: Machine
    mesh: Mesh
    sequences_per_s: float
    date: str = ""
    interleave: int = 1
    """Stages that each pipeline rank holds; the bubble is shorter by this factor."""

    @classmethod
    def of(cls, row: dict[str, Any]) -> PublishedRun:
        """Read a row of core/facts/throughput.toml, or one of the same form."""
        shape = named_shape(row["model"])
        assert shape is not None, row["model"]
        machine = Machine.of(row.get("instance_type", "ml.trn1.32xlarge"), row["instances"])
        recompute: Recompute = row["recompute"]
        tp, pp, nxd = row["tp"], row["pp"], row["stack"] == "nxd"
        return cls(
            id=row["id"],
            model=row["model"],
            release=row["release"],
            work=Work(
                shape, row["seq_len"], row["global_batch"], fused_attention=nxd, gathers_again=True
            ),
            machine=machine,
            mesh=Mesh(tp, pp, machine.world // (tp * pp), row["micro_batch"], recompute, True),
            sequences_per_s=row["sequences_per_s"],
            date=row.get("date", ""),
        )

    @classmethod
    def on_gpus(cls, row: dict[str, Any]) -> PublishedRun:
        """Read a row of core/facts/throughput_gpu.toml, which has the cluster's network and may
        give MFU only.
        """
        config = table("throughput_gpu")["models"].get(row["model"])
        shape = ModelShape.from_config(config) if config else named_shape(row["model"])
        assert shape is not None, row["model"]
        machine = replace(
            Machine.of(row["instance_type"], row["instances"]),
            network=row["network_gbps"] * 1e9 / 8,
        )
        recompute: Recompute = row["recompute"]
        tp, pp = row["tp"], row["pp"]
        peak = machine.core_flops * machine.world
        flops = row["seq_len"] * shape.flops_per_token(row["seq_len"])
        return cls(
            id=row["id"],
            model=row["model"],
            release=MATURE,
            work=Work(
                shape,
                row["seq_len"],
                row["global_batch"],
                fused_attention=row["stack"] != "megatron",
                gathers_again=True,
                whole_experts=True,
            ),
            machine=machine,
            mesh=Mesh(
                tp,
                pp,
                machine.world // (tp * pp),
                row["micro_batch"],
                recompute,
                tp > 1,
                ep=row.get("ep", 1),
            ),
            sequences_per_s=(
                row["sequences_per_s"] if "sequences_per_s" in row else row["mfu"] * peak / flops
            ),
            date=row["date"],
            interleave=row.get("interleave", 1),
        )

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the share of the devices' dense peak."""
        flops = self.work.seq_len * self.work.flops_per_token()
        return self.sequences_per_s * flops / (self.machine.core_flops * self.machine.world)

    def __str__(self) -> str:
        hosts = f"{self.machine.count} instances"
        return f"{self.model} tp {self.mesh.tp} pp {self.mesh.pp} on {hosts}, {self.date}"


def predict_speed(run: PublishedRun, k: Coefficients) -> float:
    """Predict the sequences per second of a published run, with the software of its time: no run is
    engine native's.
    """
    k = replace(k, kernels=None)
    time = step_time(run.work, run.machine, run.mesh, k)
    step = time.total - time.bubble * (1 - 1 / run.interleave)
    return run.work.global_batch / step * exp(-k.yearly_gain * max(0, MATURE - run.release))


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """The runs of core/facts/throughput.toml, without those marked as misprints."""
    return tuple(
        PublishedRun.of(row) for row in table("throughput")["runs"] if "excluded" not in row
    )


@cache
def published_gpu_runs(chip: str | None = None) -> tuple[PublishedRun, ...]:
    """The same for runs on GPUs; with `chip`, only those on that chip."""
    rows = (row for row in table("throughput_gpu")["runs"] if "excluded" not in row)
    runs = tuple(PublishedRun.on_gpus(row) for row in rows)
    return tuple(run for run in runs if chip in (None, run.machine.chip))


@cache
def published_experts() -> tuple[PublishedRun, ...]:
    """The runs of mixtures of experts in core/facts/throughput_gpu.toml, all on H100."""
    return tuple(
        PublishedRun.on_gpus(row)
        for row in table("throughput_gpu")["expert_runs"]
        if "excluded" not in row
    )


def fit(
    runs: Sequence[PublishedRun], start: Coefficients | None = None, priors: Priors | None = None
) -> Coefficients:
    """Fit the coefficients to `runs` by the Levenberg-Marquardt method, on their logs as all are
    positive.

    Runs of mixtures of experts determine only their own coefficients; the rest are those of their
    chip.
    """
    base, names = start, DENSE
    if runs[0].work.shape.experts is not None:
        base, names, priors = (
            start or Coefficients.for_machine(runs[0].machine),
            EXPERTS,
            priors or _EXPERT_PRIORS,
        )
    priors = priors or (_GPU_PRIORS if runs[0].machine.chip else _PRIORS)
    x = [log(getattr(start, n)) for n in names] if start else [log(median) for median, _ in priors]

    def coefficients(x: Sequence[float]) -> Coefficients:
        values: dict[str, Any] = {name: exp(v) for name, v in zip(names, x, strict=True)}
        return replace(base, **values) if base else Coefficients(**values)

    def residuals_of(x: Sequence[float]) -> list[float]:
        k = coefficients(x)
        errors = [log(predict_speed(r, k) / r.sequences_per_s) / _SPREAD for r in runs]
        return errors + [
            (v - log(median)) / spread for v, (median, spread) in zip(x, priors, strict=True)
        ]

    damping = 1e-3
    residuals = residuals_of(x)
    for _ in range(60):
        columns = []
        for i in range(len(x)):
            shifted_x = [v + 1e-5 * (i == j) for j, v in enumerate(x)]
            columns.append(
                [(b - a) / 1e-5 for a, b in zip(residuals, residuals_of(shifted_x), strict=True)]
            )
        normal = [
            [_dot(a, b) * (1 + damping * (i == j)) for j, b in enumerate(columns)]
            for i, a in enumerate(columns)
        ]
        step = _solve(normal, [-_dot(c, residuals) for c in columns])
        next_x = [a + b for a, b in zip(x, step, strict=True)]
        new = residuals_of(next_x)
        gain = _dot(residuals, residuals) - _dot(new, new)
        if gain > 0:
            x, residuals, damping = next_x, new, damping * 0.3
            if gain < 1e-7:
                break
        else:
            damping *= 5
    return coefficients(x)


@dataclass(frozen=True)
class LeftOutRun:
    """A run, and its throughput as predicted from all other runs."""

    run: PublishedRun
    predicted_speed: float
    half_width: float
    """Half-width of the 90 % interval, in log."""

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_speed / self.run.sequences_per_s - 1

    @property
    def is_inside(self) -> bool:
        return abs(log(self.predicted_speed / self.run.sequences_per_s)) <= self.half_width


def leave_one_out(runs: Sequence[PublishedRun] | None = None, by: str = "id") -> list[LeftOutRun]:
    """Predict each run from those that differ in `by`: `id` leaves out one run, `model` all runs of
    its model.
    """
    runs = runs or published_runs()
    groups = dict.fromkeys(getattr(r, by) for r in runs)
    all_coefficients = fit(runs)
    out = []
    for group in groups:
        other_runs = [r for r in runs if getattr(r, by) != group]
        k = fit(other_runs, all_coefficients)
        spread = residual(other_runs, k)
        for run in runs:
            if getattr(run, by) == group:
                nearest_run = nearest(run.work, run.machine, run.mesh, other_runs)
                out.append(LeftOutRun(run, predict_speed(run, k), half_width(spread, nearest_run)))
    return out


def residual(runs: Sequence[PublishedRun], k: Coefficients) -> float:
    """Standard deviation of log throughput about the model, with the fitted coefficients as lost
    degrees of freedom.
    """
    errors = [log(predict_speed(r, k) / r.sequences_per_s) for r in runs]
    coefficient_names = EXPERTS if runs[0].work.shape.experts else DENSE
    return sqrt(_dot(errors, errors) / max(1, len(errors) - len(coefficient_names)))


@dataclass(frozen=True)
class NearestRun:
    """The run most similar to a plan: a measured one of engine native if its kernels on the chip
    are known, else a published one. `distance` counts doublings of the feature that differs most.
    """

    run: PublishedRun | MeasuredRun
    distance: float

    @property
    def is_calibrated(self) -> bool:
        return isinstance(self.run, MeasuredRun) or self.distance <= NEAR_DOUBLINGS


def nearest(
    work: Work, machine: Machine, mesh: Mesh, runs: Sequence[PublishedRun] | None = None
) -> NearestRun | None:
    """Find the most similar run of `runs`, by default of those that plans for this machine rest on.

    None if none was published for the chip, of a dense model for a dense one and of a mixture of
    experts for a mixture.
    """
    if runs is None and kernels_of(machine):
        return NearestRun(*nearest_measured(work, mesh))
    features = _features(work, mesh)

    def distance_to(run: PublishedRun) -> float:
        return max(abs(a - b) for a, b in zip(features, _features(run.work, run.mesh), strict=True))

    candidates = [
        (distance_to(run), run)
        for run in similar_runs(machine, runs, experts=work.shape.experts is not None)
    ]
    return NearestRun(*min(candidates, key=lambda f: f[0])[::-1]) if candidates else None


def similar_runs(
    machine: Machine, runs: Sequence[PublishedRun] | None = None, *, experts: bool = False
) -> list[PublishedRun]:
    """The published runs on the same chip; those on H100 also count for H200, which has the same
    cores.

    experts: those of mixtures of experts, otherwise of dense models.
    """
    if runs is None:
        runs = (
            published_experts()
            if experts
            else published_gpu_runs()
            if machine.chip
            else published_runs()
        )
    return [
        r
        for r in runs
        if r.machine.core_flops == machine.core_flops and bool(r.machine.chip) == bool(machine.chip)
    ]


def best_published(machine: Machine, *, experts: bool = False) -> PublishedRun | None:
    """The published run on the same chip with the highest MFU; `experts`: of a mixture of
    experts.
    """
    return max(similar_runs(machine, experts=experts), key=lambda run: run.mfu, default=None)


def spread_of(machine: Machine, *, experts: bool = False) -> float:
    """`residual` of the runs that plans for this chip rest on."""
    if kernels_of(machine):
        measured_spread: float = table("gpu_kernels")["residual"]
        return measured_spread
    if experts:
        of_experts: float = table("throughput_gpu")["experts"]["residual"]
        return of_experts
    if machine.link:
        spread: float = table("throughput_gpu")["chips"][reference_chip(machine.chip)]["residual"]
        return spread
    neuron: float = table("throughput")["coefficients"]["residual"]
    return neuron


def half_width(spread: float, nearest_run: NearestRun | None) -> float:
    """Half-width of the 90 % interval, in log; wider if the nearest run is less similar."""
    is_calibrated = nearest_run is not None and nearest_run.is_calibrated
    # 2.13 is the 95 % quantile of Student's t with 4 degrees of freedom: the residuals have heavier
    # tails than a normal distribution (docs/planner-formulas.md).
    wide = (
        2.13
        * spread
        * sqrt(
            1
            + (
                nearest_run.distance
                if nearest_run is not None and is_calibrated
                else NEAR_DOUBLINGS
            )
            ** 2
        )
    )
    return wide if is_calibrated else max(MIN_UNCALIBRATED_WIDTH, wide)


def width_of(
    work: Work,
    machine: Machine,
    nearest_run: NearestRun | None,
    correction: Correction,
    *,
    is_unpublished: bool,
) -> float:
    """Half-width of a plan's interval: narrow after a run of the user's own, wide if no run of the
    library was published (`is_unpublished`).
    """
    if correction.is_own(machine):
        return 2.13 * spread_of(machine)
    if nearest_run is not None and isinstance(nearest_run.run, MeasuredRun):
        return width_on_gpus(work, machine, nearest_run.distance)
    return (
        UNPUBLISHED_ENGINE_WIDTH
        if is_unpublished
        else half_width(spread_of(machine, experts=work.shape.experts is not None), nearest_run)
    )


def _features(work: Work, mesh: Mesh) -> tuple[float, ...]:
    # Size and pipeline depth count half: the model extrapolates well over both, as each has a
    # separate term.
    return (
        log2(work.shape.active_parameters() / mesh.tp / mesh.pp) / 2,
        log2(mesh.ep) / 2,
        log2(mesh.tp),
        log2(mesh.pp) / 2,
        log2(work.seq_len),
        log2(mesh.micro_batch),
    )


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a linear system by Gaussian elimination with pivots; numpy is not a dependency of the
    client.
    """
    n = len(right)
    rows = [[*row, b] for row, b in zip(matrix, right, strict=True)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda j: abs(rows[j][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for j in range(n):
            if j != i:
                f = rows[j][i] / rows[i][i]
                rows[j] = [a - f * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [rows[i][n] / rows[i][i] for i in range(n)]


@dataclass(frozen=True)
class Correction:
    """The ratio of measured to planned speed in a run of the user's own, for its chip."""

    factor: float = 1.0
    core_flops: float = 0.0

    def of(self, machine: Machine) -> float:
        """The factor for a machine: 1 if it has another chip."""
        return self.factor if self.is_own(machine) else 1.0

    def is_own(self, machine: Machine) -> bool:
        """Whether the user's run was on this machine's chip."""
        return bool(self.core_flops) and machine.core_flops == self.core_flops

    def describe(self, machine: Machine) -> list[str]:
        """A sentence about the correction of a plan for this machine."""
        if self.of(machine) != 1:
            return [
                f"corrected by your own run, which was {self.factor:.2f} times as fast as the model"
                " says"
            ]
        is_other_chip = self.core_flops and machine.core_flops != self.core_flops
        return (
            ["your own run was on another chip, and corrects nothing here"] if is_other_chip else []
        )


def correction(
    work: Work, machine: Machine, mesh: Mesh, measured_speed: float | None
) -> Correction:
    """The correction by a run that reached `measured_speed` tokens a second with this mesh,
    repeated over all the machine.

    Raises `ConfigError` if that cannot have run there.
    """
    if measured_speed is None:
        return Correction()
    mesh = replace(mesh, dp=max(1, machine.world // (mesh.tp * mesh.pp)))
    if faults := [
        fault for fault in refusals(work, machine, mesh) if not fault.startswith("memory:")
    ]:
        raise ConfigError(
            f"measured: this config's own mesh cannot have run ({faults[0]}); give the run's"
            " config",
            code="config.combination",
        )
    peak_speed = machine.core_flops * machine.world / work.flops_per_token()
    if measured_speed > peak_speed:
        raise ConfigError(
            f"measured: {measured_speed:,.0f} tokens a second are more than the {peak_speed:,.0f}"
            f" that {machine.count} x {machine.type} can reach at its peak; give those of the whole"
            " run of this config",
            code="config.wrong_value",
        )
    planned_speed = work.global_batch * work.seq_len / step_time(work, machine, mesh).total
    return Correction(measured_speed / planned_speed, machine.core_flops)
