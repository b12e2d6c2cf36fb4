"""`smtrain.check` of preference data: the first pairs, read as stage prepare reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import smtrain
from smtrain.tools.check_records import _tokenizer

Pair = dict[str, Any]
GOLDEN = Path(__file__).parents[1] / "worker/golden_dpo/model"


@pytest.fixture
def found(local_home: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The findings about pairs of some records."""

    def look(records: list[Pair], **train: Any) -> list[str]:
        (tmp_path / "pairs.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
        config: dict[str, Any] = {
            "name": "pairs",
            "target": "local",
            "model": {"path": GOLDEN},
            "data": {"path": tmp_path / "pairs.jsonl"},
            "train": {"objective": "dpo", "seq_len": 32, "lr": 1e-6, "precision": "fp32", **train},
        }
        report = smtrain.check(config)
        return [
            f"{one.level} {one.text}; {one.remedy}"
            for one in report.findings
            if one.check in ("pairs", "config")
        ]

    return look


def pair(prompt: str = "w1 w2", chosen: str = " w3 w4", rejected: str = " w5") -> Pair:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_good_pairs_are_said_to_be_good(found: Callable[..., list[str]]) -> None:
    said = found([pair(), pair(rejected=" w6")])
    assert said[-1].startswith("ok data.path: pairs.jsonl: 2 of the first 2 records are pairs")
    assert not any(line.startswith(("warning", "fault")) for line in said)


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (
            [pair(), pair(rejected=" w3 w4")],
            "warning data.path: pairs.jsonl: 1 of the first 2 records: pairs of two equal",
        ),
        (
            [pair(), {"text": "w1"}],
            "fault data.path: pairs.jsonl: 1 of the first 2 records are no pairs: line 2: no",
        ),
        (
            [pair(), pair(chosen=" w3" * 40)],
            "1 of the first 2 records: pairs with an answer cut to 17 tokens; raise train",
        ),
        (
            [pair(prompt="w1 " * 40)],
            "fault data.path: pairs.jsonl: no pair of the first 1 records is left",
        ),
        (
            [pair(chosen="w1 w2 w3", rejected="w1 w2 w4")],
            "in 1 of the first 1 records both answers begin with the prompt",
        ),
    ],
)
def test_what_is_wrong_with_the_first_pairs_is_told(
    found: Callable[..., list[str]], records: list[Pair], said: str
) -> None:
    assert any(said in line for line in found(records)), found(records)


def test_a_learning_rate_of_pre_training_is_a_warning(found: Callable[..., list[str]]) -> None:
    assert "warning train.lr: 0.00015 is above" in " ".join(found([pair()], lr=1.5e-4))
    lora = found([pair()], lr=1.5e-4, adapter={})
    assert not any("train.lr" in line for line in lora)


def test_a_model_in_s3_is_copied_with_all_that_its_tokenizer_reads(tmp_path: Path) -> None:
    """transformers 5 saves a template for calls of tools in a separate folder."""
    names = ["tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    place = SimpleNamespace(
        record=SimpleNamespace(queues=True),
        listing=lambda _: [
            {"Key": f"m/{name}"} for name in (*names, "model.safetensors", "old/config.json")
        ],
        fetch=lambda bucket, key, path: path.write_text(f"{bucket} {key}"),
    )
    context: Any = SimpleNamespace(model_path="s3://bucket/m", chain=SimpleNamespace(target=place))
    folder = _tokenizer(context, tmp_path)
    assert folder is not None
    copied = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )
    assert copied == sorted(names)
