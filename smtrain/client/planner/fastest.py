"""The fastest micro-batch, recomputation and layers of the stages for a (tp, pp, dp, ep, cp)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from smtrain.client.planner.machines import Machine, Mesh, Recompute, Work, stage_numbers
from smtrain.client.planner.needs import CoreNeeds
from smtrain.client.planner.throughput import (
    Coefficients,
    StageTimes,
    exchange_time,
    exchanged_numbers,
    expert_gathers,
    update_time,
)

MICRO_BATCHES = (1, 2, 4, 8)
# share of a core's memory to fill: the formulas are a few percent off, the runtime is a guess
ROOM = 0.95
_Layers = tuple[int, ...]


@dataclass
class _Slots:
    """Seconds of a micro-batch under one (tp, pp, ep, cp)."""

    forms: list[_Layers] = field(default_factory=list)
    """The layers of the stages, as in `Mesh`."""
    ways: dict[int, list[tuple[int, Recompute, int, float, float]]] = field(default_factory=dict)
    """By micro-batch: a running number, recomputation, place in `forms`, seconds of a slot and of
    the other stages.
    """
    count: int = 0

    def add(
        self, m: int, recompute: Recompute, layers: _Layers, slot: float, mean_others: float
    ) -> None:
        """Append one way to run a micro-batch."""
        if layers not in self.forms:
            self.forms.append(layers)
        self.ways.setdefault(m, []).append(
            (self.count, recompute, self.forms.index(layers), slot, mean_others)
        )
        self.count += 1


@dataclass(frozen=True)
class SharedFigures:
    """Figures of a search that several machines share."""

    needs: dict[tuple[bool, bool], CoreNeeds] = field(default_factory=dict)
    """By whether a machine has accelerators, and Neuron cores."""
    slots: dict[tuple[object, ...], dict[tuple[int, int, int, int], _Slots]] = field(
        default_factory=dict
    )
    """By the figures of a machine that decide how long a slot takes."""
    exchanged_by_mesh: dict[tuple[object, ...], list[tuple[int, int]]] = field(default_factory=dict)
    """`exchanged_numbers` by mesh."""


class FastestMeshes:
    """The fastest mesh that fits for each (tp, pp, dp, ep, cp) on a kind of machine, whatever their
    number.
    """

    def __init__(
        self,
        work: Work,
        machine: Machine,
        recompute: tuple[Recompute, ...],
        shared_figures: SharedFigures,
    ) -> None:
        self._work, self._machine, self._recompute = work, machine, recompute
        # A mesh needs the same memory on all accelerated types, but for the scores of cut rows.
        kind = machine.has_accelerators, machine.neuron
        self._needs = shared_figures.needs.get(kind) or shared_figures.needs.setdefault(
            kind, CoreNeeds(work, machine)
        )
        self._k = Coefficients.for_machine(machine)
        self._exchanged = shared_figures.exchanged_by_mesh
        self._exchanges: dict[tuple[object, ...], float] = {}
        speeds = machine.core_flops, machine.core_bytes, machine.cores, machine.link, machine.chip
        self._slots = shared_figures.slots.setdefault(speeds, {})
        self._times: dict[tuple[int, int, Recompute, int, int], StageTimes] = {}
        self._known: dict[tuple[int, int, int, int, int], tuple[Mesh, float, float] | None] = {}

    def fastest(
        self, tp: int, pp: int, dp: int, ep: int = 1, cp: int = 1
    ) -> tuple[Mesh, float, float] | None:
        """The fastest micro-batch and recomputation that fits: mesh, seconds of a step, bytes of
        the worst core.
        """
        key = tp, pp, dp, ep, cp
        if key not in self._known:
            self._known[key] = self._find(tp, pp, dp, ep, cp)
        return self._known[key]

    def _find(
        self, tp: int, pp: int, dp: int, ep: int, cp: int
    ) -> tuple[Mesh, float, float] | None:
        work, key, limit = self._work, (tp, pp, ep, cp), ROOM * self._machine.core_bytes
        if self._needs.lower_bound(tp, pp, ep, dp * cp) > limit:
            return None
        if key not in self._slots:
            self._slots[key] = self._make(tp, pp, ep, cp)
        slots = self._slots[key]
        single_times = [
            {r: self._time_once(tp, pp, dp, ep, cp, layers, r) for r in self._recompute}
            for layers in slots.forms
        ]
        timings: list[tuple[float, int, int, Recompute, int]] = []
        for m, ways in slots.ways.items():
            count, remainder = divmod(work.global_batch, dp * m)
            if not remainder:
                timings += [
                    (
                        count * slot
                        + mean_others
                        + single_times[form][r][0] * (count if work.shards_fully else 1)
                        + single_times[form][r][1],
                        i,
                        m,
                        r,
                        form,
                    )
                    for i, r, form, slot, mean_others in ways
                ]
        timings.sort()
        too_big: dict[tuple[Recompute, int], int] = {}
        for seconds, _, m, r, form in timings:
            if seconds == math.inf:
                break
            if m >= too_big.get((r, form), m + 1):
                continue  # a larger micro-batch never needs less memory
            mesh = Mesh(
                tp,
                pp,
                dp,
                m,
                r,
                self._sequence_parallel(tp),
                layers=slots.forms[form],
                ep=ep,
                cp=cp,
            )
            if (need := self._needs.worst(mesh, limit)) <= limit:
                return mesh, seconds, need
            too_big[r, form] = m
        return None

    def _time_once(
        self, tp: int, pp: int, dp: int, ep: int, cp: int, layers: _Layers, recompute: Recompute
    ) -> tuple[float, float]:
        """Seconds of the exchange of gradients and weights, and of the optimizer's update; infinite
        if a core cannot hold their state.
        """
        if self._needs.held_bound(tp, pp, dp * cp, ep, layers) > ROOM * self._machine.core_bytes:
            return math.inf, 0.0
        mesh = Mesh(tp, pp, dp, recompute=recompute, layers=layers, ep=ep, cp=cp)
        key = tp, pp, ep, cp, layers, ep == dp * cp, expert_gathers(self._work, mesh)
        seconds = self._exchanges.get(key)
        if seconds is not None and not self._k.kernels:
            return seconds, 0.0
        if seconds is None:
            numbers = self._exchanged.get(key) or self._exchanged.setdefault(
                key, exchanged_numbers(self._work, mesh)
            )
            seconds = self._exchanges[key] = exchange_time(
                self._work, self._machine, mesh, self._k, numbers
            )
        return seconds, update_time(self._work, mesh, self._k)

    def _make(self, tp: int, pp: int, ep: int, cp: int) -> _Slots:
        work, machine, slots = self._work, self._machine, _Slots()
        least_bytes = stage_numbers(work.shape, Mesh(tp, pp, 1, ep=ep), pp - 1) * (
            work.least_width + (0.0 if work.lora else 4.0)
        )
        if (
            work.shards_fully or least_bytes < machine.core_bytes
        ):  # weights and gradients, which dp does not divide, must fit alone
            for m in MICRO_BATCHES:
                for r in self._recompute:
                    times = self._times.get((tp, m, r, ep, cp))
                    if times is None:
                        mesh = Mesh(tp, 1, 1, m, r, self._sequence_parallel(tp), ep=ep, cp=cp)
                        times = self._times[tp, m, r, ep, cp] = StageTimes(
                            work, machine, mesh, self._k
                        )
                    # If stages cannot be even: by time, or the remainder on the last ones, which
                    # need less memory.
                    layers, slot, mean_others = times.balance_layers(pp)
                    slots.add(m, r, layers, slot, (pp - 1) * mean_others)
                    if layers:
                        last, mean_others = times.slowest(pp, ())
                        slots.add(m, r, (), last.total, (pp - 1) * mean_others)
        return slots

    def _sequence_parallel(self, tp: int) -> bool:
        return tp > 1 and self._work.seq_len % tp == 0
