"""The recipe by which a key of a config is added (CONTRIBUTING.md), followed for two made-up
keys.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smtrain.core.config import JobConfig
from smtrain.stages import keys_of

ROOT = Path(__file__).parents[3]
MODEL = {
    "model": {"path": "m"},
    "compute": {"instance_count": 1, "instance_type": "ml.trn1.32xlarge"},
}

Edits = dict[str, list[tuple[str, str]]]
"""By file: lines that are there, and those that the recipe puts before them.

New files have no such line.
"""
GENERATED = {"docs/reference/config.md", "smtrain/core/config/smtrain.schema.json"}

TRAIN_KEY: Edits = {
    "smtrain/core/config/training.py": [
        (
            "    seed: int = Field(0, ge=0",
            (
                '    z_loss: Annotated[float, ADDED_LATER] = Field(0.0, ge=0)\n    """Factor of the'
                ' z-loss; 0: none."""\n'
            ),
        )
    ],
    "smtrain/worker/engine/base.py": [("    cp: int = 1", "    z_loss: float = 0.0\n")],
    "smtrain/worker/engine/native/engine.py": [
        ("        self.rank, self.world_size = ", "        self.z_loss = options.z_loss\n")
    ],
    "tests/worker/engine/test_z_loss.py": [
        ("", "def test_it_evens_out_the_logits() -> None: ...\n")
    ],
}
DATA_KEY: Edits = {
    "smtrain/core/config/data.py": [
        (
            "    deduplicate: bool = False",
            (
                "    joined: Annotated[bool, ADDED_LATER] = False\n"
                '    """Put no token between documents. Attention crosses them then."""\n'
            ),
        )
    ],
    "smtrain/worker/data/prepare_options.py": [
        ("    overwrite: bool = True", "    joined: bool = False\n"),
        ("            max_bad=data.max_bad", "            joined=data.joined,\n"),
    ],
    "smtrain/worker/data/prepare/pieces.py": [
        (
            "        return self.facts.eos_id if ",
            "        if self.options.joined:\n            return None\n",
        )
    ],
    "tests/worker/data/test_joined.py": [
        ("", "def test_no_token_is_between_documents() -> None: ...\n")
    ],
}

CODE = """
import contextlib, io, json, runpy, sys
from dataclasses import fields
from pathlib import Path

def output(run):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        run()
    return out.getvalue()

written = output(lambda: runpy.run_path("scripts/config-reference", run_name="__main__"))
from smtrain.cli import main
from smtrain.core.config import JobConfig
from smtrain.stages import keys_of
from smtrain.worker.data.prepare.pieces import TokenizeSettings
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.data.tokenizer import TokenizerFacts
from smtrain.worker.engine.base import ParallelOptions

sys.argv = ["smtrain", "data", "prepare", "--help"]
def found(raw):
    config = JobConfig.model_validate(raw)
    facts = TokenizerFacts(**{**dict.fromkeys(one.name for one in fields(TokenizerFacts)), "eos_id": 2})
    settings = TokenizeSettings(PrepareOptions.of(config), Path("m"), facts)
    return {
        "train": keys_of(config, "train"), "prepare": keys_of(config, "prepare"),
        "engine": ParallelOptions.of(config).z_loss, "between documents": settings.eos_id,
    }
raw, key = json.loads(sys.stdin.read())
print(json.dumps({"written": written, "help": output(main), "default": found(raw), "set": found({**raw, **key})}))
"""


def follow(edits: Edits, folder: Path) -> None:
    """Edit the copy of the repository in `folder`."""
    for name, places in edits.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text("utf-8") if path.exists() else ""
        for line, more in places:
            assert text.count(line) == 1 or not text, f"{name}: {line}"
            text = text.replace(line, more + line)
        path.write_text(text, "utf-8")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The keys in a copy of the package, at their defaults and set."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("smtrain", "docs/reference"):
        shutil.copytree(ROOT / name, folder / name)  # with what Python has compiled
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/config-reference", folder / "scripts")
    follow(TRAIN_KEY, folder)
    follow(DATA_KEY, folder)
    keys = [MODEL, {"train": {"z_loss": 0.5}, "data": {"joined": True}}]
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"},
        input=json.dumps(keys),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in (name for name in {**TRAIN_KEY, **DATA_KEY} if name.endswith(".py")):
        compile((folder / name).read_text("utf-8"), name, "exec")
    made: dict[str, Any] = json.loads(done.stdout)
    return made


@pytest.mark.parametrize("edits", [TRAIN_KEY, DATA_KEY], ids=["train", "data"])
def test_a_key_is_at_most_six_files(edits: Edits, found: dict[str, Any]) -> None:
    assert {line.partition(":")[0] for line in found["written"].splitlines()} == GENERATED
    assert len({*edits, *GENERATED}) == 6


def test_at_its_default_it_changes_no_job(found: dict[str, Any]) -> None:
    config = JobConfig.model_validate(MODEL)
    for stage in ("train", "prepare"):
        assert found["default"][stage] == json.loads(json.dumps(keys_of(config, stage)))
    assert (found["default"]["engine"], found["default"]["between documents"]) == (0.0, 2)


def test_set_it_reaches_the_job_and_the_code(found: dict[str, Any]) -> None:
    assert found["set"]["train"]["train"]["z_loss"] == 0.5
    assert found["set"]["prepare"]["data"]["joined"] is True
    assert (found["set"]["engine"], found["set"]["between documents"]) == (0.5, None)


def test_a_key_of_the_text_is_an_option_of_the_command(found: dict[str, Any]) -> None:
    assert "More options:\n  --joined  Put no token between documents.\n" in found["help"]
