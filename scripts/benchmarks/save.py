"""Compare the standstill of training for a background save with that for a synchronous one, in one
run.

One rank has a Llama of about `--billions` parameters (bf16, 14 bytes per parameter on disk) and
saves it `--rounds` times in each way, in turn. `ratio` is the median standstill over the median of
`save`, which also writes, hashes, flushes and reads back; the bar is 0.15. The standstill is
`begin_save` (finite check) and the time that the next step, of one row of 128 tokens, waits before
its update for the rest of the copies (`waited_s`). `step_s` is such a step without a save and
`step_while_saving_s` the step with it, which shares the cores with copying, hashing and writing.
`behind_s` is the time from the start to a whole checkpoint. Copies go to memory that stays between
saves. Needs about 34 bytes of memory and 14 of disk per parameter. Progress is printed on stderr.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from resume import config_of, engine_of, fitting

BAR = 0.15
TOKENS = 128


def measure(folder: Path, billions: float, rounds: int) -> dict[str, float]:
    """Save in turn in both ways; the first round fills caches and is not counted."""
    engine = engine_of(config_of(billions))
    rows = torch.arange(TOKENS)[None]
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        steps = range(2 * number + 1, 2 * number + 3)
        figures = {"step_s": timed(lambda: engine.step(rows, rows, 0.0))}
        began = time.perf_counter()
        figures["begin_s"] = timed(partial(engine.begin_save, folder, steps[0], {}))
        figures["step_while_saving_s"], figures["waited_s"] = step_and_wait(engine, rows)
        engine.end_save()
        figures["behind_s"] = time.perf_counter() - began
        figures["stood_s"] = figures["begin_s"] + figures["waited_s"]
        figures["synchronous_s"] = timed(partial(engine.save, folder, steps[1], {}))
        for step in steps:
            drop(folder / f"step_{step:08d}")
        for name, value in figures.items() if number else ():
            seconds.setdefault(name, []).append(value)
        text = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
        print(f"round {number}: {text}", file=sys.stderr)
    parameters = engine.parameters
    engine.close()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["stood_s"] / medians["synchronous_s"]
    return {"parameters": parameters, **medians, "ratio": ratio, "bar": BAR}


def step_and_wait(engine: Any, rows: Any) -> tuple[float, float]:
    """The seconds of a step, and of its wait for copies before the update."""
    saver, waits = engine._saver, list[float]()
    finish = saver.finish_before_change
    saver.finish_before_change = lambda: waits.append(timed(finish))
    try:
        return timed(lambda: engine.step(rows, rows, 0.0)), sum(waits)
    finally:
        del saver.finish_before_change


def timed(action: Callable[[], object]) -> float:
    """The seconds of an action."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def drop(checkpoint: Path) -> None:
    """Delete a checkpoint, so that the disk holds one at a time."""
    for path in sorted(checkpoint.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    checkpoint.rmdir()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--billions", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        billions = fitting(options.billions, Path(folder))
        figures = measure(Path(folder), billions, options.rounds)
    if options.json:
        print(json.dumps({key: round(value, 4) for key, value in figures.items()}))
        return
    print(
        f"{figures['parameters'] / 1e9:.2f} billion parameters: training stands still for"
        f" {figures['stood_s']:.2f} s ({figures['begin_s']:.2f} s of the call), and for"
        f" {figures['synchronous_s']:.2f} s without writing behind: ratio {figures['ratio']:.3f}"
        f" (bar {BAR}); whole after {figures['behind_s']:.2f} s; a step takes"
        f" {figures['step_s']:.2f} s, and {figures['step_while_saving_s']:.2f} s next to the save"
    )


if __name__ == "__main__":
    main()
