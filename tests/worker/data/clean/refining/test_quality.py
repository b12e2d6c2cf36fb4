"""Filters decide as datatrove does, on any number of machines, and report dropped documents."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from smtrain import load_config
from smtrain.core.errors import ConfigError, DataError
from smtrain.worker.data.clean.cleaning import Cleaning, NearDuplicates
from smtrain.worker.data.clean.quality import FILTERS, judge
from smtrain.worker.data.prepare.spread.driver import Spread
from smtrain.worker.data.read import blocks
from smtrain.worker.data.report import page, report
from tests.extras import need
from tests.worker.data.corpora import digest
from tests.worker.data.prepare.spread.executors import InThisProcess
from tests.worker.data.quiet import prepare

need("datatrove", "spacy", "rensa", "phonenumbers")
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[5]


def prose(draw: random.Random, sentences: int) -> str:
    """Sentences that all filters keep if there are enough."""

    def word() -> str:
        return "".join(
            draw.choice("bdfklmnprst") + draw.choice("aeiou") for _ in range(draw.randrange(2, 4))
        )

    def sentence() -> str:
        return (
            f"{word().title()} {word()} that {word()} have {word()} with {word()} of {word()}"
            f" {word()}."
        )

    return "\n".join(f"{sentence()} {sentence()}" for _ in range(sentences))


def documents(draw: random.Random) -> list[str]:
    good = [prose(draw, 12) for _ in range(6)]
    noise = [
        "short",
        "",
        "word " * 300,
        "{ code } " * 80,
        "\n".join(f"- item {i}" for i in range(90)),
        "### " * 100,
        f"{good[0]} And one more.",
        f"{prose(draw, 8)}\nThen mail a@host.org now.\nno end here",
        "1 2 3 4 5 6 7 8 9 " * 40,
        "...\n" * 60,
    ]
    texts = good + noise
    draw.shuffle(texts)
    return texts


@pytest.mark.parametrize("name", FILTERS)
def test_every_filter_is_datatroves_own(name: str) -> None:
    from datatrove.data import Document

    module, kind = FILTERS[name]
    theirs: Any = getattr(importlib.import_module(f"datatrove.pipeline.filters.{module}"), kind)()
    decide, kept = judge(name), set()
    for text in [text for text in documents(random.Random(0)) if text.strip()]:
        document = Document(text=text, id="")
        said = theirs.filter(document)
        expected = (document.text, "") if said is True else (None, said[1])
        assert decide(text) == expected
        kept.add(expected[0] is None)
    assert kept == {True, False}


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(2))
def test_one_digest_for_every_cut_and_order(
    seed: int, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2048)
    draw = random.Random(seed)
    (tmp_path / "text").mkdir()
    for number in range(3):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in documents(draw))
        (tmp_path / f"text/{number}.jsonl").write_text(rows)
    names = ("gopher_quality", "gopher_repetition", "fineweb", "c4")
    cleaning = Cleaning(deduplicate=True, filters=names, pii="mask", near=NearDuplicates())
    sources, options = [tmp_path / "text"], {"seq_len": 8, "workers": 1, "cleaning": cleaning}
    made = prepare(sources, tmp_path / "wanted", tokenizer_folder, **options)
    assert made.documents
    assert made.dropped["near duplicates"] == made.near_duplicates["left_out"] > 0
    assert {reason.split(":")[0] for reason in made.dropped} > {"by gopher_quality"}
    assert made.examples.keys() > {
        reason for reason in made.dropped if reason.startswith("by ")
    } - {"-"}
    spread = Spread(InThisProcess(draw), share_bytes=4096)
    prepare(sources, tmp_path / "out", tokenizer_folder, spread=spread, **options)
    assert digest(tmp_path / "out") == digest(tmp_path / "wanted")


def test_the_report_shows_what_would_be_taken(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    texts = documents(random.Random(1))
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    cleaning = Cleaning(filters=("gopher_quality",), pii="count", near=NearDuplicates())
    result = report([source], cleaning=cleaning)
    assert result.judged == len(texts)
    assert result.dropped["near duplicates"] == 1
    assert result.noted == {"e-mail addresses": 1}
    shown = page(result)
    assert "by gopher_quality: gopher_short_doc" in shown
    assert "Examples: near duplicates" in shown
    assert "a@host.org" not in shown.partition("Examples: e-mail")[2]


def config(**data: Any) -> Any:
    model = str(ROOT)
    return load_config(
        {"model": {"path": model}, "data": {"path": str(ROOT / "README.md"), **data}}
    )


def test_what_is_not_installed_or_not_text_is_told_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer_folder: Path
) -> None:
    with pytest.raises(ConfigError, match=r"data\.filters"):
        config(filters=["gopher"])
    with pytest.raises(ConfigError, match=r"c4 is named twice"):
        config(filters=["c4", "c4"])
    with pytest.raises(ConfigError, match=r"data\.filters: megatron is tokens"):
        config(filters=["c4"], format="megatron")
    with pytest.raises(ConfigError, match=r"data\.phone_region: has no effect unless data\.pii"):
        config(phone_region="US")
    for places in ("smtrain.client.config.checks.data", "smtrain.worker.data.clean.cleaning"):
        monkeypatch.setattr(f"{places}.present", lambda name: False)
    with pytest.raises(
        ConfigError, match=r"data\.filters: this needs the package datatrove.*pip install"
    ):
        config(filters=["c4"])
    with pytest.raises(ConfigError, match=r"data\.near_duplicates: this needs the package rensa"):
        config(near_duplicates={})
    (tmp_path / "a.txt").write_text("some words")
    for cleaning in (Cleaning(filters=("c4",)), Cleaning(near=NearDuplicates())):
        with pytest.raises(DataError, match="this needs the package"):
            prepare(
                tmp_path / "a.txt",
                tmp_path / "out",
                tokenizer_folder,
                seq_len=1,
                cleaning=cleaning,
                progress=None,
            )
    assert not (tmp_path / "out").exists()
