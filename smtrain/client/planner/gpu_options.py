"""Prices of train.compile and train.deterministic on a GPU, and the number of steps from which
compiling pays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf

from smtrain.client.planner.kernels import kernels_of
from smtrain.client.planner.machines import Machine, Mesh, Work
from smtrain.client.planner.throughput import step_time
from smtrain.core.config.machine_defaults import COMPILE_SECONDS
from smtrain.core.config.units import spell


@dataclass(frozen=True)
class RunPrice:
    """A run with one value of an option; hours and dollars as in `Plan`, None if unknown."""

    step_s: float
    hours: float | None = None
    dollars: float | None = None

    def __str__(self) -> str:
        hours = "" if self.hours is None else f", {spell(self.hours * 3600)}"
        return f"{self.step_s:.3g} s a step{hours}" + (
            "" if self.dollars is None else f", ${self.dollars:,.2f}"
        )


@dataclass(frozen=True)
class GpuOptions:
    """The two options of a plan, and what each value costs."""

    compile: bool
    compile_earns_from: int | None
    """The number of steps from which compiling saves more than it takes; None: never."""
    compiled: RunPrice
    uncompiled: RunPrice
    deterministic: bool
    same_bits: RunPrice
    """With `deterministic: true`."""
    other_bits: RunPrice

    @classmethod
    def of(
        cls,
        work: Work,
        machine: Machine,
        mesh: Mesh,
        price: Callable[[float], tuple[float | None, float | None]],
        faster: float = 1.0,
    ) -> GpuOptions | None:
        """The options of a plan, if the chip's kernels are known. `price` gives hours and dollars
        for the seconds of a step; `faster` is the factor of a run of the user's own.
        """
        if kernels_of(replace(machine, count=1)) is None:
            return None

        def run(variant: Work) -> RunPrice:
            seconds = step_time(variant, machine, mesh).total / faster
            return RunPrice(seconds, *price(seconds))

        return cls(
            compile=work.is_compiled,
            compile_earns_from=break_even_steps(work, machine, mesh),
            compiled=run(replace(work, is_compiled=True)),
            uncompiled=run(replace(work, is_compiled=False)),
            deterministic=work.deterministic,
            same_bits=run(replace(work, deterministic=True)),
            other_bits=run(replace(work, deterministic=False)),
        )

    def lines(self) -> list[str]:
        """The options as two lines of a plan."""
        current_run, other_run = (
            (self.compiled, self.uncompiled) if self.compile else (self.uncompiled, self.compiled)
        )
        pays = (
            "never pays"
            if self.compile_earns_from is None
            else f"pays from {self.compile_earns_from:,} steps on"
        )
        value, alternative = ("on", "without") if self.compile else ("off", "with it")
        variants = [("not deterministic", self.other_bits), ("deterministic", self.same_bits)]
        bits = "; ".join(
            f"{name}: {run}"
            for name, run in (reversed(variants) if self.deterministic else variants)
        )
        return [
            (
                f"compile     {value}: {current_run.step_s:.3g} s a step, {other_run.step_s:.3g} s"
                f" {alternative}; {pays}"
            ),
            f"bits        {bits}",
        ]


def step_seconds(work: Work, machine: Machine, mesh: Mesh) -> tuple[float, float]:
    """Seconds of a step without and with compilation."""
    slow, fast = (
        step_time(replace(work, is_compiled=on), machine, mesh).total for on in (False, True)
    )
    return slow, fast


def break_even_steps(work: Work, machine: Machine, mesh: Mesh) -> int | None:
    """Steps after which compiling has saved the seconds that it takes; None if it saves nothing."""
    slow, fast = step_seconds(work, machine, mesh)
    steps = COMPILE_SECONDS / (slow - fast) if slow > fast else inf
    return None if steps == inf else ceil(steps)
