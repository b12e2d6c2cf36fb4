"""`smtrain.check` of conversations and pairs: lost text, by its cause, with a remedy that
ends it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.choose import backend_of
from smtrain.client.findings import Finding
from smtrain.client.launch.stages import Chain
from smtrain.client.preflight.context import Context
from smtrain.tools.check import RECORD_CHECKS
from tests.worker.data.chats import CHATML, talk

TALK = CHATML.replace(
    "{{ m.content }}", " {{ m.content }} "
)  # words stand apart for this tokenizer
CUT = TALK.replace(
    "{{ m.content }}", "{{ m.content if keep_thinking else m.content.split('</think>')[-1] }}"
)
THOUGHT = "<think>w1 w2</think>w3"
Found = Callable[..., list[str]]


@pytest.fixture
def found(local_home: Path, tmp_path: Path, model: Path) -> Found:
    """The warnings about some records, as "text; remedy"."""

    def look(
        records: Any, template: str = TALK, objective: str = "sft", **options: Any
    ) -> list[str]:
        (model / "chat_template.jinja").write_text(template)
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        config = smtrain.load_config(
            {
                "name": "talks",
                "target": "local",
                "model": {"path": model, "chat_template_kwargs": options},
                "data": {"path": tmp_path / "a.jsonl"},
                "train": {"objective": objective, "seq_len": 400, "lr": 1e-6, "precision": "fp32"},
            }
        )
        context = Context(Chain(config, backend_of(config, "local")), ("prepare",))
        about = [one for name in ("conversations", "pairs") for one in RECORD_CHECKS[name](context)]
        assert isinstance(about[0], Finding)
        assert not [one for one in about if one.level == "fault"]
        return [f"{one.text}; {one.remedy}" for one in about if one.level == "warning"]

    return look


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_an_option_of_the_template_that_keeps_thoughts_is_the_remedy(
    found: Found, objective: str
) -> None:
    asked = talk("two and two?")
    row: dict[str, Any] = {"messages": talk("two and two?", THOUGHT)}
    if objective == "dpo":
        row = {"prompt": asked, "chosen": talk("", "w4")[1:], "rejected": talk("", THOUGHT)[1:]}
    (warning,) = found([row], CUT, objective)
    lost = (
        "1 of the first 1 records have parts of turns of the role assistant, which the chat"
        " template leaves out"
    )
    assert lost in warning
    assert warning.endswith("; set model.chat_template_kwargs: {keep_thinking: true}")
    assert found([row], CUT, objective, keep_thinking=True) == []


def test_a_template_without_an_option_is_to_be_replaced(found: Found) -> None:
    row = {"messages": talk("two and two?", THOUGHT)}
    (warning,) = found([row], CUT.replace("m.content if keep_thinking else ", ""))
    assert (
        "; put a chat_template.jinja that writes it next to tokenizer.json in model.path" in warning
    )
    assert found([row]) == []


def test_options_that_the_template_does_not_read_are_named(found: Found) -> None:
    row = {
        "messages": talk("hi", "ho"),
        "thinking_budget": 512,
        "chat_template_kwargs": {"mood": "glad"},
    }
    budget, mood = sorted(found([row], CUT), reverse=True)
    assert "have thinking_budget, which the chat template does not read; leave it out" in budget
    assert "have chat_template_kwargs.mood, which the chat template does not read" in mood
    (typo,) = found([{"messages": talk("hi", "ho")}], CUT, keep_thnking=True)
    assert typo.startswith(
        "model.chat_template_kwargs: the chat template does not read keep_thnking"
    )


TEXT = {"prompt": "w1 w2", "chosen": " w3", "rejected": " w4"}


@pytest.mark.parametrize(
    ("row", "words", "better"),
    [
        (
            {**TEXT, "system": "be brief"},
            [
                "have system, which text has no place for; write prompt, chosen and rejected as"
                " lists of messages"
            ],
            {
                "system": "be brief",
                "prompt": talk("w1"),
                "chosen": talk("", "w3")[1:],
                "rejected": talk("", "w4")[1:],
            },
        ),
        (
            {**TEXT, "enable_thinking": False},
            ["have enable_thinking, which text has no place for"],
            TEXT,
        ),
        (
            {
                "prompt": talk("w1"),
                "chosen": talk("", "w2", "w3", "w4")[1:],
                "rejected": talk("", "w5")[1:],
            },
            [
                "answers with turns of a user or of tools in them, which are learned",
                "; put these turns in the prompt",
            ],
            {
                "prompt": talk("w1", "w2", "w3"),
                "chosen": talk("", "w4")[1:],
                "rejected": talk("", "w5")[1:],
            },
        ),
        (
            {**TEXT, "chosen": " w3\n\nHuman: w4\n\nAssistant: w5"},
            ["answers with turns of a user or of tools in them"],
            TEXT,
        ),
    ],
)
def test_each_slip_of_pairs_is_told_with_what_ends_it(
    row: dict[str, Any], words: list[str], better: dict[str, Any], found: Found
) -> None:
    (warning,) = found([row], objective="dpo")
    assert all(word in warning for word in words), warning
    assert found([better], objective="dpo") == []


def test_a_user_s_turn_in_a_text_answer_is_told(found: Found) -> None:
    row = {
        "instruction": "w1",
        "output": "w2<|im_end|>\n<|im_start|>user\nw3<|im_end|>\n<|im_start|>assistant\nw4",
    }
    (warning,) = found([row])
    assert "answers with turns of a user or of tools in them" in warning
