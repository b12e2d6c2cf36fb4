"""The whole config of docs/slurm.md: planned for its nodes, which hold it, and its script
printed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import smtrain
from smtrain.cli import launch
from smtrain.client.backends.choose import backend_of
from smtrain.client.launch.stages import Chain
from smtrain.client.preflight.context import Context
from smtrain.client.preflight.cost import memory
from tests.docs.pages import ROOT, blocks


def test_the_config_of_the_page_fits_its_nodes_and_has_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path / "home"))
    texts = [block.text for block in blocks(ROOT / "docs/slurm.md")]
    (text,) = [text for text in texts if "\nmachines:\n" in text]
    file = tmp_path / "run.yaml"
    file.write_text(text)
    config = smtrain.load_config(file)
    plan = smtrain.plan(config)
    assert plan.fits, plan.faults
    assert (plan.machines, plan.mesh.tp * plan.mesh.pp * plan.mesh.dp) == ("2 x node", 16)
    assert not [warning for warning in plan.warnings if "saving" in warning]
    context = Context(Chain(config, backend_of(config), look=False), ["train"])
    assert [finding.level for finding in memory(context)] == ["ok"]
    launch.app(args=[str(file), "--stage", "train", "--dry-run"], standalone_mode=False)
    script = capsys.readouterr().out
    for line in ("--nodes=2", "--partition=gpu", "--time=240", "--exclusive"):
        assert f"#SBATCH {line}\n" in script
