"""Tokenizers without a tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from transformers import AutoTokenizer

from smtrain.core.errors import DataError
from smtrain.worker.data.tokenizer import load_tokenizer, tokenizer_facts

TEXTS = ["hello world, it's 12345 fine", " über café  naïve\n\n北京", "a<|endoftext|>b", "\t x\r\n"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(
        TEXTS * 9, vocab_size=320, special_tokens=["<|endoftext|>"], show_progress=False
    )
    made.save_model(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("family", "named"), [("qwen2", None), ("llama", "Qwen2Tokenizer"), ("llama", "GPT2Tokenizer")]
)
def test_vocab_and_merges_give_the_ids_that_transformers_gives(
    folder: Path, family: str, named: str | None
) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": 400}))
    if named:
        about = {"tokenizer_class": named, "eos_token": "<|endoftext|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ours = load_tokenizer(folder)
    for text in TEXTS:
        assert (
            ours.encode(text, add_special_tokens=False).ids
            == theirs(text, add_special_tokens=False).input_ids
        )
    facts = tokenizer_facts(folder)
    assert facts.vocab_size == len(theirs)
    assert facts.eos_id == (theirs.eos_token_id if named else None)
    (folder / "merges.txt").write_text("#version: 0.2\n")
    assert tokenizer_facts(folder).sha256 != facts.sha256
    assert len(load_tokenizer(folder).encode(TEXTS[0]).ids) > len(ours.encode(TEXTS[0]).ids)


def test_what_transformers_cannot_tell_is_asked_for(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 400}))
    with pytest.raises(
        DataError, match=r"a fast tokenizer of vocab.json and merges.txt .*name its class"
    ):
        load_tokenizer(folder)


def test_a_folder_without_any_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"no tokenizer.json, nor vocab.json with merges.txt, nor tokenizer.model"
    ):
        load_tokenizer(tmp_path)
