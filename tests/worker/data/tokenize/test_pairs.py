"""Preference data: every form of a record, TRL's tokens, and what is left out or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smtrain.core.errors import DataError
from smtrain.worker.data.indexed import IndexedDataset
from smtrain.worker.data.load.loader import TokenLoader
from smtrain.worker.data.load.rows import PairRows
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.pack.exchange import merge_marked
from smtrain.worker.data.summary import inspect
from smtrain.worker.data.tokenize.preference import preference
from smtrain.worker.data.tokenize.turns import RecordFault
from tests.typed import typed as smtrain
from tests.worker.data.chats import talk, tokenizer, write
from tests.worker.data.quiet import prepare_sft

GOLDEN = Path(__file__).parents[2] / "golden_dpo"
Answers = list[tuple[list[int], list[int]]]


def prepared(
    source: Path, output: Path, folder: Path = GOLDEN / "model", **more: Any
) -> DatasetManifest:
    return prepare_sft(
        source, output, folder, **{"seq_len": 46, "objective": "dpo", "workers": 1, **more}
    )


def read(output: Path) -> Answers:
    """The prompt and the answer of every sequence."""
    tokens, mask = IndexedDataset(output / "tokens"), IndexedDataset(output / "tokens_mask")
    return [
        (tokens[i][mask[i] == 0].tolist(), tokens[i][mask[i] == 1].tolist())
        for i in range(len(tokens))
    ]


def golden(form: str) -> Answers:
    out: Answers = []
    for pair in json.loads((GOLDEN / "expected.json").read_text("utf-8"))["tokens"][form]:
        room = 24 - len(pair["prompt_ids"])
        out += [(pair["prompt_ids"], pair[f"{name}_ids"][:room]) for name in ("chosen", "rejected")]
    return out


def turns(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def said(answer: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": answer.strip()}]


def test_messages_that_repeat_the_chosen_conversation_are_read(tmp_path: Path) -> None:
    row = {
        "prompt": turns("w1")[0]["content"],
        "chosen": turns("w1") + said("w2"),
        "rejected": turns("w1") + said("w3"),
    }
    rows = [{**row, "messages": row["chosen"]}, {**row, "messages": turns("w1") + said("w4")}]
    manifest = prepared(write(tmp_path / "a.jsonl", rows), tmp_path / "out")
    assert manifest.unread == {"messages": 1}


@pytest.mark.parametrize(
    "form", ["explicit", "implicit", "conversational", "conversational_implicit"]
)
def test_tokens_are_trl_s(form: str, tmp_path: Path) -> None:
    told: list[str] = []
    manifest = prepared(GOLDEN / f"{form}.jsonl", tmp_path / "out", say=told.append)
    wanted = golden(form)
    assert read(tmp_path / "out") == wanted
    assert (manifest.objective, manifest.samples, manifest.documents) == (
        "dpo",
        len(wanted) // 2,
        len(wanted) // 2,
    )
    if form == "explicit":
        full = "pairs whose prompt leaves no room for an answer in 24 tokens"
        assert manifest.dropped == {full: 1}
        assert {f"prepare: 1 {full}", "prepare: 2 pairs with an answer cut to 24 tokens"} <= {*told}


def test_each_record_has_its_own_form(tmp_path: Path) -> None:
    forms = ("explicit", "implicit", "conversational", "conversational_implicit")
    rows = [
        json.loads((GOLDEN / f"{f}.jsonl").read_text("utf-8").splitlines()[i])
        for i, f in enumerate(forms)
    ]
    prepared(write(tmp_path / "a.jsonl", rows), tmp_path / "out")
    assert read(tmp_path / "out") == [
        x for i, f in enumerate(forms) for x in golden(f)[2 * i : 2 * i + 2]
    ]


CONVERSATION = {"prompt": turns("q"), "chosen": said("a"), "rejected": said("b")}
TEXT = {"prompt": "q", "chosen": " a", "rejected": " b"}
ONE_OF_THEM = {"name": "f", "parameters": {}}
FORMS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "ShareGPT",
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        CONVERSATION,
    ),
    ("alpaca", {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"}, CONVERSATION),
    (
        "alpaca, input",
        {"instruction": "q", "input": "x", "chosen": "a", "rejected": "b"},
        {**CONVERSATION, "prompt": turns("q\n\nx")},
    ),
    (
        "UltraFeedback",
        {
            "prompt": "q",
            "chosen": turns("q") + said("a"),
            "rejected": turns("q") + said("b"),
            "messages": turns("q") + said("a"),
        },
        CONVERSATION,
    ),
    ("answers only", {"prompt": "q", "chosen": said("a"), "rejected": said("b")}, CONVERSATION),
    ("turns and text", {"prompt": turns("q"), "chosen": "a", "rejected": "b"}, CONVERSATION),
    (
        "repeated",
        {
            "prompt": turns("q"),
            "chosen": turns("q") + said("a"),
            "rejected": turns("q") + said("b"),
        },
        CONVERSATION,
    ),
    ("messages", {"messages": turns("q"), "chosen": "a", "rejected": "b"}, CONVERSATION),
    (
        "OpenAI",
        {
            "input": {"messages": turns("q"), "tools": []},
            "preferred_output": said("a"),
            "non_preferred_output": said("b"),
        },
        CONVERSATION,
    ),
    (
        "system",
        {"system": "s", **CONVERSATION},
        {**CONVERSATION, "prompt": [{"role": "system", "content": "s"}, *turns("q")]},
    ),
    (
        "HH-RLHF",
        {"chosen": "\n\nHuman: q\n\nAssistant: yes", "rejected": "\n\nHuman: q\n\nAssistant: no"},
        {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": " yes", "rejected": " no"},
    ),
    (
        "a longer one",
        {"chosen": "q a", "rejected": "q a b"},
        {"prompt": "q ", "chosen": "a", "rejected": "a b"},
    ),
    (
        "an empty prompt",
        {"prompt": [], "chosen": turns("q") + said("a"), "rejected": turns("q") + said("b")},
        CONVERSATION,
    ),
    (
        "nothing in common",
        {"chosen": "a ", "rejected": "b "},
        {"prompt": "", "chosen": "a ", "rejected": "b "},
    ),
    (
        "equal conversations",
        {"chosen": turns("q") + said("a"), "rejected": turns("q") + said("a")},
        {**CONVERSATION, "rejected": said("a")},
    ),
]


@pytest.mark.parametrize(
    ("row", "same"), [form[1:] for form in FORMS], ids=[form[0] for form in FORMS]
)
def test_the_usual_forms_mean_the_same(row: dict[str, Any], same: dict[str, Any]) -> None:
    pair = preference(row)
    assert {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} == same


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"prompt": "q", "chosen": "a"}, "no columns chosen and rejected, only 'prompt', 'chosen'"),
        (
            {"prompt": "q", "chosen": "a", "rejected": None},
            "no columns chosen and rejected, only 'prompt', 'chosen'",
        ),
        ({**TEXT, "images": ["x.png"]}, "'images' is not read"),
        (
            {**TEXT, "rejected": said("b")},
            "'chosen' and 'rejected' are not both text or both messages",
        ),
        ({**TEXT, "chosen": 3}, "'chosen' is int, not text or a list of messages"),
        ({**TEXT, "prompt": 3}, "'prompt' is int, not text or a list of messages"),
        ({**CONVERSATION, "chosen": []}, "'chosen' is an empty list"),
        (
            {**CONVERSATION, "chosen": [{"role": "assistant"}]},
            "'chosen': turn 1 has no text in 'content'",
        ),
        ({**CONVERSATION, "chosen": turns("again")}, "'chosen' has no answer of the assistant"),
        (
            {"chosen": turns("q") + said("a"), "rejected": turns("p") + said("b")},
            "have no common beginning",
        ),
        ({**CONVERSATION, "tools": "{"}, "'tools' is text and not JSON"),
        (
            {**CONVERSATION, "chat_template_kwargs": "x"},
            "'chat_template_kwargs' is text and not JSON",
        ),
        (
            {**CONVERSATION, "chat_template_kwargs": {"tools": []}},
            "'chat_template_kwargs' is no object",
        ),
        ({**TEXT, "chosen": "half \ud800"}, "half a surrogate pair"),
        (
            {
                **CONVERSATION,
                "chosen": [{"role": "assistant", "content": [{"type": "image", "image": "x"}]}],
            },
            "turn 1 has no text",
        ),
    ],
)
def test_a_record_that_is_no_pair_says_why(row: dict[str, Any], fault: str) -> None:
    with pytest.raises(RecordFault, match=fault.replace("(", r"\(")):
        preference(row)


def test_bad_records_are_named_with_file_and_line(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [TEXT, TEXT, {"prompt": "q", "chosen": "a"}])
    with pytest.raises(
        DataError, match=r"a\.jsonl, line 3: no columns chosen and rejected.* raise data\.max_bad"
    ):
        prepared(source, tmp_path / "out")
    manifest = prepared(source, tmp_path / "out", max_bad=1)
    assert (manifest.samples, manifest.bad_line_count) == (2, 1)
    with pytest.raises(DataError, match="the only record is bad"):
        prepared(write(tmp_path / "b.jsonl", [{"text": "x"}]), tmp_path / "none", max_bad=9)


def test_columns_by_other_names_and_tables(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"question": f"w{i}", "better": " w7 w8", "worse": f" w{i} w2", "score": "x"}
        for i in range(1, 6)
    ]
    columns = {"prompt": "question", "chosen": "better", "rejected": "worse"}
    first = prepared(write(tmp_path / "a.jsonl", rows), tmp_path / "jsonl", columns=columns)
    assert first.unread == {"score": 5}
    table = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), table)
    second = prepared(table, tmp_path / "parquet", columns=columns)
    assert second.unread == first.unread
    assert read(tmp_path / "jsonl") == read(tmp_path / "parquet")
    with pytest.raises(
        DataError,
        match=r"has the columns question, .*, and not chosen and rejected; name the columns",
    ):
        prepared(table, tmp_path / "none")


def test_tools_and_values_for_the_template(tmp_path: Path) -> None:
    template = (
        "{% if tools %}{{ tools[0].function.name }} {% endif %}{% if short %}w1 {% endif %}"
        "{% for m in messages %}{{ m.content }} {% endfor %}"
    )
    folder = tokenizer(tmp_path / "tok", None)
    (folder / "chat_template.jinja").write_text(template)
    row = {
        **CONVERSATION,
        "tools": json.dumps([ONE_OF_THEM]),
        "chat_template_kwargs": {"short": True},
    }
    prepared(write(tmp_path / "a.jsonl", [row, CONVERSATION]), tmp_path / "out", folder)
    from transformers import AutoTokenizer

    words: Any = AutoTokenizer.from_pretrained(folder)
    assert [words.decode(prompt) for prompt, _ in read(tmp_path / "out")[::2]] == ["f w1 q ", "q "]


def test_text_needs_no_template_and_conversations_do(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "tok", None)
    prepared(write(tmp_path / "a.jsonl", [TEXT]), tmp_path / "text", folder)
    (prompt, answer), _ = read(tmp_path / "text")
    assert prompt
    assert answer[-1] == DatasetManifest.load(tmp_path / "text").eos_id
    with pytest.raises(DataError, match="has no chat template, which conversations need"):
        prepared(write(tmp_path / "b.jsonl", [CONVERSATION]), tmp_path / "talks", folder)


def test_turns_in_an_answer_and_a_second_beginning_are_counted(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    folder = tokenizer(tmp_path / "tok", None)
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = ("<|im_start|>", words.token_to_id("<|im_start|>"))
    words.post_processor = TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    words.save(str(folder / "tokenizer.json"))
    about = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, "bos_token": begin[0]}))
    rows = [TEXT, {**TEXT, "prompt": "<|im_start|>q"}, {**TEXT, "rejected": " b\n\nHuman: more?"}]
    told: list[str] = []
    made = prepared(
        write(tmp_path / "a.jsonl", rows), tmp_path / "out", folder, seq_len=90, say=told.append
    )
    assert sorted(made.noted.values()) == [1, 1]
    assert inspect(tmp_path / "out").facts["found"] == made.noted
    assert set(merge_marked([tmp_path / "out"] * 2, tmp_path / "both").noted.values()) == {2}
    assert (
        "prepare: 1 text prompts that begin with <|im_start|>, which the tokenizer adds once more,"
        " as in TRL" in told
    )
    assert (
        "prepare: 1 answers with turns of a user or of tools in them, which are learned like the"
        " answer" in told
    )


def test_equal_and_overlong_pairs_are_counted(tmp_path: Path) -> None:
    told: list[str] = []
    one = {"prompt": "w1", "chosen": " w2", "rejected": " w3"}
    rows = [one, {**one, "rejected": " w2"}, {**one, "chosen": " w2" * 40}]
    manifest = prepared(
        write(tmp_path / "a.jsonl", rows), tmp_path / "out", say=told.append, overlong="drop"
    )
    assert manifest.dropped == {"pairs with an answer longer than 24 tokens": 1}
    assert manifest.samples == 2
    assert "prepare: 1 pairs of two equal answers, from which nothing is learned" in told
    alike = {"prompt": "w1", "chosen": " w2" * 40, "rejected": " w2" * 50}
    prepared(write(tmp_path / "b.jsonl", [one, alike]), tmp_path / "cut", say=told.append)
    assert told.count("prepare: 1 pairs of two equal answers, from which nothing is learned") == 2


def test_a_prompt_is_on_one_side_with_all_its_pairs(tmp_path: Path) -> None:
    from smtrain.worker.data.clean.holdout import HoldOut

    rows = [{"prompt": f"w{i % 12}", "chosen": f" w{i} w7", "rejected": " w8"} for i in range(60)]
    manifest = prepared(write(tmp_path / "a.jsonl", rows), tmp_path / "out", holdout=HoldOut(0.4))
    assert manifest.validation is not None
    assert manifest.validation["samples"] + manifest.samples == 60
    sides = []
    for name in ("tokens", "validation"):
        tokens = IndexedDataset(tmp_path / "out" / name)
        sides.append({int(tokens[i][0]) for i in range(len(tokens))})
    assert sides[0]
    assert sides[1]
    assert not sides[0] & sides[1]


@pytest.mark.parametrize("packing", [True, False])
def test_rows_hold_whole_pairs_once_an_epoch(packing: bool, tmp_path: Path) -> None:
    prepared(GOLDEN / "explicit.jsonl", tmp_path / "out")
    loader = TokenLoader(
        tmp_path / "out",
        seq_len=46,
        global_batch_size=2,
        dp_rank=0,
        dp_size=1,
        seed=3,
        vocab_size=96,
        packing=packing,
    )
    rows = loader.rows
    assert isinstance(rows, PairRows)
    rows.references[:] = np.arange(38).reshape(19, 2)
    count, met = rows.packing.rows(0), []
    assert (count == 19) is not packing
    for first in range(0, count - count % 2, 2):
        ids, labels, segments, references = (x.numpy() for x in loader.batch(first))
        assert references.shape == (2, rows.most, 2)
        for row in range(2):
            pairs = references[row][np.isfinite(references[row][:, 0])]
            met += (pairs[:, 0] // 2).astype(int).tolist()
            for place, pair in enumerate(pairs[:, 0].astype(int) // 2):
                for k in range(2):
                    within = segments[row] == 2 * place + k
                    tokens, mask = rows.samples.sample(2 * int(pair) + k)
                    assert ids[row][within].tolist() == tokens[:-1].tolist()
                    assert (
                        labels[row][within].tolist()
                        == np.where(mask[1:], tokens[1:], -100).tolist()
                    )
            assert (labels[row][segments[row] >= 2 * len(pairs)] == -100).all()
    loader.close()
    assert len(set(met)) == len(met) >= 17


def test_the_command_prepares_pairs_and_inspects_them(tmp_path: Path) -> None:
    command = ("data", "prepare", str(GOLDEN / "explicit.jsonl"), str(tmp_path / "out"), "--model")
    done = smtrain(*command, str(GOLDEN / "model"), "--objective", "dpo", "--seq-len", "46")
    assert done.returncode == 0, done.stderr
    assert "19 documents" in done.stdout
    facts = inspect(tmp_path / "out").facts
    assert (facts["documents"], facts["rows_an_epoch"] < 19, facts["learned_tokens"] > 100) == (
        38,
        True,
        True,
    )
    refused = smtrain(
        *command, str(GOLDEN / "model"), "--objective", "dpo", "--map-keys", '{"output": "x"}'
    )
    assert "'output' is no column; use" in refused.stderr


def test_conversations_of_several_turns(tmp_path: Path) -> None:
    chat = talk("w1", "w2", "w3")
    row = {"chosen": [*chat, *said("w4")], "rejected": [*chat, *said("w5")]}
    prepared(write(tmp_path / "a.jsonl", [row]), tmp_path / "out")
    (prompt, chosen), (_, rejected) = read(tmp_path / "out")
    assert [len(prompt), len(chosen), len(rejected)] == [11, 2, 2]


def test_csv_holds_pairs_and_conversations(tmp_path: Path) -> None:
    folder = GOLDEN / "model"
    (tmp_path / "a.tsv").write_text(
        "prompt\tchosen\trejected\nw1\t w2\t w3\nw4\t w5\t w6\nw7\t w8\n"
    )
    manifest = prepared(tmp_path / "a.tsv", tmp_path / "tsv", max_bad=1)
    assert (manifest.samples, manifest.bad_lines) == (
        2,
        ["a.tsv, line 4: 2 fields, but the first line has 3"],
    )
    rows = [
        {"prompt": "w1", "chosen": " w2", "rejected": " w3"},
        {"prompt": "w4", "chosen": " w5", "rejected": " w6"},
    ]
    prepared(write(tmp_path / "a.jsonl", rows), tmp_path / "jsonl")
    assert read(tmp_path / "tsv") == read(tmp_path / "jsonl")
    (tmp_path / "b.csv").write_text("prompt,chosen,rejected\nw1,w2,\n")
    with pytest.raises(
        DataError, match=r"b\.csv, line 2: no columns chosen and rejected, only 'prompt', 'chosen'"
    ):
        prepared(tmp_path / "b.csv", tmp_path / "none", max_bad=0)
    (tmp_path / "c.csv").write_text("prompt,answer\nw1,w2\n")
    with pytest.raises(
        DataError, match=r"c\.csv has the columns prompt, answer, and not chosen and rejected"
    ):
        prepared(tmp_path / "c.csv", tmp_path / "none")
    (tmp_path / "d.csv").write_text("instruction,input,output\nw1,,w2\n")
    made = prepare_sft(tmp_path / "d.csv", tmp_path / "sft", folder, seq_len=46, workers=1)
    assert (made.samples, made.bad_line_count) == (1, 0)


@pytest.mark.parametrize("end", [None, "<|stop|>"])
def test_the_end_of_text_pairs_is_a_token_of_tokenizer_json(
    end: str | None, tmp_path: Path
) -> None:
    """A token that only tokenizer_config.json names has an id that no other objective gives."""
    folder = tokenizer(tmp_path / "model", "chatml")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": end}))
    source = write(tmp_path / "a.jsonl", [{"prompt": "what", "chosen": "this", "rejected": "that"}])
    with pytest.raises(
        DataError,
        match=r"the tokenizer has (no|'<\|stop\|>' as) eos_token.*that tokenizer\.json has",
    ):
        prepare_sft(source, tmp_path / "out", folder, seq_len=63, objective="dpo")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "eos_token": "<|im_end|>"})
    )
    assert prepare_sft(source, tmp_path / "out", folder, seq_len=63, objective="dpo").documents == 1
