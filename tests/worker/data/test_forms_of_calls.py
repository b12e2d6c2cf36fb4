"""Calls of functions and tools mean the same in lines and in tables, as objects and as JSON within
JSON.
"""

from __future__ import annotations

import json
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smtrain.core.errors import DataError
from smtrain.worker.data.indexed import IndexedDataset
from smtrain.worker.data.tokenizer import load_tokenizer
from tests.worker.data.chats import tokenizer, write
from tests.worker.data.quiet import prepare_sft

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tokenizer(tmp_path_factory.mktemp("model"), None)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def record(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A question, a call and its answer; the keys of arguments and parameters differ by
    function.
    """
    properties = {key: {"type": "string", f"about_{key}": "x"} for key in arguments}
    return {
        "messages": [
            {"role": "user", "content": "what?"},
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
            },
            {"role": "tool", "content": "so", "name": name},
            {"role": "assistant", "content": "that"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": name, "parameters": {"properties": properties}},
            }
        ],
    }


ROWS = [record("weather", {"city": "Rome", "days": "2"}), record("time", {"zone": "UTC"})]


def texts(source: Path, output: Path, model: Path, objective: str) -> list[str]:
    prepare_sft(source, output, model, seq_len=1023, objective=objective)
    tokens = IndexedDataset(output / "tokens")
    return [load_tokenizer(model).decode(tokens[i].tolist(), False) for i in range(len(tokens))]


def as_pairs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    worse = [{"role": "assistant", "content": "no"}]
    return [
        {
            "prompt": row["messages"][:1],
            "chosen": row["messages"][1:],
            "rejected": worse,
            "tools": row["tools"],
        }
        for row in rows
    ]


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_a_table_writes_no_nulls_that_its_rows_do_not_have(
    model: Path, tmp_path: Path, objective: str
) -> None:
    rows = as_pairs(ROWS) if objective == "dpo" else ROWS
    lines = texts(write(tmp_path / "a.jsonl", rows), tmp_path / "lines", model, objective)
    assert '"arguments": {"zone": "UTC"}' in lines[-1] + lines[-2]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        assert texts(tmp_path / name, tmp_path / f"of {name}", model, objective) == lines


OF_CALL = pa.struct({"name": pa.string(), "arguments": pa.map_(pa.string(), pa.string())})
OF_MESSAGE = pa.struct(
    {
        "role": pa.string(),
        "content": pa.string(),
        "name": pa.string(),
        "tool_calls": pa.list_(pa.struct({"function": OF_CALL})),
    }
)


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_a_map_of_a_table_is_an_object(model: Path, tmp_path: Path, objective: str) -> None:
    rows = [record("weather", {"city": "Rome", "days": "2"}), record("now", {})]
    rows = [{**row, "tools": json.dumps(row["tools"])} for row in rows]
    rows = as_pairs(rows) if objective == "dpo" else rows
    columns = {
        name: pa.array(
            [row[name] for row in rows], pa.string() if name == "tools" else pa.list_(OF_MESSAGE)
        )
        for name in rows[0]
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    lines = texts(write(tmp_path / "a.jsonl", rows), tmp_path / "lines", model, objective)
    assert texts(tmp_path / "a.parquet", tmp_path / "table", model, objective) == lines


@pytest.mark.parametrize("place", ["arguments", "parameters", "chat_template_kwargs"])
@pytest.mark.parametrize(
    ("value", "kind"),
    [(datetime(2026, 1, 2), "datetime"), (Decimal("1.5"), "Decimal"), (b"x", "bytes")],
)
def test_a_value_that_json_lacks_is_refused(
    model: Path, tmp_path: Path, place: str, value: Any, kind: str
) -> None:
    """transformers writes it as "<datetime>", and the model would learn that."""
    row = record("weather", {"city": "Rome"})
    if place == "arguments":
        row["messages"][1]["tool_calls"][0]["function"]["arguments"]["since"] = value
    elif place == "parameters":
        row["tools"][0]["function"]["parameters"]["properties"]["city"]["default"] = value
    else:
        row[place] = {"since": value}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=f"a value of type {kind}, which JSON does not have"):
        texts(tmp_path / "a.parquet", tmp_path / "out", model, "sft")


def twice(value: Any) -> str:
    return json.dumps(json.dumps(value))


@pytest.mark.parametrize("objective", ["sft", "dpo"])
@pytest.mark.parametrize("form", ["inner", "twice", "members", "whole"])
def test_json_within_json_is_read_as_what_it_stands_for(
    model: Path, tmp_path: Path, objective: str, form: str
) -> None:
    def written(row: dict[str, Any]) -> dict[str, Any]:
        row = json.loads(json.dumps(row))
        turn, tools = row["messages"][1], row["tools"]
        write = twice if form == "twice" else json.dumps
        if form in ("inner", "twice"):
            turn["tool_calls"][0]["function"]["arguments"] = write(
                turn["tool_calls"][0]["function"]["arguments"]
            )
            tools[0]["function"]["parameters"] = write(tools[0]["function"]["parameters"])
        elif form == "members":
            turn["tool_calls"], row["tools"] = [
                [json.dumps(one) for one in some] for some in (turn["tool_calls"], tools)
            ]
        else:
            turn["tool_calls"], row["tools"] = json.dumps(turn["tool_calls"]), json.dumps(tools)
        return row

    def of(rows: list[dict[str, Any]], name: str) -> list[str]:
        rows = as_pairs(rows) if objective == "dpo" else rows
        return texts(write(tmp_path / f"{name}.jsonl", rows), tmp_path / name, model, objective)

    assert of([written(row) for row in ROWS], form) == of(ROWS, "objects")
