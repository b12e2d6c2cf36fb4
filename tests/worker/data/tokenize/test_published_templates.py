"""Published chat templates: every part of every answer is learned, or its loss is counted by its
name.

The templates are those that TRL ships: of Llama, Qwen, Gemma, DeepSeek, Phi, GLM, Cohere, LFM,
Nemotron, gpt-oss... A marker stands in each part of each turn.
"""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from importlib.util import find_spec
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smtrain.core.errors import CheckpointError
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.data.tokenize.dialogue import conversation
from smtrain.worker.data.tokenize.pairs import PairMaker
from smtrain.worker.data.tokenize.preference import preference
from smtrain.worker.data.tokenize.template_options import OPTIONS
from smtrain.worker.data.tokenize.turns import RecordFault
from smtrain.worker.generation.conversation import text_of, unwritten_parts
from smtrain.worker.generation.load import LoadedModel
from tests.worker.data.chats import tokenizer

SHIPPED = Path(
    (find_spec("trl") or pytest.skip("trl is not installed", allow_module_level=True)).origin or ""
).parent
FILES = sorted(
    (SHIPPED / "chat_templates").glob("*.jinja"), key=lambda path: (path.stat().st_size, path.stem)
)
NAMES = [path.stem for path in FILES]
OF_IMAGES = ("idefics3", "llava_next", "smolvlm", "qwen2_5_vl", "qwen3_vl")
STYLES = ("plain", "think", "channel", "reasoning_content", "thinking", "call", "spaces")
Marks = list[tuple[str, str]]
"""(marker, field that holds it)."""


@pytest.fixture(scope="module")
def makers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makers of samples by the name of their chat template."""
    folder = tokenizer(tmp_path_factory.mktemp("tok"), "chatml")
    base = PairMaker(folder, PrepareOptions(seq_len=400, objective="dpo"))
    return cache(lambda name: with_template(base, name))


def with_template(maker: PairMaker, name: str) -> PairMaker:
    """The maker with another chat template."""
    made, template = copy.copy(maker), copy.copy(maker.template)
    source = (SHIPPED / f"chat_templates/{name}.jinja").read_text("utf-8")
    template._tokenizer = copy.copy(template._tokenizer)
    template._tokenizer.chat_template = template.source = source
    template._tokenizer.bos_token = "<s>"
    made.__dict__["template"] = template
    return made


def answer(style: str, mark: Any) -> tuple[list[dict[str, Any]], Marks]:
    """The turns of an answer with a marker in each part, and the markers."""
    a, b, c = mark(), mark(), mark()
    turn: dict[str, Any] = {"role": "assistant", "content": f"{b} then {c}."}
    marks = [(b, "content"), (c, "content")]
    if style in ("think", "channel"):
        opened, closed = {
            "think": ("<think>", "</think>"),
            "channel": ("<|channel>thought\n", "<channel|>"),
        }[style]
        return [{**turn, "content": f"{opened}{a} or not{closed}{turn['content']}"}], [
            (a, "content"),
            *marks,
        ]
    if style in ("reasoning_content", "thinking"):
        return [{**turn, style: f"{a} or not"}], [(a, style), *marks]
    if style == "spaces":
        return [{**turn, "content": f" \n{turn['content']}\n"}], marks
    if style == "call":
        arguments = {f"k{a}": f'the "{b}" of 1', "more": {"deep": [c, 2]}}
        call = {
            "id": mark(),
            "type": "function",
            "function": {"name": "now", "arguments": arguments},
        }
        turns = [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "name": "now", "content": mark()},
        ]
        last, more = answer("plain", mark)
        return [*turns, *last], [*((one, "tool_calls") for one in (a, b, c)), *more]
    return [turn], marks


@st.composite
def talks(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Marks, Marks]:
    """The turns before the last answer, the last answer, and the markers of both."""
    numbers = count(10)

    def mark() -> str:
        return f"Zq{next(numbers)}x"

    turns, marks = (
        ([{"role": "system", "content": f"be {mark()}"}] if draw(st.booleans()) else []),
        [],
    )
    for _ in range(draw(st.integers(0, 1))):
        more, found = answer(draw(st.sampled_from(STYLES)), mark)
        turns += [{"role": "user", "content": f"what is {mark()}?"}, *more]
        marks += found
    last, found = answer(draw(st.sampled_from(STYLES)), mark)
    return [*turns, {"role": "user", "content": f"what is {mark()}?"}], last, marks, found


def is_counted(field: str, names: list[str]) -> bool:
    if field == "content":
        return any(
            "of the role assistant" in name or "is seen and not learned" in name for name in names
        )
    return any(name.endswith(f"[].{field}") or "is seen and not learned" in name for name in names)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@given(talk=talks(), thinking=st.sampled_from([None, True, False]))
def test_each_part_of_an_answer_is_learned_or_its_loss_counted(
    name: str, makers: Any, talk: Any, thinking: bool | None
) -> None:
    hold_talk(makers(name), talk, thinking)


def test_each_style_of_answer_in_thirty_templates(makers: Any) -> None:
    short = [
        name for name in NAMES if name.removesuffix("_training") not in OF_IMAGES
    ]  # quick to compile
    names = [*short[:28], "qwen3", "gemma4_v2"]
    assert {"deepseek_r1_distill", "llama3_training", "phi3"} < {*short[:28]}
    for name, style in product(names, ("think", "channel", "reasoning_content", "call", "spaces")):
        marks = (f"Zq{number}x" for number in count(10))
        first, earlier = answer(style, marks.__next__)
        last, latest = answer(style, marks.__next__)
        asked = [{"role": "user", "content": f"what is {next(marks)}?"} for _ in range(2)]
        hold_talk(makers(name), ([asked[0], *first, asked[1]], last, earlier, latest), None)


def hold_prompt(loaded: LoadedModel, before: list[dict[str, Any]]) -> None:
    """Compare the prompt of generate with the text that it reports as missing."""
    try:
        text, names = text_of(loaded, before), unwritten_parts(loaded, before, {})
    except CheckpointError:  # the prompt is named
        return
    for turn in before:
        for field, value in turn.items():
            lost = [mark for mark in re.findall(r"Zq\d+x", json.dumps(value)) if mark not in text]
            about = (
                f"turns of the role {turn['role']}" if field == "content" else f"messages[].{field}"
            )
            assert not lost or any(about in name for name in names), (lost, names, text)


def hold_talk(made: PairMaker, talk: Any, thinking: bool | None) -> None:
    """Compare what SFT and DPO learn of a conversation, and generate writes of its prompt, with
    what is counted.
    """
    before, last, earlier, latest = talk
    hold_prompt(LoadedModel(made.folder, None, made.template._tokenizer), before)
    options = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    try:
        dialogue = conversation({"messages": [*before, *last], **options})
        rendered = made.template.render(dialogue)
        names = made.template.unwritten_names(dialogue, rendered)
    except RecordFault:  # the record is named with its line
        pass
    else:
        learned = "\n".join(r.text[start:end] for r in rendered for start, end in r.answers)
        for mark, field in [*earlier, *latest]:
            assert mark in learned or is_counted(field, names), (mark, names, learned)
        if all(mark in learned for mark, _ in [*earlier, *latest]):
            assert not any("parts of turns" in one and "assistant" in one for one in names), (
                names,
                learned,
            )
    row = {
        "prompt": before,
        "chosen": last,
        "rejected": [*last[:-1], {**last[-1], "content": "no"}],
        **options,
    }
    try:
        pair = preference(row)
        prompt, chosen, _ = texts = made._texts(pair)
        names = made._ignored_names(row, pair, texts)
    except RecordFault:
        return
    start = next(
        (i for i, (a, b) in enumerate(zip(prompt, chosen, strict=False)) if a != b), len(prompt)
    )
    for mark, field in latest:
        assert mark in chosen[start:] or is_counted(field, names), (mark, names, chosen)
    for mark, field in earlier:
        assert mark in prompt or is_counted(field, names), (mark, names, prompt)


def test_calls_without_content_are_written_or_refused_in_a_sentence(makers: Any) -> None:
    marks = (f"Zq{number}x" for number in count(10))
    turns, _ = answer("call", marks.__next__)
    dialogue = conversation({"messages": [{"role": "user", "content": "what?"}, *turns]})
    rendered = makers("deepseek_r1_distill").template.render(dialogue)[0]
    assert '```json\n{"kZq10x": "the \\"Zq11x\\" of 1"' in rendered.text
    refused = (
        "a call of a function, and the chat template does not write tool_calls; leave such records"
        " out, or put"
    )
    for name in ("phi3", "llama3"):
        with pytest.raises(RecordFault, match=refused):
            makers(name).template.unwritten_names(dialogue, makers(name).template.render(dialogue))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", {"enable_thinking"}),
        ("lfm2_2_5_v2", {"preserve_thinking"}),  # `thinking` is set by the template itself
        ("gptoss", {"reasoning_effort"}),
        ("deepseek_r1_distill", set()),
    ],
)
def test_the_options_of_a_template_are_what_it_reads_of_its_caller(
    name: str, options: set[str], makers: Any
) -> None:
    assert {*OPTIONS, "reasoning_content"} & makers(name).template.variables == {
        *options,
        *({"builtin_tools"} if name == "gptoss" else ()),
    }


OFF = {"enable_thinking": False}


@pytest.mark.parametrize(
    ("row", "for_all", "thinks"),
    [
        ({}, {}, True),
        ({"chat_template_kwargs": OFF}, {}, False),
        ({"chat_template_kwargs": json.dumps(OFF)}, {}, False),
        (OFF, {}, False),
        ({}, OFF, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, OFF, True),
        (
            {"chat_template_kwargs": {"enable_thinking": None}},
            OFF,
            False,
        ),  # a table's row without it
    ],
)
def test_options_of_a_record_win_over_those_for_all(
    row: dict[str, Any], for_all: dict[str, Any], thinks: bool, makers: Any
) -> None:
    made = copy.copy(makers("qwen3").template)
    made.options = for_all
    turns = [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "four"}]
    dialogue = conversation({"messages": turns, **row})
    (rendered,) = made.render(dialogue)
    ((start, end),) = rendered.answers
    empty = "<think>\n\n</think>\n\n"
    assert rendered.text[start:end] == f"{empty if thinks else ''}four<|im_end|>"
    assert made.unwritten_names(dialogue, [rendered]) == []
    maker = copy.copy(makers("qwen3"))
    maker.__dict__["template"] = made
    other = [{"role": "assistant", "content": "five"}]
    prompt, _, rejected = maker._texts(
        preference({"prompt": turns[:1], "chosen": turns[1:], "rejected": other, **row})
    )
    assert prompt.endswith(empty) is not thinks
    assert rejected.endswith(f"{empty}five<|im_end|>\n")
