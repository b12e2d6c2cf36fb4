"""Keep benchmark results: one JSON line per run in docs/benchmarks/history.jsonl, and a picture of
all of them.

    scripts/bench NAME --append      calls `append NAME` with the benchmark's line of JSON on its standard input
    scripts/bench_history.py draw    draws docs/benchmarks/history.svg again from the file

Compare only runs of one machine: each benchmark and machine has its own panel.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HISTORY = ROOT / "docs/benchmarks/history.jsonl"
WIDTH, ROW, LABEL, LINE = 900, 34, 330, 430  # pixels
MAX_NUMBERS = 8  # numbers drawn of a benchmark


def machine() -> str:
    """The processor's model and number of cores, on which a figure depends most."""
    model = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        model = next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        pass
    return f"{model}, {os.cpu_count()} cores"


def commit() -> str:
    """The commit that ran, with a + if the tree had changes."""
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return result.stdout.strip() or "unknown"


def entry(name: str, text: str) -> dict[str, Any]:
    """The record of a run. Raises ValueError if the last line is not a JSON object."""
    lines = [line for line in text.splitlines() if line.strip()]
    result = json.loads(lines[-1]) if lines else None
    if not isinstance(result, dict):
        raise ValueError(f"{name} --json printed no JSON object")
    timestamp = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {
        "name": name,
        "at": timestamp,
        "commit": commit(),
        "machine": machine(),
        "result": result,
    }


def numbers(result: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a result by dotted key."""
    numbers_by_key: dict[str, float] = {}
    for key, value in result.items():
        if isinstance(value, dict):
            numbers_by_key |= numbers(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers_by_key[f"{prefix}{key}"] = float(value)
    return numbers_by_key


def read(history: Path) -> list[dict[str, Any]]:
    """Every record, oldest first."""
    if not history.is_file():
        return []
    return [json.loads(line) for line in history.read_text("utf-8").splitlines() if line.strip()]


def picture(records: list[dict[str, Any]]) -> str:
    """An SVG with a line for each number of each benchmark and machine: its course run by run,
    first and last value.
    """
    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        panels.setdefault((record["name"], record["machine"]), []).append(record)
    out, y = [], 16
    for (name, machine_name), runs in sorted(panels.items()):
        y += 28
        spans = (
            f"{runs[0]['at'][:10]} to {runs[-1]['at'][:10]}, {len(runs)}"
            f" run{'s' if len(runs) > 1 else ''}"
        )
        out.append(f'<text class="title" x="16" y="{y}">{escape(name)}</text>')
        out.append(
            f'<text class="note" x="{WIDTH - 16}" y="{y}" text-anchor="end">{escape(machine_name)};'
            f" {spans}</text>"
        )
        keys = list(numbers(runs[-1]["result"]))[:MAX_NUMBERS]
        for key in keys:
            y += ROW
            values = [figures[key] for run in runs if key in (figures := numbers(run["result"]))]
            out += _line(key, values, y)
        y += 12
    height = y + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        ' role="img">\n<title>Benchmarks over time</title>\n<style>\ntext { font: 13px system-ui,'
        ' "Segoe UI", Roboto, Arial, sans-serif; fill: #5a6675; }\n.title { font-weight: 600;'
        " font-size: 16px; }\n.note { font-size: 12px; }\npath { fill: none; stroke: #4078c8;"
        " stroke-width: 2; }\ncircle { fill: #4078c8; }\n</style>\n" + "\n".join(out) + "\n</svg>\n"
    )


def _line(key: str, values: list[float], y: int) -> list[str]:
    low, high = min(values), max(values)
    step = LINE / max(1, len(values) - 1)
    # Zero is the bottom: a change of one percent must not look like a cliff.
    span = max(high, 0.0) - min(low, 0.0) or 1.0
    points = [
        (LABEL + i * step, y - 22 * (value - min(low, 0.0)) / span)
        for i, value in enumerate(values)
    ]
    path = " L".join(f"{x:.1f} {up:.1f}" for x, up in points)
    return [
        f'<text x="16" y="{y}">{escape(key)}</text>',
        f'<path d="M{path}"/>',
        *(f'<circle cx="{x:.1f}" cy="{up:.1f}" r="3"/>' for x, up in points),
        (
            f'<text x="{WIDTH - 16}" y="{y}" text-anchor="end">{values[0]:.4g} to'
            f" {values[-1]:.4g}</text>"
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["append", "draw"])
    parser.add_argument("name", nargs="?")
    parser.add_argument("--history", type=Path, default=HISTORY)
    arguments = parser.parse_args()
    if arguments.what == "append":
        if not arguments.name:
            parser.error("append needs the benchmark's name")
        try:
            record = entry(arguments.name, sys.stdin.read())
        except ValueError as error:
            sys.exit(f"scripts/bench: {error}; nothing was kept")
        arguments.history.parent.mkdir(parents=True, exist_ok=True)
        with open(arguments.history, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, sort_keys=True) + "\n")
        print(json.dumps(record["result"]))
    arguments.history.with_suffix(".svg").write_text(picture(read(arguments.history)), "utf-8")


if __name__ == "__main__":
    main()
