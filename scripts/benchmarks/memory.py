"""Predicted against measured peak memory of the native engine, over gloo on this machine's CPUs, as a table."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def main() -> None:
    """Measure and print; takes a few minutes on two cores."""
    from tests.engine.world import World
    from tests.planner.peaks import COMBINATIONS, compare

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    worlds = {size: World(size) for size in (1, 2, 4)}
    worst, rows = 0.0, []
    for family, mesh in COMBINATIONS:
        found = compare(family, mesh, worlds)
        _, measured, predicted = max(found, key=lambda row: row[1])
        worst = max(worst, *(abs(p / m - 1) for _, m, p in found))
        rows.append(
            f"| {family} | {mesh} | {measured / 1e6:.2f} | {predicted / 1e6:.2f} | {predicted / measured - 1:+.1%} |"
        )
        if not options.json:
            print(rows[-1], flush=True)
    for world in worlds.values():
        world.stop()
    result = {"combinations": len(rows), "worst_error": round(worst, 4)}
    print(json.dumps(result) if options.json else f"{len(rows)} combinations, worst of any stage {worst:.1%}")


if __name__ == "__main__":
    main()
