"""Sentences about a prepared dataset."""

from __future__ import annotations

import pytest

from smtrain.core.protocol.prepared import size_words


@pytest.mark.parametrize(
    ("objective", "form"),
    [
        ("pretrain", "samples of 128"),
        ("sft", "conversations for rows of 128"),
        ("dpo", "pairs for rows of 128"),
    ],
)
def test_only_windows_of_text_have_the_length_of_a_row(objective: str, form: str) -> None:
    manifest = {"objective": objective, "tokens": 12000, "samples": 1500, "seq_len": 128}
    assert size_words(manifest) == f"12,000 tokens, 1,500 {form}"
