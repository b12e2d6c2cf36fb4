"""The machines of stages without an accelerator: chosen by the model's size, refused if they do not
hold it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.planner.resolve import load_config
from smtrain.client.planner.stages import host_gib, machine_for, need, volume_for
from smtrain.core.facts import table
from smtrain.stages import STAGES, stages_of

LARGE = Path(__file__).parents[3] / "examples/llama-2-70b-trn1.yaml"
GIB = 2**30
NO_PROMPTS: dict[str, Any] = {"generate": {"prompts": []}}


def test_seventy_billion_weights_are_generated_with_on_a_machine_that_holds_them() -> None:
    config = load_config(LARGE)
    wanted = need(config, "generate")
    assert wanted is not None
    assert wanted.memory == pytest.approx(138e9 + 0.6 * GIB + 2 * 80 * 8 * 128 * 2 * 4096, rel=0.01)
    chosen = machine_for(config, "generate")
    assert chosen == "ml.r5.8xlarge"
    assert (host_gib(chosen) or 0) * GIB * 0.9 > wanted.memory
    request = smtrain.request(LARGE, stage="generate")
    assert request["ResourceConfig"]["InstanceType"] == chosen
    assert machine_for(config, "train") == "ml.trn1.32xlarge"


def test_it_is_judged_on_such_a_machine_too() -> None:
    assert (
        machine_for(load_config(LARGE, evaluate={"tasks": ["mmlu"]}), "evaluate") == "ml.r5.8xlarge"
    )


def test_conversions_keep_the_small_machine_and_get_the_disk() -> None:
    config = load_config(LARGE)
    for stage in ("convert", "export"):
        assert machine_for(config, stage) == "ml.m5.4xlarge"
        assert volume_for(config, stage) == 256
    fp32 = load_config(LARGE, set_=["train.precision=fp32"])
    assert volume_for(fp32, "export") == 300  # 276 GB and the image
    assert (
        volume_for(
            load_config(LARGE, set_=["train.precision=fp32", "compute.volume_gb=256"]), "export"
        )
        == 256
    )


def test_what_the_config_names_is_kept_and_a_small_model_changes_nothing() -> None:
    named = load_config(LARGE, set_=["compute.cpu_instance_type=ml.c5.4xlarge"])
    assert machine_for(named, "generate") == "ml.c5.4xlarge"
    small = load_config(LARGE, set_=["model.path=s3://my-bucket/models/Llama-3.2-1B"])
    assert {machine_for(small, stage) for stage in STAGES if stage not in ("compile", "train")} == {
        "ml.m5.4xlarge"
    }
    unknown = load_config(LARGE, set_=["model.path=s3://my-bucket/models/ours"])
    assert need(unknown, "generate") is None
    assert machine_for(unknown, "generate") == "ml.m5.4xlarge"


def test_the_tables_agree() -> None:
    sizes = [row["host_gib"] for row in table("instances")["cpu"].values()]
    assert sizes == sorted(sizes)
    priced = {row["type"] for row in table("prices")["rows"]}
    assert table("instances")["cpu"].keys() <= priced


def test_the_plan_prices_the_stage_on_its_own_machine() -> None:
    plan = smtrain.plan(LARGE)
    assert {price.type for price in plan.prices} >= {"ml.m5.4xlarge", "ml.r5.8xlarge"}
    assert plan.dollars_by_item["generate"] > 0


def found(stage: Any, *set_: str) -> list[tuple[str, str, str]]:
    """The findings of `check` on a stage's machine."""
    from smtrain.client.backends.sagemaker.backend import SageMakerBackend
    from smtrain.client.launch.stages import Chain
    from smtrain.client.preflight.context import Context
    from smtrain.client.preflight.stages import stages

    chain = Chain(load_config(LARGE, set_=set_), SageMakerBackend("aws", "us-west-2"), look=False)
    return [(f.level, f.text, f.remedy) for f in stages(Context(chain, [stage]))]


def test_check_refuses_a_machine_that_does_not_hold_the_stage() -> None:
    ((level, text, remedy),) = found("generate", "compute.cpu_instance_type=ml.m5.4xlarge")
    assert level == "fault"
    assert "takes about 130 GiB of memory, and ml.m5.4xlarge has 64 GiB" in text
    assert remedy == "set compute.cpu_instance_type: ml.r5.8xlarge"
    ((level, text, remedy),) = found("export", "compute.volume_gb=100")
    assert (level, remedy) == ("fault", "set compute.volume_gb: 200")
    assert "writes 138 GB, and its disk has 100 GB" in text
    ((level, _, remedy),) = found("generate", "compute.max_run=60")
    assert (level, remedy) == ("warning", "raise compute.max_run")
    assert found("generate")[0][0] == "ok"


@pytest.mark.parametrize(
    ("stage", "remedy"),
    [
        ("generate", "set generate.prompts: [] to leave the stage out"),
        ("evaluate", "leave evaluate.tasks out"),
    ],
)
def test_a_stage_that_no_machine_holds_may_be_left_out(stage: Any, remedy: str) -> None:
    changes = {
        "model.path": "s3://my-bucket/kimi-k2",
        "parallel": "auto",
        "train.engine": "native",
        "compute.instance_type": "ml.p5.48xlarge",
        "compute.instance_count": 64,
        "compute.processes_per_instance": 8,
        "evaluate.tasks": "[mmlu]",
    }
    ((level, _, told),) = found(stage, *(f"{key}={value}" for key, value in changes.items()))
    assert (level, told) == ("fault", f"{remedy}, as no type known to smtrain holds this model")


def test_without_prompts_a_run_has_no_stage_generate() -> None:
    all_stages, others = (stages_of(load_config(LARGE, **more)) for more in ({}, NO_PROMPTS))
    assert all_stages == [*others, "generate"]
    assert smtrain.Run(load_config(LARGE, **NO_PROMPTS)).texts == []
