"""Measure the text that a core processes per second in each pass over documents: the figures that
`smtrain plan` uses.

The text is the prose of this machine (.md, .rst and .txt of installed packages), --megabytes of it.
All cores work at once, as in a prepare stage, each on the same text. A figure is MB of text per
processor second, because other load on the machine affects wall time more; the median over cores,
and over --rounds rounds. `all` is every pass one after the other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sysconfig
import time
from pathlib import Path

from smtrain.core.machine import cores_here
from smtrain.worker.data.clean.cleaning import Cleaning, EvaluationTexts, Languages, NearDuplicates
from smtrain.worker.data.clean.overlap import OverlapFinder
from smtrain.worker.data.clean.quality import FILTERS
from smtrain.worker.data.clean.refiner import Refiner

PASSES = {
    **{name: Cleaning(filters=(name,)) for name in FILTERS},
    "near": Cleaning(near=NearDuplicates()),
    "pii": Cleaning(pii="mask"),
    "mojibake": Cleaning(fix_mojibake=True),
    "language": Cleaning(languages=Languages(("en",))),
    "tests": Cleaning(tests=EvaluationTexts("")),
}
QUESTIONS = 10_000
"""Texts of the test that documents are compared with."""
ENDINGS = {".md", ".rst", ".txt"}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=float, default=1.0, help="of text")
    options = parser.parse_args()
    texts, size = prose(options.megabytes * 1e6)
    rates: dict[str, list[float]] = {name: [] for name in PASSES}
    with multiprocessing.get_context("spawn").Pool(cores_here()) as pool:
        for _ in range(options.rounds):
            for name in PASSES:
                seconds = pool.map(pass_seconds, [(name, texts)] * cores_here(), chunksize=1)
                rates[name].append(size / 1e6 / statistics.median(seconds))
    figures = {
        f"{name}_mb_per_s": round(statistics.median(rounds), 2) for name, rounds in rates.items()
    }
    figures["all_mb_per_s"] = round(
        1 / sum(1 / statistics.median(rounds) for rounds in rates.values()), 3
    )
    result = {
        **figures,
        "cores": cores_here(),
        "megabytes": round(size / 1e6, 2),
        "documents": len(texts),
    }
    print(
        json.dumps(result) if options.json else "\n".join(f"{k:26} {v}" for k, v in result.items())
    )


def prose(byte_limit: float) -> tuple[list[str], int]:
    """Documents of about so many bytes in total, and their number."""
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*")):
        if path.suffix in ENDINGS and path.is_file() and size < byte_limit:
            texts.append(path.read_text("utf-8", errors="ignore"))
            size += len(texts[-1].encode())
    return texts, size


def pass_seconds(work: tuple[str, list[str]]) -> float:
    """Processor seconds of one pass over the texts, after its libraries are loaded."""
    name, texts = work
    words = [str(number) for number in range(QUESTIONS)]
    tests = (
        OverlapFinder(" ".join(words[at:] + words[:at])[:200] for at in range(QUESTIONS))
        if name == "tests"
        else None
    )
    refiner = Refiner(PASSES[name], tests)
    refiner.refine(texts[:2])
    start = time.process_time()
    refiner.refine(texts)
    return time.process_time() - start


if __name__ == "__main__":
    main()
