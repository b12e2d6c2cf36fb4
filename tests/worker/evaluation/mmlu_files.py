"""A small MMLU in both of its layouts."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

SUBJECTS = {"anatomy": 12, "college_physics": 7}


def questions(subject: str, count: int, split: str) -> list[dict[str, Any]]:
    rows = []
    for i in range(count):
        choices = [f"the red fox {i + k}" for k in range(4)]
        text = f" what is {split} number {i} of {subject}? "
        rows.append(
            {
                "question": text,
                "subject": subject,
                "choices": choices,
                "answer": (i * 7 + len(subject)) % 4,
            }
        )
    return rows


def as_parquet(folder: Path) -> Path:
    """As cais/mmlu: a folder a subject, choices as a list, the answer's number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for subject, count in SUBJECTS.items():
        (folder / subject).mkdir(parents=True)
        for split, number in (("test", count), ("dev", 5)):
            rows = questions(subject, number, split)
            pq.write_table(
                pa.Table.from_pylist(rows), folder / subject / f"{split}-00000-of-00001.parquet"
            )
    return folder


def as_csv(folder: Path, header: bool = False) -> Path:
    """As Hendrycks': a folder a split, no header, the answer's letter."""
    for split, wanted in (("test", None), ("dev", 5)):
        (folder / split).mkdir(parents=True)
        for subject, count in SUBJECTS.items():
            with (folder / split / f"{subject}_{split}.csv").open("w", newline="") as file:
                out = csv.writer(file)
                if header:
                    out.writerow(["question", "A", "B", "C", "D", "answer"])
                for row in questions(subject, wanted or count, split):
                    out.writerow([row["question"], *row["choices"], "ABCD"[row["answer"]]])
    return folder
