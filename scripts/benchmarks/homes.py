"""Damage each file of a home of the local control plane, one at a time, and check what survives.

    scripts/bench homes [--count 100] [--seed 0] [--json]
    scripts/bench homes --full                      # every file in every way: about ten minutes
    scripts/bench homes --many --only job.json      # every variant of wrong types
    scripts/bench homes --only 'index.sqlite:types:3'

The home has eleven kinds of jobs. A file is cut in half, emptied, filled with random bytes,
replaced by a folder, well-formed with wrong types, removed, or gets foreign neighbours. Then the
plane must start, and start again; name in server.log every skipped file; have all other jobs with
their logs, metrics and objects; and run a new job. Prints each fault with its mutation,
`FILE:WAY[:VARIANT]`. The status is 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.plane.homes import check, make, mutations  # noqa: E402
from tests.plane.planes import Forks, scratch  # noqa: E402


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument(
        "--count", type=int, default=100, help="how many mutations, chosen by --seed"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no further one after this time"
    )
    parser.add_argument("--full", action="store_true", help="every file in every way")
    parser.add_argument("--many", action="store_true", help="every variant of wrong types")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="mutations whose name has this text"
    )
    options = parser.parse_args()
    began, trial_count = time.monotonic(), 0
    faults: dict[str, list[str]] = {}
    with scratch("1G") as folder:
        forks = Forks()
        try:
            home_files = make(folder, forks)
            all_variants = options.many or ":types:" in options.only  # the name of one variant
            todo = mutations(home_files, everything=options.full, many=all_variants)
            todo = [mutation for mutation in todo if options.only in str(mutation)]
            if not (options.full or options.many or options.only):
                todo = random.Random(options.seed).sample(todo, min(options.count, len(todo)))
            elif len(todo) > options.count and "--count" in " ".join(sys.argv):
                todo = random.Random(options.seed).sample(todo, options.count)
            for mutation in todo:
                if time.monotonic() - began > options.seconds:
                    break
                trial_count += 1
                if problems := check(home_files, mutation, forks):
                    faults[str(mutation)] = problems
                    for text in problems[:3]:
                        print(f"{mutation}: {text}", file=sys.stderr, flush=True)
                if trial_count % 20 == 0:
                    print(
                        f"{trial_count} of {len(todo)}, {time.monotonic() - began:.0f} s",
                        file=sys.stderr,
                        flush=True,
                    )
        finally:
            forks.close()
    figures = {
        "mutations": trial_count,
        "seconds": round(time.monotonic() - began),
        "failed_starts": sum(
            "does not start" in text for problems in faults.values() for text in problems
        ),
        "faults": len(faults),
        "by_way": dict(Counter(name.split(":")[1] for name in faults)),
        "names": sorted(faults),
    }
    print(
        json.dumps(figures)
        if options.json
        else "\n".join(f"{k:14} {v}" for k, v in figures.items())
    )
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
