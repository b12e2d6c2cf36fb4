"""The durations of test files are measured, shown and kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import durations
from tests.durations import Spent

pytest_plugins = ["pytester"]
CONFTEST = """
from pathlib import Path
import pytest
from tests import durations

durations.KEPT = Path({kept!r})

def pytest_configure(config):
    config.pluginmanager.register(durations.Durations(config), "durations")
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(durations, "KEPT", tmp_path / "durations.json")
    return tmp_path / "durations.json"


def test_a_run_shows_and_keeps_each_file_with_what_its_processes_used(
    pytester: pytest.Pytester, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    pytester.makeconftest(CONFTEST.format(kept=str(kept)))
    busy = "import time; end = time.process_time() + 0.5\\nwhile time.process_time() < end: pass"
    pytester.makepyfile(
        test_busy=(
            "import subprocess, sys\ndef test_busy(): subprocess.run([sys.executable, '-c',"
            f" '''{busy}'''])"
        ),
        test_idle="def test_one(): pass\ndef test_two(): pass",
    )
    options = ["-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"]
    output = pytester.runpytest_subprocess(*options).stdout.str()
    assert "the 2 slowest of 2 files" in output
    assert "CPU seconds by folder" in output
    spent_by_file = {file: Spent(**spent) for file, spent in json.loads(kept.read_text()).items()}
    assert spent_by_file["test_busy.py"].cpu >= 0.5
    assert spent_by_file["test_busy.py"].wall >= 0.5
    assert spent_by_file["test_idle.py"].tests == 2


def test_a_mark_finds_processes_that_are_no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys, time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    )
    script += "print('done', flush=True); sys.stdin.read()"
    environment = {**os.environ, durations.MARK: "other"}
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout
        process.stdout.readline()
        mine, with_it = durations.cpu_seconds("nothing"), durations.cpu_seconds("other")
    finally:
        process.kill()
        process.communicate()
    assert with_it - mine >= 0.25


@pytest.mark.parametrize(
    "text", ["", "[]", '{"a.py": 3}', '{"a.py": {"wall": 1, "other": 2}}', "\udcff"]
)
def test_a_damaged_record_is_replaced(kept: Path, text: str) -> None:
    kept.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert durations.known() == {}
    durations.keep({"tests/a.py": Spent(1.0, 2.0, 3)})
    durations.keep({"tests/b.py": Spent(2.0, 2.0, 1)})
    assert set(durations.known()) == {"tests/a.py", "tests/b.py"}
