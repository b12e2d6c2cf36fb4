"""The package as pip installs it: an sdist of this checkout, its wheel, in a new environment.

The environment has the packages of the one that runs the tests, but nothing from the checkout.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.worker.checkpoint.folders import LLAMA, hf_folder

REPOSITORY = Path(__file__).parents[2]
# Imported by every Python of the environment: hides the modules named in BLOCKED as if they were
# not installed.
BLOCKER = """
import os, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ.get("BLOCKED", "").split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""
BUILD = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"


@dataclass
class Installed:
    """An environment with smtrain, and its own home."""

    bin: Path
    home: Path

    def run(self, *command: str, blocked: str = "") -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, away from the checkout."""
        environment = self.environment(blocked)
        return subprocess.run(
            [self.bin / command[0], *command[1:]],
            env=environment,
            cwd=self.home,
            capture_output=True,
            text=True,
        )

    def environment(self, blocked: str = "") -> dict[str, str]:
        """The variables of a shell in which only the environment is active."""
        return {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.home),
            "SMTRAIN_HOME": str(self.home / "state"),
            "BLOCKED": blocked,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
        }

    def smtrain(self, *arguments: str, blocked: str = "") -> str:
        """The output of a command that succeeds."""
        done = self.run("smtrain", *arguments, blocked=blocked)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy, because setuptools writes next to the sources."""
    folder = tmp_path_factory.mktemp("source") / "smtrain"
    folder.mkdir()
    for name in ("smtrain", "entrypoints", "docs"):
        shutil.copytree(
            REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder)
    out = folder.parent / "dist"
    done = subprocess.run(
        [sys.executable, "-c", BUILD, out], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="session")
def installed(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    packages = next((folder / "venv").glob("lib/python*/site-packages"))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (packages / "sitecustomize.py").write_text(BLOCKER)
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        folder / "venv/bin/python",
    ]
    quick = [
        "-q",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--no-compile",
        "--ignore-installed",
    ]
    subprocess.run([*pip, "install", *quick, sdist], check=True)
    home = folder / "home"
    home.mkdir()
    (home / "text").mkdir()
    (home / "text" / "a.jsonl").write_text('{"text": "a"}\n')
    hf_folder(home / "model", LLAMA)
    (home / "model" / "tokenizer.json").write_text("{}")
    config = {
        "name": "away",
        "model": {"path": "model"},
        "data": {"path": "text"},
        "parallel": {"tp": 2},
        "train": {"steps": 2, "global_batch_size": 2, "seq_len": 8},
        "output": {"s3_uri": "s3://bucket/runs"},
        "compute": {
            "instance_type": "ml.trn1.2xlarge",
            "processes_per_instance": 2,
            "max_run": "1h",
            "role": "arn:aws:iam::123456789012:role/train",
            "region": "us-east-2",
        },
    }
    (home / "config.yaml").write_text(json.dumps(config))
    return Installed(folder / "venv" / "bin", home)
