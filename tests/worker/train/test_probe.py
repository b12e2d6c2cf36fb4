"""`smtrain plan --probe`: this machine as an entry of `machines`."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import smtrain
from smtrain.cli.plan import app
from smtrain.core.config.compute import MachineEntry
from smtrain.worker.train.probe import measure
from tests import tiers


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
