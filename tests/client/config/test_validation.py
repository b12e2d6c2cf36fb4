"""`train.validation`: what cannot be held out is refused by key, and a config without it stays what
it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smtrain import ConfigError, load_config
from smtrain.core.config.training import parts
from smtrain.stages import keys_of


def faults(raw: dict[str, Any], validation: Any, **train: Any) -> list[str]:
    settings = {**raw, "train": {**raw.get("train", {}), **train, "validation": validation}}
    with pytest.raises(ConfigError) as caught:
        load_config(settings)
    return list(caught.value.faults)


@pytest.mark.parametrize(
    ("validation", "train", "sentence"),
    [
        ({}, {}, "train.validation: does not say what is held out; set fraction"),
        ({"fraction": 0}, {}, "train.validation.fraction: got 0"),
        ({"fraction": 1}, {}, "train.validation.fraction: got 1"),
        ({"fraction": 0.1, "path": "."}, {}, "both say what is held out"),
        ({"fraction": 0.1, "intervall": 3}, {}, "did you mean train.validation.interval?"),
        ({"path": "/not/there"}, {}, "train.validation.path: /not/there does not exist"),
        ({"path": "hf://some/text"}, {}, "train.validation.path: hf://some/text is not a path"),
        ({"split": "980,10,10"}, {}, "use fraction, or, if it is that, set data.format: megatron"),
        ({"split": "0,10,10"}, {}, "it leaves nothing for training or validation"),
        ({"split": "much"}, {}, "such as 980,10,10"),
        ({"fraction": 0.1, "interval": 0}, {}, "train.validation.interval: got 0"),
        (
            {"fraction": 0.1, "interval": 30, "keep_best": True},
            {"save_interval": 100},
            "must be a multiple of",
        ),
        (
            {"fraction": 0.1, "samples": 2},
            {},
            "train.validation.samples: answers held-out questions",
        ),
        (0.1, {}, "train.validation: got 0.1; it is a section"),
    ],
)
def test_each_fault_is_one_sentence(
    raw: dict[str, Any], validation: Any, train: Any, sentence: str
) -> None:
    (only,) = faults(raw, validation, **train)
    assert sentence in only


def test_the_best_checkpoint_is_exported_where_one_is_kept(raw: dict[str, Any]) -> None:
    best = {"checkpoint": "best"}
    for validation in (None, {"fraction": 0.1}):
        with pytest.raises(
            ConfigError, match=r"export\.checkpoint: best needs train\.validation\.keep_best: true"
        ):
            load_config(raw, train={"validation": validation}, export=best)
    kept = {"validation": {"fraction": 0.1, "keep_best": True}, "save_interval": 100}
    newest, lowest = (load_config(raw, train=kept, export=export) for export in ({}, best))
    assert keys_of(lowest, "export")["export"] == best
    assert "export" not in keys_of(newest, "export")
    assert keys_of(newest, "train") == keys_of(lowest, "train")
    with pytest.raises(
        ConfigError, match=r"export\.checkpoint: best is read from the checkpoints of engine native"
    ):
        load_config(raw, train={**kept, "engine": "nxd"}, export=best)
    load_config(raw, train={**kept, "engine": "nxd", "adapter": {}}, export=best)


def test_what_is_held_out_decides_the_prepared_data_and_nothing_else_does(
    raw: dict[str, Any],
) -> None:
    plain = load_config(raw)
    assert "validation" not in keys_of(plain, "train")["train"]

    def loaded(**validation: Any) -> Any:
        return load_config({**raw, "train": {**raw.get("train", {}), "validation": validation}})

    tenth, often = loaded(fraction=0.1), loaded(fraction=0.1, interval=1, batches=2)
    assert keys_of(plain, "prepare") != keys_of(tenth, "prepare") == keys_of(often, "prepare")
    assert keys_of(tenth, "train") != keys_of(often, "train")
    for stage in ("convert", "export", "generate", "compile"):
        assert keys_of(plain, stage) == keys_of(often, stage)


def test_a_path_is_relative_to_its_file(raw: dict[str, Any], tmp_path: Path) -> None:
    import json

    (tmp_path / "held.txt").write_text("a held-out text")
    (tmp_path / "run.yaml").write_text(
        json.dumps({**raw, "train": {"validation": {"path": "held.txt"}}}, default=str)
    )
    config = load_config(tmp_path / "run.yaml")
    assert config.train.validation is not None
    assert config.train.validation.path == str(tmp_path / "held.txt")


def test_megatrons_shares() -> None:
    assert parts("980,10,10") == (0.98, 0.01, 0.01)
    assert parts("90,10") == (0.9, 0.1, 0.0)
