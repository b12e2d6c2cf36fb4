"""demo:// works for every model and text of a command, and is refused as a dataset of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import smtrain.core.demo
from smtrain.cli.dispatch import call
from smtrain.core.demo.inputs import MODEL, TEXT


@pytest.fixture
def demo(trained_inputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's inputs, as existing folders."""
    made = {MODEL: trained_inputs["model"], TEXT: trained_inputs["text"]}
    monkeypatch.setattr(smtrain.core.demo, "materialise", lambda uri: made[uri])


def ran(*words: str) -> None:
    assert call(words[0], f"smtrain.cli.{words[0]}", list(words[1:])) == 0


def test_prepare_inspect_import_and_report_take_it(
    demo: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "tokens")
    ran(
        "data", "prepare", TEXT, out, "--model", MODEL, "--seq-len", "32", "--validation-path", TEXT
    )
    assert "documents" in capsys.readouterr().out
    ran("data", "inspect", out, "--model", MODEL)
    assert "begins: " in capsys.readouterr().out
    prefix = next(Path(out).glob("*.bin")).with_suffix("")
    ran("data", "import", str(prefix), str(tmp_path / "again"), "--model", MODEL, "--seq-len", "32")
    page = tmp_path / "page.html"
    ran("data", "report", TEXT, "--model", MODEL, "--against", TEXT, "--out", str(page))
    assert page.is_file()


def test_models_are_taken_by_checkpoint_plan_and_convert(
    demo: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran("checkpoint", "inspect", MODEL, "--config", MODEL)
    assert json.loads(capsys.readouterr().out)
    ran("convert", MODEL, str(tmp_path / "hf"), "--to", "hf", "--config", MODEL)
    assert (tmp_path / "hf/config.json").is_file()


@pytest.mark.parametrize(
    "words", [["inspect", TEXT], ["export", TEXT, "out"], ["import", TEXT, "out", "--model", MODEL]]
)
def test_text_is_no_dataset(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("data", "smtrain.cli.data", words) == 2
    assert f"`smtrain data prepare {TEXT} OUT --model FOLDER` makes some" in capsys.readouterr().err


def test_a_name_that_there_is_not_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        call(
            "data",
            "smtrain.cli.data",
            ["prepare", TEXT, str(tmp_path / "o"), "--model", "demo://nothing"],
        )
        == 2
    )
    assert (
        "demo://nothing: no such demo input; there are demo://python-stdlib"
        in capsys.readouterr().err
    )
