"""A benchmark's result is kept as one line, and drawn."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/bench_history.py"


def history(folder: Path, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments, "--history", str(folder / "history.jsonl")]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def test_lines_are_added_and_drawn(tmp_path: Path) -> None:
    for seconds in (2.0, 1.5):
        line = json.dumps({"seconds": seconds, "peak": {"mb": 80}, "what": "<plan>", "ok": True})
        assert history(tmp_path, "append", "plan", text=f"installing...\n{line}\n").returncode == 0
    records = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [record["result"]["seconds"] for record in records] == [2.0, 1.5]
    assert {"at", "commit", "machine", "name", "result"} == records[0].keys()
    texts = [node.text for node in ElementTree.parse(tmp_path / "history.svg").iter() if node.text]
    assert "2 to 1.5" in texts
    assert "peak.mb" in texts
    assert not any(text == "ok" or text == "what" for text in texts)


def test_a_benchmark_that_failed_leaves_nothing(tmp_path: Path) -> None:
    done = history(tmp_path, "append", "plan", text="Traceback\n")
    assert done.returncode != 0
    assert not (tmp_path / "history.jsonl").exists()


def test_the_page_shows_what_the_file_holds(tmp_path: Path) -> None:
    kept = ROOT / "docs/benchmarks"
    (tmp_path / "history.jsonl").write_bytes((kept / "history.jsonl").read_bytes())
    assert history(tmp_path, "draw").returncode == 0
    assert (tmp_path / "history.svg").read_bytes() == (kept / "history.svg").read_bytes()
