"""The table of faults names existing tests, and counts a skipped try as lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "scripts/benchmarks/faults.py"
NAMED = [
    test
    for row in tomllib.loads(BENCH.with_suffix(".toml").read_text())["fault"]
    for test in row["tests"]
]


def test_every_fault_is_tried_by_tests_that_there_are() -> None:
    assert NAMED
    parts = [name.partition("::") for name in NAMED]
    lacking = [
        f"{file}::{function}"
        for file, _, function in parts
        if not (ROOT / file).is_file() or f"def {function}" not in (ROOT / file).read_text()
    ]
    assert lacking == []


def test_what_was_tried_and_lost_is_read_from_a_report(tmp_path: Path) -> None:
    kills, prepare = "tests.worker.checkpoint.test_killed", "tests.worker.data.prepare.test_prepare"
    report = tmp_path / "report.xml"
    report.write_text(f"""<testsuites><testsuite>
        <testcase classname="{kills}" name="test_a">
          <properties><property name="tries" value="5"/></properties>
        </testcase>
        <testcase classname="{kills}" name="test_b"><failure/></testcase>
        <testcase classname="{kills}" name="test_c"><skipped/></testcase>
        <testcase classname="{prepare}" name="test_d"/>
    </testsuite></testsuites>""")
    command = [sys.executable, str(BENCH), "--report", str(report), "--only", "killed", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    result = json.loads(done.stdout)
    assert (result["tried"], result["survived"], result["lost"]) == (7, 6, 1)
    assert done.returncode == 1
    assert "conversion killed at a random moment" in result["lost_faults"]
    assert "prepare killed" not in result["lost_faults"]
