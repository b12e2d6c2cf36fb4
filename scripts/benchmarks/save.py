"""Compare the standstill of training for a background save with that for a synchronous one, in one
run.

One rank has a Llama of about `--billions` parameters (bf16, 14 bytes per parameter on disk) and
saves it `--rounds` times in each way, in turn. `ratio` is the median of `begin_save` (finite check
and copy) over the median of `save`, which also writes, hashes, flushes and reads back; the bar is
0.15. `behind_s` is the time from the return to a whole checkpoint. On CUDA the copies go
to pinned memory, from the second save on without allocating it. Needs about 34 bytes of memory and
14 of disk per parameter. Progress is printed on stderr.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from resume import config_of, engine_of, fitting

BAR = 0.15


def measure(folder: Path, billions: float, rounds: int) -> dict[str, float]:
    """Save in turn in both ways; the first round fills caches and is not counted."""
    engine = engine_of(config_of(billions))
    synchronous_seconds, standstills, rest_seconds = [], [], []
    for number in range(rounds + 1):
        began = time.perf_counter()
        engine.begin_save(folder, 2 * number + 1, {})
        returned = time.perf_counter()
        engine.end_save()
        whole = time.perf_counter()
        engine.save(folder, 2 * number + 2, {})
        done = time.perf_counter()
        for step in (2 * number + 1, 2 * number + 2):
            drop(folder / f"step_{step:08d}")
        if number:
            standstills.append(returned - began)
            rest_seconds.append(whole - returned)
            synchronous_seconds.append(done - whole)
        print(
            f"round {number}: stood {returned - began:.2f} s, behind {whole - returned:.2f} s,"
            f" waited {done - whole:.2f} s",
            file=sys.stderr,
        )
    parameters = engine.parameters
    engine.close()
    stood_s, waited_s = statistics.median(standstills), statistics.median(synchronous_seconds)
    return {
        "parameters": parameters,
        "stood_s": stood_s,
        "behind_s": statistics.median(rest_seconds),
        "waited_s": waited_s,
        "ratio": stood_s / waited_s,
        "bar": BAR,
    }


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
        f" {figures['stood_s']:.2f} s, and for {figures['waited_s']:.2f} s without writing behind:"
        f" ratio {figures['ratio']:.3f} (bar {BAR}); whole {figures['behind_s']:.2f} s later"
    )


if __name__ == "__main__":
    main()
