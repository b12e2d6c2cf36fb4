"""`smtrain plan --probe`: this machine as an entry of `machines`."""

from __future__ import annotations

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


def test_the_memory_of_a_neuron_core_is_known_by_its_machine(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "product_name"
    monkeypatch.setattr(probe, "_EC2_NAME", file)
    assert probe._memory_by_name() == 0
    for name, gib in (("trn2.48xlarge\n", 24.0), ("trn2.3xlarge", 24.0), ("trn1.32xlarge", 16.0), ("laptop", 0.0)):
        file.write_text(name)
        assert probe._memory_by_name() == gib


def test_a_device_that_tells_no_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(probe, "spawn", lambda *_, nprocs, **__: None)
    monkeypatch.setattr(probe, "_read", lambda _: (90.0, 0.0, 10.0))
    monkeypatch.setattr(probe, "_memory_by_name", lambda: 0.0)
    with pytest.raises(
        ConfigError, match="torch does not say the memory of a cuda device here; describe the machine by"
    ):
        measure(2)
