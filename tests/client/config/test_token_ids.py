"""Ids that a model does not have, told before anything is sent."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from smtrain import ConfigError, load_config

VOCAB = {f"token {i}": i for i in range(500)}


def change(path: Path, **keys: Any) -> None:
    about = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(about | keys))


@pytest.fixture
def folder(model_folder: Path) -> Path:
    change(
        model_folder / "tokenizer.json",
        model={"type": "BPE", "vocab": VOCAB, "merges": []},
        added_tokens=[],
    )
    return model_folder


@pytest.mark.parametrize("eos", [50256, [50256, 2], 512, -1])
def test_an_end_of_document(raw: dict[str, Any], folder: Path, eos: Any) -> None:
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 512
    change(folder / "config.json", eos_token_id=eos)
    with pytest.raises(
        ConfigError,
        match=r"model\.path: .*: eos_token_id is .* the ids 0 to 511 .*tokenizer_config",
    ):
        load_config(raw)
    for remedy in ({"eos_token": "token 3"}, {"eos_token": {"content": "token 3"}}):
        change(folder / "tokenizer_config.json", **remedy)
        load_config(raw)
    (folder / "tokenizer_config.json").unlink()
    change(folder / "config.json", eos_token_id=[511, 50256])
    load_config(raw)


def test_tokens_beyond_the_vocabulary_are_no_fault(raw: dict[str, Any], folder: Path) -> None:
    """Only a text that has such a token is refused, when it is prepared; but an end is in every
    text.
    """
    change(folder / "tokenizer.json", added_tokens=[{"id": 512, "content": "<more>"}])
    load_config(raw)
    unigram = [[name, -1.0] for name in [*VOCAB, *map(str, range(13))]]
    change(folder / "tokenizer.json", added_tokens=[], model={"type": "Unigram", "vocab": unigram})
    load_config(raw)
    change(folder / "tokenizer_config.json", eos_token="12")
    with pytest.raises(ConfigError, match="eos_token_id is 512 and the model has the ids 0 to 511"):
        load_config(raw)


def test_padding(raw: dict[str, Any], folder: Path) -> None:
    for fine in (None, 0, 511, -1):
        change(folder / "config.json", pad_token_id=fine)
        load_config(raw)
    change(folder / "config.json", pad_token_id=32000)
    with pytest.raises(
        ConfigError, match="pad_token_id is 32000 and the model has the ids 0 to 511"
    ):
        load_config(raw)


def test_prepared_data_with_such_an_end(raw: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    from smtrain.client.config.checks.local_data import mismatches

    config = load_config(raw)
    fine = {"seq_len": config.train.seq_len, "samples": 1, "vocab_size": 512, "eos_id": 3}
    assert list(mismatches(config, fine, {"vocab_size": 512}, None)) == []
    faults = list(mismatches(config, {**fine, "eos_id": 50256}, {"vocab_size": 512}, None))
    assert faults == ["the data has token ids up to 50256, and the model's vocabulary is 512"]
    nested = {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "vocab_size": 512},
    }
    assert list(mismatches(config, {**fine, "eos_id": 50256}, nested, None)) == faults
    padded = {**fine, "model_vocab_size": 640}
    assert list(mismatches(config, padded, nested, None)) == [], "the job compares the tokenizers"
    names = ("vocab.json", "merges.txt")
    for name in names:  # a tokenizer of two files
        (tmp_path / name).write_text(name)
    same = {**padded, "tokenizer_sha256": hashlib.sha256("".join(names).encode()).hexdigest()}
    assert list(mismatches(config, same, nested, tmp_path)) == []
    other = {**padded, "tokenizer_sha256": "0" * 64}
    assert list(mismatches(config, other, nested, tmp_path)) == [
        "the data was prepared for a model of vocab_size 640 with another tokenizer, and the"
        " model's is 512"
    ]
    assert list(mismatches(config, {**other, "model_vocab_size": 512}, nested, tmp_path)) == [
        "the data was prepared with another tokenizer than the model's"
    ]


def test_a_reference_is_compared_with_the_text_part() -> None:
    from smtrain.client.config.checks.weights import reference_faults

    text = {"model_type": "gemma3_text", "vocab_size": 512}
    whole = {"model_type": "gemma3", "text_config": text}
    assert (
        list(reference_faults(whole, text, "x")) == list(reference_faults(text, whole, "x")) == []
    )
    other = {"model_type": "gemma3", "text_config": {**text, "vocab_size": 640}}
    assert [fault for _, fault in reference_faults(whole, other, "x")] != []
