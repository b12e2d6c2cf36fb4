"""A user's first hour on this machine from a wheel: text, config, plan, check, run and chat."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.install.conftest import REPOSITORY, Installed


@pytest.mark.full
@pytest.mark.slow
def test_five_commands_lead_from_a_text_to_a_model_that_answers(
    installed: Installed, tmp_path: Path
) -> None:
    walk = [
        sys.executable,
        str(REPOSITORY / "scripts/first-hour"),
        "--smtrain",
        str(installed.bin / "smtrain"),
    ]
    done = subprocess.run(
        [*walk, "--steps", "2", "--model", "demo://tiny-llama", "--folder", str(tmp_path / "hour")],
        env=installed.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.partition("first line, longest silence, took, exit status\n")[
        2
    ].splitlines()
    assert [re.findall(r" (\d+)  smtrain (\w+)", line)[0] for line in table] == [
        ("0", name) for name in ("init", "plan", "check", "run", "chat")
    ]
    assert "cost        nothing here" in done.stdout
    assert "0 faults, 0 warnings" in done.stdout
    assert "next:       smtrain chat tiny-llama" in done.stdout
    assert "ml." not in done.stdout
    assert "$" not in re.sub(r"^\$ smtrain", "", done.stdout, flags=re.MULTILINE), (
        "no price at home"
    )
