"""The checks of a config accept every proposal of the planner: models x machines x counts."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

import smtrain
from smtrain.client.planner.resolve_mesh import NO_MESH
from smtrain.core.errors import ConfigError
from smtrain.core.facts import table
from tests import tiers

MODELS = sorted(table("models")["models"])
# One type of each kind of host: all sizes of g5, g6 and g6e differ in nothing that a check looks at
# but their devices.
TYPES = (
    "ml.trn1.2xlarge",
    "ml.trn1.32xlarge",
    "ml.trn1n.32xlarge",
    "ml.trn2.48xlarge",
    "ml.p4d.24xlarge",
    "ml.p5.4xlarge",
    "ml.p5.48xlarge",
    "ml.p5en.48xlarge",
    "ml.p6-b200.48xlarge",
    "ml.g5.12xlarge",
    "ml.g6.48xlarge",
    "ml.g6e.xlarge",
)
COUNTS = (1, 3, 8)


def given(model: str, kind: str, count: int, **train: Any) -> dict[str, Any]:
    return {
        "model": {"path": f"s3://models/{model}"},
        "data": {"path": "s3://texts/t/"},
        "parallel": "auto",
        "train": train,
        "compute": {"instance_type": kind, "instance_count": count},
    }


def combinations(kind: str) -> list[tuple[str, int]]:
    """Models and counts for a type: all or, in the gate, each count with another model, and each
    model with some type.
    """
    if tiers.full():
        return list(product(MODELS, COUNTS))
    first, each = TYPES.index(kind), max(len(COUNTS), -(-len(MODELS) // len(TYPES)))
    return [
        (MODELS[(first + len(TYPES) * n) % len(MODELS)], COUNTS[n % len(COUNTS)])
        for n in range(each)
    ]


def test_the_gate_tries_each_model_each_count_and_each_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiers, "full", lambda: False)
    tried = [combinations(kind) for kind in TYPES]
    assert {model for pairs in tried for model, _ in pairs} == set(MODELS)
    assert all({count for _, count in pairs} == set(COUNTS) for pairs in tried)


@pytest.mark.parametrize("kind", TYPES)
def test_what_auto_proposes_may_be_written_down(kind: str) -> None:
    refused, proposed = [], 0
    for model, count in combinations(kind):
        try:
            config = smtrain.load_config(given(model, kind, count), target="aws")
        except ConfigError as error:
            if not error.faults[0].startswith(
                ("parallel: auto finds no mesh", "model.path: engine nxd trains no ")
            ):
                refused.append((model, count, error.faults))
            continue
        proposed += 1
        written = {
            **config.model_dump(mode="json"),
            "parallel": config.parallel.model_dump(mode="json"),
        }
        try:
            smtrain.load_config(written, target="aws")
        except ConfigError as error:
            refused.append((model, count, error.faults))
    assert not refused
    assert proposed or kind in ("ml.g6e.xlarge", "ml.trn1.2xlarge")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "model", ["mistral-7b", "qwen2.5-7b", "qwen3-8b", "pythia-12b", "llama-3.2-1b"]
)
def test_what_best_and_the_table_propose_may_be_written_down(model: str) -> None:
    """tp 4 needs a whole host of Trainium1, and an odd length cannot be cut for sequence
    parallelism.
    """
    for length in (4096, 1001):
        raw = {**given(model, "ml.trn1.32xlarge", 1, seq_len=length), "parallel": {}}
        machines = [
            ("ml.trn1.32xlarge", 1),
            ("ml.trn1.2xlarge", 2),
            ("ml.trn1.32xlarge", 3),
            ("ml.g5.48xlarge", 1),
        ]
        try:
            plan = smtrain.plan(raw, machines=machines, best=True)
        except ConfigError as error:
            told = error.faults[0]
        else:
            told = ""
        assert not told or told.startswith(("compute: no mesh of these machines", NO_MESH))
        for choice in () if told else plan.choices:
            count, _, kind = choice.machines.partition(" x ")
            mesh = choice.mesh
            parallel = {
                "tp": mesh.tp,
                "pp": mesh.pp,
                "dp": mesh.dp,
                "micro_batch_size": mesh.micro_batch,
                "sequence_parallel": mesh.sequence_parallel,
                "activation_checkpointing": mesh.recompute,
            }
            written = {
                **given(model, kind, int(count), seq_len=length, global_batch_size=8),
                "parallel": parallel,
            }
            faults = refusal(written)
            assert not [f for f in faults if f.startswith("parallel.")], (choice, faults)


def refusal(raw: dict[str, Any]) -> list[str]:
    try:
        smtrain.load_config(raw, target="aws")
    except ConfigError as error:
        return error.faults
    return []
