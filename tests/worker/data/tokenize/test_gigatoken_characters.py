"""Every character gets the ids of `tokenizers`, and documents that need them are found anywhere in
a block.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import random
from pathlib import Path
from types import ModuleType
from unicodedata import combining

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smtrain.worker.data.read.reading import strings
from smtrain.worker.data.tokenize import gigatoken_characters
from smtrain.worker.data.tokenize.encoder import (
    Encoder,
    GigatokenEncoder,
    TokenizersEncoder,
    choose,
)
from smtrain.worker.data.tokenize.gigatoken_adapt import adapt_tokenizer
from tests.tiers import examples

SCRIPT = Path(__file__).resolve().parents[4] / "scripts/tokenizer-differences"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script tokenizer-differences, whose tokenizers have a token for any two bytes of a
    word.
    """
    loader = importlib.machinery.SourceFileLoader("tokenizer_differences", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folders(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, nfc in (("gpt2", False), ("llama3", False), ("qwen2", True)):
        made[name] = tmp_path_factory.mktemp(name)
        (made[name] / "tokenizer.json").write_text(script.tokenizer_json(name, nfc))
    return made


class Encoders(dict[str, tuple[GigatokenEncoder, TokenizersEncoder]]):
    """Both encoders of each tokenizer, made on first use."""

    def __init__(self, folders: dict[str, Path]) -> None:
        super().__init__()
        self.folders = folders

    def __missing__(self, name: str) -> tuple[GigatokenEncoder, TokenizersEncoder]:
        self[name] = GigatokenEncoder(self.folders[name]), TokenizersEncoder(self.folders[name])
        return self[name]


@pytest.fixture(scope="module")
def encoders(folders: dict[str, Path]) -> Encoders:
    return Encoders(folders)


def same(pair: tuple[Encoder, Encoder], texts: list[str]) -> bool:
    (ids, lengths), (wanted, wanted_lengths) = (each.encode(strings(texts), False) for each in pair)
    return np.array_equal(ids, wanted) and np.array_equal(lengths, wanted_lengths)


def points(text: str) -> list[int]:
    spans = [[int(end, 16) for end in part.split("-")] for part in text.split()]
    return [c for span in spans for c in range(span[0], span[-1] + 1)]


NEW = " ".join(
    f"a{c}a {c}a{c}1{c}{c}!{c}" for c in "\u088f\ua7ce\U00016ea0\U000323b0"
)  # letters of Unicode 17
# marks newer than the Unicode by which tokenizers sorts
NKO, ARABIC, TELUGU, MALAYALAM = (f"a{c}\u0334b\u0334{c}" for c in "\u07fd\u08ca\u0c3c\u0d3b")


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen2"])
@pytest.mark.parametrize(
    "text", [NEW, NKO, ARABIC, TELUGU, MALAYALAM], ids=["new", "nko", "arabic", "telugu", "mal"]
)
def test_what_was_seen_to_go_wrong_in_the_middle_of_a_corpus(
    encoders: Encoders, name: str, text: str
) -> None:
    plain = [f"ordinary text {i} with “quotes” and 漢字 " * 40 for i in range(30)]
    late = "x" * 5_000 + text  # beyond the compared sample
    assert same(encoders[name], [*plain, late, *plain, text, f"{late} {text}"])


def test_without_the_table_it_did_go_wrong(encoders: Encoders) -> None:
    """Otherwise the table is not needed, and the tests above prove nothing."""
    from smtrain.worker.data.tokenize.encoder import _giga

    for name, text in (("llama3", NEW), ("qwen2", ARABIC)):
        giga, plain = encoders[name]
        assert not np.array_equal(
            _giga(giga._make(), strings([text]))[0], plain.encode(strings([text]), False)[0]
        )


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen2"])
def test_every_tenth_character_of_the_table_and_as_many_others(
    script: ModuleType, encoders: Encoders, name: str
) -> None:
    draw = random.Random(3)
    known = points(gigatoken_characters.CHARACTERS)
    others = draw.sample(script.code_points(), 3_000)
    assert same(encoders[name], [script.around(chr(c)) for c in [*known[::10], *others]])


MARKS = [
    *(chr(c) for c in range(0x300, 0x20F1, 7) if combining(chr(c))),
    *"\u07fd\u08ca\u0c3caé\u0300\u0916漢\n 1",
]


@given(st.lists(st.text(st.sampled_from(MARKS))))
@settings(max_examples=examples(60), deadline=None)
def test_marks_in_any_order(encoders: Encoders, texts: list[str]) -> None:
    assert same(encoders["qwen2"], texts)


def test_only_documents_that_hold_one_are_taken_from_gigatoken(encoders: Encoders) -> None:
    giga, _ = encoders["qwen2"]
    texts = strings(
        ["ordinary", "\u0628\u064e\u0651", "“a\u08ca”", "漢" * 99 + "\u088f", "", "\u088f"]
    )
    assert giga._differences.find(texts).tolist() == [2, 3, 5]
    assert giga._differences.find(texts.slice(2, 2)).tolist() == [0, 1]
    assert giga._differences.find(strings([])).tolist() == []


def test_a_normalizer_that_was_not_compared_is_left_to_tokenizers(
    script: ModuleType, tmp_path: Path
) -> None:
    import json

    whole = json.loads(script.tokenizer_json("gpt2", False))
    (tmp_path / "tokenizer.json").write_text(json.dumps({**whole, "normalizer": {"type": "NFKC"}}))
    encoder, why = choose(tmp_path)
    assert isinstance(encoder, TokenizersEncoder)
    assert why
    parts = [{"type": "Replace"}, {"type": "NFC"}]
    for last, known in (([], True), ([{"type": "Lowercase"}], False)):
        normalizer = {"type": "Sequence", "normalizers": [*parts, *last]}
        assert (
            adapt_tokenizer(json.dumps({**whole, "normalizer": normalizer}).encode()).is_comparable
            == known
        )
