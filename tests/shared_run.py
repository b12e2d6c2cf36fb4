"""A whole run, made once for all workers of a test session, and read by tests of several parts.

The first worker that needs it makes it in a home below the session's common folder. Every worker
reads a copy of that home, with a separate control plane, so no test sees what another worker's
test does to it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import json
import os
import shutil
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.plane.client import shut_down
from tests.client.iam.wire import Call, recorded

CONFIG = Path(__file__).parents[1] / "docs/llama.yaml"
COMMIT = "1" * 40
BASE_CARD = "---\nlicense: apache-2.0\nlanguage: [en]\nwidget: x\n---\n# Base\n"
"""The README of the base model, whose terms the exported model takes over."""
PATIENCE = 900.0
"""Seconds that a worker waits for the one that makes the run, which took three minutes at a load of
eight a core.
"""


@dataclass(frozen=True)
class SharedRun:
    """docs/llama.yaml through all its stages, with TensorBoard's files, started from `COMMIT` with
    changes.
    """

    home: Path
    """$SMTRAIN_HOME of this worker's copy, while a test uses the run."""
    raw: dict[str, Any]
    """Its config: docs/llama.yaml and keys that change no job's name."""
    run: smtrain.Run
    calls: tuple[Call, ...]
    """The AWS calls of `smtrain.check` and `smtrain.run` when it was made."""


@pytest.fixture(scope="session")
def kept_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedRun]:
    """This worker's copy of the shared run. Its control plane ends with the worker."""
    base = tmp_path_factory.getbasetemp()
    common = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    made = _made_once(common / "shared-run")
    home = tmp_path_factory.mktemp("copy") / "home"
    shutil.copytree(made, home, copy_function=_linked, symlinks=True)
    content = json.loads((home / "made.json").read_text("utf-8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMTRAIN_HOME", str(home))
        run = smtrain.run(CONFIG, say=lambda _: None)
    assert all(result.skipped for result in run.results), "the copy has every job"
    yield SharedRun(home, content["raw"], run, tuple(Call(**call) for call in content["calls"]))
    shut_down(home)
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def shared_run(kept_run: SharedRun, monkeypatch: pytest.MonkeyPatch) -> SharedRun:
    """The shared run, in whose home the test is."""
    monkeypatch.setenv("SMTRAIN_HOME", str(kept_run.home))
    return kept_run


def _made_once(folder: Path) -> Path:
    """The home of the run. Who comes while another process makes it waits for that one."""
    failed = folder.with_suffix(".failed")
    with _exclusively(folder.with_suffix(".lock")):
        if failed.exists():
            pytest.fail(
                f"another worker could not make the shared run: {failed.read_text('utf-8')}"
            )
        if not folder.exists():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)  # of a worker that was killed
            try:
                _make(part)
            except BaseException as error:
                failed.write_text(repr(error), "utf-8")
                raise
            part.rename(folder)
    return folder


@contextmanager
def _exclusively(path: Path) -> Iterator[None]:
    until = time.monotonic() + PATIENCE
    with path.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < until, (
                    "another worker makes the shared run, and does not come to an end"
                )
                time.sleep(0.1)
        yield


def _make(home: Path) -> None:
    """Run docs/llama.yaml in a new home, whose control plane is ended again."""
    from smtrain.core.demo.inputs import MODEL, materialise

    home.mkdir()
    raw = {
        **smtrain.load_config(CONFIG).model_dump(mode="json", exclude_unset=True),
        "track": {"tensorboard": "live"},
        "tags": {"smtrain:git": f"{COMMIT} with changes"},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMTRAIN_HOME", str(home))
        try:
            _small_text(home / "demo/python-stdlib")
            _measured()
            (materialise(MODEL) / "README.md").write_text(BASE_CARD, "utf-8")
            with recorded() as calls:
                assert smtrain.check(raw).ok
                smtrain.run(raw, say=lambda _: None)
        finally:
            shut_down(home)
    (home / "local/endpoint.json").unlink()
    content = {"raw": raw, "calls": [dataclasses.asdict(call) for call in dict.fromkeys(calls)]}
    (home / "made.json").write_text(json.dumps(content), "utf-8")


def _small_text(folder: Path) -> None:
    """A demo text of the library's smaller files: learning a tokenizer from all of it takes ten
    times as long.
    """
    folder.mkdir(parents=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for part in (".", "asyncio", "email", "json", "unittest")
        for path in (library / part).glob("*.py")
    ]
    with (folder / "python-stdlib.jsonl").open("w", encoding="utf-8") as out:
        # The smallest come last: docs/data.md cuts off parts of 1 % of the tokens, which must hold
        # a document each.
        for path in sorted(files, key=lambda path: path.stat().st_size)[200::-1]:
            out.write(
                json.dumps({"path": path.name, "text": path.read_text("utf-8", errors="replace")})
                + "\n"
            )


def _measured() -> None:
    """Keep a speed of this machine in the home: on a busy machine every plan would measure it."""
    from smtrain.client.planner import probing
    from smtrain.core.config.compute import MachineEntry

    for processes, number in itertools.product((1, 2), ("fp32", "bf16")):
        entry = MachineEntry(
            kind="cpu", devices=processes, memory_gib=4, tflops=0.1, host_memory_gib=16
        )
        probing._save_measurement(probing._key(processes, number), entry)


def _linked(source: str, target: str) -> None:
    """Copy a file; bodies of objects, which are never changed, as links."""
    if "/local/s3/" in source and "/blobs/" in source:
        os.link(source, target)
    else:
        shutil.copy2(source, target)
