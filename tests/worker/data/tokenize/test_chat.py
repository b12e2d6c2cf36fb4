from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smtrain.core.errors import DataError
from smtrain.worker.data.tokenize.chat import ChatTemplate
from smtrain.worker.data.tokenize.dialogue import Dialogue, conversation
from smtrain.worker.data.tokenize.turns import RecordFault
from tests.worker.data.chats import TEMPLATES, talk, tokenizer


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str | None, ChatTemplate] = {}

    def get(name: str | None) -> ChatTemplate:
        if name not in made:
            made[name] = ChatTemplate(tokenizer(tmp_path_factory.mktemp(name or "none"), name))
        return made[name]

    return get


def learned(template: ChatTemplate, messages: list[dict[str, Any]]) -> list[list[str]]:
    """The answers of each text."""
    return [[r.text[a:b] for a, b in r.answers] for r in template.render(Dialogue(messages))]


FOUR = talk("two and two?", "four", "and three?", "seven.\n\n")


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("chatml", [["four<|im_end|>", "seven.\n\n<|im_end|>"]]),
        ("marked", [["four<|im_end|>", "seven.\n\n<|im_end|>"]]),
        ("opened", [["four<|im_end|>", "seven.\n\n<|im_end|>"]]),
        ("inst", [[" four <end>", " seven.\n\n <end>"]]),
        (
            "thinking",
            [
                ["<think>\n\n</think>\n\nfour<|im_end|>"],
                ["<think>\n\n</think>\n\nseven.\n\n<|im_end|>"],
            ],
        ),
        ("endless", [["four<end>"], ["seven.<end>"]]),
        ("alpaca", [["four<end>", "seven.\n\n<end>"]]),
    ],
)
def test_what_is_learned_are_the_answers_with_their_end(
    template: Any, name: str | None, answers: list[list[str]]
) -> None:
    assert learned(template(name), FOUR) == answers


def test_a_text_is_what_transformers_makes_of_the_conversation(
    template: Any, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    for name in ("chatml", "marked", "inst", "opened"):
        theirs: Any = AutoTokenizer.from_pretrained(tokenizer(tmp_path / name, name))
        assert template(name).render(Dialogue(FOUR))[0].text == theirs.apply_chat_template(
            FOUR, tokenize=False
        )


def test_a_template_that_rewrites_earlier_turns_gives_each_answer_what_it_was_given_for(
    template: Any,
) -> None:
    first, second = template("thinking").render(Dialogue(FOUR))
    assert "seven" not in first.text
    assert "<|im_start|>assistant\nfour<|im_end|>\n<|im_start|>user" in second.text


def test_about_says_which_template_and_how_answers_are_found(template: Any) -> None:
    assert template("marked").about.endswith("answers found by its generation marks")
    assert "what each turn adds" in template("chatml").about


@pytest.mark.parametrize(
    "row",
    [
        {"messages": talk("hi", "hello", "unanswered")},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"instruction": "hi", "input": "", "output": "hello", "text": "anything"},
        {"instruction": "hi", "input": None, "output": "hello"},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                talk("", "hello")[1],
            ]
        },
        {"messages": None, "instruction": "hi", "output": "hello"},
    ],
)
def test_every_spelling_of_a_conversation_is_the_same_conversation(row: dict[str, Any]) -> None:
    assert conversation(row) == Dialogue(talk("hi", "hello"))


def test_alpaca_has_an_input_and_perhaps_a_system() -> None:
    row = {"instruction": "add", "input": "1 2", "output": "3", "system": "be brief"}
    assert conversation(row, "alpaca").messages == talk("add\n\n1 2", "3", system="be brief")


def test_what_the_format_knows_beside_the_text_goes_to_the_template() -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "now"}}],
        "name": None,
    }
    row = {"messages": [*talk("what time?"), call], "tools": [{"type": "function"}]}
    dialogue = conversation(row)
    assert dialogue.messages[1] == {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "now"}}],
    }
    assert dialogue.tools == [{"type": "function"}]


@pytest.mark.parametrize(
    ("row", "shape", "words"),
    [
        ({"text": "x"}, "auto", "no column messages, conversations or instruction, only 'text'"),
        ({"instruction": "x", "output": "y"}, "messages", "no column messages or conversations"),
        ({"messages": talk("hi", "x")}, "alpaca", "no column instruction"),
        ({"messages": "hi"}, "auto", "'messages' is not a list of objects"),
        ({"messages": talk("hi")}, "auto", "no answer of the assistant to a user"),
        ({"messages": [*talk("hi", "x")][1:]}, "auto", "no answer of the assistant to a user"),
        (
            {"messages": [{"role": "user"}, *talk("", "x")[1:]]},
            "auto",
            "turn 1 has no text in 'content'",
        ),
        (
            {"conversations": [{"from": "crowd", "value": "x"}]},
            "auto",
            "turn 1 has from 'crowd', which is no",
        ),
        ({"instruction": "x", "output": ""}, "auto", "an empty output"),
        ({"instruction": 3, "output": "x"}, "auto", "'instruction' is int, not a string"),
        ({"instruction": "\ud800", "output": "x"}, "auto", "half a surrogate pair"),
    ],
)
def test_what_is_no_conversation_is_told(row: dict[str, Any], shape: Any, words: str) -> None:
    with pytest.raises(RecordFault, match=words):
        conversation(row, shape)


def test_what_the_template_refuses_is_told(template: Any) -> None:
    with pytest.raises(
        RecordFault, match="the chat template refuses it \\(Only user and assistant roles"
    ):
        template("inst").render(Dialogue(talk("hi", "x", system="be kind")))


def test_a_template_that_forgets_earlier_turns_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_last = (
        "{% set m = messages[-1] %}{{ messages | length }}{{ m.role }}: {{ m.content }}<|im_end|>"
    )
    monkeypatch.setitem(TEMPLATES, "forgets", only_last)
    with pytest.raises(RecordFault, match="does not keep the turns before an answer as they were"):
        ChatTemplate(tokenizer(tmp_path, "forgets")).render(Dialogue(FOUR))


@pytest.mark.parametrize("settings", ['"x"', "[1", '{"tokenizer_class": 7}'])
def test_settings_of_a_tokenizer_that_cannot_be_used_are_told(
    tmp_path: Path, settings: str
) -> None:
    folder = tokenizer(tmp_path, "chatml")
    (folder / "tokenizer_config.json").write_text(settings)
    with pytest.raises(DataError, match="holds no tokenizer that transformers loads"):
        ChatTemplate(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% generation %}\n{% for m in messages %}{{ m.content }}", r"line 2 is not valid Jinja"),
        ("{{ messages[0].content" + " " * 200_000 + "}}", r"has 200,024 characters, more than"),
    ],
)
def test_a_template_that_no_record_can_use_is_refused_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.setitem(TEMPLATES, "broken", text)
    with pytest.raises(DataError, match=words):
        ChatTemplate(tokenizer(tmp_path, "broken"))


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"has no chat template, .* put a chat_template\.jinja next to"
    ):
        ChatTemplate(tokenizer(tmp_path, None))
