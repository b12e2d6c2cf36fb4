"""A tokenizer may have more ids than its model, as Gemma 3 1B's: only data that gets one of them is
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from smtrain.core.errors import DataError
from smtrain.core.model import hf_tokenizer
from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.indexed import IndexedDataset
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.pack.exchange import import_tokens
from smtrain.worker.data.tokenizer import tokenizer_facts
from tests.worker.data.chats import talk, tokenizer, write
from tests.worker.data.quiet import prepare, prepare_sft
from tests.worker.data.writer import IndexedWriter

ADDED = "<image_soft_token>"
FAULT = (
    r"the token '<image_soft_token>' has the id {0}, and the model has the ids 0 to {1}"
    r" \(vocab_size {0}\)"
)
TEXT = "the answer to this question, and some words more " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with one token beyond its model's vocabulary."""
    folder = tokenizer(tmp_path_factory.mktemp("model"), "chatml")
    saved: Any = AutoTokenizer.from_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": len(saved)})
    )
    saved.add_special_tokens({"pad_token": ADDED})
    saved.save_pretrained(folder)
    return folder


def fault(model: Path) -> str:
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    return FAULT.format(size, size - 1)


def jsonl(folder: Path, texts: list[str]) -> Path:
    return write(folder / "a.jsonl", [{"text": text} for text in texts])


def slow_jsonl(folder: Path, texts: list[str]) -> Path:
    """Lines of which one is empty, so that Arrow does not read them."""
    (folder / "a.jsonl").write_text(
        "\n" + "".join(json.dumps({"text": text}) + "\n" for text in texts[1:])
    )
    return folder / "a.jsonl"


def parquet(folder: Path, texts: list[str]) -> Path:
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet")
    return folder / "a.parquet"


def csv(folder: Path, texts: list[str]) -> Path:
    (folder / "a.csv").write_text("text\n" + "".join(f'"{text}"\n' for text in texts))
    return folder / "a.csv"


@pytest.mark.parametrize("form", [jsonl, slow_jsonl, parquet, csv])
@pytest.mark.parametrize(
    "cleaning", [Cleaning(), Cleaning(min_characters=9, deduplicate=True)], ids=["", "cleaned"]
)
def test_of_text_only_the_line_with_such_a_token_is_bad(
    model: Path, tmp_path: Path, form: Callable[[Path, list[str]], Path], cleaning: Cleaning
) -> None:
    def prepared(source: Path, **more: Any) -> DatasetManifest:
        return prepare(source, tmp_path / "out", model, seq_len=8, cleaning=cleaning, **more)

    texts = [TEXT, f"{TEXT} 2", f"{TEXT} {ADDED}", "short", f"{TEXT} 4"]
    source = form(tmp_path, texts)
    with pytest.raises(
        DataError,
        match=rf"^{source.name}, line 3: {fault(model)}; 1 bad line so far .* correct the",
    ):
        prepared(source)
    made = prepared(source, max_bad=1)
    assert made.bad_line_count == 1
    assert (
        IndexedDataset(tmp_path / "out/tokens").tokens.max()
        < made.vocab_size
        == made.model_vocab_size
    )
    written = (tmp_path / "out/tokens.bin").read_bytes()
    source.unlink()
    without = form(tmp_path, [text for text in texts if ADDED not in text])
    said: list[str] = []
    assert prepared(without, say=said.append).bad_line_count == 0
    assert (tmp_path / "out/tokens.bin").read_bytes() == written
    assert any(
        f"{ADDED!r} is {made.vocab_size}" in line and "only a text that has" in line
        for line in said
    )


def test_a_text_that_cleaning_gives_such_a_token_is_refused(model: Path, tmp_path: Path) -> None:
    source = jsonl(tmp_path, [TEXT, TEXT + ADDED.replace("i", "\uff49", 1)])
    options = {"cleaning": Cleaning(unicode="nfkc"), "max_bad": 9}
    with pytest.raises(
        DataError,
        match=rf"{source.name}: a text, as it is cleaned, is bad: {fault(model)}; correct",
    ):
        prepare(source, tmp_path / "out", model, seq_len=8, **options)


@pytest.mark.parametrize("separator", [None, "\n---\n"])
def test_of_plain_text_the_document_is_named(
    model: Path, tmp_path: Path, separator: str | None
) -> None:
    (tmp_path / "a.txt").write_text(f"{TEXT}\n---\n{TEXT}\n---\n{ADDED}")
    line = 5 if separator else 1
    with pytest.raises(DataError, match=rf"a\.txt, line {line}: {fault(model)}"):
        prepare(tmp_path / "a.txt", tmp_path / "out", model, seq_len=8, separator=separator)


@pytest.mark.parametrize("objective", ["sft", "dpo"])
@pytest.mark.parametrize("plain", [False, True], ids=["messages", "text"])
def test_of_records_only_the_one_with_such_a_token_is_bad(
    model: Path, tmp_path: Path, objective: str, plain: bool
) -> None:
    def record(question: str, answer: str) -> dict[str, Any]:
        if objective == "sft":
            return (
                {"instruction": question, "output": answer}
                if plain
                else {"messages": talk(question, answer)}
            )
        prompt: Any = question if plain else [{"role": "user", "content": question}]
        return {"prompt": prompt, "chosen": answer, "rejected": "no"}

    rows = [
        record("what", "this"),
        record(f"what is {ADDED}", "that"),
        record("who", f"{ADDED} it is"),
        record("a", "b"),
    ]
    source = write(tmp_path / "a.jsonl", rows)
    options = {"seq_len": 63, "objective": objective}
    with pytest.raises(
        DataError, match=rf"a\.jsonl, lines 2 and 3: {fault(model)}; 2 bad records so far"
    ):
        prepare_sft(source, tmp_path / "out", model, **options)
    assert prepare_sft(source, tmp_path / "out", model, **options, max_bad=2).samples == 2
    written = (tmp_path / "out/tokens.bin").read_bytes()
    write(source, [rows[0], rows[3]])
    assert prepare_sft(source, tmp_path / "out", model, **options).bad_line_count == 0
    assert (tmp_path / "out/tokens.bin").read_bytes() == written


def test_a_token_behind_the_cut_does_no_harm(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"messages": talk("what", f"{TEXT} {ADDED}")}])
    assert prepare_sft(source, tmp_path / "out", model, seq_len=20).samples == 1
    with pytest.raises(DataError, match=fault(model)):
        prepare_sft(source, tmp_path / "out", model, seq_len=500)


@pytest.mark.parametrize("form", ["pair", "rows"])
def test_ready_tokens_are_judged_by_the_ids_that_they_have(
    model: Path, tmp_path: Path, form: str
) -> None:
    size = tokenizer_facts(model).vocab_size

    def written(ids: list[int]) -> Path:
        folder = tmp_path / "in"
        folder.mkdir(exist_ok=True)
        if form == "rows":
            pq.write_table(pa.table({"input_ids": [ids]}), folder / "a.parquet")
            return folder
        with IndexedWriter(folder / "x.bin", folder / "x.idx", "uint16") as writer:
            writer.add_document([np.array(ids)])
        return folder / "x"

    refused = re.escape(
        f"has the id {size}, and the model has the ids 0 to {size - 1}; give the model that the"
    )
    with pytest.raises(DataError, match=refused):
        import_tokens(written([3] * 20 + [size]), tmp_path / "out", model, 8)
    if form == "pair":
        with pytest.raises(DataError, match=refused):
            prepare(tmp_path / "in/x.idx", tmp_path / "out", model, seq_len=8)
    made = import_tokens(written([3] * 20 + [size - 1]), tmp_path / "out", model, 8)
    assert made.vocab_size == made.model_vocab_size == size


def test_another_models_tokenizer_is_named_as_that(model: Path, tmp_path: Path) -> None:
    """Pieces that were not added to a tokenizer belong to the vocabulary that the model was trained
    with.
    """
    small = Path(tmp_path / "small")
    small.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (small / name).write_bytes((model / name).read_bytes())
    (small / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 270}))
    with pytest.raises(
        DataError,
        match=r"lines 1, 2 and 3: the token .* \(vocab_size 270\); the tokenizer is that of another",
    ):
        prepare(jsonl(tmp_path, [TEXT] * 3), tmp_path / "out", small, seq_len=8, append_eod=False)
    assert (
        hf_tokenizer.surplus_remark({"a": 0, "b": 1}, 2)
        == hf_tokenizer.surplus_remark({"a": 9}, None)
        == ""
    )
    assert "2 tokens beyond the model's vocab_size of 1 ('b' is 1)" in hf_tokenizer.surplus_remark(
        {"a": 0, "c": 2, "b": 1}, 1
    )
