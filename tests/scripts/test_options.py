"""`scripts/test MODE OPTIONS`: options go only to the tests of that mode."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = (
    ".venv/bin",
    ".venv/nxd/bin",
    ".venv/lowest/bin",
    ".venv/v2/bin",
    ".venv/toolkit-env/bin",
)
TOOLS = ("ruff", "lint-imports", "deptry", "mypy")
SCRIPTS = ("setup", "packages", "nxd-environment", "slurm-packages", "lowest-environment")
# It records its arguments, reports fixed affected tests, and coverage at the floor.
PYTHON = """#!/bin/sh
case "$*" in
*pytest*) echo "$(dirname "$0" | cut -d/ -f2 | sed s/^bin$/main/) $*" >>calls ;;
*tests.parts\ files\ 7) ;;
*tests.parts\ files*) echo tests/one.py ;;
*tests.parts\ environments*) echo extra s3 tf456 ;;
*tests.parts\ green*) echo "$4" >>green ;;
*tests.affected*) echo "affected $*" >>calls; echo tests/one.py ;;
*coverage*) echo 50 ;;
esac
"""


class Checkout:
    """A checkout with the real scripts/test, whose environments and installers are stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for place in PYTHONS:
            self.program(f"{place}/python", PYTHON)
        for tool in TOOLS:
            self.program(f".venv/bin/{tool}", "#!/bin/sh\n")
        for script in SCRIPTS:
            self.program(f"scripts/{script}", "#!/bin/sh\n")
        for program in ("docker", "dockerd"):
            self.program(f"programs/{program}", "#!/bin/sh\n")
        self.program(".venv/toolkit-env/bin/torchrun", "#!/bin/sh\n")
        for installed in ("s3", "pcluster", "extra", "tf456", "tf457", "tf500", "toolkit"):
            (folder / ".venv" / installed).mkdir()
        for name in (
            "tests/one.py",
            "tests/worker/engine/a.py",
            "tests/docs/a.py",
            "pyproject.toml",
        ):
            self.write(name, "")
        self.write("tests/quick.txt", "tests/one.py\n")
        self.write("tests/coverage-floor.txt", "50\n")
        shutil.copy(ROOT / "scripts/test", folder / "scripts/test")
        made_from = (folder / "pyproject.toml").read_bytes() + (
            folder / "scripts/test"
        ).read_bytes()
        self.write(".venv/v2/.smtrain", hashlib.sha256(made_from).hexdigest())

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def program(self, name: str, text: str) -> None:
        self.write(name, text).chmod(0o755)

    def calls(self, *words: str) -> list[list[str]]:
        """The arguments of every pytest that `scripts/test WORDS` starts."""
        (self.folder / "calls").write_text("")
        path = f"{self.folder / 'programs'}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "scripts/test", *words],
            cwd=self.folder,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.status = done.returncode
        return [line.split() for line in (self.folder / "calls").read_text().splitlines()]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def named_in(call: list[str]) -> list[str]:
    pairs = zip(["", *call], call, strict=False)
    return [word for before, word in pairs if word.startswith("tests/") and before != "--ignore"]


MODES = (
    "--nxd",
    "--slurm",
    "--docker",
    "--s3",
    "--sdk-v2",
    "--lowest",
    "--transformers",
    "--quick",
    "--coverage",
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options", [["-q"], ["-x", "-k", "docs"], ["-k", "tests"], ["--maxfail", "2"]], ids=" ".join
)
def test_options_alone_keep_the_tests_of_a_mode(
    checkout: Checkout, mode: str, options: list[str]
) -> None:
    plain, with_options = checkout.calls(mode), checkout.calls(mode, *options)
    assert checkout.status == 0
    assert len(plain) == len(with_options) >= 1
    for before, after in zip(plain, with_options, strict=True):
        assert named_in(before) == named_in(after) != [] or mode == "--docker"
        assert " ".join(options) in " ".join(after)
    if mode == "--nxd":
        assert [(call[0], named_in(call)) for call in with_options] == [
            ("nxd", ["tests/worker/engine"])
        ]


@pytest.mark.parametrize("mode", MODES)
def test_a_test_that_is_named_is_the_only_one(checkout: Checkout, mode: str) -> None:
    calls = checkout.calls(mode, "tests/worker/engine/a.py::test_x", "-q")
    assert [named_in(call) for call in calls] == [["tests/worker/engine/a.py::test_x"]]


def test_the_gate_takes_options_and_stays_the_gate(checkout: Checkout) -> None:
    (call,) = checkout.calls("-x", "-q")
    assert "-m not full --durations 10 -x -q" in " ".join(call)
    (named,) = checkout.calls("-q", "tests/one.py")
    assert "not full" not in " ".join(named)
    assert named_in(named) == ["tests/one.py"]


@pytest.mark.parametrize(
    ("words", "base"), [(["-q"], []), (["main", "-q"], ["main"]), (["main"], ["main"])]
)
def test_a_base_and_options_are_told_apart(
    checkout: Checkout, words: list[str], base: list[str]
) -> None:
    query, call = checkout.calls("--changed", *words)
    assert query[3:] == base
    assert named_in(call) == ["tests/one.py"]
    assert call[-1] == ("-q" if "-q" in words else "tests/one.py")


def test_every_part_of_full_gets_the_options_and_tests_cannot_be_named(checkout: Checkout) -> None:
    plain, with_options = checkout.calls("--full"), checkout.calls("--full", "-k", "docs")
    assert len(plain) == len(with_options) > 5
    assert all(call[-2:] == ["-k", "docs"] for call in with_options)
    assert checkout.calls("--full", "tests/one.py") == []
    assert checkout.status == 2


def test_a_part_of_full_runs_its_files_and_is_recorded_if_all_of_it_is_green(
    checkout: Checkout,
) -> None:
    record = checkout.write("green", "")
    suite, *others = checkout.calls("--full", "2/7")
    assert (checkout.status, named_in(suite)) == (0, ["tests/one.py"])
    assert len(others) == 3
    assert len(checkout.calls("--full", "7/7")) == 3, "no suite"
    assert record.read_text() == "2\n7\n"
    assert checkout.calls("--full", "2/7", "-k", "docs")
    assert record.read_text() == "2\n7\n"
    assert checkout.calls("--full", "8/7") == []
    assert checkout.status == 2
    checkout.program(".venv/bin/mypy", "#!/bin/sh\nexit 1\n")
    assert checkout.calls("--full", "2/7")
    assert (checkout.status, record.read_text()) == (1, "2\n7\n")
