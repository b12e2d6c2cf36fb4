"""W&B without a network: the folder it writes holds every step once, and is read back record by
record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb")

from smtrain.core.config.track import Wandb
from smtrain.core.tracking.buffer import Buffered
from smtrain.core.tracking.settings import TrackedRun, TrackedStep
from smtrain.core.tracking.wandb import WandbTracker

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def blobs(file: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format behind a head of seven bytes."""
    data, at, parts = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if left < 7 or kind == 0:
            at += left
            continue
        part = data[at + 7 : at + 7 + length]
        at += 7 + length
        parts = part if kind in (1, 2) else parts + part
        if kind in (1, 4):
            yield parts


def written(folder: Path) -> list[dict[str, Any]]:
    """Every row of history in W&B's own files."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for file in sorted(folder.rglob("*.wandb")):
        for data in blobs(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {
                    i.key or ".".join(i.nested_key): json.loads(i.value_json)
                    for i in record.history.item
                }
                rows.append(items)
    return rows


def test_an_offline_run_has_every_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    for job, steps in (("r-train-00000001", range(1, 21)), ("r-train-00000001-2", range(15, 31))):
        tracked = TrackedRun("r", job, "0123456789abcdef", "1", {"train.lr": "0.1"}, {})
        buffered = Buffered(
            WandbTracker(Wandb(project="tests"), tracked, tmp_path / "wandb", None), print
        )
        for number in steps:
            buffered.log(TrackedStep(number, number, {"step": float(number), "loss": 3.0 / number}))
        assert buffered.close("Completed", 300) == 0
    rows = written(tmp_path / "wandb")
    assert [(row["_step"], row["loss"]) for row in rows] == [(n, 3.0 / n) for n in range(1, 31)]
