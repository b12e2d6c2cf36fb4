"""Instruction data through the local control plane, from records to answers."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import smtrain
from smtrain.cli.demo_show import answers, run_and_show
from smtrain.client.backends.choose import sagemaker
from smtrain.client.backends.sagemaker.s3 import list_objects
from smtrain.client.planner.resolve import load_config
from smtrain.core.demo.inputs import CHAT_TEMPLATE
from smtrain.core.files import home
from smtrain.core.protocol.uris import split_uri
from tests.client.launch.test_local_run import exact_records

pytestmark = [pytest.mark.slow, pytest.mark.full]

STEPS = 12


@pytest.fixture(scope="module")
def base(
    local_home: Path, trained_inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sft")
    shutil.copytree(trained_inputs["model"], folder / "model")
    (folder / "model/chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "data").mkdir()
    pairs = [(f"what is red number {i}?", f"the red fox number {i}.") for i in range(120)]
    alpaca = [{"instruction": q, "input": "", "output": a} for q, a in pairs[:60]]
    shared = [
        {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
        for q, a in pairs[60:90]
    ]
    openai = [
        {"messages": [{"role": r, "content": c} for r, c in (("user", q), ("assistant", a)) * 2]}
        for q, a in pairs[90:]
    ]
    for name, rows in (("alpaca", alpaca), ("messages", shared + openai)):
        (folder / f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "name": "sft",
        "target": "local",
        "model": {"path": folder / "model"},
        "data": {"path": folder / "data"},
        "parallel": {"tp": 2},
        "train": {
            "objective": "sft",
            "steps": STEPS,
            "global_batch_size": 8,
            "seq_len": 64,
            "precision": "fp32",
            "lr": 3e-3,
            "schedule": "constant",
            "save_interval": 6,
        },
        "compute": {"instance_type": "ml.trn1.2xlarge", "processes_per_instance": 2},
        "generate": {"prompts": ["what is red number 7?"], "max_new_tokens": 8},
    }


@pytest.fixture(scope="module")
def whole(base: dict[str, Any]) -> smtrain.Run:
    return smtrain.run(base, say=lambda _: None)


def test_a_run_goes_from_records_to_an_answer(whole: smtrain.Run, tmp_path: Path) -> None:
    assert [result.stage for result in whole.results] == [
        "prepare",
        "convert",
        "train",
        "export",
        "generate",
    ]
    assert whole.loss[-1] < whole.loss[0] - 1
    assert whole.texts[0]["prompt"] == "what is red number 7?"
    assert "### " not in whole.texts[0]["completion"]
    assert (whole.download(tmp_path / "model") / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    told = "\n".join(line.text for line in whole.job("prepare").lines())
    assert "120 documents" in told
    assert "answers found by what each turn adds to its prompt" in told


def test_the_demo_shows_its_answers_before_and_after(
    whole: smtrain.Run, base: dict[str, Any], tmp_path: Path
) -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    run_and_show(base, tmp_path, console)
    said = console.export_text()
    asked, _, told = said.partition("run sft in s3://")
    assert "answers before it is trained" in asked
    assert "what is red number 7?" in asked
    found = re.search(r"what is red number 7\?\n  before +(.*)\n(?:  .*\n)*?  after +(.*)\n", told)
    assert found is not None
    before, after = found.groups()
    assert after.strip() == whole.texts[0]["completion"].strip()
    assert before.strip() != after.strip()
    assert (tmp_path / "model/config.json").is_file()
    [kept] = (home() / "demo").glob("answers-*.jsonl")
    records = [json.loads(line) for line in kept.read_text("utf-8").splitlines()]
    kept.write_text(
        "".join(json.dumps(one | {"completion": "as it was"}) + "\n" for one in records), "utf-8"
    )
    assert set(answers(load_config(base, target="local")).values()) == {
        "as it was"
    }  # a second call asks nothing
    kept.unlink()


def test_it_goes_on_from_the_same_row_with_other_data_parallel_ranks(
    whole: smtrain.Run, base: dict[str, Any]
) -> None:
    before = whole.job("train")
    expected, newest = exact_records(before), before.checkpoints[-1]
    assert newest.rstrip("/").endswith(f"{STEPS:08d}")
    bucket, _ = split_uri(newest)
    for item in list_objects(sagemaker(before.target), newest):
        sagemaker(before.target).s3.delete_object(Bucket=bucket, Key=item["Key"])
    for stage in ("convert", "train"):
        job = smtrain.launch(base, stage=stage, parallel={"tp": 1}, say=lambda _: None)
    found = exact_records(job)
    assert sorted(found) == [*range(7, STEPS + 1)]
    for step, record in found.items():
        assert record["loss"] == pytest.approx(expected[step]["loss"], rel=1e-4)
