"""Time and memory to plan 70B over every mesh of 1 to 64 instances of all types, on one core.

Measured from outside: a fresh interpreter from its start to its end, its peak resident memory as
the kernel counts it. It finds compiled bytecode, as every start but a user's first does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
CODE = """
import smtrain
from smtrain.core.facts import table
from smtrain.core.facts.gpus import without_kernels
types = [
    t
    for t, row in table("instances")["instances"].items()
    if "core_gib" in row and without_kernels(t) is None
]
plan = smtrain.plan(
    model="llama-3-70b", machines=[(t, n) for t in types for n in range(1, 65)],
    train={"global_batch_size": 1024, "seq_len": 8192}, compute={"region": "us-east-1"},
)
assert plan.fits and len(plan.choices) == 5
"""


def main() -> None:
    """Measure and print the median of some rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    core = {min(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, core)
    walls, cpus = [], []
    with TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(options.rounds + 1):
            cpu_before, began = children_cpu_seconds(), time.perf_counter()
            subprocess.run([sys.executable, "-c", CODE], check=True, cwd=ROOT, env=environment)
            walls.append(time.perf_counter() - began)
            cpus.append(children_cpu_seconds() - cpu_before)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    # The first round compiles the bytecode and fills the page cache.
    result = {
        "wall_s": round(median(walls[1:]), 3),
        "cpu_s": round(median(cpus[1:]), 3),
        "peak_mib": round(peak, 1),
    }
    print(
        json.dumps(result)
        if options.json
        else "\n".join(f"{name:9} {value}" for name, value in result.items())
    )


def children_cpu_seconds() -> float:
    """Processor seconds of all children so far: the wall time on an otherwise idle core."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
