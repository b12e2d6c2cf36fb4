"""A tokenizer gives the same ids each time, never cut, and all of them in the model's
vocabulary.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from smtrain.core.errors import DataError
from smtrain.core.model import hf_tokenizer
from smtrain.worker.data.indexed import IndexedDataset
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.data.read.reading import strings
from smtrain.worker.data.tokenize import encoder
from smtrain.worker.data.tokenize.samples import SampleMaker
from smtrain.worker.data.tokenizer import load_tokenizer, settled_json, tokenizer_facts
from tests.typed import typed as smtrain
from tests.worker.data.chats import tokenizer
from tests.worker.data.quiet import prepare

TEXT = "the words of a small text, and some words more " * 4
TRUNCATED = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
PADDED = {
    "strategy": {"Fixed": 99},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<|end|>",
}
SWITCHES: dict[str, Any] = {
    "dropout 0.5": {"model": {"dropout": 0.5}},
    "truncation to 4 tokens": {"truncation": TRUNCATED},
    "padding": {"padding": PADDED},
}


@pytest.fixture
def folder(tmp_path: Path, tokenizer_folder: Path) -> Path:
    return Path(shutil.copytree(tokenizer_folder, tmp_path / "model"))


def change(path: Path, **keys: Any) -> None:
    about = json.loads(path.read_text()) if path.is_file() else {}
    for key, value in keys.items():
        about[key] = (
            {**about[key], **value} if isinstance(about.get(key), dict) and value else value
        )
    path.write_text(json.dumps(about))


def ids(tokenizer: Any) -> set[tuple[int, ...]]:
    """The distinct results of ten calls."""
    once = getattr(tokenizer, "backend_tokenizer", tokenizer)
    results = {tuple(once.encode(TEXT, add_special_tokens=False).ids) for _ in range(10)}
    if once is not tokenizer:
        results |= {
            tuple(tokenizer(TEXT, add_special_tokens=False)["input_ids"]) for _ in range(10)
        }
    return results


@pytest.mark.parametrize("switch", [*SWITCHES, "all"])
def test_what_draws_cuts_or_pads_is_off_wherever_it_is_loaded(
    switch: str, folder: Path, tokenizer_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for keys in SWITCHES.values() if switch == "all" else [SWITCHES[switch]]:
        change(folder / "tokenizer.json", **keys)
    plain = ids(load_tokenizer(tokenizer_folder))
    said: list[str] = []
    assert ids(load_tokenizer(folder, said.append)) == plain
    assert len(said) == 1
    assert all(name in said[0] for name in (SWITCHES if switch == "all" else [switch]))
    assert ids(hf_tokenizer.load(folder)) == plain
    assert ids(tokenizers.Tokenizer.from_str(settled_json(folder)[0].decode())) == plain
    made, why = encoder.choose(folder)
    assert why == ""
    assert tuple(made.encode(strings([TEXT]), True)[0].tolist()) in plain
    assert capfd.readouterr().err == ""


def test_it_is_named_once_a_process(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change(folder / "tokenizer.json", model={"dropout": 0.1})
    for _ in range(2):
        load_tokenizer(folder)
        hf_tokenizer.load(folder)
    assert capfd.readouterr().err.count("tokenizer: dropout 0.1 is switched off") == 1


def test_two_prepares_give_one_result_and_name_it(folder: Path, tmp_path: Path) -> None:
    change(folder / "tokenizer.json", model={"dropout": 0.5})
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    written = []
    for name in ("one", "two"):
        done = smtrain(
            "data",
            "prepare",
            str(tmp_path / "a.jsonl"),
            str(tmp_path / name),
            "--model",
            str(folder),
            "--seq-len",
            "8",
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("prepare: tokenizer: dropout 0.5 is switched off") == 1
        assert done.stderr.count("switched off") == 1
        written.append((tmp_path / name / "tokens.bin").read_bytes())
    assert written[0] == written[1]


def test_unigrams_are_not_drawn(tmp_path: Path) -> None:
    pieces = [
        ("<unk>", 0.0),
        ("▁", -1.0),
        ("a", -2.0),
        ("b", -2.0),
        ("ab", -2.5),
        ("ba", -2.5),
        ("aba", -3.0),
    ]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0, byte_fallback=False))
    plain = {tuple(made.encode("abababa").ids)}
    model: Any = made.model
    model.alpha, model.nbest_size = 0.1, 5
    switched_off = hf_tokenizer.settle(made)
    assert {tuple(made.encode("abababa").ids) for _ in range(20)} == plain
    assert switched_off == ["alpha 0.1", "nbest_size 5"]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (
            {"sp_model_kwargs": {"enable_sampling": True, "nbest_size": -1, "alpha": 0.1}},
            "sp_model_kwargs",
        ),
        ({"enable_sampling": True}, "enable_sampling True"),
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"truncation": True, "padding": "max_length"}, "truncation True, padding max_length"),
    ],
)
def test_settings_of_tokenizer_config_are_off_and_named(
    keys: dict[str, Any], named: str, folder: Path
) -> None:
    plain = ids(hf_tokenizer.load(folder))
    change(folder / "tokenizer_config.json", **keys)
    said: list[str] = []
    loaded = hf_tokenizer.load(folder, said.append)
    assert ids(loaded) == plain
    assert len(said) == 1
    assert named in said[0]
    assert not (loaded.init_kwargs.get("sp_model_kwargs") or {}).get("enable_sampling")


def test_sampling_of_sentencepiece_does_not_reach_it() -> None:
    options = {"enable_sampling": True, "nbest_size": -1, "alpha": 0.1, "add_bos": False}
    off, switched_off = hf_tokenizer._deterministic_overrides({"sp_model_kwargs": options})
    assert off == {"sp_model_kwargs": {"add_bos": False}}
    assert switched_off == ["sp_model_kwargs.enable_sampling True"]
    assert hf_tokenizer._deterministic_overrides(
        {"sp_model_kwargs": {"alpha": 0.1}, "dropout": 0.0}
    ) == ({}, [])


# Ids


def test_a_truncated_answer_is_never_a_sample(folder: Path, tmp_path: Path) -> None:
    made = tokenizer(tmp_path / "chat", "chatml")
    plain = ids(load_tokenizer(made))
    change(made / "tokenizer.json", truncation=TRUNCATED, model={"dropout": 0.5})
    maker = SampleMaker(made, PrepareOptions(seq_len=64))
    assert ids(maker._tokenizer) == plain


@pytest.mark.parametrize("eos", [50256, [50256, 3], 512, -1])
def test_an_end_that_the_model_does_not_have_is_refused(
    eos: Any, folder: Path, tmp_path: Path
) -> None:
    change(folder / "config.json", vocab_size=512, eos_token_id=eos)
    change(folder / "tokenizer_config.json", eos_token=None)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    number = eos[0] if isinstance(eos, list) else eos
    words = (
        rf"eos_token_id is {number} and the model has the ids 0 to 511 .* as eos_token in"
        r" tokenizer_config\.json"
    )
    for append in (True, False):
        with pytest.raises(DataError, match=words):
            prepare(
                tmp_path / "a.jsonl",
                tmp_path / "out",
                folder,
                seq_len=8,
                append_eod=append,
                progress=None,
            )
    assert not (tmp_path / "out").exists()
    # the remedy
    change(folder / "tokenizer_config.json", eos_token="<|end|>")
    assert tokenizer_facts(folder).eos_id == 0
    # the other one
    change(folder / "tokenizer_config.json", eos_token=None)
    change(folder / "config.json", eos_token_id=[511, 50256])
    facts = tokenizer_facts(folder)
    assert (facts.eos_id, facts.vocab_size) == (511, 512)
    made = prepare(tmp_path / "a.jsonl", tmp_path / "out", folder, seq_len=8, progress=None)
    assert IndexedDataset(tmp_path / "out/tokens").tokens.max() == 511 < made.vocab_size


def test_an_end_without_a_config_is_one_of_the_tokenizers(folder: Path) -> None:
    change(folder / "config.json", model_type="llama", eos_token_id=70_000)
    change(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(DataError, match="eos_token_id is 70000"):
        tokenizer_facts(folder)


def test_a_token_that_only_the_config_knows_is_not_learned_in_pieces(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, "alpaca")
    change(made / "tokenizer_config.json", eos_token="<|stop|>")
    with pytest.raises(
        DataError,
        match=r"the chat template writes '<\|stop\|>', which tokenizer_config\.json calls",
    ):
        SampleMaker(made, PrepareOptions(seq_len=64))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "tokenizer.json",
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9085657\n",
        ),
        ("tokenizer.json", "<!DOCTYPE html><html>sign in</html>"),
        ("tokenizer.json", ""),
    ],
    ids=["pointer", "page", "empty"],
)
def test_a_file_that_is_none_of_a_tokenizer_is_named_as_what_it_is(
    name: str, content: str, folder: Path
) -> None:
    (folder / name).write_text(content)
    with pytest.raises(DataError, match=rf"{name} (is|holds|has|was)") as caught:
        load_tokenizer(folder)
    assert "tokenizers library" not in str(caught.value)
