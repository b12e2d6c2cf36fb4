"""Invariants of any plan, and shapes that are known to be good, bad and unwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import cast

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from smtrain.client.planner.machines import (
    RECOMPUTE,
    Machine,
    Mesh,
    Work,
    mesh_faults,
    named_shape,
    sizes_of_rank,
)
from smtrain.client.planner.memory import PROCESS, core_memory, host_memory, worst_core
from smtrain.client.planner.search import adapter_ways, mesh_warnings, refusals, search
from smtrain.client.planner.throughput import Coefficients, StageTimes, slot_time, step_time
from smtrain.core.facts import table
from smtrain.core.model.shape import ModelShape
from tests.tiers import examples

TYPES = sorted(
    t
    for t, row in table("instances")["instances"].items()
    if row.get("chip") not in ("K80", "V100", "T4")
)
NAMES = sorted(table("models")["models"])
POWERS = [1, 2, 4, 8, 16, 32]


@st.composite
def works(draw: st.DrawFn) -> Work:
    shape = named_shape(draw(st.sampled_from(NAMES)))
    assert shape is not None
    return Work(
        shape,
        seq_len=draw(st.sampled_from([64, 2048, 4096, 8192])),
        global_batch=draw(st.sampled_from([8, 96, 256, 1024])),
        precision=draw(st.sampled_from(["bf16", "fp32"])),
        gathers_again=draw(st.booleans()),
    )


@st.composite
def meshes(draw: st.DrawFn, machine: Machine) -> Mesh:
    tp, pp = draw(st.sampled_from(POWERS)), draw(st.sampled_from(POWERS))
    assume(machine.world % (tp * pp) == 0)
    sp = draw(st.booleans()) and tp > 1
    m, r = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(RECOMPUTE))
    return Mesh(tp, pp, machine.world // (tp * pp), m, r, sp)


machines = st.builds(Machine.of, st.sampled_from(TYPES), st.sampled_from([1, 2, 4, 6, 16]))


@given(works(), machines, st.data(), st.floats(1, 8))
@settings(
    deadline=None, max_examples=examples(150), suppress_health_check=[HealthCheck.filter_too_much]
)
def test_more_memory_never_makes_a_fitting_plan_unfit(
    work: Work, machine: Machine, data: st.DataObject, more: float
) -> None:
    mesh = data.draw(meshes(machine))
    assume(not list(mesh_faults(work, machine, mesh)))
    larger = replace(
        machine, core_bytes=machine.core_bytes * more, host_bytes=machine.host_bytes * more
    )
    if not list(refusals(work, machine, mesh)):
        assert not list(refusals(work, larger, mesh))
    assert worst_core(work, larger, mesh) == worst_core(work, machine, mesh)


@given(works(), machines, st.data())
@settings(
    deadline=None, max_examples=examples(150), suppress_health_check=[HealthCheck.filter_too_much]
)
@pytest.mark.full
def test_twice_the_instances_never_take_longer(
    work: Work, machine: Machine, data: st.DataObject
) -> None:
    assume(
        not machine.link or machine.count > 1
    )  # the GPUs of one host exchange over links faster than its network
    mesh = data.draw(meshes(machine))
    twice, wider = replace(machine, count=2 * machine.count), replace(mesh, dp=2 * mesh.dp)
    assume(not list(mesh_faults(work, machine, mesh)) and not list(mesh_faults(work, twice, wider)))
    assert step_time(work, twice, wider).total <= step_time(work, machine, mesh).total
    assert worst_core(work, twice, wider)[1].total <= worst_core(work, machine, mesh)[1].total * 1.3


@given(works(), st.lists(machines, min_size=1, max_size=3))
@settings(deadline=None, max_examples=examples(40))
def test_the_search_gives_legal_meshes_that_fit_the_fastest_first(
    work: Work, some: list[Machine]
) -> None:
    found = search(work, some)
    for c in found[:50]:
        assert not list(refusals(work, c.machine, c.mesh))
        assert c.machine in some
        assert abs(step_time(work, c.machine, c.mesh).total / c.step_s - 1) < 1e-9
    assert [c.step_s for c in found] == sorted(c.step_s for c in found)


@given(works(), st.sampled_from(TYPES), st.integers(1, 8))
@settings(deadline=None, max_examples=examples(30))
def test_up_to_twice_the_instances_are_never_slower(work: Work, type_: str, count: int) -> None:
    """A higher limit of instances can only help."""
    half = search(work, [Machine.of(type_, n) for n in range(1, count + 1)])
    whole = search(work, [Machine.of(type_, n) for n in range(1, 2 * count + 1)])
    if half:
        assert whole[0].step_s <= half[0].step_s


def work(name: str, seq_len: int = 4096, batch: int = 1024) -> Work:
    shape = named_shape(name)
    assert shape is not None
    return Work(shape, seq_len, batch, gathers_again=True)


def test_llama_3_70b_over_eight_cores_is_refused_with_the_shortfall() -> None:
    machine = Machine.of("ml.trn1.32xlarge", 32)
    (fault,) = refusals(work("llama-3-70b", 8192), machine, Mesh(8, 1, 128, 1, "full", True))
    assert "short by 37.5 GiB" in fault
    assert "gradients" in fault


def test_llama_2_7b_at_tp_8_pp_4_is_unwise_by_its_factor() -> None:
    machine, mesh = Machine.of("ml.trn1.32xlarge", 32), Mesh(8, 4, 32, 1, "full", True)
    best = search(work("llama-2-7b"), [machine], recompute=("selective", "full"))[0]
    (doubt,) = mesh_warnings(work("llama-2-7b"), machine, mesh, best)
    assert doubt.startswith("unwise: 1.")
    assert "times slower than tp 8 x pp 1" in doubt


def test_each_reason_against_a_mesh_is_named() -> None:
    machine = Machine.of("ml.trn1.32xlarge", 4)
    seven = work("llama-2-7b")
    told = " ".join(mesh_faults(seven, machine, Mesh(64, 33, 7, 3)))
    for words in (
        "tp = 64 does not divide the model's 32 attention heads",
        "pp = 33 is more than the model's 32 layers",
        "is not the 4 x 32 = 128 cores",
        "not a multiple of dp x micro-batch = 7 x 3",
    ):
        assert words in told
    odd = replace(seven, shape=replace(seven.shape, vocab=32001))
    assert not list(mesh_faults(odd, machine, Mesh(8, 1, 16))), (
        "both engines pad a vocabulary that tp does not divide"
    )
    few = replace(seven, global_batch=8)
    assert any(
        "the pipeline waits" in d
        for d in mesh_warnings(few, machine, Mesh(8, 4, 4, 1, "full", True), None)
    )
    large = Machine.of("ml.trn1.32xlarge", 8)
    across = mesh_warnings(work("llama-2-70b"), large, Mesh(64, 4, 1, 1, "full", True), None)
    assert any("leaves the host, which has 32" in d for d in across)


def test_stages_that_cannot_be_even_leave_room_for_the_output_matrix() -> None:
    machine = Machine.of("ml.trn1.32xlarge", 1)
    shape = replace(cast(ModelShape, named_shape("llama-3-8b")), layers=30)
    job = Work(shape, seq_len=4096, global_batch=64)
    mesh, k = Mesh(8, 4, 1, 1, "full", True), Coefficients.for_machine(machine)
    counts = StageTimes(job, machine, mesh, k).balance_layers(mesh.pp)[0]
    assert (len(counts), sum(counts)) == (4, 30)
    assert counts[-1] < counts[-2] == max(counts), "the last stage also has the output matrix"
    uneven = replace(mesh, layers=counts)
    slots = [
        slot_time(job, machine, replace(mesh, layers=other), k).total
        for other in neighbours(counts)
    ]
    assert slot_time(job, machine, uneven, k).total <= min(slots)
    assert step_time(job, machine, uneven).total < step_time(job, machine, mesh).total
    found = next(c for c in search(job, [machine]) if c.mesh.pp == 4)
    assert sum(found.mesh.layers) == 30
    assert found.step_s == pytest.approx(step_time(job, machine, found.mesh).total)
    assert all(not c.mesh.layers for c in search(work("llama-3-8b"), [machine])), (
        "32 layers: stages are even"
    )


def neighbours(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """One layer moved from any stage to any other."""
    for one, other in permutations(range(len(counts)), 2):
        yield tuple(n - (s == one) + (s == other) for s, n in enumerate(counts))


def test_memory_counts_the_layers_that_a_stage_has() -> None:
    machine, job = Machine.of("ml.trn1.32xlarge", 1), work("llama-2-70b")
    mesh = Mesh(8, 4, 1, 1, "full", True)
    each = [
        core_memory(job, machine, replace(mesh, layers=(18, 20, 20, 22)), s).weights
        for s in range(4)
    ]
    same = [core_memory(job, machine, replace(mesh, layers=(20,) * 4), s) for s in range(4)]
    assert same == [core_memory(job, machine, mesh, s) for s in range(4)]
    layer = (same[1].weights - each[0] + sizes_of_rank(job.shape, 8).embed * 2) / 2
    assert each[3] - same[3].weights == pytest.approx(2 * layer)
    assert worst_core(job, machine, replace(mesh, layers=(10, 40, 20, 10)))[0] == 1
    assert "adds up to 79 layers" in " ".join(
        mesh_faults(job, machine, replace(mesh, layers=(19, 20, 20, 20)))
    )


def test_long_rows_are_cut_over_ranks_if_that_is_faster() -> None:
    machine, shape = Machine.of("ml.p5.48xlarge", 4), named_shape("llama-3.1-8b")
    assert shape is not None
    short, long = Work(shape, 8192, 1), Work(shape, 1 << 17, 1)
    assert {c.mesh.cp for c in search(short, [machine])} == {1}
    found = search(long, [machine], recompute=("none", "full"))
    best, whole = found[0], next(c for c in found if c.mesh.cp == 1)
    assert best.mesh.cp > 1
    assert best.step_s < 0.7 * whole.step_s
    assert not list(mesh_faults(long, machine, best.mesh))
    assert 0 < step_time(long, machine, best.mesh).parts()["context_parallel"] < 0.2 * best.step_s
    assert "context_parallel" not in step_time(long, machine, whole.mesh).parts()
    assert {c.mesh.cp for c in search(replace(long, gathers_again=True), [machine])} == {1}, (
        "engine nxd cuts no rows"
    )
    faults = [*mesh_faults(Work(shape, 1000, 4), machine, Mesh(1, 1, 2, cp=16))]
    assert faults == ["train.seq_len = 1000 cannot be cut over cp = 16"]


def test_full_sharding_takes_less_memory_and_more_messages() -> None:
    machine, shape = Machine.of("ml.p4d.24xlarge", 2), named_shape("llama-3.1-8b")
    assert shape is not None
    zero1 = Work(shape, 4096, 64)
    sharded, mesh = replace(zero1, shards_fully=True), Mesh(1, 1, 16, 1, "full")
    (_, whole), (_, part) = (worst_core(job, machine, mesh) for job in (zero1, sharded))
    state = part.weights + part.gradients + part.optimizer
    assert state == pytest.approx(16 * shape.parameters() / 16, rel=1e-6)
    assert [*refusals(zero1, machine, mesh)]
    assert part.total < 0.5 * whole.total
    assert not [*refusals(sharded, machine, mesh)]
    # Four micro-batches of a gradient and two weights, in place of one of each.
    once, often = (step_time(job, machine, mesh).data_parallel for job in (zero1, sharded))
    assert often / once == pytest.approx(4 * (4 + 2 * 2) / (4 + 2))
    rows, weights = (
        host_memory(replace(sharded, saves_rows=saves_rows), machine, mesh)
        for saves_rows in (True, False)
    )
    # Half of the processes are on a host: one copy of masters and moments, also in the background.
    state = 12 * shape.parameters() / 2
    assert rows.save == rows.async_save == pytest.approx(machine.cores * PROCESS + state)
    assert weights.save - rows.save == 2 * shape.parameters(), "the whole weights, once on a host"
    hints, ways = (dict(adapter_ways(job, machine)) for job in (sharded, zero1))
    assert hints["QLoRA (quantize: nf4, parallel.shard: optimizer)"] == [*ways.values()][-1]
    for c in search(sharded, [machine]):
        assert c.step_s == pytest.approx(step_time(sharded, c.machine, c.mesh).total)
