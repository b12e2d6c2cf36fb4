"""Write the data of the three runs: text, questions with answers, and pairs of a better and a worse
answer.

`python examples/preferences/make.py` builds everything from the docstrings of this machine's Python
library: a question about a function, its own help() text as the chosen answer, and the text of
another function of the same length as the rejected one. No function is in two of the three data
sets, and the held-out pairs are about functions of their own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from smtrain.core.demo import materialise

HERE = Path(__file__).resolve().parent
TEXT, CHATS, PAIRS, HELD_OUT = 200, 200, 64, 48
# characters of an answer, so that each answer with its question fits half a row of 256 tokens
LONGEST = 160
SEED = 1


def make(folder: Path) -> dict[str, int]:
    """Write the four data sets below a folder; return the number of records of each."""
    with (materialise("demo://python-help") / "help.jsonl").open(encoding="utf-8") as lines:
        known = [row for row in map(json.loads, lines) if len(row["output"]) <= LONGEST]
    draw = random.Random(SEED)
    draw.shuffle(known)
    parts = iter(known)
    text = [{"text": row["output"]} for row in islice(parts, TEXT)]
    chats = list(islice(parts, CHATS))
    pairs = [pair(row, known, draw) for row in islice(parts, PAIRS + HELD_OUT)]
    written = {
        "text/help.jsonl": text,
        "chats/help.jsonl": chats,
        "pairs/help.jsonl": pairs[HELD_OUT:],
        "held-out/help.jsonl": pairs[:HELD_OUT],
    }
    for name, records in written.items():
        write(folder / name, records)
    return {name: len(records) for name, records in written.items()}


def pair(
    row: dict[str, str], known: list[dict[str, str]], draw: random.Random
) -> dict[str, object]:
    """A question with its answer, and another function's answer that is about as long."""
    others = [one for one in known if one["output"] != row["output"]]
    alike = sorted(others, key=lambda one: abs(len(one["output"]) - len(row["output"])))[:20]
    answers = {"chosen": row["output"], "rejected": draw.choice(alike)["output"]}
    told = {name: [{"role": "assistant", "content": answer}] for name, answer in answers.items()}
    return {"prompt": [{"role": "user", "content": row["instruction"]}], **told}


def write(file: Path, records: Iterable[object]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")


if __name__ == "__main__":
    for name, count in make(HERE / "data").items():
        print(f"{count:5} records in {HERE / 'data' / name}")
