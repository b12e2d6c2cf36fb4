"""Records that jobs and smtrain itself read: a stage's channels, the notes in smtrain's folder,
benchmarks' files.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from smtrain.core.errors import DataError
from smtrain.core.protocol.lineage import Origin
from smtrain.core.protocol.owner import Owner
from testing.fuzz import world


def channels(folder: Path) -> None:
    """/opt/ml of a stage: its config, hyperparameters of a tuning job, hosts and the list of
    uploads.
    """
    import hashlib

    from smtrain.client.planner.resolve import load_config

    (folder / "input/config").mkdir(parents=True)
    (folder / "input/data/config").mkdir(parents=True)
    (folder / "input/data/text").mkdir(parents=True)
    config = load_config("run.yaml").model_dump(mode="json")
    (folder / "input/data/config/config.json").write_text(json.dumps(config))
    (folder / "input/data/text/a").write_bytes(b"abc")
    files = {"a": [3, hashlib.sha256(b"abc").hexdigest()]}
    uploads = {"text": {"uri": "s3://b/x/", "files": files}}
    (folder / "input/data/config/uploads.json").write_text(json.dumps(uploads))
    hyperparameters = {"smtrain_tuned": "train.lr", "train.lr": "1e-4"}
    (folder / "input/config/hyperparameters.json").write_text(json.dumps(hyperparameters))
    (folder / "input/config/resourceconfig.json").write_text(
        json.dumps({"hosts": ["a", "b"], "current_host": "b"})
    )


def read_stage(folder: Path) -> str:
    import os
    from unittest import mock

    from smtrain.core.config.stage_file import stage_config
    from smtrain.core.protocol.container import Container

    with mock.patch.dict(os.environ, SMTRAIN_ML_ROOT=str(folder)):
        config = stage_config(Container.from_files())
    return repr(config.train.steps)


def read_uploads(folder: Path) -> str:
    from testing.fuzz.judge import entrypoint

    try:
        entrypoint("uploads").files_of(folder)
    except ValueError as error:
        raise DataError(str(error)) from None
    return ""


def questions(folder: Path) -> None:
    rows = [{"q": text, "a": "yes"} for text in world.sentences(4)]
    (folder / "a.jsonl").write_text(world.lines(rows))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(world.lines(rows).encode()))
    (folder / "c.json").write_text(json.dumps({"examples": rows}))
    (folder / "d.csv").write_text("q,a\n" + "".join(f"{row['q']},yes\n" for row in rows))
    (folder / "prompts.jsonl").write_text(
        world.lines([{"prompt": text} for text in world.sentences(3)])
    )
    (folder / "prompts.txt").write_text("one\ntwo\n")


def read_questions(folder: Path) -> str:
    from smtrain.tools.chat.generate import read_prompts
    from smtrain.worker.evaluation.questions import _rows

    files = ("a.jsonl", "b.jsonl.gz", "c.json", "d.csv")
    for name in files:
        for _ in _rows(folder / name):
            pass
    read_prompts([folder / "prompts.jsonl", folder / "prompts.txt"])
    return ""


def records(folder: Path) -> None:
    """Write the records that smtrain keeps in its folder and in a run's prefix."""
    for kind, content in (
        ("slurm", {"shared": "/fsx/smtrain"}),
        ("pai-dlc", {"storage": "oss://b/x"}),
    ):
        (folder / kind).mkdir()
        (folder / kind / "latest.json").write_text(json.dumps(content))
    cursor = {"start": 1, "newest": 2, "changes": 0, "keys": {"1": "AAAAAAAAAAA="}}
    (folder / "cursor.json").write_text(json.dumps(cursor))
    (folder / "owner.json").write_bytes(Owner("j", "r", "a", True, 1.0).to_json())
    (folder / "origin.json").write_text(Origin(1, None, None).to_json())
    events = [{"event": "start", "at": 1}, {"event": "end", "at": 2, "status": 0}]
    (folder / "events.jsonl").write_text(world.lines(events))
    (folder / "step_00000001").mkdir()
    (folder / "step_00000001/manifest.json").write_text(
        json.dumps({"files": {"a": {"size": 3}}, "config": {}})
    )


def read_records(folder: Path) -> str:
    import os
    from unittest import mock

    from smtrain.client.backends.choose import registries
    from smtrain.client.backends.slurm.state import events_of, state_of
    from smtrain.client.follow.follower import Cursor
    from smtrain.client.jobs.checkpoints import compare_with_record
    from smtrain.core.errors import SmtrainError

    def text(name: str) -> bytes:
        file = folder / name
        return file.read_bytes() if file.is_file() and not file.is_symlink() else b""

    with mock.patch.dict(os.environ, SMTRAIN_HOME=str(folder)):
        for _, registry in registries():
            try:
                registry.section_of()
            except SmtrainError:
                continue
    Cursor.load(folder / "cursor.json")
    Origin.parse(text("origin.json"))
    state_of(events_of(text("events.jsonl").decode("utf-8", "replace")), None, stopping=False)
    compare_with_record(text("step_00000001/manifest.json"), {"a": 3}, "step_00000001")
    Owner.parse(text("owner.json"), "s3://b/owner.json")
    return ""
