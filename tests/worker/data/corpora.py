"""Text in several forms for preparations, and a digest of their output."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def digest(folder: Path) -> str:
    """A digest of all files of a prepared folder."""
    whole = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        whole.update(path.name.encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()


def corpus(folder: Path, draw: random.Random) -> list[Path]:
    """Two sources in several formats with duplicates, bad lines, long and empty documents, files of
    all sizes.
    """
    words = [
        "the",
        "words",
        "of",
        "a",
        "small",
        "text",
        "and",
        "some",
        "more",
        "of",
        "them",
        "são",
        "数据",
    ]

    def text() -> str:
        return " ".join(draw.choices(words, k=draw.choice([0, 1, 5, 5, 20, 200])))

    def line() -> str:
        return draw.choice(
            [json.dumps({"text": text()}), json.dumps({"text": "again"}), "", '{"no": 1}']
        )

    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
        for number in range(draw.randrange(1, 4)):
            rows = "\n".join(line() for _ in range(draw.randrange(60)))
            (folder / name / f"{number}.jsonl").write_text(rows + draw.choice(["", "\n"]))
        (folder / name / "a.jsonl.gz").write_bytes(gzip.compress((line() + "\n").encode() * 9))
        (folder / name / "z.txt").write_text("a separate whole text\n" * 30)
        table = pa.table({"text": [text() for _ in range(draw.randrange(1, 40))]})
        pq.write_table(table, folder / name / "p.parquet", row_group_size=7)
    return [folder / "one", folder / "two"]


def conversations(folder: Path, tokenizer: Path) -> tuple[Path, list[Path]]:
    """A tokenizer folder with a chat template, and a source of instruction data with bad
    records.
    """
    model = folder / "model"
    model.mkdir(parents=True)
    for path in tokenizer.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    about = json.loads((model / "tokenizer_config.json").read_text())
    about["chat_template"] = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    )
    (model / "tokenizer_config.json").write_text(json.dumps(about))
    rows = [
        (
            {"instruction": f"say the words {i}", "output": "words " * (i % 11) or "none"}
            if i % 9
            else {"no": i}
        )
        for i in range(150)
    ]
    (folder / "talk").mkdir()
    (folder / "talk/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    good = [row for row in rows if "no" not in row]
    pq.write_table(pa.Table.from_pylist(good), folder / "talk/b.parquet", row_group_size=20)
    return model, [folder / "talk"]
