"""The recipe by which one more target is added (CONTRIBUTING.md, "A target"), followed with a
made-up one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SCHEMA = "smtrain/core/config/smtrain.schema.json"  # scripts/config-reference writes it
MOST = 8
"""Files of the package that a new target may touch outside its own folder."""

EDITS = {
    "smtrain/core/targets.py": (
        (r"TargetName = Literal\[", 'TargetName = Literal["shelf", '),
        (
            r"    for record in \(\n",
            (
                '    for record in (\n        TargetRecord("shelf", "a shelf", "on the shelf",'
                ' "Shelf", folder="shelf", section="shelf", arn="shelf:", paths=True, queues=True,'
                ' own_machines=True, unpriced="on a shelf"),\n'
            ),
        ),
    ),
    "smtrain/core/config/schema.py": (
        (r"\n\nStage = str\n", "\nfrom smtrain.core.config.shelf import Shelf\n\nStage = str\n"),
        (
            r"\n    model: Model\n",
            (
                '\n    shelf: Shelf = Shelf()\n    """A shelf, for target shelf."""\n    model:'
                " Model\n"
            ),
        ),
    ),
}
SECTION = '''
"""The section `shelf`: a folder in which jobs lie until somebody takes them (target shelf)."""

from smtrain.core.config.section import Section


class Shelf(Section):
    """A folder of jobs."""

    folder: str | None = None
    """Its path."""
    grace: int = 30
    """Seconds between SIGTERM and SIGKILL."""
'''
RULES = '''
"""Rules for target shelf."""

from collections.abc import Iterator

from smtrain.client.config.checks.rule import ConfigRule, Fault, rule_faults
from smtrain.core.config.schema import JobConfig

SHELF = (ConfigRule("shelf.folder", lambda c: c.shelf.folder is None, "shelf.folder: is missing; name a folder"),)


def section_faults(config: JobConfig) -> Iterator[Fault]:
    """Faults of a config for a shelf."""
    yield from rule_faults(SHELF, config)
'''
REGISTRY = '''
"""Jobs that were put on shelves from here."""

from smtrain.client.backends.job_registry import JobRegistry
from smtrain.core.config.shelf import Shelf

REGISTRY = JobRegistry(
    "shelf", Shelf, "SMTRAIN_SHELF", lambda text: Shelf(folder=text), "/shelf",
    "no shelf is known here; start a run with --target shelf",
)
'''
CHECKS = '''
"""Check a shelf before anything is put on it."""

from pathlib import Path

from smtrain.client.findings import Finding


def run_checks(backend, config, stages, copied=(), *, probe=False):
    """Check that the folder exists."""
    folder = backend.section.folder
    level = "ok" if Path(folder).is_dir() else "fault"
    yield Finding("shelf", level, f"{folder} for {', '.join(stages)}, probe {probe}")
'''
BACKEND = '''
"""A shelf as a backend."""

import json
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from smtrain.client.backends.base import Pace
from smtrain.client.backends.description import JobState, JobTimes, describe, summary
from smtrain.client.backends.shelf.registry import REGISTRY
from smtrain.core.config.shelf import Shelf
from smtrain.core.errors import JobError
from smtrain.core.targets import TARGETS


@dataclass(frozen=True)
class ShelfBackend:
    """One shelf."""

    section: Shelf
    name: str = "shelf"
    record = TARGETS["shelf"]
    pace = Pace(1, 0, 0, 0, 0, ((0, 5),), 60, (1, 1), 1)

    @property
    def grace(self):
        return self.section.grace

    def region_name(self):
        return "us-east-1"

    def role(self, role):
        return ""

    def base(self, uri):
        return f"file://{self.section.folder}"

    def in_place(self, path):
        return str(path) if str(path).startswith("file://") else f"file://{path}"

    def preview(self, requests):
        return json.dumps(list(requests))

    def put(self, uri, files, say):
        for name, body in files:
            path = Path(uri.removeprefix("file://"), name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body if isinstance(body, bytes) else body.read_bytes())

    def submit(self, request, after=(), say=print):
        self._file(request["TrainingJobName"]).write_text(json.dumps(request))
        REGISTRY.remember(self.section, request["TrainingJobName"])
        return "1"

    def queued_id(self, name):
        return "1"

    def describe(self, name, patience):
        if not self._file(name).is_file():
            raise JobError(f"{name}: no such job")
        now = datetime.now(timezone.utc)
        stopped = Path(self.section.folder, name).exists()
        state = JobState("Stopped", "Stopped") if stopped else JobState("InProgress", "Pending")
        return describe(json.loads(self._file(name).read_text()), "shelf", "1", state, JobTimes(now, now), [])

    def rows(self, contains, page):
        names = [path.stem for path in Path(self.section.folder).glob("*.json") if (contains or "") in path.stem]
        yield [summary(self.describe(name, None)) for name in names]

    def stop(self, name):
        Path(self.section.folder, name).touch()

    def tags(self, description):
        return description.get("Tags", [])

    def log_page(self, name, host, start, pattern, token, patience):
        return {"events": []}

    def last_events(self, name, count, patience):
        return []

    def listing(self, uri):
        paths = Path(uri.removeprefix("file://")).rglob("*")
        return [{"Key": str(path), "Size": path.stat().st_size, "ETag": "1"} for path in paths if path.is_file()]

    def read(self, uri):
        return Path(uri.removeprefix("file://")).read_bytes()

    def fetch(self, bucket, key, path):
        path.write_bytes(Path(key).read_bytes())

    def _file(self, name):
        return Path(self.section.folder, f"{name}.json")


BACKEND = ShelfBackend
'''
OWN = "smtrain/client/backends/shelf/"
NEW = {
    "smtrain/core/config/shelf.py": SECTION,
    "smtrain/client/config/checks/shelf.py": RULES,
    f"{OWN}__init__.py": '"""Jobs on a shelf."""\n',
    f"{OWN}registry.py": REGISTRY,
    f"{OWN}checks.py": CHECKS,
    f"{OWN}backend.py": BACKEND,
}
# What a user does with a target, each step in one line of the answer.
STEPS = """
import json, sys
from pathlib import Path
import smtrain
from smtrain.client.jobs.listing import list_jobs
from smtrain.client.backends.choose import backend_by_name

raw = json.load(sys.stdin)
try:
    smtrain.load_config({**raw, "shelf": {}})
except smtrain.ConfigError as error:
    print("fault", error)
config = smtrain.load_config(raw)
print("config", config.stop_grace, config.own_command, config.data.path)
print("request", smtrain.request(raw, stage="prepare")["OutputDataConfig"]["S3OutputPath"])
print("check", *(str(finding.text) for finding in smtrain.check(raw, stage="prepare") if finding.check == "shelf"))
job = smtrain.launch(raw, stage="prepare", wait=False)
print("job", job.name.rpartition("-")[0], job.target.name, smtrain.Job(job.name).target.name, job.status)
print("list", [one.name for one in list_jobs(backend_by_name("shelf"))] == [job.name])
smtrain.Job(job.name).stop()
print("stopped", smtrain.Job(job.name).status)
sys.argv = ["smtrain", "list", "--target", "shelf"]
from smtrain.cli import main
main()
"""


def add_target(root: Path) -> list[str]:
    """Follow the recipe in a copy of the package; return the files that are touched outside the own
    folder.
    """
    for name, edits in EDITS.items():
        text = (root / name).read_text()
        for pattern, replacement in edits:
            text, count = re.subn(pattern, replacement.replace("\\", r"\\"), text, count=1)
            assert count == 1, pattern
        (root / name).write_text(text)
    for name, text in NEW.items():
        assert not (root / name).exists()
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return [name for name in (*EDITS, *NEW) if not name.startswith(OWN)]


def test_a_target_is_one_record_one_section_one_folder_and_one_file_of_rules(
    tmp_path: Path, raw: dict[str, Any]
) -> None:
    copy, shelf = tmp_path / "copy", tmp_path / "shelf"
    for folder in ("smtrain", "entrypoints"):
        shutil.copytree(ROOT / folder, copy / folder)  # with what Python has compiled
    shelf.mkdir()
    touched = add_target(copy)
    assert len([*touched, SCHEMA]) <= MOST, touched
    words = {"type": "WordLevel", "vocab": {"hello": 0, "world": 1}, "unk_token": "hello"}
    (tmp_path / "model/tokenizer.json").write_text(
        json.dumps({"model": words, "pre_tokenizer": {"type": "Whitespace"}})
    )
    (tmp_path / "text/a.jsonl").write_text(json.dumps({"text": "hello world " * 50}))
    config = {**raw, "name": "a", "target": "shelf", "shelf": {"folder": str(shelf)}}
    answer = subprocess.run(
        [sys.executable, "-c", STEPS],
        cwd=copy,
        text=True,
        capture_output=True,
        input=json.dumps(config),
        env={
            **os.environ,
            "PYTHONPATH": str(copy),
            "SMTRAIN_HOME": str(tmp_path / "home"),
            "COLUMNS": "200",
        },
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    *lines, _, row = answer.stdout.splitlines()
    assert lines == [
        "fault shelf.folder: is missing; name a folder",
        f"config 30 None {raw['data']['path']}",
        f"request file://{shelf}/a/jobs",
        f"check {shelf} for prepare, probe False",
        "job a-prepare shelf shelf InProgress",
        "list True",
        "stopped Stopped",
    ]
    assert row.split()[:3] == ["a", "prepare", "Stopped"]
