"""Compare predicted with measured peak memory of the native engine, over gloo on this machine's
CPUs, as a table.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))


def main() -> None:
    """Measure and print; takes a few minutes on two cores."""
    from tests.client.planner.peaks import ADAPTED, COMBINATIONS, CUT, LONG, MIXED, PAIRED, compare
    from tests.worker.engine import world as engine_world

    engine_world.PATIENCE = 3600  # one thread, and rows of 2048 tokens
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument(
        "--lora", action="store_true", help="only LoRA's, after the peak of full training"
    )
    parser.add_argument("--pairs", action="store_true", help="only those on pairs (objective dpo)")
    parser.add_argument(
        "--cut", action="store_true", help="only those whose rows are cut over ranks (parallel.cp)"
    )
    parser.add_argument(
        "--experts", action="store_true", help="only experts with cut, packed and long rows"
    )
    parser.add_argument(
        "--long", action="store_true", help="only one row of 32k tokens, whole and cut over 2 ranks"
    )
    options = parser.parse_args()
    if options.long:
        print(json.dumps(long_row()))
        return
    worlds = {size: engine_world.World(size) for size in (1, 2, 4)}
    special = options.lora or options.pairs or options.cut or options.experts
    cases = [] if special else [(family, mesh, False) for family, mesh in COMBINATIONS]
    cases += (
        [] if special and not options.lora else [(family, mesh, True) for family, mesh in ADAPTED]
    )
    cases += [(family, mesh, False) for family, mesh in PAIRED] if options.pairs else []
    cases += [(family, mesh, False) for family, mesh in CUT] if options.cut else []
    length: dict[str, Any] = {"seq_len": LONG, "batch": 4} if options.cut else {}
    combinations = [(family, mesh, with_adapter, length) for family, mesh, with_adapter in cases]
    if options.experts:
        combinations = [
            (family, mesh, False, {"seq_len": tokens, "batch": 4, "packed": is_packed})
            for family, mesh, tokens, is_packed in MIXED
        ]
    worst = 0.0
    for family, mesh, with_adapter, length in combinations:
        stages = compare(family, mesh, worlds, with_adapter, paired=options.pairs, **length)
        _, actual, estimate = max(stages, key=lambda row: row[1])
        worst = max(worst, *(abs(p / m - 1) for _, m, p in stages))
        numbers = f"{actual / 1e6:.2f} | {estimate / 1e6:.2f} | {estimate / actual - 1:+.1%} |"
        if with_adapter and not options.json:
            full_bytes = max(m for _, m, _ in compare(family, mesh, worlds))
            numbers = f"{full_bytes / 1e6:.2f} | {numbers}"
        if not options.json:
            print(f"| {family} | {mesh} | {numbers}", flush=True)
    for world in worlds.values():
        world.stop()
    result = {"combinations": len(combinations), "worst_error": round(worst, 4)}
    print(
        json.dumps(result)
        if options.json
        else f"{len(combinations)} combinations, worst of any stage {worst:.1%}"
    )


def long_row() -> dict[str, object]:
    """Measure what a step on one row of 32768 tokens needs above the state, with 1 rank and on the
    larger of 2.
    """
    from tests.client.planner.peaks import model, peak
    from tests.worker.engine import world as worlds
    from tests.worker.engine.cases import mesh

    worlds.PATIENCE = 3600  # one thread, and all pairs of 32768 tokens
    sizes = {
        "hidden_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 256,
    }
    sizes |= {"head_dim": 48, "num_hidden_layers": 3, "max_position_embeddings": 1 << 15}
    config, bytes_by_ranks = {**model("llama"), **sizes}, {}
    for cp in (1, 2):
        with worlds.World(cp) as world:
            peaks = world.run(peak, config, mesh(f"111 cp{cp} m1"), 1, 1 << 15)
        bytes_by_ranks[cp] = max(top - state for _, state, top, *_ in peaks)
    mib = {cp: round(bytes_ / 2**20) for cp, bytes_ in bytes_by_ranks.items()}
    return {
        "tokens": 1 << 15,
        "one_rank_mib": mib[1],
        "of_two_mib": mib[2],
        "share": round(bytes_by_ranks[2] / bytes_by_ranks[1], 3),
    }


if __name__ == "__main__":
    main()
