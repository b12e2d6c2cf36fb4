"""Text that a chat template drops or changes is counted, in answers and in fields of a turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smtrain.core.errors import DataError
from smtrain.worker.data.manifest import DatasetManifest
from tests.worker.data.chats import CHATML, talk, tokenizer, write
from tests.worker.data.quiet import prepare_sft

LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
OWN = {
    # DeepSeek-R1-Distill's: the thought of each answer is cut off
    "cut": LOOP + "{{ m.content.split('</think>')[-1] }}" + END,
    # a thought stays in the last answer only
    "last": LOOP + "{{ m.content if loop.last else m.content.split('</think>')[-1] }}" + END,
    "field": (
        LOOP
        + "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{%"
        " endif %}{{ m.content }}" + END
    ),
    "trim": LOOP + "{{ m.content | trim }}" + END,
    "upper": LOOP + "{{ m.content | upper }}" + END,
    "outside": (
        LOOP
        + "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>{% generation %}{{"
        " m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif"
        " %}\n{% endfor %}"
    ),
    "calls": (
        LOOP + "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{% endfor %}" + END
    ),
    "first": (
        LOOP + "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{{ c.function.arguments.zone }}{% endfor %}" + END
    ),
    "text": (
        LOOP + "{% if m.content is none %}{{ m.tool_calls[0].function.name +"
        " m.tool_calls[0].function.arguments }}{% else %}{{ m.content + '' }}{% endif %}" + END
    ),
    "none": LOOP + "{{ m.content + '' }}" + END,
    "chatml": CHATML,
}
THOUGHT = "<think>two and two</think>Four."
PART = "parts of turns of the role assistant"
SPACE = "white space of answers"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tokenizer(tmp_path_factory.mktemp("tok"), "chatml")

    def use(name: str) -> Path:
        (made / "chat_template.jinja").write_text(OWN[name])
        return made

    return use


def counted(row: Any, tmp_path: Path, folder: Path, **more: Any) -> dict[str, int]:
    return prepared(row, tmp_path, folder, **more).unread


def prepared(row: Any, tmp_path: Path, folder: Path, **more: Any) -> DatasetManifest:
    rows = row if isinstance(row, list) else [row]
    return prepare_sft(
        write(tmp_path / "a.jsonl", rows), tmp_path / "out", folder, seq_len=400, workers=1, **more
    )


def call(**arguments: Any) -> dict[str, Any]:
    function = {"type": "function", "function": {"name": "now", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [function]}


@pytest.mark.parametrize(
    ("template", "messages", "unread"),
    [
        ("cut", talk("two and two?", THOUGHT), {PART: 1}),
        ("cut", talk("two and two?", THOUGHT, "and?", "Five."), {PART: 1}),
        ("cut", talk("two and two?", "Four."), {}),
        ("last", talk("two and two?", THOUGHT, "and?", THOUGHT), {}),  # a sample for each answer
        ("chatml", talk("two and two?", THOUGHT, "and?", THOUGHT), {}),
        (
            "field",
            [
                *talk("a?", "Four."),
                talk("b?")[0],
                {**talk("", "Five.")[1], "reasoning_content": "one"},
            ],
            {},
        ),
        (
            "field",
            [
                talk("b?")[0],
                {**talk("", "Five.")[1], "reasoning_content": "one", "thinking": "two"},
            ],
            {"messages[].thinking": 1},
        ),
        (
            "outside",
            [talk("b?")[0], {**talk("", "Five.")[1], "reasoning_content": "one"}],
            {"text of answers that is seen and not learned": 1},
        ),
        ("trim", talk("a? ", " Four.\n"), {SPACE: 1}),
        ("chatml", talk("a? ", " Four.\n"), {}),
        ("upper", talk("1?", "Four."), {PART: 1}),
        ("calls", [talk("a?")[0], call(zone='the "zone"\n', at={"é": [1, 2.5]})], {}),
        (
            "first",
            [talk("a?")[0], call(zone="west", hour="noon")],
            {"parts of messages[].tool_calls": 1},
        ),
        (
            "text",
            [talk("a?")[0], call(zone="west")],
            {},
        ),  # arguments as text, as DeepSeek-R1's template has them
    ],
)
def test_each_part_of_an_answer_is_learned_or_counted(
    template: str, messages: list[Any], unread: dict[str, int], tmp_path: Path, folder: Any
) -> None:
    assert counted({"messages": messages}, tmp_path, folder(template)) == unread


def test_a_call_that_a_template_cannot_write_is_a_sentence(tmp_path: Path, folder: Any) -> None:
    with pytest.raises(
        DataError,
        match=r"a\.jsonl, line 1: an answer is a call of a function, .*chat_template\.jinja",
    ):
        prepared({"messages": [talk("a?")[0], call(zone="west")]}, tmp_path, folder("none"))


@pytest.mark.parametrize("answer", ["chosen", "rejected"])
def test_a_thought_in_one_of_two_answers_is_counted(
    answer: str, tmp_path: Path, folder: Any
) -> None:
    row = {
        "prompt": talk("two and two?"),
        "chosen": talk("", "Four.")[1:],
        "rejected": talk("", "Five.")[1:],
    }
    row[answer] = talk("", THOUGHT)[1:]
    assert counted(row, tmp_path, folder("cut"), objective="dpo") == {PART: 1}
    assert counted(row, tmp_path, folder("chatml"), objective="dpo") == {}
