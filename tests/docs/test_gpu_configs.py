"""The ready configs of examples/gpu: each loads, is planned for its machine, which holds it, and
has a request.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.planner import this_machine
from smtrain.core.model.footprint import GIB
from tests.docs.pages import ROOT

CONFIGS = sorted((ROOT / "examples/gpu").glob("*.yaml"))
TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
DATA = {
    "my-text": {"text": "a"},
    "my-conversations": TALK,
    "my-pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configs with the data that they name."""
    copy = Path(shutil.copytree(ROOT / "examples/gpu", tmp_path_factory.mktemp("configs") / "gpu"))
    for name, record in DATA.items():
        (copy / name).mkdir()
        (copy / name / "a.jsonl").write_text(json.dumps(record))
    return copy


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_ready_config_fits_its_machine_and_has_a_request(
    path: Path, folder: Path, local_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "memory_here", lambda: 24 * GIB)
    monkeypatch.setattr(this_machine, "free_disk", lambda: 1e12)
    source: Any = folder / path.name
    # dpo.yaml begins with the model of sft.yaml's run, which is not there
    first: Any = {"model": {"path": "hf://Qwen/Qwen3-8B@main"}} if path.stem == "dpo" else {}
    config = smtrain.load_config(source, **first)
    plan = smtrain.plan(config, measured=1000.0 if config.own_machine is None else None)
    assert plan.fits, plan.faults
    assert [
        word for word in ("billed", "AWS's", "image") if word in str(plan).partition("\n!")[0]
    ] == []
    request = smtrain.request(config, stage="train")
    assert request["HyperParameters"]["steps"] == str(config.train.steps)
    assert f"examples/gpu/{path.name}" in (ROOT / "docs/first-run-gpu.md").read_text()
