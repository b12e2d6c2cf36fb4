"""The walks of `scripts/walks`: each first page has its commands, and what stands in for a machine
replaces something of the page.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.client.backends.slurm.daemons import cannot, lacking
from tests.docs.doors import DOORS, config_of
from tests.docs.pages import ROOT

STEPS = {
    "home": ("init", "plan", "check", "run", "chat", "list", "status", "download"),
    "gpu": ("doctor", "plan", "check", "run", "chat"),
    "slurm": ("plan", "check", "run", "list", "status", "logs", "download"),
    "aws": ("init", "iam", "plan", "check", "run", "list", "status", "logs", "stop", "download"),
    "notebook": (),
}


@pytest.mark.parametrize("name", DOORS)
def test_a_page_leads_from_a_config_to_a_model(name: str) -> None:
    door = DOORS[name]
    texts = [command.text for command in door.commands()]
    assert len(texts) > 1
    for step in STEPS[name]:
        assert any(f"smtrain {step}" in text for text in texts), step
    for piece in door.stand_ins:
        assert any(piece in text for text in texts), f"{piece} is no longer on the page"
    for beginning in door.edits:
        assert any(text.startswith(beginning) for text in texts), beginning
    assert not any("hf://" in door.fill(text, "") for text in texts), "a walk needs no network"


def test_a_job_is_named_by_what_was_printed_before() -> None:
    said = "[1/3] prepare: a-prepare-1a2b3c4d\n[3/3] train: my-run-train-0a1b2c3d\n"
    assert DOORS["aws"].fill("smtrain logs JOB", said) == "smtrain logs my-run-train-0a1b2c3d"
    assert "PREPARE_JOB" in DOORS["aws"].fill("smtrain data report PREPARE_JOB", said)


def test_the_run_of_slurm_is_named_by_its_config() -> None:
    name = config_of("docs/slurm.md")["name"]
    texts = [command.text for command in DOORS["slurm"].commands()]
    assert f"smtrain status {name}" in texts


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", DOORS)
def test_a_walk_meets_no_refusal(name: str) -> None:
    if name == "slurm" and (reason := lacking()):
        cannot(reason)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/walks"), name], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
