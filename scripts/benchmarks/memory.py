"""Compare predicted with measured peak memory of the native engine, over gloo on this machine's CPUs, as a table."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def main() -> None:
    """Measure and print; takes a few minutes on two cores."""
    from tests.client.planner.peaks import ADAPTED, COMBINATIONS, PAIRED, compare
    from tests.worker.engine.world import World

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--lora", action="store_true", help="only LoRA's, after the peak of full training")
    parser.add_argument("--pairs", action="store_true", help="only those on pairs (objective dpo)")
    options = parser.parse_args()
    worlds = {size: World(size) for size in (1, 2, 4)}
    cases = [] if options.lora or options.pairs else [(family, mesh, False) for family, mesh in COMBINATIONS]
    cases += [] if options.pairs else [(family, mesh, True) for family, mesh in ADAPTED]
    cases += [(family, mesh, False) for family, mesh in PAIRED] if options.pairs else []
    worst = 0.0
    for family, mesh, adapted in cases:
        stages = compare(family, mesh, worlds, adapted, paired=options.pairs)
        _, measured, predicted = max(stages, key=lambda row: row[1])
        worst = max(worst, *(abs(p / m - 1) for _, m, p in stages))
        numbers = f"{measured / 1e6:.2f} | {predicted / 1e6:.2f} | {predicted / measured - 1:+.1%} |"
        if adapted and not options.json:
            whole = max(m for _, m, _ in compare(family, mesh, worlds))
            numbers = f"{whole / 1e6:.2f} | {numbers}"
        if not options.json:
            print(f"| {family} | {mesh} | {numbers}", flush=True)
    for world in worlds.values():
        world.stop()
    result = {"combinations": len(cases), "worst_error": round(worst, 4)}
    print(json.dumps(result) if options.json else f"{len(cases)} combinations, worst of any stage {worst:.1%}")


if __name__ == "__main__":
    main()
