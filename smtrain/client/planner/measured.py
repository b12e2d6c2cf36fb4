"""A run of one's own corrects the model: so many times as fast as it planned."""

from __future__ import annotations

from dataclasses import dataclass, replace

from smtrain.client.planner.machines import Machine, Mesh, Work
from smtrain.client.planner.search import refusals
from smtrain.client.planner.throughput import step_time
from smtrain.core.errors import ConfigError


@dataclass(frozen=True)
class Correction:
    """What a measured run says of the model, on one chip."""

    factor: float = 1.0
    core_flops: float = 0.0

    def of(self, machine: Machine) -> float:
        """How many times as fast as the model says this machine is."""
        return self.factor if machine.core_flops == self.core_flops else 1.0

    def said(self, machine: Machine) -> list[str]:
        """The correction of a plan for this machine, in a sentence."""
        if self.of(machine) != 1:
            return [f"corrected by your own run, which was {self.factor:.2f} times as fast as the model says"]
        return ["your own run was on another chip, and corrects nothing here"] if self._elsewhere(machine) else []

    def _elsewhere(self, machine: Machine) -> bool:
        return bool(self.core_flops) and machine.core_flops != self.core_flops


def correction(work: Work, machine: Machine, mesh: Mesh, measured: float | None) -> Correction:
    """By a run of this mesh, data-parallel over all of the machine, that reached `measured` tokens a second.

    Raises `ConfigError` where that cannot have run there.
    """
    if measured is None:
        return Correction()
    mesh = replace(mesh, dp=max(1, machine.world // (mesh.tp * mesh.pp)))
    if faults := [fault for fault in refusals(work, machine, mesh) if not fault.startswith("memory:")]:
        raise ConfigError([f"measured: this config's own mesh cannot have run ({faults[0]}); give the run's config"])
    most = machine.core_flops * machine.world / work.shape.flops_per_token(work.seq_len)
    if measured > most:
        raise ConfigError(
            [
                f"measured: {measured:,.0f} tokens a second are more than the {most:,.0f} that {machine.count} x "
                f"{machine.type} can reach at its peak; give those of the whole run of this config"
            ]
        )
    planned = work.global_batch * work.seq_len / step_time(work, machine, mesh).total
    return Correction(measured / planned, machine.core_flops)
