"""The config of the README is one that AWS could be sent as it stands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from smtrain.facts.images import serves
from tests.checkpoint.folders import LLAMA, hf_folder
from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The README's config, with a model and a text where it looks for them."""
    folder = tmp_path_factory.mktemp("readme")
    config = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert config
    (folder / "config.yaml").write_text(config[1])
    hf_folder(folder / "Llama-3.2-1B", {**LLAMA, "vocab_size": 64})
    (folder / "Llama-3.2-1B" / "tokenizer.json").write_text("{}")
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.jsonl").write_text('{"text": "a"}\n')
    return folder


@pytest.mark.parametrize("stage", ["prepare", "convert", "train"])
def test_its_config_is_a_request_of_an_image_and_machines_that_its_engine_runs_on(
    folder: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    command = [
        sys.executable,
        "-m",
        "smtrain",
        "launch",
        "config.yaml",
        "--stage",
        stage,
        "--target",
        "aws",
        "--dry-run",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    request = json.loads(done.stdout)
    assert serves(request["AlgorithmSpecification"]["TrainingImage"], "nxd")
    assert request["ResourceConfig"]["InstanceType"].startswith("ml.trn1") == (stage == "train")


def test_its_links_and_pictures_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert {"docs/panel.svg", "docs/loss.svg", "docs/first-run-aws.md"} <= set(links)
    assert [link for link in links if not (ROOT / link).exists()] == []
