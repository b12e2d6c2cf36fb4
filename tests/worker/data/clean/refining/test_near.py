"""Near duplicates are found as often as the formula says; the first is kept; a kill forgets
nothing.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smtrain.worker.data.clean.cleaning import Cleaning, NearDuplicates
from smtrain.worker.data.clean.dedup import SeenDocuments, SeenSignatures, band_keys, shingles
from tests.extras import need
from tests.tiers import examples
from tests.worker.data.quiet import prepare

need("rensa")


def pair(draw: random.Random, similarity: float, size: int = 300) -> tuple[str, str]:
    """Two texts whose sets of words have exactly this Jaccard similarity."""
    shared = round(2 * size * similarity / (1 + similarity))
    words = [f"w{draw.getrandbits(60)}" for _ in range(2 * size - shared)]
    one, two = words[:size], words[size - shared :]
    draw.shuffle(two)
    return " ".join(one), " ".join(two)


@pytest.mark.parametrize(
    "near", [NearDuplicates(words=1), NearDuplicates(0.6, words=1, permutations=96)]
)
def test_pairs_are_found_as_often_as_the_formula_says(near: NearDuplicates) -> None:
    draw, count = random.Random(5), 200
    bands, rows = near.shape
    assert bands * rows <= near.permutations
    for similarity in (0.5, 0.7, 0.8, 0.9):
        texts = [text for _ in range(count) for text in pair(draw, similarity)]
        keys = band_keys(texts, near).reshape(count, 2, bands)
        share = float((keys[:, 0] == keys[:, 1]).any(axis=1).mean())
        expected = 1 - (1 - similarity**rows) ** bands
        # four standard deviations of a share of so many, and one percent that the families of
        # hashes are no ideal
        assert abs(share - expected) < 4 * (expected * (1 - expected) / count) ** 0.5 + 0.01, (
            similarity
        )
    assert 1 - (1 - near.similarity**rows) ** bands >= 0.9


def test_words_are_runs_whatever_the_script() -> None:
    assert shingles("The Cat sat, on a mat.", 5) == ["the cat sat on a", "cat sat on a mat"]
    assert shingles("two words", 5) == ["two words"]
    assert shingles("数据 text", 2) == ["数 据", "据 text"]
    assert shingles(" ... ", 5) == [" ... "]


def test_the_first_is_kept_and_what_is_unlike_stays(tmp_path: Path, tokenizer_folder: Path) -> None:
    draw = random.Random(1)
    words = [f"word{i}" for i in range(500)]
    first = " ".join(draw.choices(words, k=200))
    texts = [
        first,
        f"{first} and an end",
        " ".join(draw.choices(words, k=200)),
        "...",
        "!!!",
        first.upper(),
        "",
    ]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = prepare(
        source,
        tmp_path / "out",
        tokenizer_folder,
        seq_len=8,
        cleaning=Cleaning(near=NearDuplicates()),
    )
    assert made.dropped == {"near duplicates": 2}
    about = made.near_duplicates
    assert (about["compared"], about["left_out"], about["rate"]) == (7, 2, 2 / 7)
    assert about["examples"][0].startswith("a.jsonl: word")
    assert json.loads((tmp_path / "out/manifest.json").read_text())["near_duplicates"] == about
    # exact duplicates are removed first and not compared
    both = Cleaning(deduplicate=True, near=NearDuplicates())
    source.write_text(source.read_text() * 2)
    made = prepare(source, tmp_path / "two", tokenizer_folder, seq_len=8, cleaning=both)
    assert made.dropped == {"duplicates": 7, "near duplicates": 2}
    assert made.near_duplicates["compared"] == 7


def test_only_so_many_are_remembered() -> None:
    near = NearDuplicates(documents=3)
    bands = near.shape[0]
    keys = np.arange(1, 6 * bands + 1, dtype=np.uint64)  # six documents unlike one another
    seen = SeenSignatures(near)
    assert seen.new(keys[: 5 * bands]).all()
    assert seen.documents == 3
    assert seen.new(keys).tolist() == [False] * 3 + [True] * 3


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.lists(st.integers(0, 300), max_size=60), max_size=12))
def test_a_table_that_grows_answers_like_a_set(batches: list[list[int]]) -> None:
    table, known = SeenDocuments(8), set[int]()
    for batch in batches:
        keys = np.array(batch, np.uint64)
        zeros = {1 if key == 0 else key for key in batch}  # 0 and 1 are one
        assert table.contains(keys).tolist() == [(key or 1) in known for key in batch]
        table = table.with_room(len(batch))
        fresh = table.new(keys)
        expected = []
        for key in batch:
            expected.append((key or 1) not in known)
            known.add(key or 1)
        assert fresh.tolist() == expected
        assert zeros <= known
