"""Every documented field of a record is learned, seen, counted or refused, as
docs/record-fields.md says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smtrain.cli.data_keys import read_column_map
from smtrain.core.errors import ConfigError, DataError
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.read.record_fields import FIELDS, PAIRS, USES, RecordField
from smtrain.worker.data.tokenize.dialogue import COLUMNS, MAPPABLE_COLUMNS, conversation
from smtrain.worker.data.tokenize.template_losses import GREETING
from smtrain.worker.data.tokenize.turns import RecordFault
from tests.typed import typed as smtrain
from tests.worker.data.chats import TEMPLATES, talk, tokenizer, write
from tests.worker.data.prepare.test_sft import read
from tests.worker.data.quiet import prepare_sft

ROOT = Path(__file__).parents[4]
MARK = "zebra"
# Everything that a message may have, in the form of templates for models with tools.
FULL = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{"
    " m.role }}{{ ' ' + m.name if m.name else '' }}\n{{ m.reasoning_content or '' }}{{ m.content or"
    " '' }}{{ m.refusal or '' }}{{ m.tool_call_id or '' }}{% for c in m.tool_calls or [] %}{{"
    " c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}{%"
    " if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"name": "now", "arguments": json.dumps({"zone": MARK})}
VALUES: dict[str, Any] = {
    "history": [[f"first {MARK}", f"then {MARK}"]],
    "tools": json.dumps([{"name": MARK, "parameters": {}}]),
    "functions": [{"name": MARK, "parameters": {}}],
    "images": ["a.png"],
    "videos": ["a.mp4"],
    "audios": ["a.wav"],
    "kto_tag": False,
    "label": False,
    "parallel_tool_calls": True,
    "weight": 0,
    "train": False,
    "loss": False,
    "chosen": MARK,
    "rejected": "worse",
    "preferred_output": [],
    "non_preferred_output": [],
    "messages[].tool_calls": [{"type": "function", "function": CALL}],
    "messages[].function_call": CALL,
    "messages[].train_detail": [{"begin_offset": 0, "end_offset": 1, "train": True}],
    "messages[].weight": 0,
    "messages[].loss": False,
    "messages[].train": False,
    "conversations[].train": False,
    "chat_template_kwargs": json.dumps({"mood": MARK}),
    "enable_thinking": True,
    "thinking": True,
    "preserve_thinking": False,
    "clear_thinking": False,
    "thinking_budget": 9,
    "documents": [{"text": MARK}],
    "builtin_tools": [MARK],
    "segments": [{"label": True, "text": MARK}],
    "choices": [MARK],
}
ROWS = [
    pytest.param(field, name, id=f"{field.origin} {name}")
    for field in FIELDS
    for name in field.names
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    TEMPLATES["full"] = FULL
    return tokenizer(tmp_path_factory.mktemp("tok"), "full")


def prepared(
    rows: list[Any], tmp_path: Path, folder: Path, **more: Any
) -> tuple[DatasetManifest, list[str]]:
    said: list[str] = []
    options = {"seq_len": 400, "workers": 1, "say": said.append, **more}
    made = prepare_sft(write(tmp_path / "a.jsonl", rows), tmp_path / "out", folder, **options)
    return made, said


def record(name: str) -> dict[str, Any]:
    """A complete record in the form of a field, including the field."""
    value = VALUES.get(name, MARK)
    column, _, inner = name.partition("[].")
    if not inner:
        if column in ("messages", "conversations"):
            role, text = ("role", "content") if column == "messages" else ("from", "value")
            return {column: [{role: "user", text: "hi"}, {role: "assistant", text: MARK}]}
        return {"instruction": "add", "input": "1", "output": "3", name: value}
    question, answer = talk("hi", "yes")
    if inner in ("role", "from"):
        question[inner] = {"role": "user", "from": "human"}[inner]
        return {column: [{inner: question[inner], "content": f"hi {MARK}"}, answer]}
    if inner in ("content", "value"):
        return {column: [question, {"role": "assistant", inner: MARK}]}
    if inner in ("name", "tool_call_id"):
        return {column: [{**question, inner: value}, answer]}
    return {column: [question, {**answer, inner: value}, *talk("and", "so")]}


def test_the_page_shows_the_table() -> None:
    rows = [
        f"| {f.origin} | {', '.join(f'`{n}`' for n in f.names)} | {USES[f.use]} | {f.meaning} |"
        for f in FIELDS
    ]
    table = ["| from | field | what is done with it | which is |", "|---|---|---|---|", *rows]
    assert "\n".join(table) in (ROOT / "docs/record-fields.md").read_text("utf-8")
    assert set(MAPPABLE_COLUMNS) < set(COLUMNS)


@pytest.mark.parametrize(("field", "name"), ROWS)
def test_each_field_is_what_the_table_says(
    field: RecordField, name: str, tmp_path: Path, folder: Path
) -> None:
    row = record(name)
    if field.use == "refused":
        for pair in PAIRS:
            row |= {other: VALUES[other] for other in pair if name in pair}
        with pytest.raises((RecordFault, DataError)):
            prepared([row], tmp_path, folder)
        return
    made, said = prepared([row], tmp_path, folder)
    text, learned = read(tmp_path / "out", folder)[0]
    if field.use == "decides":
        assert learned == "so<|im_end|>"
        assert "yes" in text
        return
    counted = field.use in ("counted", "columns", "option")  # the template reads no option
    key = {"chat_template_kwargs": "chat_template_kwargs.mood"}.get(name, name)
    assert made.unread == ({key: 1} if counted else {})
    assert any(f"not read: {key} 1" in sentence for sentence in said) == counted
    inner = name.partition("[].")[2]
    if field.use == "learned":
        assert MARK in learned
    elif not counted:
        assert MARK in text
        assert MARK not in learned or inner in ("refusal", "reasoning_content")  # of an answer
    if field.use == "columns":
        made, _ = prepared(
            [{name: MARK, "output": "3"}], tmp_path, folder, columns={"instruction": name}
        )
        assert made.unread == {}
        assert MARK in read(tmp_path / "out", folder)[0][0]


def test_earlier_turns_of_alpaca_are_turns() -> None:
    row = {
        "instruction": "c",
        "input": "more",
        "output": "d",
        "system": "s",
        "history": [["a", "b"]],
    }
    assert conversation(row).messages == talk("a", "b", "c\n\nmore", "d", system="s")
    nothing: tuple[Any, ...] = (None, [], "")
    for none in nothing:
        assert conversation({**row, "history": none}).messages == talk("c\n\nmore", "d", system="s")
    for wrong in ("a", [["a"]], [["a", None]], [["a", ""]], [{"a": "b"}]):
        with pytest.raises(RecordFault, match="'history' is not a list of pairs"):
            conversation({**row, "history": wrong})


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_a_system_prompt_of_the_record_goes_before_turns_without_one(
    column: str, tmp_path: Path, folder: Path
) -> None:
    turns = talk("hi", "ho")
    assert conversation({"system": "s", column: turns}).messages == talk("hi", "ho", system="s")
    first = talk("hi", "ho", system="first")
    made, _ = prepared(
        [{"system": "s", column: first}, {"system": "first", column: first}], tmp_path, folder
    )
    assert made.unread == {"system": 1}
    made, _ = prepared(
        [{"who": "s you are", column: turns}], tmp_path, folder, columns={"system": "who"}
    )
    assert "s you are" in read(tmp_path / "out", folder)[0][0]
    assert made.unread == {}


@pytest.mark.parametrize("name", ["chatml", "marked", "thinking", "full"])
@pytest.mark.parametrize(
    "switch", [{"weight": 0}, {"train": False}, {"loss": False}, {"weight": 0.0, "train": True}]
)
def test_a_turn_that_is_not_to_be_learned_is_seen_only(
    name: str, switch: dict[str, Any], tmp_path: Path
) -> None:
    TEMPLATES["full"] = FULL
    folder = tokenizer(tmp_path / "tok", name)
    turns = talk("a question", "wrong", "once more", "right")
    turns[1] |= switch
    turns[3] |= dict.fromkeys(switch, 1)
    prepared([{"messages": turns}], tmp_path, folder)
    samples = read(tmp_path / "out", folder)
    assert len(samples) == 1
    assert "wrong" in samples[0][0]
    assert "right" in samples[0][1]
    assert "wrong" not in samples[0][1]


def test_a_switch_is_on_or_off(tmp_path: Path, folder: Path) -> None:
    values: tuple[Any, ...] = (0.5, "0", 2, [])
    for value in values:
        with pytest.raises(RecordFault, match=r"turn 2 has weight .* it must be 0 or 1"):
            conversation({"messages": [talk("a")[0], {**talk("", "b")[1], "weight": value}]})
    question, answer = talk("a", "b")
    none = [{**question, "train": True}, {**answer, "weight": 0}]
    made, _ = prepared([{"messages": none}, {"messages": talk("a", "b", "left")}], tmp_path, folder)
    assert (made.samples, made.unread) == (
        1,
        {"messages[].train": 1, "turns after the last answer": 1},
    )
    assert made.dropped == {"conversations whose answers are all marked as not to be learned": 1}
    with pytest.raises(
        DataError, match=r"gives no sample \(1 conversations whose answers are all marked"
    ):
        prepared([{"messages": none}], tmp_path, folder)


def test_calls_of_functions_are_spelled_as_templates_read_them(
    tmp_path: Path, folder: Path
) -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": MARK}}}
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "what time"},
            {
                "from": "function_call",
                "value": json.dumps({"name": "now", "arguments": {"zone": MARK}}),
            },
            {"from": "observation", "value": "noon"},
            {"from": "gpt", "value": "it is noon"},
        ],
        "tools": json.dumps([{"name": "now", "parameters": {}}]),
    }
    dialogue = conversation(sharegpt)
    assert dialogue.messages[1] == {"role": "assistant", "tool_calls": [call]}
    assert dialogue.messages[2] == {"role": "tool", "content": "noon"}
    assert dialogue.tools == [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    openai = {
        "messages": [
            talk("what time")[0], {"role": "assistant", "content": None, "function_call": CALL},
            {"role": "function", "name": "now", "content": "noon"}, talk("", "it is noon")[1],
        ]
    }  # fmt: skip
    assert conversation(openai).messages[1] == {"role": "assistant", "tool_calls": [call]}
    prepared([sharegpt], tmp_path, folder)
    text, learned = read(tmp_path / "out", folder)[0]
    assert "noon" in text
    assert learned == 'now {"zone": "zebra"}<|im_end|>it is noon<|im_end|>'
    with pytest.raises(RecordFault, match="'tools' is text and not JSON"):
        conversation({**sharegpt, "tools": "a clock"})


def test_what_a_template_does_not_write_is_counted_or_refused(tmp_path: Path) -> None:
    TEMPLATES["narrow"] = (
        "{% for m in messages if m.role in ('user', 'assistant') %}<|im_start|>{{ m.role }}\n{{"
        " m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt"
        " %}<|im_start|>assistant\n{% endif %}"
    )
    folder = tokenizer(tmp_path / "tok", "narrow")
    turns = talk("hi", "ho", system="be brief")
    turns[1] |= {"name": "ann", "mood": {"is": "glad"}, "level": 3}
    made, _ = prepared([{"messages": turns, "tools": [{"name": "now"}]}], tmp_path, folder)
    assert made.unread == {
        "messages[].name": 1,
        "messages[].mood": 1,
        "tools": 1,
        "turns of the role system": 1,
    }
    developer = [{"role": "developer", "content": "be brief"}, *talk("hi", "ho")]
    assert prepared([{"messages": developer}], tmp_path, folder)[0].unread == {
        "turns of the role system": 1
    }
    greeting = [talk("", "welcome")[1], *talk("hi", "ho")]
    assert prepared([{"messages": greeting}], tmp_path, folder)[0].unread == {GREETING: 1}
    call = [
        talk("hi")[0],
        {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
    ]
    with pytest.raises(DataError, match="the chat template does not write tool_calls"):
        prepared([{"messages": call}], tmp_path, folder)


def test_either_column_has_turns_in_either_spelling() -> None:
    for column in ("messages", "conversations"):
        for role, text in (("role", "content"), ("from", "value"), ("role", "value")):
            turns = [{role: "human", text: "hi"}, {role: "assistant", text: "ho"}]
            assert conversation({column: turns}).messages == talk("hi", "ho")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "json"])
def test_it_is_said_and_shown_for_every_kind_of_file(
    kind: str, tmp_path: Path, folder: Path
) -> None:
    rows = [
        {"messages": talk("hi", "ho"), "note": "text", "source": {"url": "u"}, "score": 1.5}
    ] * 3
    path = tmp_path / f"a.{kind}"
    table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=2)
    elif kind == "arrow":
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) if kind == "jsonl" else json.dumps(rows))
    done = smtrain(
        "data",
        "prepare",
        str(path),
        str(tmp_path / "out"),
        "--model",
        str(folder),
        "--objective",
        "sft",
        "--seq-len",
        "64",
    )
    assert done.returncode == 0, done.stderr
    for text in (done.stdout, done.stderr):
        assert "not read: note 3, source 3" in text
    shown = smtrain("data", "inspect", str(tmp_path / "out"))
    assert "not read         note 3, source 3" in shown.stdout


def test_keys_of_mindspeed() -> None:
    default = {
        "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
        "system_tag": "system", "observation_tag": "observation", "function_tag": "function_call",
    }  # fmt: skip
    keys = {"messages": "chat", "history": "before", "query": "", "tags": default}
    assert read_column_map(json.dumps(keys), "sft") == {"messages": "chat", "history": "before"}
    for tags in ({"role_tag": "who"}, {"user_tag": "gpt"}, {"name_tag": "x"}, "from"):
        with pytest.raises(ConfigError, match="--map-keys: tags: "):
            read_column_map(json.dumps({"tags": tags}), "sft")
