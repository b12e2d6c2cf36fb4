"""The checks of a config for a backend with a queue read nothing of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smtrain.client.backends.choose import backend_of
from smtrain.client.launch.stages import Chain
from smtrain.client.planner import this_machine
from smtrain.client.planner.resolve import load_config
from smtrain.client.planner.result import Plan
from smtrain.client.preflight.checks import _run_check
from smtrain.client.preflight.context import Context
from smtrain.client.preflight.cost import memory
from smtrain.core.errors import ConfigError

BOX = {"devices": 2, "memory_gib": 24, "tflops": 80, "host_memory_gib": 256, "network_gbs": 10}


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose memory may not be read."""

    def refuse() -> float:
        raise AssertionError("the memory of this machine was read")

    monkeypatch.setattr(this_machine, "memory_here", refuse)
    monkeypatch.setattr(this_machine, "free_disk", refuse)


def context_of(raw: dict[str, Any], tmp_path: Path, kind: str) -> Context:
    compute = {"instance_type": kind, "instance_count": 2, "processes_per_instance": 2}
    cluster = {"shared": str(tmp_path)}
    values = {**raw, "target": "slurm", "cluster": cluster, "compute": compute}
    config = load_config({**values, "machines": {"box": BOX}})
    return Context(Chain(config, backend_of(config), look=False), ["train"])


@pytest.mark.usefixtures("refused")
def test_nodes_without_an_accelerator_get_no_memory_of_this_machine(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    context = context_of(raw, tmp_path, "ml.c5.xlarge")
    assert isinstance(context.plan, ConfigError)
    (reason,) = _run_check(context, "memory", memory)
    assert "ml.c5.xlarge " in str(reason)


@pytest.mark.usefixtures("refused")
def test_nodes_of_the_config_are_planned_as_nodes(raw: dict[str, Any], tmp_path: Path) -> None:
    context = context_of(raw, tmp_path, "box")
    assert isinstance(context.plan, Plan)
    assert (context.plan.machines, context.plan.here) == ("2 x box", False)
    (finding,) = memory(context)
    assert finding.level == "ok"
    assert finding.text.endswith(" of 24.0 GiB")
