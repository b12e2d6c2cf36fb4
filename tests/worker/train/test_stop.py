"""Real ranks under the launcher: stopped, killed, and stuck."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.worker.train import launched
from tests.worker.train.test_shell import Shell

pytestmark = pytest.mark.slow


@pytest.fixture
def shell(tmp_path: Path, trained_inputs: dict[str, Path]) -> Shell:
    return launched.lay_out(tmp_path / "ml", trained_inputs)


# the gate has tests/client/launch/test_kill_loop.py, and test_local_run.py for a stop
@pytest.mark.full
def test_stopped_or_killed_it_resumes_bit_for_bit(shell: Shell) -> None:
    launched.stopped_and_killed_like_left_alone(shell, "native", {})


@pytest.mark.full
def test_a_rank_that_never_comes_ends_the_job_with_every_ranks_stack(shell: Shell) -> None:
    stuck = os.pathsep.join(
        [str(Path(__file__).parent / "stuck"), os.environ.get("PYTHONPATH", "")]
    )
    status, said = launched.finish(
        launched.start(shell, {"stall_minutes": 0.1}, {"PYTHONPATH": stuck})
    )
    assert status != 0
    for rank in (0, 1):
        assert f"[rank{rank}]: no step after" in said
    assert re.search(r"^\[rank1\]: .* in never$", said, re.M), "it waits for its batch"
    assert re.search(r"^\[rank0\]: .* in (is_agreed|begin_step)$", said, re.M), (
        "it waits for rank 1"
    )
    assert "train.stall_minutes: nothing was done for 0.1 minutes after step" in shell.failure
    assert "the run resumes from its last checkpoint" in shell.failure
