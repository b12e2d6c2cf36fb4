"""The summary of `scripts/test --full` counts pytest's results, and says why tests were skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import summary

pytest_plugins = ["pytester"]


def test_it_counts_each_part_and_gives_the_reason_of_each_skip(
    pytester: pytest.Pytester, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytester.makepyfile(
        "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no Docker   here')\n"
        "@pytest.mark.skip(reason='no Docker here')\ndef test_c(): pass\n"
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider", f"--junitxml={tmp_path}/one.xml")
    pytester.makepyfile("def test_d(): assert False\ndef test_e(x): pass\n")
    pytester.runpytest_inprocess("-p", "no:cacheprovider", f"--junitxml={tmp_path}/two.xml")
    capsys.readouterr()
    assert summary.main(str(tmp_path)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[0::2] == ["one", "1", "2"]
    assert lines[2].split()[0::2] == ["two", "0", "0"]
    assert "skipped in one: 2 x no Docker here" in lines
    assert sum(line.startswith("FAILED in two: ") for line in lines) == 2
    assert lines[-1] == "1 passed, 2 failed, 2 skipped"


def test_no_results_is_a_failure(tmp_path: Path) -> None:
    assert summary.main(str(tmp_path)) == 1
