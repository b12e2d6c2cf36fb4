"""Generated code runs confined: its rights, its limits and its score."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from smtrain.core.errors import SmtrainError
from smtrain.worker.evaluation import generated_code, sandbox
from smtrain.worker.evaluation.generated_code import ConfinedCodeEval, pass_at, passes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the filters are Linux's")
OWN = (
    "open('a', 'w').write('x')\nimport os\nassert os.listdir('.') =="
    " ['a']\nos.remove('a')\nos.mkdir('d')"
)
MAY = {
    "compute": "assert sum(range(10)) == 45",
    "write in its folder": OWN,
    "start a thread": "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
    "call numpy": (
        "import numpy\nassert (numpy.ones((64, 64)) @ numpy.ones((64, 64))).sum() == 64**3"
    ),
    "find an empty folder and environment": (
        "import os\nassert os.listdir('.') == [] and 'SECRET' not in os.environ"
    ),
    "hear that there is no network": (
        "import socket\ntry:\n    socket.create_connection(('127.0.0.1', 80))\n"
        "except PermissionError:\n    pass"
    ),
}
MAY_NOT = {
    "fail": "assert 1 == 2",
    "not be Python": "def f(:",
    "end before its tests": "raise SystemExit(0)",
    "end its process": "import os\nos._exit(0)",
    "open a socket": "import socket\nsocket.socket()",
    "write elsewhere": "open({victim!r}, 'a')",
    "delete elsewhere": "import os\nos.remove({victim!r})",
    "empty a file elsewhere": "import os\nos.open({victim!r}, os.O_RDONLY | os.O_TRUNC)",
    "empty by name": "import os\nos.truncate({victim!r}, 0)",
    "change rights elsewhere": "import os\nos.chmod({victim!r}, 0)",
    "take more memory": "bytearray(5 << 30)",
    "fill the disk": "open('a', 'w').write('x' * (17 << 20))",
    "raise its limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "start a process": "import os\nos.fork()",
    "start a program": "import subprocess\nsubprocess.run(['true'])",
    "end its parent": "import os\nos.kill(os.getppid(), 9)",
    "read what is not given": "input()",
}


def test_a_program_may_compute_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    monkeypatch.setenv("SECRET", "1")
    programs = {
        **MAY,
        **{name: text.replace("{victim!r}", repr(str(victim))) for name, text in MAY_NOT.items()},
    }
    _, passed = ConfinedCodeEval().compute([""], [list(programs.values())], k=[1])
    assert [name for name, right in zip(programs, passed[0], strict=True) if right] == list(MAY)
    assert (victim.read_text(), oct(victim.stat().st_mode & 0o777)) == ("kept", "0o644")
    assert not list(Path(tempfile.gettempdir()).glob("smtrain-generated-*"))


def test_a_program_that_waits_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated_code, "WALL_SECONDS", 0.5)
    assert not passes("import time\ntime.sleep(100)")


@pytest.mark.full  # 3 seconds of CPU; the gate has the limit by the clock
def test_a_program_that_computes_for_ever_is_ended() -> None:
    assert not passes("while True:\n    pass")


def test_scores_are_those_of_the_metric() -> None:
    scores, passed = ConfinedCodeEval().compute(
        ["assert f() == 1"] * 2, [["f = lambda: 1"] * 2, ["f = lambda: 2"] * 2], [1, 2, 3]
    )
    assert passed == {0: [True, True], 1: [False, False]}
    assert scores == {"pass@1": 0.5, "pass@2": 0.5}
    assert [pass_at(1, 4, 1), pass_at(2, 4, 1), pass_at(2, 4, 3)] == pytest.approx(
        [1 / 4, 1 / 2, 1.0]
    )


WITHOUT_LANDLOCK = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("confined", {path!r})
confined = importlib.util.module_from_spec(spec)
spec.loader.exec_module(confined)
os.chdir({folder!r})
confined.filter_calls(files=False)
open("kept").read()
for call in (lambda: open("new", "w"), lambda: os.remove("kept"), lambda: os.mkdir("new"), lambda: open("kept", "r+")):
    try:
        call()
    except PermissionError:
        continue
    sys.exit(1)
"""


def test_without_landlock_no_file_is_changed_at_all(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    program = WITHOUT_LANDLOCK.format(path=sandbox.__file__, folder=str(tmp_path))
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert os.listdir(tmp_path) == ["kept"]


def test_a_machine_that_cannot_confine_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "confined.py"
    broken.write_text(Path(sandbox.__file__).read_text().replace('sys.platform != "linux"', "True"))
    monkeypatch.setattr(sandbox, "__file__", str(broken))
    with pytest.raises(
        SmtrainError,
        match=r"cannot be confined on this machine \(it needs Linux\); evaluate on Linux",
    ):
        passes("pass")
    with pytest.raises(KeyError):
        sandbox.program_of("riscv64", True)
    assert len(sandbox.program_of("aarch64", False)) % 8 == 0
