"""Tasks of stage evaluate: what can be told of them before a training that they would come
after.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smtrain.client.planner.resolve import load_config
from smtrain.core.errors import ConfigError

TASK = """
task: reds
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl, dev: [more.jsonl]}}
process_docs: !function helper.py
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tasks"
    made.mkdir()
    (made / "reds.yaml").write_text(TASK)
    for name in ("questions.jsonl", "more.jsonl"):
        (made / name).write_text("{}\n")
    return made


def test_a_task_with_its_questions_and_one_of_the_harness_are_taken(
    raw: dict[str, Any], folder: Path
) -> None:
    config = load_config({**raw, "evaluate": {"tasks": ["reds", "hellaswag"], "data": str(folder)}})
    assert config.evaluate.tasks == ("reds", "hellaswag")


def test_questions_that_are_not_there_are_told(raw: dict[str, Any], folder: Path) -> None:
    for name in ("questions.jsonl", "more.jsonl"):
        (folder / name).unlink()
    with pytest.raises(ConfigError) as caught:
        load_config({**raw, "evaluate": {"tasks": ["reds"], "data": str(folder)}})
    sentences = [fault for fault in caught.value.faults if "the task reds reads" in fault]
    assert len(sentences) == 2
    assert f"{folder / 'questions.jsonl'}, which does not exist; put it there" in sentences[0]


def test_a_folder_without_tasks_is_told(raw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"none holds no task's \.yaml and no MMLU"):
        load_config({**raw, "evaluate": {"tasks": ["mmlu"], "data": str(tmp_path / "none")}})
    with pytest.raises(
        ConfigError, match=r"no BBH \(TASK\.json, .*\); BoolQ \(dev\.jsonl .*\); give the folder"
    ):
        load_config(
            {**raw, "evaluate": {"tasks": ["boolq", "bbh"], "data": str(tmp_path / "none")}}
        )
