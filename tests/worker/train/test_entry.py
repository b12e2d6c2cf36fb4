"""A stage that fails: one sentence in output/failure, a traceback in the log, and no secret in either."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz" + "AbCdEfGh"
STAGE = """
from smtrain.worker.train.entry import main

def stage(config, container):
    raise {error}("the hub said no to {token}")

main(stage)
"""


def failed(root: Path, error: str) -> tuple[str, str]:
    """What a stage that raises `error` leaves in its log and in output/failure."""
    channel = root / "input/data/config"
    channel.mkdir(parents=True)
    (channel / "config.json").write_text('{"model": {"path": "hf://org/model"}}')
    script = root / "stage.py"
    script.write_text("from smtrain.core.errors import SmtrainError\n" + STAGE.format(error=error, token=TOKEN))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False,
        env={"SMTRAIN_ML_ROOT": str(root), "PYTHONPATH": str(Path(__file__).parents[3]), "RANK": "3"},
    )  # fmt: skip
    assert done.returncode == 1
    return done.stderr, (root / "output/failure").read_text()


def test_a_defect_shows_its_traceback_and_no_secret(tmp_path: Path) -> None:
    log, failure = failed(tmp_path, "KeyError")
    assert "[rank3]: Traceback (most recent call last)" in log
    assert failure.startswith("algo-1, rank 3: KeyError: 'the hub said no to <hidden")
    assert "in stage" in log
    assert TOKEN not in log, "also not in the lines of source that a traceback shows"
    assert TOKEN not in failure


def test_a_sentence_of_ours_has_no_traceback_and_no_secret(tmp_path: Path) -> None:
    log, failure = failed(tmp_path, "SmtrainError")
    assert log == f"{failure}\n"
    assert failure == "algo-1, rank 3: the hub said no to <hidden: looks like a secret>"
