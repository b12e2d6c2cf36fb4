"""Any model of the table on any instances: with defaults it loads, plans and passes its checks, or
one sentence says why there is no such run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from botocore.session import get_session
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import smtrain
from smtrain.client.backends.choose import backend_of
from smtrain.client.launch.stages import Chain
from smtrain.client.preflight.checks import run_checks
from smtrain.core.facts import table
from smtrain.core.facts.gpus import has_bf16
from smtrain.stages import stages_of
from tests.tiers import examples

TRIES = int(os.environ.get("SMTRAIN_DEFAULTS", examples(60)))
MODELS = sorted(table("models")["models"])
WITHOUT_TEXTS = "kimi-k2"  # no machine without accelerators holds it whole
NEURON = sorted(table("instances")["instances"])
OTHERS = sorted(
    set(get_session().get_service_model("sagemaker").shape_for("TrainingInstanceType").enum)  # type: ignore[attr-defined]
    - set(NEURON)
)
# Faults of an account, not of the config.
ASKING = [
    "role",
    "permissions",
    "buckets",
    "token",
    "quotas",
    "image",
    "model",
    "data",
    "text",
    "inputs",
    "resume",
]
# The registry of TorchNeuron's image is not known, so a run on trn2 names its own.
OWN = "123456789012.dkr.ecr.us-east-1.amazonaws.com/own:1"


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMTRAIN_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def outcome(
    model: str, kind: str, count: int, image: str | None, prompts: Sequence[str] = ("a",)
) -> list[str]:
    """The sentences against such a run; empty if it may start."""
    raw = {
        "model": {"path": f"s3://models/{model}"},
        "data": {"path": "s3://text/t/"},
        "output": {"s3_uri": "s3://out"},
        "generate": {"prompts": prompts},
        "train": {"precision": "bf16" if has_bf16(kind) else "fp16"},
        "compute": {
            "instance_type": kind,
            "instance_count": count,
            "role": "arn:aws:iam::123456789012:role/t",
            "region": "us-east-1",
            "image": image,
        },
    }
    try:
        config = smtrain.load_config(raw, target="aws")
        chain = Chain(config, backend_of(config))
        report = run_checks(chain, stages_of(config, "aws"), left_out=ASKING)
    except smtrain.ConfigError as error:
        return error.faults
    if kind in NEURON:
        made = smtrain.plan(config)
        assert made.fits
        assert (made.mesh.tp, made.mesh.pp, made.mesh.dp) == (
            config.parallel.tp,
            config.parallel.pp,
            config.dp,
        )
    return [finding.text for finding in report.faults]


@settings(
    max_examples=TRIES,
    deadline=None,
    derandomize=TRIES < 100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example("llama-2-70b", "ml.trn1.32xlarge", 16, None)
@example("llama-3.2-1b", "ml.trn1.2xlarge", 1, None)
@example("llama-3.1-405b", "ml.trn2.48xlarge", 3, OWN)
@given(
    st.sampled_from(MODELS),
    st.one_of(st.sampled_from(NEURON), st.sampled_from(OTHERS)),
    st.one_of(st.integers(1, 8), st.integers(1, 64)),
    st.sampled_from([None, OWN]),
)
def test_it_may_start_or_one_sentence_says_why_not(
    model: str, kind: str, count: int, image: str | None
) -> None:
    told = outcome(model, kind, count, image)
    assert len(told) <= 1, told
    assert all(len(sentence) < 300 and "\n" not in sentence for sentence in told)
    if kind in NEURON and told:
        known = (
            "compute.instance_count: no mesh of",
            "compute.image: no image is known",
            f"{kind} has no EFA",
            f"compute.instance_type: {kind} is for a ",
            "model.path: engine nxd trains no ",
            f"compute.instance_type: {kind} has K80 GPUs",
        )
        assert told[0].startswith(known), told


@pytest.mark.sample(8)
@pytest.mark.parametrize("model", sorted({*MODELS} - {WITHOUT_TEXTS}))
def test_every_model_has_machines(model: str) -> None:
    sizes = (1, 4, 16, 64)
    kinds = ("ml.trn1.32xlarge", "ml.p5.48xlarge")
    assert any(outcome(model, kind, count, None) == [] for kind in kinds for count in sizes)


@pytest.mark.full  # two large plans; tests/client/planner/test_stages.py has the remedy
def test_a_model_that_no_machine_holds_whole_runs_without_texts() -> None:
    machines = (WITHOUT_TEXTS, "ml.p5.48xlarge", 64, None)
    (told,) = outcome(*machines)
    assert told == "stage generate takes about 1913 GiB of memory, and ml.r7i.48xlarge has 1536 GiB"
    assert outcome(*machines, prompts=()) == []
