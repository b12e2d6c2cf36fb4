"""Memory of the meshes of a search: bounds before exact bytes, and figures that several meshes
share only once.
"""

from __future__ import annotations

from smtrain.client.planner.full_shard_memory import Peak
from smtrain.client.planner.machines import (
    Machine,
    Mesh,
    Work,
    expert_share,
    layers_of,
    rank_numbers,
    trained_numbers,
)
from smtrain.client.planner.memory import (
    HeldMemory,
    held_bytes,
    micro_batches_in_flight,
    on_machine,
    peak_moment,
    peak_stages,
    standing_bytes,
)


class CoreNeeds:
    """Bytes that meshes of one work need on a kind of machine: one with GPUs, Neuron cores, or no
    accelerators.
    """

    def __init__(self, work: Work, machine: Machine) -> None:
        self._work, self._machine = on_machine(work, machine), machine
        self._alike = len(work.shape.kinds) == 1
        self._numbers: dict[tuple[int, int, int], float] = {}
        self._held: dict[
            tuple[int, int, int, int, tuple[int, ...]], tuple[float, dict[int, HeldMemory]]
        ] = {}
        self._trained: dict[
            tuple[int, int, int, tuple[int, ...]], list[tuple[int, tuple[int, int]]]
        ] = {}
        self._standing: dict[tuple[int, int, int], float] = {}
        self._peaks: dict[object, Peak] = {}
        self._totals: dict[Mesh, dict[int, float]] = {}

    def lower_bound(self, tp: int, pp: int, ep: int, shards: int) -> float:
        """Lower bound of the worst core for any layers of the stages: the mean of the stages'
        weights, gradients and optimizer state.
        """
        work, key = self._work, (tp, pp, ep)
        if key not in self._numbers:
            self._numbers[key] = (
                rank_numbers(work.shape, tp, ep) / pp * (1 - 1e-9)
            )  # float rounding
        if work.shards_fully:  # masters, gradients and moments in fp32
            return self._numbers[key] * (work.width if work.lora else 16.0) / shards
        trained_width = 0.0 if work.lora else 4.0 + (8.0 + 4.0 * (work.width == 2)) / shards
        return self._numbers[key] * (work.least_width + trained_width)

    def held_bound(self, tp: int, pp: int, shards: int, ep: int, layers: tuple[int, ...]) -> float:
        """Lower bound of the worst core for any micro-batch and recomputation."""
        bounds = self._held.get((tp, pp, shards, ep, layers))
        return (bounds or self._held_of(Mesh(tp, pp, shards, layers=layers, ep=ep)))[0]

    def worst(self, mesh: Mesh, limit: float) -> float:
        """Bytes of the worst core, or of the first stage above `limit`: the rest is then not
        computed.
        """
        need, totals = 0.0, self._totals.setdefault(mesh, {})
        for stage, bytes_ in self._held_of(mesh)[1].items():
            total = totals.get(stage)
            if total is None:
                total = totals[stage] = bytes_.total(
                    self._peak(mesh, stage), self._standing_bytes(mesh)
                )
            need = max(need, total)
            if need > limit:
                break
        return need

    def _held_of(self, mesh: Mesh) -> tuple[float, dict[int, HeldMemory]]:
        """A lower bound of the worst core, and the `held_bytes` of each stage that tells."""
        key = mesh.tp, mesh.pp, mesh.shards, mesh.ep, mesh.layers
        if key not in self._held:
            held_by_stage = {
                stage: held_bytes(self._work, self._machine, mesh, stage, numbers)
                for stage, numbers in self._parameters_by_stage(mesh)
            }
            self._held[key] = (
                max(bytes_.lower_bound for bytes_ in held_by_stage.values()),
                held_by_stage,
            )
        return self._held[key]

    def _standing_bytes(self, mesh: Mesh) -> float:
        key = mesh.dp, mesh.cp, mesh.micro_batch
        if key not in self._standing:
            self._standing[key] = standing_bytes(self._work, mesh)
        return self._standing[key]

    def _parameters_by_stage(self, mesh: Mesh) -> list[tuple[int, tuple[int, int]]]:
        """Each stage that tells, with its trained parameters and those of them that ep divides."""
        work, key = self._work, (mesh.tp, mesh.pp, mesh.ep, mesh.layers)
        if key not in self._trained:
            self._trained[key] = [
                (stage, (trained_numbers(work, mesh, stage), expert_share(work, mesh, stage)))
                for stage in peak_stages(work, mesh)
            ]
        return self._trained[key]

    def _peak(self, mesh: Mesh, stage: int) -> Peak:
        """The `peak_moment` of a stage: one for all dp, unless this cuts the weights, and for all
        pp if the model's layers are alike.
        """
        part: object = mesh.pp, mesh.layers, stage
        if self._alike:
            part = layers_of(self._work.shape.layers, mesh.pp, stage, mesh.layers)
        flying = micro_batches_in_flight(self._work, mesh, stage)
        ends = stage == 0, stage == mesh.pp - 1
        cut = mesh.tp, mesh.cp, mesh.ep, mesh.micro_batch, mesh.recompute, mesh.sequence_parallel
        key: object = (cut, part, ends, flying)
        if self._work.shards_fully:
            micro_batches = self._work.global_batch // (mesh.dp * mesh.micro_batch)
            key = (key, mesh.shards, micro_batches > flying)
        if key not in self._peaks:
            self._peaks[key] = peak_moment(self._work, self._machine, mesh, stage)
        return self._peaks[key]
