"""A real XLA device, whose tensors are lazy: XLA's own CPU, one process.

No graph is compiled after the third step.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run(*arguments: str) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "NXD_CPU_MODE"} | {
        "PJRT_DEVICE": "CPU"
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.worker.engine.nxd.lazily", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_the_optimizer_needs_none_of_the_library() -> None:
    """This lets the next test measure its graph with torch_xla alone."""
    code = (
        "import sys; sys.modules['neuronx_distributed'] = None; import"
        " smtrain.worker.engine.nxd.optimizer"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@pytest.mark.xla
def test_the_optimizers_graph_is_the_same_at_every_step() -> None:
    result = run("optimizer")
    assert [step for step in result["ours"] if step > 3] == []
    assert {325, 350} <= set(result["torchs"]), (
        "torch's own is compiled again: the device bakes scalars into graphs"
    )
    assert result["apart"] < 1e-5


@pytest.mark.nxd
@pytest.mark.parametrize("how", ["zero1", "plain", "adapter", "apart"])
def test_steps_through_a_learning_rate_of_0_compile_nothing_after_the_third(
    how: str, tmp_path: Path
) -> None:
    result = run(how, str(tmp_path))
    assert [step for step in result["compiled"] if step > 3] == []
    assert result["waits"] == 0, "giving the device a step fetches nothing from it"
    assert all(map(math.isfinite, result["losses"]))
    assert result["losses"][-1] < result["losses"][0]
    assert result["again"] == [result["losses"][step - 1] for step in result["on"]]
