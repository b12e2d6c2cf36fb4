"""The demo asks questions that the training holds out, split as stage prepare splits them."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest

from smtrain.cli.demo import REAL, _available
from smtrain.cli.demo_show import held_out, records, select_questions
from smtrain.client.planner.resolve import load_config
from smtrain.core.demo.inputs import CHAT_TEMPLATE, HELP, materialise, save_tokenizer
from smtrain.core.errors import ConfigError
from smtrain.worker.data.clean.holdout import HoldOut
from smtrain.worker.data.prepare.sft import prepare_sft
from smtrain.worker.data.prepare_options import PrepareOptions


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_the_questions_are_divided_as_stage_prepare_divides_them(tmp_path: Path) -> None:
    config = load_config(REAL, target="local")
    assert config.train.validation is not None
    known = records(config)
    save_tokenizer((one.answer for one in known), tmp_path / "model", vocabulary=300, end="<end>")
    (tmp_path / "model/chat_template.jinja").write_text(CHAT_TEMPLATE)
    manifest = prepare_sft(
        [materialise(HELP)],
        tmp_path / "out",
        tmp_path / "model",
        PrepareOptions(
            seq_len=1024, workers=1, holdout=HoldOut(fraction=config.train.validation.fraction)
        ),
        say=lambda _: None,
        progress=lambda _: None,
    )
    assert manifest.validation is not None
    assert manifest.validation["documents"] == sum(one.held_out for one in known) > 20
    assert manifest.samples == sum(not one.held_out for one in known)


def test_what_is_asked_is_held_out() -> None:
    known = records(load_config(REAL, target="local"))
    chosen_questions = select_questions(known)
    assert len({one.question for one in chosen_questions}) == 3
    assert all(one.held_out for one in chosen_questions)
    assert select_questions(known) == chosen_questions
    without = records(load_config(REAL, target="local", train={"validation": None}))
    assert not any(one.held_out for one in select_questions(without))


def test_other_data_brings_questions_of_its_own() -> None:
    assert (
        records(load_config(REAL, target="local", data={"path": "demo://python-questions"})) == []
    )


def test_the_example_makes_the_questions_that_its_config_asks(tmp_path: Path) -> None:
    example = tmp_path / "python-help"
    unmade = shutil.ignore_patterns("questions.jsonl")
    shutil.copytree(Path(__file__).parents[2] / "examples/python-help", example, ignore=unmade)
    runpy.run_path(str(example / "make.py"), run_name="__main__")
    made = [
        json.loads(line)
        for line in (example / "task/questions.jsonl").read_text("utf-8").splitlines()
    ]
    answers = {
        one.question: one.answer
        for one in records(load_config(example / "config.yaml", target="local"))
    }
    assert len(made) > 50
    assert all(one["choices"][one["right"]] == answers[one["question"]] for one in made)


def test_a_fault_is_told_before_anything_is_fetched(own_home: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.lr"):
        _available(["train.lr=x"])
    assert not (own_home / "demo").exists()


def test_without_an_index_the_demo_says_why_and_goes_on(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert not _available([])
    assert (
        "the demo continues with a tiny model from scratch, as with --tiny"
        in capsys.readouterr().out
    )
    assert not (own_home / "demo/smollm2").exists()


def test_the_held_out_loss_is_told_before_and_after() -> None:
    step = {"loss": 1.0, "grad_norm": 1.0}
    judged = [
        {"val_loss": loss, "val_ppl": ppl}
        for loss, ppl in ((3.0, 20.0855), (2.5, 12.1825), (2.0, 7.3891))
    ]
    steps: list[dict[str, float]] = [
        {"step": 0},
        {"step": 1, **step},
        {"step": 2, **step},
        {"step": 4, **step},
    ]
    records = [steps[0] | judged[0], steps[1], steps[2] | judged[1], steps[3] | judged[2]]
    said = held_out(records)
    assert said.startswith("loss 3.000 ")
    assert " 2.000 on what is held out" in said
    assert said.endswith("perplexity 20.1 before, 7.4 after")
    assert held_out(steps) == ""
