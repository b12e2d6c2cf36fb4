"""If the n-th write of plane, client, script or stage fails, there is one error message, and the
same command resumes.

`SMTRAIN_NTH_WRITES` is the number of n to try (spread over all; 0: every one), each with the next
of four errors. The gate tries one of the plane's and one of a training's.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from smtrain.core.config import JobConfig
from smtrain.plane.client import running_endpoint, shut_down
from smtrain.plane.server.processes import marked_pids
from smtrain.stages import keys_of
from tests import tiers
from tests.faults.nthwrite import FailingDisk
from tests.faults.zygote import HUNG, Zygote
from tests.worker.train.launched import CONFIG, lay_out

pytestmark = pytest.mark.slow

TRIES = int(os.environ.get("SMTRAIN_NTH_WRITES", "2" if tiers.full() else "1"))
FIRST = int(os.environ.get("SMTRAIN_NTH_FIRST", "1"))
ERRORS = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO)
NAMED = re.compile(
    r"no space left on|is read-only|read-only file system|disk quota|input/output error", re.I
)


def chosen(count: int) -> list[tuple[int, int]]:
    """(n, error) to try, for so many writes."""
    numbers: Sequence[int] = range(FIRST, count + 1)
    if TRIES and len(numbers) > TRIES:
        numbers = [
            numbers[i * len(numbers) // TRIES + len(numbers) // (2 * TRIES)] for i in range(TRIES)
        ]
    return [(n, ERRORS[i % 4]) for i, n in enumerate(numbers)]


def each_ends_in_a_sentence(
    disk: FailingDisk,
    count: int,
    attempt: Callable[[int], tuple[int, str]],
    again: Callable[[int], tuple[int, str]],
) -> int:
    """Try the chosen writes; `attempt` and `again` return status and output.

    Return the number of tries.

    All faults are reported together at the end.
    """
    wrong = []
    for n, error in chosen(count):
        disk.fail(error, n)
        status, output = attempt(n)
        hit = disk.failed
        disk.heal()
        about = f"write {n} of {count}, {errno.errorcode[error]}: {hit}\n{output}"
        fault = None
        if status == HUNG:
            fault = f"HUNG: {about}"
        elif status not in (0, 1, 2) or "Traceback" in output:
            fault = f"no sentence (status {status}): {about}"
        elif status and not NAMED.search(output.strip().splitlines()[-1]):
            fault = f"does not say why: {about}"
        status, output = again(n)
        if status:
            fault = f"{fault or about}\ndoes not resume ({status}), then:\n{output}"
        print(f"write {n} of {count}, {errno.errorcode[error]}: {fault or 'resumes'}", flush=True)
        wrong += [fault] if fault else []
    assert not wrong, "\n\n".join(wrong)
    return len(chosen(count))


class Plane:
    """The cheap run, each time with a new home."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "homes").mkdir()
        self.disk = FailingDisk(root / "shim", [root / "homes", Path("/opt/ml")])
        self.zygote = Zygote("tests.faults.cheap_run", self.disk.environment())

    def home(self, n: int) -> Path:
        return self.root / "homes" / str(n)

    def attempt(self, n: int) -> tuple[int, str]:
        home = self.home(n)
        return self.zygote.run([str(home), str(home / "result")], self.root / "said.txt")

    def again(self, n: int) -> tuple[int, str]:
        """Run the same command again; check its result, and that nothing is left over."""
        status, output = self.attempt(n)
        home = self.home(n)
        try:
            if status == 0 and (home / "result/sum").read_text() != "72\n":
                return 1, f"another result\n{output}"
            if left := marked_pids(home, include_subfolders=True):
                return 1, f"processes {left} are left over\n{output}"
            if "warning" in output:
                return 1, output
        finally:
            if running_endpoint(home):
                shut_down(home)
        shutil.rmtree(home, ignore_errors=True)
        return status, output


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    plane = Plane(tmp_path_factory.mktemp("plane"))
    yield plane
    plane.zygote.close()


def test_of_plane_client_and_script(
    plane: Plane, record_property: Callable[[str, int], None]
) -> None:
    plane.disk.fail(errno.ENOSPC, 1 << 60)
    status, output = plane.attempt(0)
    count = plane.disk.count
    assert (status, plane.again(0)[0]) == (0, 0), output
    assert count > 100
    print(f"{count} writes")
    record_property("tries", each_ends_in_a_sentence(plane.disk, count, plane.attempt, plane.again))


class Stage:
    """A stage in one process, each time in a copy of the same /opt/ml."""

    def __init__(self, root: Path, zygote: Zygote, disk: FailingDisk, name: str) -> None:
        self.root, self.zygote, self.disk, self.name = root, zygote, disk, name
        self.result: object = None
        self._status = 0

    def ml(self, n: int) -> Path:
        return self.root / "tries" / f"{self.name}-{n}"

    def attempt(self, n: int) -> tuple[int, str]:
        ml = self.ml(n)
        if not ml.exists():
            shutil.copytree(self.root / "ml", ml)
        (ml / "output").mkdir(exist_ok=True)
        (ml / "output/failure").unlink(missing_ok=True)
        self._status, output = self.zygote.run([str(ml), self.name], self.root / "said.txt")
        return self._status, output

    def again(self, n: int) -> tuple[int, str]:
        """Run it again if it did not finish, and compare the result with that of an undisturbed
        run.
        """
        status, output = self.attempt(n) if self._status else (0, "")
        result = self.read(n) if status == 0 else None
        shutil.rmtree(self.ml(n))
        if status == 0 and result != self.result:
            return 1, f"another result: {result} for {self.result}\n{output}"
        return status, output

    def read(self, n: int) -> object:
        """The losses of a training, or the files of any other stage."""
        ml = self.ml(n)
        if self.name != "train":
            files = [path for path in sorted((ml / "model").rglob("*")) if path.is_file()]
            return {
                path.relative_to(ml).as_posix(): sha256(path.read_bytes()).hexdigest()
                for path in files
            }
        lines = (ml / "output/data/metrics.jsonl").read_text().splitlines()
        return {r["step"]: (r["loss"], r["grad_norm"]) for r in map(json.loads, lines)}


@pytest.fixture(scope="module")
def stages(
    tmp_path_factory: pytest.TempPathFactory, trained_inputs: dict[str, Path]
) -> Iterator[dict[str, Stage]]:
    root = tmp_path_factory.mktemp("stages")
    lay_out(root / "ml", trained_inputs)
    config: dict[str, Any] = {
        **CONFIG,
        "parallel": {},
        "compute": {"instance_type": "ml.m5.xlarge", "processes_per_instance": 1},
        "train": {**CONFIG["train"], "steps": 6, "save_interval": 2, "global_batch_size": 4},
    }
    (root / "ml/input/data/config").mkdir(exist_ok=True)
    config_file = root / "ml/input/data/config/config.json"
    config_file.write_text(json.dumps(keys_of(JobConfig.model_validate(config), "train")))
    (root / "tries").mkdir()
    disk = FailingDisk(root / "shim", [root / "tries"])
    zygote = Zygote("tests.faults.one_rank", {**disk.environment(), "OMP_NUM_THREADS": "1"})
    made = {
        name: Stage(root, zygote, disk, name) for name in ("prepare", "convert", "train", "export")
    }
    status, output = made["train"].attempt(0)
    assert status == 0, output
    shutil.copytree(made["train"].ml(0) / "checkpoints", root / "ml/input/data/checkpoint")
    shutil.rmtree(made["train"].ml(0))
    yield made
    zygote.close()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "train" else pytest.mark.full)
        for name in ("prepare", "convert", "train", "export")
    ],
)
def test_of_a_stage(
    stages: dict[str, Stage], name: str, record_property: Callable[[str, int], None]
) -> None:
    stage = stages[name]
    stage.disk.fail(errno.ENOSPC, 1 << 60)
    status, output = stage.attempt(0)
    count = stage.disk.count
    assert status == 0, output
    stage.result = stage.read(0)
    assert stage.result
    print(f"{name}: {count} writes")
    record_property("tries", each_ends_in_a_sentence(stage.disk, count, stage.attempt, stage.again))
