"""Real ranks of engine nxd under the launcher: stopped and killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.worker.train import launched


@pytest.mark.nxd
def test_stopped_or_killed_it_resumes_bit_for_bit(
    tmp_path: Path, trained_inputs: dict[str, Path]
) -> None:
    paths = [str(Path(__file__).parent / "cpu"), os.environ.get("PYTHONPATH", "")]
    environment = {"NXD_CPU_MODE": "1", "PJRT_DEVICE": "CPU", "PYTHONPATH": os.pathsep.join(paths)}
    shell = launched.lay_out(tmp_path / "ml", trained_inputs)
    launched.stopped_and_killed_like_left_alone(shell, "nxd", environment)
