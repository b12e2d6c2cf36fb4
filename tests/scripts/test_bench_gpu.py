"""`scripts/bench gpu` at toy size: its driver, its figures, and one part that trains."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks import gpu_parts
from scripts.benchmarks.gpu_parts import figures, shapes
from scripts.benchmarks.gpu_parts.driver import RESULT, Driver, Line
from scripts.benchmarks.gpu_parts.parts import PARTS
from smtrain.core.model.shape import ModelShape
from tests import warm

ROOT = Path(gpu_parts.__file__).parents[3]
BEGIN = (
    f"import sys, time; sys.stdin.readline(); print('{RESULT}' + '{{\"imported\": true}}',"
    " flush=True); "
)
SCRIPTS = {
    "good": BEGIN + f"print('{RESULT}' + '{{\"tokens\": 7}}')",
    "faulty": BEGIN + "raise ValueError('no such kernel')",
    "broken": "import no_such_module",
    "slow": BEGIN + f"print('{RESULT}' + '{{\"tokens\": 8}}', flush=True); time.sleep(60)",
    "parent": "import subprocess, sys; subprocess.Popen(['sleep', '60']); " + BEGIN,
    "last": BEGIN + f"print('{RESULT}' + '{{\"tokens\": 9}}')",
}


def driven(folder: Path, seconds: float, limit: float = 20) -> list[Line]:
    lines: list[Line] = []
    limits = {name: 0.2 if name == "slow" else limit for name in SCRIPTS}
    Driver(
        limits, lambda name: [sys.executable, "-ISc", SCRIPTS[name]], seconds, folder, lines.append
    ).run()
    return lines


def test_a_part_that_fails_or_is_late_leaves_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    lines = driven(tmp_path, 60)
    by_part = {name: [line for line in lines if line["part"] == name] for name in SCRIPTS}
    assert [line["tokens"] for line in lines if "tokens" in line] == [7, 8, 9]
    assert by_part["faulty"][0]["failed"] == "ValueError: no such kernel"
    assert by_part["broken"][0]["failed"] == "ModuleNotFoundError: No module named 'no_such_module'"
    assert by_part["slow"][1]["failed"] == "took longer than 0 s"
    assert all("seconds" in found[-1] for found in by_part.values())
    assert "failed" not in by_part["parent"][0]
    assert time.monotonic() - began < 30, "the slow part is killed, and what the parent left behind"
    assert "Traceback" in (tmp_path / "log.txt").read_text()


def test_parts_without_time_are_skipped(tmp_path: Path) -> None:
    assert driven(tmp_path, 5) == [
        {"part": name, "skipped": "no time was left"} for name in SCRIPTS
    ]


@pytest.mark.slow
def test_a_part_trains_packed_rows_as_its_plan_and_its_whole_rows(tmp_path: Path) -> None:
    script = tmp_path / "part.py"
    script.write_text(
        "import os, sys\nsys.argv = ['child', 'packed', '--toy']\n"
        "from scripts.benchmarks.gpu_parts import child\nos._exit(child.main())\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    done = warm.run([script], environment)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [
        json.loads(line.removeprefix(RESULT))
        for line in done.stdout.splitlines()
        if line.startswith(RESULT)
    ]
    device = {"device": "CPU", "gib": 0.0, "tflops": {"8192^3": 0.05}}
    lines = [figures.add_figures(line, device, toy=True) for line in said if "row" in line]
    ours, whole = lines[:2]
    assert [line["role"] for line in lines] == ["ours", "peer"] * 2
    assert ours["losses"][0] > ours["losses"][-1] > 0
    assert "losses" not in whole, "it does not start from the initial values"
    assert ours["attended"] < ours["S"]
    assert ours["mfu_of_measured"] > 0
    assert ours["plan"]["low"] < ours["plan"]["tokens_per_s"] < ours["plan"]["high"]
    assert set(figures.ratios(lines)) == {"packed 8192", "packed 32768"}
    assert next(line["aten"] for line in said if "profile" in line) > 100


def test_operations_are_products_and_half_of_the_attention() -> None:
    config = shapes.model_config("1b", toy=False)
    shape, work = ModelShape.from_config(config), {"model": "1b", "S": 4096}
    attention = 6 * 16 * 32 * 64 * 4096
    products = 6 * (shape.parameters() - 33 * 2048)  # without norms
    assert figures.operations(work, toy=False) == products + attention
    assert figures.operations({**work, "lora": True}, toy=False) == pytest.approx(
        4 / 6 * products + attention
    )
    assert figures.operations({**work, "attended": 1024.0}, toy=False) == products + attention / 4


def line(row: str, system: str, role: str, **more: Any) -> Line:
    return {"part": "p", "row": row, "system": system, "role": role, **more}


def test_ratios_are_of_the_best_peer_and_reasons_are_kept() -> None:
    lines = [
        line("a", "smtrain", "ours", tokens_per_s=300, losses=[2.0, 1.0]),
        line("a", "x", "peer", tokens_per_s=200, losses=[2.0, 1.01]),
        line("a", "y", "peer", tokens_per_s=150),
        line("a", "smtrain deterministic", "variant", tokens_per_s=900),
        line("b", "smtrain", "ours", ms=2.0),
        line("b", "x", "peer", ms=1.0),
        line("c", "x", "peer", failed="OutOfMemoryError: 3 GiB"),
        {"part": "q", "skipped": "no time was left"},
    ]
    said = figures.summary(lines)
    assert said["over_best_peer"] == {"a": 1.5, "b": 0.5}
    assert said["loss_difference"] == {"a": pytest.approx(0.0099, abs=1e-4)}
    assert said["without_result"] == ["p: c: x: OutOfMemoryError: 3 GiB", "q: no time was left"]
    assert "ours over the best peer" in figures.table_of(lines)


def test_a_card_of_the_table_has_its_data_sheet_peak() -> None:
    assert figures.sheet_peak("NVIDIA H200") == 989e12
    assert figures.sheet_peak("NVIDIA H100 80GB HBM3") == 989e12
    assert figures.sheet_peak("NVIDIA H100 PCIe") is None
    assert figures.sheet_peak("CPU") is None


def test_every_part_has_its_function() -> None:
    sources = {path.stem: path.read_text() for path in Path(gpu_parts.__file__).parent.glob("*.py")}
    for name, part in PARTS.items():
        module, _, function = part.function.partition(":")
        assert f"def {function}(" in sources[module], name
