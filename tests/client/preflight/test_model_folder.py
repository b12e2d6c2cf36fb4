"""`smtrain check FOLDER`: a model without a config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import smtrain
from tests.worker.checkpoint.folders import LLAMA, hf_folder
from tests.worker.checkpoint.test_multimodal import GEMMA, multimodal


def unknown(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA, "model_type": "arcee", "kind": "x"}))


def quantized(folder: Path) -> None:
    (folder / "config.json").write_text(
        json.dumps({**LLAMA, "quantization_config": {"quant_method": "mxfp4"}})
    )


@pytest.mark.parametrize(
    ("damage", "what", "remedy"),
    [
        (
            unknown,
            "has model_type 'arcee', which smtrain cannot train",
            "nearest is llama, which has no kind = x",
        ),
        (quantized, "is quantized (mxfp4)", "give the bf16 or fp32 model"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read", ""),
        (
            lambda folder: (folder / "config.json").write_text("[]"),
            "config.json cannot be read (it is not a JSON object)",
            "",
        ),
        (lambda folder: (folder / "config.json").unlink(), "without its config.json", ""),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no model.safetensors", ""),
    ],
)
def test_a_fault_of_a_folder_is_told(
    tmp_path: Path, damage: Callable[[Path], None], what: str, remedy: str
) -> None:
    damage(hf_folder(tmp_path / "model", LLAMA))
    report = smtrain.check(tmp_path / "model")
    (fault,) = report.faults
    assert what in fault.text
    assert remedy in fault.remedy


def test_a_key_that_is_ignored_is_named(tmp_path: Path) -> None:
    report = smtrain.check(hf_folder(tmp_path / "model", {**LLAMA, "frobnicate": 3}))
    assert report.ok
    assert "has frobnicate, which smtrain and transformers ignore" in report.findings[1].text


def test_a_model_that_can_be_trained_is_described(tmp_path: Path) -> None:
    report = smtrain.check(hf_folder(tmp_path / "model", LLAMA) / "config.json")
    assert report.ok
    assert "is a llama model of" in report.findings[0].text
    assert report.findings[0].text.endswith("for engines native and nxd")
    assert [f.level for f in report] == ["ok", "warning"], "it has no tokenizer"
    parts = smtrain.check(multimodal(tmp_path / "whole", GEMMA, "SmolVLM"))
    assert "its text part (gemma3_text) is trained" in parts.findings[1].text
