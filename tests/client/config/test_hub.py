"""Models and data of a hub: what is known to be gated is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.config.checks.weights import gated_faults
from smtrain.core.errors import ConfigError
from smtrain.core.facts.name_suggestions import is_gated

TOKEN = {"secret": "team/hub"}


def config(path: str, **sections: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model": {"path": path},
        "data": {"path": "s3://bucket/text"},
        "train": {"steps": 4},
    }
    return {**settings, **sections}


def sentences(path: str, **sections: Any) -> list[str]:
    loaded = smtrain.load_config(config(path, **sections))
    return [text for _, text in gated_faults(loaded)]


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-3.2-1B",
        "meta-llama/Llama-2-7b-hf@main",
        "google/gemma-2-2b",
        "google/Gemma-3-1b-pt",
    ],
)
def test_a_gated_model_needs_a_token(name: str) -> None:
    (fault,) = sentences(f"hf://{name}")
    assert fault.startswith(
        f"model.token: is missing, and hf://{name} is gated: accept its licence on the hub"
    )
    assert f"`hf download {name.partition('@')[0]} --local-dir FOLDER`" in fault
    assert not sentences("s3://bucket/model", model={"path": f"hf://{name}", "token": TOKEN})


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-7B", "google/flan-t5-base", "mistralai/Mistral-7B-v0.3", "me/meta-llama"]
)
def test_another_model_does_not(name: str) -> None:
    assert not sentences(f"hf://{name}")


def test_a_mirror_is_asked_without_one() -> None:
    assert not sentences(
        "hf://meta-llama/Llama-3.2-1B",
        compute={"environment": {"HF_ENDPOINT": "https://mirror.example"}},
    )


def test_gated_data_needs_a_token() -> None:
    (fault,) = sentences(
        "s3://bucket/model", data={"path": "hf://bigcode/starcoderdata:python@train"}
    )
    assert "hf://bigcode/starcoderdata:python@train is gated" in fault
    assert is_gated("hf://bigcode/the-stack#abc", data=True)
    assert not is_gated("hf://bigcode/the-stack")


def test_a_folder_of_the_name_is_no_model_of_the_hub(tmp_path: Path) -> None:
    assert not is_gated(str(tmp_path / "meta-llama/Llama-3.2-1B"))


@pytest.mark.parametrize("target", ["local", "aws"])
def test_nothing_starts_and_a_plan_is_made(target: Any, local_home: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("words " * 100)
    raw = config(
        "hf://meta-llama/Llama-3.2-1B",
        data={"path": str(tmp_path / "text.txt")},
        compute={"region": "us-west-2", "role": "arn:aws:iam::111122223333:role/x"},
        output={"s3_uri": "s3://bucket/prefix"},
    )
    for call in (
        smtrain.run,
        lambda source, **more: smtrain.request(source, stage="fetch", **more),
    ):
        with pytest.raises(
            ConfigError,
            match=r"^model\.token: is missing, and hf://meta-llama/Llama-3\.2-1B is gated",
        ):
            call(raw, target=target)
    assert smtrain.plan(raw).hours


def test_a_check_finds_it(local_home: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("words " * 100)
    raw = config("hf://meta-llama/Llama-3.2-1B", data={"path": str(tmp_path / "text.txt")})
    report = smtrain.check(raw)
    assert any(
        "hf://meta-llama/Llama-3.2-1B is gated" in line for line in report.sentences("fault")
    )
