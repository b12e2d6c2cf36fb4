"""Follow a job of 32 hosts while 30 % of the API calls fail and lines arrive late and out of order.

Counts lost and repeated lines (by count and hash of every host's lines), and the client's own
calls, processor seconds and memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.follow.follower import Follower
from smtrain.core.protocol.log_lines import Line
from smtrain.plane.client import shut_down
from testing.plane import plane


def main() -> None:
    """Follow one synthetic job and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--hosts", type=int, default=32)
    parser.add_argument("--lines", type=int, default=10_000, help="of each host")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="seconds that the hosts take to write them"
    )
    parser.add_argument(
        "--late",
        type=float,
        default=3.0,
        help="seconds; the tenth out of order arrives even later",
    )
    parser.add_argument("--wrong", type=float, default=0.3, help="fraction of the calls that fail")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["SMTRAIN_HOME"] = home
        try:
            figures = measure(options)
        finally:
            shut_down()
    print(
        json.dumps(figures)
        if options.json
        else "\n".join(f"{name:15} {value}" for name, value in figures.items())
    )


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Keep a fixed-size sum of line hashes per host, so that only the client's memory can grow."""
    control = plane()
    control.delivery(
        late=options.late, reorder=0.1, late_streams=options.late, empty_pages=0.05, seed=1
    )
    third = options.wrong / 3
    control.faults(
        operations=["logs:*", "sagemaker:*"], throttle=third, errors=third, drops=third, seed=2
    )
    job = control.synthetic_job(hosts=options.hosts, lines=options.lines, seconds=options.seconds)
    follower = Follower(SageMakerBackend("local"), job.name)
    follower.describe()
    memory, processor, began = peak(), time.process_time(), time.perf_counter()
    counts: Counter[str] = Counter()
    sums: defaultdict[str, int] = defaultdict(int)
    backwards = last = 0
    for event in follower.events():
        if isinstance(event, Line):
            counts[event.host] += 1
            sums[event.host] += mark(event.text)
            backwards += event.timestamp < last
            last = max(last, event.timestamp)
    wall, processor, memory = (
        time.perf_counter() - began,
        time.process_time() - processor,
        peak() - memory,
    )
    hosts = [f"algo-{n + 1}" for n in range(options.hosts)]
    differ = sum(
        (counts[host], sums[host]) != (options.lines, sum(map(mark, job.expected(host))))
        for host in hosts
    )
    return {
        "lines": sum(counts.values()),
        "expected": options.hosts * options.lines,
        "hosts_that_differ": differ,
        "out_of_order": backwards,
        "wall_s": round(wall, 1),
        "cpu_s": round(processor, 1),
        "memory_mib": round(memory, 1),
        "calls": dict(follower.patience.calls),
        "repeated": follower.patience.repeated,
    }


def mark(text: str) -> int:
    """Sums of these are equal if the same lines arrived the same number of times."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big")


def peak() -> float:
    """Peak resident memory so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
