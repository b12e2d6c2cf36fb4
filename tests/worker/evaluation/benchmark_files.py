"""Small copies of benchmarks in the forms in which their authors and the hub distribute them."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
BOOLQ: Rows = [
    {
        "passage": f"the fox {i} is {'red' if i % 3 else 'brown'}.",
        "question": f"is the fox {i} red",
        "label": i % 2,
    }
    for i in range(8)
]
BBH: Rows = [
    {"input": f"not ( {i} ) is", "target": "[invalid]" if i % 2 else "True"} for i in range(4)
]
"""The harness's filter answers [invalid] if a text has no `the answer is`."""
MCQ: Rows = [
    {
        "passage": None,
        "question": f"what is {i}?",
        "options": [f"(A)the red fox {i}", f"(B){i}", "(C)the", "(D)a dog"],
        "label": ["A", ["A", "C"], "C D"][i % 3],
        "answer": None,
        "other": None,
    }
    for i in range(9)
]
GOLD = [[0], [0, 2], [2, 3]]
CLOZE: Rows = [
    {"passage": None, "question": f"what is {i}?", "options": None, "label": None, "answer": answer}
    for i, answer in enumerate(("3", "no number", "4"))
]
CEVAL: Rows = [
    {
        "id": i,
        "question": f"what is {i}?",
        "A": f"the red fox {i}",
        "B": "the",
        "C": "a",
        "D": "fox",
        "answer": "ABCD"[i % 4],
    }
    for i in range(6)
]
HUMANEVAL: Rows = [
    {
        "task_id": f"HumanEval/{i}",
        "prompt": f"def f{i}(x):\n    return x + {i}\n",
        "entry_point": f"f{i}",
        "canonical_solution": "",
        "test": f"def check(candidate):\n    assert candidate(1) == {1 + i - i % 2}\n",
    }
    for i in range(4)
]
"""Problems that an empty answer solves, if their number is even."""


def jsonl(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def parquet(path: Path, rows: Rows) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def sheet(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, list(rows[0]))
        out.writeheader()
        out.writerows(rows)
    return path


def prompted(rows: Rows) -> Rows:
    """AGIEval's questions as the hub has them: with the prompt, spelled out here."""
    return [
        {
            "query": (
                f"Q: {row['question']} Answer Choices: {' '.join(row['options'])}\n"
                "A: Among A through D, the answer is"
            ),
            "choices": row["options"],
            "gold": GOLD[i % 3],
        }
        for i, row in enumerate(rows)
    ]


def _answered(row: dict[str, Any]) -> dict[str, Any]:
    return {"question": row["question"], "answer": bool(row["label"]), "passage": row["passage"]}


def boolq_of_google(folder: Path) -> None:
    rows = [{"title": "Fox", **_answered(row)} for row in BOOLQ]
    jsonl(folder / "dev.jsonl", rows)
    jsonl(folder / "train.jsonl", rows[::-1])


def boolq_of_superglue(folder: Path) -> None:
    rows = [{**row, "label": bool(row["label"]), "idx": i} for i, row in enumerate(BOOLQ)]
    jsonl(folder / "BoolQ/val.jsonl", rows)
    jsonl(folder / "BoolQ/train.jsonl", rows[::-1])
    jsonl(
        folder / "BoolQ/test.jsonl",
        [{k: v for k, v in row.items() if k != "label"} for row in rows],
    )


def boolq_of_hub(folder: Path) -> None:
    parquet(folder / "boolq/validation-00000-of-00001.parquet", BOOLQ)
    parquet(folder / "boolq/train-00000-of-00001.parquet", BOOLQ[::-1])
    parquet(folder / "boolq/test-00000-of-00001.parquet", [{**row, "label": -1} for row in BOOLQ])


def boolq_of_hubs_other(folder: Path) -> None:
    rows = [_answered(row) for row in BOOLQ]
    parquet(folder / "data/validation-00000-of-00001.parquet", rows)
    parquet(folder / "data/train-00000-of-00001.parquet", rows[::-1])


def bbh_of_authors(folder: Path) -> None:
    path = folder / "bbh/boolean_expressions.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"canary": "do not train on this", "examples": BBH}))
    (folder / "cot-prompts").mkdir()
    (folder / "cot-prompts/boolean_expressions.txt").write_text(
        "canary\n-----\nQ: not True is\nA: False.\n"
    )


def bbh_of_hub(folder: Path) -> None:
    parquet(folder / "boolean_expressions/test-00000-of-00001.parquet", BBH)


def agieval_of_authors(folder: Path) -> None:
    jsonl(folder / "data/v1_1/aqua-rat.jsonl", MCQ)
    jsonl(folder / "data/v1_1/math.jsonl", CLOZE)


def agieval_of_hub(folder: Path) -> None:
    parquet(folder / "agieval-aqua-rat/data/test-00000-of-00001.parquet", prompted(MCQ))
    rows = [
        {"query": f"Q: {row['question']}\nA: The answer is", "answer": row["answer"]}
        for row in CLOZE
    ]
    parquet(folder / "agieval-math/data/test-00000-of-00001.parquet", rows)


def ceval_of_authors(folder: Path) -> None:
    sheet(folder / "val/logic_val.csv", CEVAL)
    sheet(folder / "dev/logic_dev.csv", [{**row, "explanation": "because"} for row in CEVAL[::-1]])
    sheet(
        folder / "test/logic_test.csv",
        [{k: v for k, v in row.items() if k != "answer"} for row in CEVAL],
    )


def ceval_of_hub(folder: Path) -> None:
    for split, rows in (
        ("val", CEVAL),
        ("dev", CEVAL[::-1]),
        ("test", [{**row, "answer": ""} for row in CEVAL]),
    ):
        parquet(
            folder / f"logic/{split}-00000-of-00001.parquet",
            [{**row, "explanation": ""} for row in rows],
        )


def humaneval_of_authors(folder: Path) -> None:
    jsonl(folder / "HumanEval.jsonl.gz", HUMANEVAL)


def humaneval_unpacked(folder: Path) -> None:
    jsonl(folder / "data/HumanEval.jsonl", HUMANEVAL)


def humaneval_of_hub(folder: Path) -> None:
    parquet(folder / "openai_humaneval/test-00000-of-00001.parquet", HUMANEVAL)


FORMS: dict[str, tuple[Callable[[Path], None], ...]] = {
    "boolq": (boolq_of_hub, boolq_of_hubs_other, boolq_of_google, boolq_of_superglue),
    "bbh": (bbh_of_authors, bbh_of_hub),
    "agieval": (agieval_of_authors, agieval_of_hub),
    "ceval": (ceval_of_authors, ceval_of_hub),
    "humaneval": (humaneval_of_authors, humaneval_unpacked, humaneval_of_hub),
}
