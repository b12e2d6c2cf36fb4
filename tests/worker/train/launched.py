"""Start the launcher with real torchrun and ranks in a shell's /opt/ml, for tests of both
engines.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from smtrain.core.config import JobConfig
from smtrain.stages import keys_of
from tests import warm
from tests.ports import free_port
from tests.processes import commands, ranks, read
from tests.worker.train.test_shell import REPO, Shell

CONFIG: dict[str, Any] = {
    "model": {"path": "s3://unused"},
    "train": {
        "steps": 40,
        "global_batch_size": 16,
        "seq_len": 32,
        "precision": "fp32",
        "lr": 1e-3,
        "save_interval": 10,
    },
    "parallel": {"tp": 2, "micro_batch_size": 4},
    "compute": {"instance_type": "ml.trn1.2xlarge", "processes_per_instance": 2},
}


def lay_out(root: Path, inputs: dict[str, Path]) -> Shell:
    """A shell with the model and prepared data in place."""
    shell = Shell(root)
    for name in ("text", "model"):
        shell.channel(name, inputs[name])
    done = shell.run("prepare")
    assert done.returncode == 0, done.stderr
    shell.channel("data", shell.result("prepared"))
    return shell


def start(
    shell: Shell, train: dict[str, Any], environment: dict[str, str], **sections: dict[str, Any]
) -> subprocess.Popen[str]:
    """Start stage train with the launcher; `stdout` has all its output.

    Its torchrun starts in a fork of a warm Python, unless `environment` changes how Python starts.
    """
    folder = shell.root / "input/data/config"
    folder.mkdir(parents=True, exist_ok=True)
    raw = {**CONFIG, **sections, "train": {**CONFIG["train"], **train}}
    (folder / "config.json").write_text(json.dumps(keys_of(JobConfig.model_validate(raw), "train")))
    (shell.root / "output").mkdir(exist_ok=True)
    (shell.root / "output/failure").unlink(missing_ok=True)
    left_out = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    inherited = {
        k: v for k, v in os.environ.items() if k not in left_out and not k.startswith("PYTEST_")
    }
    own = {
        "SMTRAIN_ML_ROOT": str(shell.root),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }
    launcher = (
        [REPO / "entrypoints/launch.py"]
        if environment
        else [REPO / "tests/worker/train/warm_launch.py", warm.name()]
    )
    return subprocess.Popen(
        [sys.executable, *map(str, launcher), "train"],
        env={**inherited, **own, "SMTRAIN_MASTER_PORT": str(free_port()), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def until(process: subprocess.Popen[str], pattern: str) -> str:
    """Read its output up to a line with the pattern."""
    said = []
    assert process.stdout
    for line in process.stdout:
        said.append(line)
        if re.search(pattern, line):
            return "".join(said)
    raise AssertionError(f"it ended without {pattern}:\n{''.join(said)}")


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status, and its output from here on."""
    said, _ = process.communicate()
    return process.returncode, said


def losses(shell: Shell) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step, unrounded, of the last time a step was done."""
    lines = (shell.root / "output/data/metrics.jsonl").read_text().splitlines()
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in map(json.loads, lines)}


def stopped_and_killed_like_left_alone(
    shell: Shell, engine: str, environment: dict[str, str]
) -> None:
    """Stop a run with SIGTERM (all ranks save, status 0), then kill a rank (the job fails), and
    resume each time.

    The numbers of all steps equal those of an undisturbed run, bit for bit.
    """
    train = {"engine": engine}
    status, said = finish(start(shell, train, environment))
    assert status == 0, said
    known = losses(shell)
    for folder in ("checkpoints", "output"):
        shutil.rmtree(shell.root / folder)

    process = start(shell, train, environment)
    until(process, r"^step=3 ")
    process.send_signal(signal.SIGTERM)
    status, said = finish(process)
    assert status == 0, said
    saved = re.search(r"asked to stop: saved step (\d+)", said)
    assert saved, said
    assert "SignalException" not in said
    assert int(saved[1]) < max(known)
    assert max(losses(shell)) == int(saved[1])

    process = start(shell, train, environment)
    said = until(process, rf"^step={int(saved[1]) + 2} ")
    assert f"from checkpoint step_{int(saved[1]):08d}" in said
    mark = os.fsencode(f"SMTRAIN_ML_ROOT={shell.root}")
    training = ranks([pid for pid in commands() if mark in read(pid, "environ").split(b"\0")])
    assert len(training) == 2
    os.kill(training[-1], signal.SIGKILL)
    status, said = finish(process)
    assert status != 0, said

    status, said = finish(start(shell, train, environment))
    assert status == 0, said
    assert losses(shell) == known
