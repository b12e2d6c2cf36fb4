"""Adapted tokenizers give the ids of `tokenizers` through gigatoken."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from smtrain.worker.data.read.reading import strings
from smtrain.worker.data.tokenize import encoder

PIECES = [
    "the words",
    " of",
    "  ",
    "\n",
    "12",
    " 345",
    "6.78e-9",
    "\x04",
    "\x00",
    "\x1d",
    "é",
    "数",
    "½",
    "²",
    "٣",
    "Ⅷ",
    "<|end|>",
    "don't",
    "\t",
    "(x)",
    "_",
    "\U00050000",
    "🙂",
    "x1y2",
    " 7 ",
    "",
]


def folder_of(path: Path, change: Any, alphabet: bool) -> Path:
    """A small byte-level BPE; most bytes have no entry unless `alphabet`."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    text = ["the words of a small text 12 345 don't (x) é 🙂\n" * 20]
    made.train_from_iterator(
        text,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, special_tokens=["<|end|>"]),
    )
    about = json.loads(made.to_str())
    change(about)
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(about))
    (path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    return path


def as_smollm(about: dict[str, Any]) -> None:
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    digits = {"type": "Digits", "individual_digits": True}
    about["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}


@pytest.mark.parametrize("change", [lambda about: None, as_smollm], ids=["gpt2", "smollm"])
@pytest.mark.parametrize("alphabet", [True, False], ids=["all bytes", "some bytes"])
def test_every_id_is_that_of_tokenizers(tmp_path: Path, change: Any, alphabet: bool) -> None:
    folder = folder_of(tmp_path / "model", change, alphabet)
    draw = random.Random(4)
    texts = strings(["".join(draw.choices(PIECES, k=draw.randrange(9))) for _ in range(800)])
    chosen, why = encoder.choose(folder)
    assert isinstance(chosen, encoder.GigatokenEncoder), why
    wanted, wanted_lengths = encoder.TokenizersEncoder(folder).encode(texts, True)
    for at in (slice(0, 800), slice(13, 99)):  # also for an array with an offset
        some = texts[at]
        ids, lengths = chosen.encode(some, True)
        assert np.array_equal(lengths, wanted_lengths[at])
        first = int(wanted_lengths[: at.start].sum())
        assert np.array_equal(ids, wanted[first : first + len(ids)])


def test_most_text_needs_no_other(tmp_path: Path) -> None:
    giga = encoder.GigatokenEncoder(folder_of(tmp_path / "model", as_smollm, True))
    texts = strings(["plain words 12 é 数 🙂", "half: ½", "a \x04 b", "٣"])
    assert giga._differences.find(texts).tolist() == [1, 3]


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about["pre_tokenizer"]["pretokenizers"][0].update(individual_digits=False),
        lambda about: about["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
        lambda about: about["added_tokens"][0].update(content="<|end1|>"),
    ],
)
def test_what_is_cut_otherwise_is_left_to_tokenizers(tmp_path: Path, change: Any) -> None:
    def both(about: dict[str, Any]) -> None:
        as_smollm(about)
        change(about)

    chosen, why = encoder.choose(folder_of(tmp_path / "model", both, True))
    assert isinstance(chosen, encoder.TokenizersEncoder)
    assert "does not take this tokenizer" in why
