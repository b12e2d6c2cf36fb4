"""Test every fault that smtrain promises to survive: how often it was tried, and how often
something was lost.

Each row of `faults.toml` names a fault and its tests; they run here, several tries each, and a try
that does not pass is lost. `--many` tries each as often as its row allows, which takes hours: rows
with the same number of tries run together, one group after the other; `--only` selects rows.
docs/reliability-tests.md has the table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import tomllib

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]


def main() -> None:
    """Run the tests, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--many", action="store_true", help="as many tries as each row allows")
    parser.add_argument(
        "--only", metavar="WORD", default="", help="faults whose text holds this word"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--report", type=Path, help="run nothing: read the --junitxml of a run of all tests"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="the table of docs/reliability-tests.md"
    )
    options = parser.parse_args()
    rows = [
        row
        for row in tomllib.loads((FOLDER / "faults.toml").read_text())["fault"]
        if options.only in row["what"]
    ]
    if not rows:
        parser.error(f"--only: no fault's text holds {options.only!r}")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(
            json.dumps(row.get("many", {}) if options.many else {}, sort_keys=True), []
        ).append(row)
    earlier_results = read(options.report) if options.report else None
    table = []
    for number, (variables, members) in enumerate(groups.items(), 1):
        if earlier_results is None:
            print(
                f"{number} of {len(groups)}: {len(members)} faults {variables}",
                file=sys.stderr,
                flush=True,
            )
        environment = {
            **os.environ,
            **{key: str(value) for key, value in json.loads(variables).items()},
        }
        tests = sorted({test for row in members for test in row["tests"]})
        results = (
            run(tests, environment, options.workers) if earlier_results is None else earlier_results
        )
        table += [(row["what"], *count_tries(row["tests"], results)) for row in members]
    order = [row["what"] for row in rows]
    table.sort(key=lambda row: order.index(row[0]))
    lost_faults = [fault for fault, tries, survivals in table if survivals < tries or not tries]
    total = Counter(tried=sum(row[1] for row in table), survived=sum(row[2] for row in table))
    if options.json:
        print(
            json.dumps(
                {**total, "lost": total["tried"] - total["survived"], "lost_faults": lost_faults}
            )
        )
    elif options.markdown:
        print("| fault | tries | survived | lost |\n|---|---|---|---|")
        for fault, tries, survivals in table:
            print(f"| {fault} | {tries} | {survivals} | {tries - survivals} |")
    else:
        print(f"{'fault':100} {'tries':>6} {'survived':>9} {'lost':>5}")
        for fault, tries, survivals in table:
            print(f"{fault:100} {tries:6} {survivals:9} {tries - survivals:5}")
        print(
            f"{'all':100} {total['tried']:6} {total['survived']:9}"
            f" {total['tried'] - total['survived']:5}"
        )
    sys.exit(1 if lost_faults else 0)


def run(tests: list[str], environment: dict[str, str], workers: int) -> dict[str, tuple[int, bool]]:
    """Tries and outcome by test id; a test that tries a fault several times reports it in the
    property `tries`.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-n",
                str(workers),
                "--dist",
                "loadfile",
                f"--junitxml={report}",
                *tests,
            ],
            cwd=ROOT,
            env=environment,
            check=False,
            stdout=sys.stderr,
        )
        return read(report)


def read(report: Path) -> dict[str, tuple[int, bool]]:
    """Tries and outcome by test id, from a report of pytest."""
    tree = ElementTree.parse(report)
    outcomes = {}
    for case in tree.iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        properties = {p.get("name"): p.get("value") for p in case.iter("property")}
        if case.find("skipped") is not None:
            continue  # skipped
        bad = any(case.find(kind) is not None for kind in ("failure", "error"))
        outcomes[name] = (int(properties.get("tries") or 1), not bad)
    return outcomes


def count_tries(tests: list[str], results: dict[str, tuple[int, bool]]) -> tuple[int, int]:
    """Tries and survivals of a row's tests: files, functions, or single cases."""
    total_tries = survivals = 0
    for name, (tries, well) in results.items():
        if any(name == test or name.startswith((f"{test}::", f"{test}[")) for test in tests):
            total_tries += tries
            survivals += tries if well else 0
    return total_tries, survivals


if __name__ == "__main__":
    main()
