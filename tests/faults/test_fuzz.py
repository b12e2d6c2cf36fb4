"""Mutated configs and damaged inputs: a result or a sentence from every command, in time
(`scripts/bench fuzz`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import yaml

from smtrain.cli import options
from testing.fuzz import samples
from testing.fuzz.commands import COMMANDS
from testing.fuzz.judge import command
from testing.fuzz.run import Totals, World, world_of
from tests.tiers import full

SEED = 60_000
FORMS = (
    "model config",
    "metrics.jsonl",
    "log",
    "megatron log",
    "csv log",
    "stage",
    "records",
    "task",
    "questions",
)
"""Forms whose readers take milliseconds."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with (
        pytest.MonkeyPatch.context() as patch,
        world_of(tmp_path_factory.mktemp("fuzz"), patch) as made,
    ):
        yield made


def survived(totals: Totals) -> None:
    assert [f"{fault.case}: {fault.text}" for fault in totals.faults] == []


def test_mutated_configs_give_a_result_or_sentences(world: World) -> None:
    totals = Totals()
    without = () if full() else ("check",)  # which starts a control plane
    world.configs(range(SEED, SEED + (400 if full() else 40)), totals, without)
    survived(totals)


def test_damaged_inputs_give_a_result_or_a_sentence(world: World) -> None:
    totals = Totals()
    world.inputs(range(SEED, SEED + (400 if full() else 80)), totals, FORMS)
    survived(totals)


@pytest.mark.full
def test_three_thousand_of_each(world: World) -> None:
    totals = Totals()
    world.configs(range(3000), totals)
    world.inputs(range(3000), totals)
    survived(totals)


@pytest.mark.full
@pytest.mark.parametrize("target", samples.TARGETS)
def test_configs_that_are_mutated_are_valid_before(world: World, target: str) -> None:
    for objective in samples.OBJECTIVES:
        for names, extra in ((samples.TARGETS, {}), *samples.EXTRAS):
            if target in names and (not extra or objective in names):
                raw = samples.merge_configs(samples.valid(target, objective), extra)
                (world.folder / "valid.yaml").write_text(yaml.safe_dump(raw))
                answer = command("run", "valid.yaml", "--dry-run")
                assert answer.status == 0, f"{objective} {extra}: {answer.err}"


def test_an_error_that_is_no_sentence_is_a_fault(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options.StartOptions, "show_dry", lambda *_: os.environ["SMTRAIN_MISSING"])
    totals, others = Totals(), [name for name in COMMANDS if name not in ("run", "launch")]
    world.configs(range(20), totals, others)
    assert {fault.kind.partition(" at ")[0] for fault in totals.faults} == {"KeyError"}
