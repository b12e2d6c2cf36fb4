"""Jobs that run through the stand-in for PAI-DLC: three ranks are trained, followed, stopped and resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.core.protocol.log_lines import Line
from testing.pai_dlc import StandIn
from tests.client.backends.pai.conftest import BOX, wait_for


def config(section: dict[str, Any], inputs: dict[str, Path], **train: Any) -> dict[str, Any]:
    return {
        "name": "pai-whole",
        "target": "pai-dlc",
        "pai": section,
        "machines": {"box": BOX},
        "model": {"path": str(inputs["model"]), "init": "scratch"},
        "data": {"path": str(inputs["text"])},
        "train": {
            "engine": "native", "steps": 8, "global_batch_size": 6, "seq_len": 32, "precision": "fp32", "lr": 1e-3,
            "warmup_steps": 2, "save_interval": 2, **train,
        },
        "compute": {"instance_type": "box", "instance_count": 3, "image": "registry/train:1"},
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.full
def test_three_ranks_are_followed_stopped_and_resumed(
    cloud: StandIn, section: dict[str, Any], trained_inputs: dict[str, Path], tmp_path: Path
) -> None:
    raw = config(section, trained_inputs, steps=4000)
    said: list[str] = []
    assert smtrain.launch(raw, stage="prepare", say=said.append).known_done
    first = smtrain.launch(raw, stage="train", wait=False, say=said.append)
    for event in first.events(poll=0.2):
        if isinstance(event, Line) and re.match(r"checkpoint of step 4 saved", event.text):
            break
    smtrain.Job(first.name).stop()  # found by its name: it was submitted from here
    assert wait_for(lambda: first.status == "Stopped")
    reached = max(int(record["step"]) for record in first.records)
    assert {line.host for line in first.lines()} == {"algo-1", "algo-2", "algo-3"}
    raw["train"]["steps"] = reached + 4
    second = smtrain.launch(raw, stage="train", say=said.append)
    assert second.known_done
    assert min(int(record["step"]) for record in second.records) == reached + 1
    folder = second.download(tmp_path / "metrics", "metrics")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == reached + 4
