"""The article before a word that is not known when the sentence is written."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

from smtrain.core.text import with_article

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "words",
    [
        "an int", "a str", "a dict", "a float", "a list", "an object", "a NoneType", "a uint8", "an ndarray", "a set",
        "an Nxd", "a HuggingFace", "a Megatron", "a NemoMegatron", "a Peft", "a Native", "an SFT run", "a LoRA",
        "a llama", "a mistral", "a gpt_neox", "a qwen3", "an mpt", "an olmo2", "an exaone", "a phi3", "a gemma",
        "an ml.trn1.2xlarge", "an hour", "a user", "a unit", "an unknown", "a one-way", "an MLflow", "a European",
    ],
)  # fmt: skip
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
                    if isinstance(text, ast.Constant) and isinstance(word, ast.FormattedValue)
                    and re.search(r"\b[Aa]n? $", str(text.value))
                ]  # fmt: skip
    assert fixed == []
