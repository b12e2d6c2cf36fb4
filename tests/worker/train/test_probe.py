"""`smtrain plan --probe`: this machine as an entry of `machines`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import smtrain
from smtrain.cli.plan import app
from smtrain.core.config.compute import MachineEntry
from smtrain.core.errors import ConfigError
from smtrain.worker.train import probe
from smtrain.worker.train.probe import measure, rates
from tests import tiers
from tests.worker.engine.world import World


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """This machine with two ranks."""
    return measure(2)


@pytest.mark.full
def test_this_machine_measured_is_an_entry_to_plan_with(measured: dict[str, Any]) -> None:
    entry = MachineEntry.model_validate(measured)
    assert (entry.kind, entry.devices) == ("cpu", 2)
    assert 0.001 < entry.tflops < 20, "a core's fp32 rate, in 1e12 a second"
    assert entry.link_gbs
    assert entry.host_memory_gib >= entry.memory_gib > 0
    raw = {
        "model": {"path": "s3://models/pythia-1.4b"}, "data": {"prepared": "s3://texts/t/"},
        "train": {"seq_len": 128}, "machines": {"here": {**entry.model_dump(), "memory_gib": 64}},
    }  # fmt: skip
    plan = smtrain.plan(raw, machines=[("here", 1)])
    assert plan.tokens_per_s is not None
    assert plan.memory_gib["runtime"] == 0, "no accelerator's runtime"


@pytest.mark.slow
def test_the_command_prints_what_a_machine_file_holds(
    measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tiers.full():  # measured once is enough
        monkeypatch.setattr("smtrain.worker.train.probe.measure", lambda: measured)
    result = CliRunner().invoke(app, ["--probe", "here"])
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout)["machines"]["here"]["devices"] >= 1


def _of_group(rank: int) -> tuple[float, float, float]:
    return rates(torch.device("neuron", rank), 2, "bf16")


@pytest.mark.full  # the gate measures two ranks of the CPU above
def test_neuron_cores_are_measured_with_their_own_group() -> None:
    """On the imitated device: its speed is the processor's, and says nothing of Neuron's."""
    pytest.importorskip("tests.worker.engine.neuron.imitation")
    of: Any = World
    world = of(2, "neuron")
    try:
        for rate, memory, moved in world.run(_of_group):
            assert 0 < rate < 20
            assert memory >= 0
            assert moved > 0
    finally:
        world.stop()


def test_the_memory_of_a_neuron_core_is_known_by_its_machine(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "product_name"
    monkeypatch.setattr(probe, "_EC2_NAME", file)
    assert probe._memory_by_name() == 0
    for name, gib in (
        ("trn2.48xlarge\n", 24.0),
        ("trn2.3xlarge", 24.0),
        ("trn1.32xlarge", 16.0),
        ("laptop", 0.0),
    ):
        file.write_text(name)
        assert probe._memory_by_name() == gib


def test_a_device_that_tells_no_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(probe, "spawn", lambda *_, nprocs, **__: None)
    monkeypatch.setattr(probe, "_read", lambda _: (90.0, 0.0, 10.0))
    monkeypatch.setattr(probe, "_memory_by_name", lambda: 0.0)
    with pytest.raises(
        ConfigError,
        match="torch does not say the memory of a cuda device here; describe the machine by",
    ):
        measure(2)


class Gpu:
    """A clock of the host and of a device that works off what is queued; a wait costs the host 20
    microseconds.
    """

    def __init__(self, flops: float) -> None:
        self.flops, self.now, self.busy_until, self.sides = flops, 0.0, 0.0, list[int]()

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        self.sides.append(len(a))
        self.now += 5e-6  # the launch
        self.busy_until = max(self.now, self.busy_until) + 2 * len(a) ** 3 / self.flops

    def wait(self) -> None:
        self.now = max(self.now, self.busy_until) + 20e-6


@pytest.mark.parametrize("flops", [40e12, 800e12])
def test_the_rate_of_a_product_is_the_devices_and_not_that_of_waiting_for_it(
    flops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One product of 4096 and a wait are 7 % below the rate of a GPU of 800 TFLOP/s."""
    gpu = Gpu(flops)
    monkeypatch.setattr(
        "smtrain.worker.train.probe.time", SimpleNamespace(perf_counter=lambda: gpu.now)
    )
    monkeypatch.setattr(probe, "_SIDE", {"cpu": 4096})
    monkeypatch.setattr(torch, "randn", lambda *size, **_: torch.empty(size, device="meta"))
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    monkeypatch.setattr(torch, "mm", gpu.multiply)
    assert probe.matmul_rate(torch.device("cpu"), "bf16", gpu.wait, 0.1) == pytest.approx(
        flops, rel=0.02
    )


def test_a_device_with_little_room_is_measured_with_smaller_matrices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sides = list[int]()
    real = torch.empty_like

    def full(a: torch.Tensor) -> torch.Tensor:
        sides.append(len(a))
        if len(a) > 512:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(a)

    monkeypatch.setattr(probe, "_SIDE", {"cpu": 2048})
    monkeypatch.setattr(torch, "empty_like", full)
    assert probe.matmul_rate(torch.device("cpu"), "fp32", lambda: None, 0.01) > 0
    assert sides == [2048, 1024, 512]
