"""Encoding in several threads gives the ids of `tokenizers`, in any order of texts."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from smtrain.worker.data.read.reading import strings
from smtrain.worker.data.tokenize import encoder


@pytest.mark.parametrize("fresh_after", [1 << 28, 250], ids=["warm", "afresh"])
def test_threads_share_a_tokenizer_and_get_the_same_ids(
    tokenizer_folder: Path, fresh_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "_FRESH_AFTER", fresh_after)
    made = []
    giga, plain = (
        encoder.GigatokenEncoder(tokenizer_folder),
        encoder.TokenizersEncoder(tokenizer_folder),
    )
    monkeypatch.setattr(giga, "_make", lambda make=giga._make: made.append(1) or make())
    texts = [strings([f"words of text {i * j} and more\n" for j in range(50)]) for i in range(40)]
    with ThreadPoolExecutor(4) as pool:
        encoded = list(pool.map(lambda text: giga.encode(text, False), texts))
    for text, (ids, lengths) in zip(texts, encoded, strict=True):
        wanted, wanted_lengths = plain.encode(text, False)
        assert np.array_equal(ids, wanted)
        assert np.array_equal(lengths, wanted_lengths)
    assert bool(made) == (fresh_after == 250)


def test_gigatoken_without_what_it_needs_in_turn_is_not_taken(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """awkward needs importlib-metadata before Python 3.12; without it the stage once failed in the
    first block.
    """
    monkeypatch.setitem(sys.modules, "awkward", None)
    chosen, why = encoder.choose(tokenizer_folder)
    assert isinstance(chosen, encoder.TokenizersEncoder)
    assert why == "gigatoken is not installed, which needs awkward"
