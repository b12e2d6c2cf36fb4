"""CloudWatch reads the line that training writes of a step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.core.demo.inputs import save_tokenizer
from smtrain.core.protocol.log_lines import MACHINE_NUMBERS, machine_line, step_line, step_record
from smtrain.worker.engine.base import (
    PairMetrics,
    ParameterNorms,
    RoutingMetrics,
    Scaling,
    StepResult,
)
from smtrain.worker.train.metrics import MetricsLog
from smtrain.worker.train.validation import ValidationResult

ROLE = "arn:aws:iam::111122223333:role/r"
RUN: dict[str, Any] = {
    "total_steps": 10,
    "first_step": 1,
    "samples": 0,
    "seq_len": 512,
    "ramp": False,
    "flops_per_token": 1e9,
    "peak": 1e15,
}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "router_aux_loss_coef": 0.02,
}


def collected(request: dict[str, Any], line: str) -> dict[str, list[float]]:
    """The numbers that CloudWatch finds in a line of the log, by the name of their metric."""
    return {
        definition["Name"].removeprefix("train:"): [
            float(number) for number in re.findall(definition["Regex"], line)
        ]
        for definition in request["AlgorithmSpecification"]["MetricDefinitions"]
    }


@pytest.mark.parametrize(("loss", "norm"), [(2.5, 0.25), (1e-7, 12345.0)])
def test_the_metric_definitions_find_every_number_in_a_steps_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: float, norm: float
) -> None:
    log = MetricsLog(tmp_path, **RUN)
    log.log(1, StepResult(loss, norm), 1.5e-4, 0.0, range(8))
    log.close()
    (line,) = capsys.readouterr().out.splitlines()
    request = smtrain.request(
        target="aws",
        model={"path": "s3://bucket/model"},
        data={"path": "s3://bucket/text"},
        parallel={"tp": 2},
        compute={"instance_type": "ml.trn1.2xlarge", "region": "us-west-2", "role": ROLE},
        output={"s3_uri": "s3://bucket/out"},
    )
    numbers = {
        definition["Name"]: [float(number) for number in re.findall(definition["Regex"], line)]
        for definition in request["AlgorithmSpecification"]["MetricDefinitions"]
    }
    assert set(numbers) == {
        "train:loss",
        "train:grad_norm",
        "train:lr",
        "train:tokens_per_s",
        "train:mfu",
    }
    assert numbers["train:loss"] == [pytest.approx(loss, abs=1e-6)]
    assert numbers["train:grad_norm"] == [norm]
    assert numbers["train:lr"] == [1.5e-4]
    assert all(len(numbers) == 1 for numbers in numbers.values())


def test_the_numbers_of_pairs_are_in_every_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pairs = PairMetrics(0.25, -1.5, 0.75, -30.125, -1e-7)
    log = MetricsLog(tmp_path, **RUN)
    log.log(
        1,
        StepResult(0.5, 1.0, pairs=pairs),
        1e-6,
        0.0,
        range(8),
        ValidationResult(0.6, 9, 0.5, 0.0, 0.125),
    )
    log.close()
    (line,) = capsys.readouterr().out.splitlines()
    request = smtrain.request(
        target="aws",
        model={"path": "s3://bucket/model"},
        data={"path": "s3://bucket/text"},
        parallel={"tp": 2},
        train={"objective": "dpo", "validation": {"fraction": 0.1}, "engine": "native"},
        compute={"instance_type": "ml.p5.48xlarge", "region": "us-west-2", "role": ROLE},
        output={"s3_uri": "s3://bucket/out"},
    )
    found = collected(request, line)
    wanted = {**pairs.numbers(), "val_loss": 0.6, "val_accuracy": 0.5, "val_margins": 0.125}
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (record,) = [json.loads(one) for one in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for name, value in wanted.items():
        assert found[name] == [pytest.approx(value, abs=1e-4)]
        tag = (
            f"validation/{name.removeprefix('val_')}"
            if name.startswith("val_")
            else f"train/{name}"
        )
        assert board.Scalars(tag)[0].value == pytest.approx(value)
        assert record[name] == value
    parsed = step_record(line)
    assert parsed is not None
    assert {name: parsed[name] for name in wanted} == pytest.approx(wanted, abs=1e-4)
    assert wanted["rewards/margins"] == 1.75
    assert "val_ppl" not in found


def test_a_step_that_was_skipped_says_so_in_place_of_its_norm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog(tmp_path, **RUN)
    log.log(1, StepResult(2.0, float("inf"), Scaling(65536.0, 32768.0, True)), 1e-4, 0.0, range(8))
    log.log(2, StepResult(2.0, 1.5, Scaling(32768.0, 32768.0, False)), 1e-4, 0.0, range(8, 16))
    log.close()
    one, two = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (one["loss_scale"], one["skipped"], "grad_norm" in one) == (65536.0, 1, False)
    assert (two["loss_scale"], "skipped" in two, two["grad_norm"]) == (32768.0, False, 1.5)
    assert "step=1 loss=2.000000 loss_scale=65536 skipped=1 lr=" in capsys.readouterr().out


def test_the_share_of_padding_is_that_of_the_positions_since_the_last_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog(tmp_path, **RUN)
    log.log(1, StepResult(2.0, 1.5), 1e-4, 0.0, range(8), padding=1024)
    log.log(3, StepResult(2.0, 1.5), 1e-4, 0.0, range(16, 24), padding=1024 + 512)
    log.close()
    one, two = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (one["padding"], two["padding"]) == (1024 / (8 * 512), 512 / (16 * 512))
    assert " padding=0.2500 data_wait=" in capsys.readouterr().out


def test_norms_of_parameters_and_the_batch_of_a_ramp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, **{**RUN, "ramp": True})
    norms = ParameterNorms(5.0, {"embedding": 3.0, "layer_00": 4.0})
    log.log(1, StepResult(2.0, 1.5, param_norms=norms), 1e-4, 0.0, range(4))
    log.log(2, StepResult(2.0, 1.5, param_norms=norms), 1e-4, 0.0, range(4, 12))
    log.close()
    one, two = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (one["param_norm"], one["batch"], two["batch"]) == (5.0, 4, 8)
    assert "grad_norm=1.5000 param_norm=5.0000 batch=4 lr=" in capsys.readouterr().out
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [board.Scalars(f"param_norm/{part}")[0].value for part in norms.parts] == [3.0, 4.0]


def test_machine_use_is_a_metric_on_request() -> None:
    line = machine_line({name: 0.25 if "_" not in name else 1e6 for name in MACHINE_NUMBERS})
    steps = step_line(
        {"step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 1e-4, "tokens_per_s": 9.0, "mfu": 0.1}, 10
    )
    raw: dict[str, Any] = {
        "target": "aws",
        "model": {"path": "s3://bucket/model"},
        "data": {"path": "s3://bucket/text"},
        "parallel": {"tp": 2},
        "output": {"s3_uri": "s3://bucket/out"},
        "compute": {"instance_type": "ml.trn1.2xlarge", "region": "us-west-2", "role": ROLE},
    }
    plain, tracked = smtrain.request(raw), smtrain.request({**raw, "track": {"machines": True}})
    definitions = tracked["AlgorithmSpecification"].pop("MetricDefinitions")
    usual = plain["AlgorithmSpecification"].pop("MetricDefinitions")
    assert definitions[: len(usual)] == usual
    assert tracked == plain
    for definition in definitions[len(usual) :]:
        name = definition["Name"].removeprefix("train:")
        assert [float(numbers) for numbers in re.findall(definition["Regex"], line)] == [
            0.25 if "_" not in name else 1e6
        ]
        assert not re.search(definition["Regex"], steps)
    assert {definition["Name"] for definition in definitions[len(usual) :]} == {
        f"train:{n}" for n in MACHINE_NUMBERS
    }
    assert not any(re.search(definition["Regex"], line) for definition in usual)


def test_half_a_line_of_a_full_disk_does_not_spoil_the_next_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    log = MetricsLog(tmp_path, **{**RUN, "first_step": 2, "samples": 8})
    log.log(2, StepResult(1.0, 1.0), 1e-4, 0.0, range(8, 16))
    log.close()
    assert [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2]


@pytest.mark.parametrize("named", ["folder", "s3"])
def test_the_numbers_of_a_router_are_metrics_of_a_mixtures_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    """By the model's config.json; by the config's keys if the model is elsewhere."""
    routing = RoutingMetrics(2.0625, 0.9375, ((0.5, 1.5, 1.25, 0.75),), 2, 0.125)
    log = MetricsLog(tmp_path / "out", **RUN)
    log.log(1, StepResult(2.5, 0.25, routing=routing), 1.5e-4, 0.0, range(8))
    log.close()
    (line,) = capsys.readouterr().out.splitlines()
    save_tokenizer(["one two three"], tmp_path / "model", vocabulary=300, end="<end>")
    (tmp_path / "model/config.json").write_text(json.dumps(MIXTRAL))
    request = smtrain.request(
        target="aws",
        model={
            "path": str(tmp_path / "model") if named == "folder" else "s3://bucket/model",
            "init": "scratch",
        },
        data={"prepared": "s3://bucket/data"},
        train={"engine": "native", "seq_len": 32},
        parallel={"ep": 1 if named == "folder" else 2},
        compute={"instance_type": "ml.p5.48xlarge", "region": "us-west-2", "role": ROLE},
        output={"s3_uri": "s3://bucket/out"},
    )
    found = collected(request, line)
    assert {name: [number] for name, number in routing.numbers().items()}.items() <= found.items()
    assert found["loss"] == [2.5]
