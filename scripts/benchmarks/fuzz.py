"""Try mutated configs and damaged inputs on every command that reads them, and count ends that
break a rule.

    scripts/bench fuzz [--configs 3000] [--inputs 3000] [--seed 0] [--json]
    scripts/bench fuzz --configs 1 --inputs 0 --seed 17          # one case again, by the number that its fault names
    scripts/bench fuzz --show --configs 1 --inputs 0 --seed 17   # its case

A case breaks a rule if it shows Python, ends with an undocumented status, says nothing, takes over
2 s of CPU time, prints requests, scripts or JSON that do not parse, or gives another result than
the undamaged input. Prints each kind of fault once, with the seeds that have it; the status is 1 if
there is one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402

from testing.fuzz.run import Totals, world_of  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--configs", type=int, default=3000)
    parser.add_argument("--inputs", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--form", action="append", default=[], help="only these inputs, e.g. parquet; repeatable"
    )
    parser.add_argument("--show", action="store_true", help="print the cases")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    totals = Totals(show=options.show)
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        world_of(Path(folder), patch) as world,
    ):
        world.configs(range(options.seed, options.seed + options.configs), totals)
        if options.inputs:
            world.inputs(range(options.seed, options.seed + options.inputs), totals, options.form)
    kinds = defaultdict(list)
    for fault in totals.faults:
        kinds[fault.kind].append(fault)
    for kind, faults in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"\n{kind}: {len(faults)}", file=sys.stderr)
        for fault in faults[:3]:
            print(f"  {fault.case}\n    {fault.text[-1500:]}", file=sys.stderr)
    summary = {
        "configs": totals.configs,
        "inputs": totals.inputs,
        "faults": len(totals.faults),
        "kinds": len(kinds),
        "cpu_s": round(totals.cpu, 1),
        "slowest_s": round(totals.slowest, 2),
    }
    print(
        json.dumps(summary)
        if options.json
        else ", ".join(f"{key} {value}" for key, value in summary.items())
    )
    return 1 if totals.faults else 0


if __name__ == "__main__":
    sys.exit(main())
