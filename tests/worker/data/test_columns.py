"""Columns with other names, and preference data, which is not read as conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smtrain.cli.data_keys import one_key, read_column_map
from smtrain.core.errors import ConfigError, DataError
from tests.worker.data.chats import talk, tokenizer
from tests.worker.data.quiet import prepare_sft

ANSWER = "because of the weather"
ASKED = "why were they late"
PAIRS: dict[str, dict[str, Any]] = {
    "text": {"prompt": ASKED, "chosen": ANSWER, "rejected": "who knows"},
    "messages": {"chosen": talk(ASKED, ANSWER), "rejected": talk(ASKED, "who knows")},
    "alpaca": {"instruction": ASKED, "input": "", "chosen": ANSWER, "rejected": "who knows"},
    "sharegpt": {
        "conversations": [
            {"from": f, "value": v} for f, v in (("human", "hi"), ("gpt", "ho"), ("human", ASKED))
        ],
        "chosen": {"from": "gpt", "value": ANSWER},
        "rejected": {"from": "gpt", "value": "who knows"},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer(tmp_path_factory.mktemp("tok"), "chatml")


def written(folder: Path, rows: list[dict[str, Any]], kind: str) -> Path:
    path = folder / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(
    source: Path, folder: Path, name: str, columns: dict[str, str] | None = None, **more: Any
) -> Any:
    return prepare_sft(
        source, source.parent / name, folder, seq_len=64, workers=1, columns=columns or {}, **more
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("shape", PAIRS)
def test_preferences_are_told_by_name(shape: str, kind: str, tmp_path: Path, folder: Path) -> None:
    source = written(tmp_path, [PAIRS[shape]] * 3, kind)
    with pytest.raises(
        DataError, match=rf"a\.{kind}: its records are pairs of preferences .* data\.columns"
    ):
        prepared(source, folder, "out", max_bad=99)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("shape", "columns"),
    [
        ("text", {"instruction": "prompt", "output": "chosen"}),
        ("messages", {"messages": "chosen"}),
        ("alpaca", {"output": "chosen"}),
    ],
)
def test_the_chosen_answers_are_learned_where_they_are_named(
    shape: str, columns: dict[str, str], kind: str, tmp_path: Path, folder: Path
) -> None:
    (tmp_path / "plain").mkdir()
    plain = written(tmp_path / "plain", [{"instruction": ASKED, "output": ANSWER}] * 3, "jsonl")
    prepared(plain, folder, "out")
    prepared(written(tmp_path, [PAIRS[shape]] * 3, kind), folder, "out", columns)
    for name in ("tokens.bin", "tokens.idx", "tokens_mask.bin"):
        assert (tmp_path / "out" / name).read_bytes() == (
            tmp_path / "plain/out" / name
        ).read_bytes()


def test_keys_as_others_name_them() -> None:
    assert one_key(["content"], "text") == "content"
    assert one_key(None, "body") == "body"
    assert read_column_map(
        '{"prompt": "question", "response": "answer", "system": "s"}', "sft"
    ) == {
        "instruction": "question",
        "output": "answer",
        "system": "s",
    }
    for keys, column in ((["a", "b"], "text"), (["a"], "body")):
        with pytest.raises(ConfigError, match="--json-keys"):
            one_key(keys, column)
    wrong = (
        '{"prompt": 1}',
        "[]",
        "prompt=a",
        '{"promt": "a"}',
        '{"prompt": "a", "instruction": "b"}',
    )
    for spelling in wrong:
        with pytest.raises(ConfigError, match="--map-keys"):
            read_column_map(spelling, "sft")
    with pytest.raises(ConfigError, match="--text-column"):
        read_column_map('{"prompt": "a"}', "pretrain")
