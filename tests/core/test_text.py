"""Text for people and programs: articles before computed words, JSON and shell words that no
cleaning changes.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smtrain.core.text import clean, json_text, say, shell_word, with_article

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "words",
    [
        "an int",
        "a str",
        "a dict",
        "a float",
        "a list",
        "an object",
        "a NoneType",
        "a uint8",
        "an ndarray",
        "a set",
        "an Nxd",
        "a HuggingFace",
        "a Megatron",
        "a NemoMegatron",
        "a Peft",
        "a Native",
        "an SFT run",
        "a LoRA",
        "a llama",
        "a mistral",
        "a gpt_neox",
        "a qwen3",
        "an mpt",
        "an olmo2",
        "an exaone",
        "a phi3",
        "a gemma",
        "an ml.trn1.2xlarge",
        "an hour",
        "a user",
        "a unit",
        "an unknown",
        "a one-way",
        "an MLflow",
        "a European",
    ],
)
def test_the_article_of_a_word(words: str) -> None:
    assert with_article(words.partition(" ")[2]) == words


def test_no_sentence_has_a_fixed_article_before_a_computed_word() -> None:
    fixed = []
    for file in [*(ROOT / "smtrain").rglob("*.py"), *(ROOT / "entrypoints").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                fixed += [
                    f"{file.relative_to(ROOT)}:{node.lineno}"
                    for text, word in pairwise(node.values)
                    if isinstance(text, ast.Constant)
                    and isinstance(word, ast.FormattedValue)
                    and re.search(r"\b[Aa]n? $", str(text.value))
                ]
    assert fixed == []


_ODD = st.text(st.characters() | st.sampled_from("\r\n\u2028\u202e\x1b\x9b'\"\\$` é"), max_size=12)


@given(_ODD)
def test_json_for_a_terminal_is_left_as_it_is_and_has_the_same_value(value: str) -> None:
    made = json_text({"a": [value]})
    assert clean(made) == made
    assert json.loads(made) == {"a": [value]}


@settings(max_examples=20)
@given(st.lists(_ODD.filter(lambda text: "\0" not in text), max_size=30))
def test_words_for_a_shell_are_left_as_they_are_and_read_back(values: list[str]) -> None:
    values = [
        value for value in values if not any("\ud800" <= letter <= "\udfff" for letter in value)
    ]
    words = [shell_word(value) for value in values]
    assert [clean(word) for word in words] == words
    script = "printf '%s\\0' " + " ".join(words) if words else "true"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, check=True, env={"LC_ALL": "C"}
    )
    assert done.stdout.decode().split("\0")[:-1] == values


@pytest.mark.parametrize("module", ["io", "ipykernel.iostream"])
def test_a_notebook_gets_what_is_said_on_standard_output(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = type("OutStream", (io.StringIO,), {"__module__": module})
    out, errors = stream(), stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", errors)
    say("measuring", error=True)
    expected = ("", "measuring\n") if module == "io" else ("measuring\n", "")
    assert (out.getvalue(), errors.getvalue()) == expected
