"""demo:// inputs are made once, from what every machine has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smtrain.core.demo.inputs import QUESTIONS, TEXT, demo_config, materialise
from smtrain.core.errors import ConfigError
from smtrain.core.model.shape import ModelShape
from tests.demo_inputs import copier


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path))


@pytest.mark.full
def test_text_and_questions_are_records_of_the_standard_library(tmp_path: Path) -> None:
    text = materialise(TEXT)
    assert text == tmp_path / "demo/python-stdlib"
    documents = [
        json.loads(line) for line in (text / "python-stdlib.jsonl").read_text("utf-8").splitlines()
    ]
    paths = [document["path"] for document in documents]
    assert "json/decoder.py" in paths
    assert not [path for path in paths if "test" in Path(path).parts]
    assert all(document.keys() == {"path", "text"} for document in documents)
    [file] = materialise(QUESTIONS).iterdir()
    records = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    answers = {record["instruction"]: record["output"] for record in records}
    assert answers["What is the function textwrap.dedent for?"].startswith(
        "Remove any common leading whitespace"
    )
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == [
        "python-questions",
        "python-stdlib",
    ]


def test_what_is_there_is_not_made_again() -> None:
    file = materialise(TEXT) / "python-stdlib.jsonl"
    file.write_text("kept")
    assert (materialise(TEXT) / "python-stdlib.jsonl").read_text() == "kept"


def test_test_processes_copy_what_one_of_them_has_made(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "text").write_text("a")

    for name in ("b", "c"):
        (tmp_path / name).mkdir()
        copier(make, tmp_path / "common/once")(tmp_path / name)
        assert (tmp_path / name / "text").read_text() == "a"
    assert len(made) == 1


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no such demo input; there are demo://python-stdlib, "):
        materialise("demo://else")


def test_the_model_is_of_the_size_that_the_pages_say() -> None:
    config = demo_config()
    assert config is not None
    assert round(ModelShape.from_config(config).parameters() / 1e6, 1) == 9.4
