"""The front door: `smtrain.plan`, `smtrain plan`, prices and the run around the training."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import smtrain
from smtrain.cli.plan import app
from smtrain.client.planner.cost import saving
from smtrain.client.planner.long_rows import long_rows
from smtrain.client.planner.machines import Machine, Work, named_shape
from smtrain.client.prices import Prices
from smtrain.core.errors import ConfigError
from tests.typed import typed


@pytest.fixture(autouse=True)
def empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def raw(
    name: str = "Llama-2-70b-hf", tp: int = 32, pp: int = 8, hosts: int = 32, **train: Any
) -> dict[str, Any]:
    return {
        "model": {"path": f"s3://bucket/{name}/"},
        "data": {"prepared": "s3://bucket/data/"},
        "parallel": {
            "tp": tp,
            "pp": pp,
            "sequence_parallel": True,
            "activation_checkpointing": "full",
        },
        "train": {"steps": 1000, "global_batch_size": 1024, "seq_len": 4096, **train},
        "compute": {
            "instance_type": "ml.trn1.32xlarge",
            "instance_count": hosts,
            "region": "us-east-1",
        },
    }


def test_a_plan_says_everything_and_needs_neither_network_nor_home(empty_home: Path) -> None:
    plan = smtrain.plan(raw())
    assert plan.fits
    assert plan.parameters == 68_976_648_192
    assert plan.sequences_per_s is not None
    assert (
        plan.sequences_per_s["low"] < plan.sequences_per_s["value"] < plan.sequences_per_s["high"]
    )
    parts = sum(v for k, v in plan.memory_gib.items() if k not in ("total", "available"))
    assert parts == pytest.approx(plan.memory_gib["total"], abs=0.01)
    assert plan.dollars == pytest.approx(sum(plan.dollars_by_item.values()))
    assert {"train", "convert", "export"} <= set(plan.dollars_by_item)
    assert plan.tokens_per_s is not None
    assert plan.tokens_per_dollar == pytest.approx(plan.tokens_per_s * 3600 / (32 * 24.73))
    assert all(p.date and p.source for p in plan.prices)
    assert len(plan.choices) == 5
    assert plan.calibrated
    assert not empty_home.exists()
    told = json.loads(json.dumps(plan.to_dict()))
    assert {
        "fits",
        "memory_gib",
        "sequences_per_s",
        "dollars",
        "tokens_per_dollar",
        "warnings",
    } <= set(told)
    assert len(str(plan).splitlines()) < 40
    assert "2026-09-27" in str(plan)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("s3://bucket/team/Llama-2-70b-hf/", True),
        ("hf://someone/Llama-2-70b-hf@main", True),
        ("hf://meta-llama/Llama-2-70b-hf@main", False),
    ],
)
def test_a_size_that_is_known_by_a_models_name_alone_is_said(path: str, told: bool) -> None:
    warned = [
        w
        for w in smtrain.plan({**raw(), "model": {"path": path}}).warnings
        if "by its name alone" in w
    ]
    assert bool(warned) == told
    assert (
        not told
        or f"that of the published Llama-2-70b-hf, by its name alone: {path} was not read"
        in warned[0]
    )


@pytest.mark.parametrize(
    ("path", "length", "words"),
    [
        (
            "hf://Qwen/Qwen3-8B-Base@main",
            131_072,
            "how many positions hf://Qwen/Qwen3-8B-Base@main has is unknown",
        ),
        (
            "s3://bucket/Qwen2.5-7B-Instruct",
            65_536,
            "(the known model of its size has 131,072)",
        ),
        (
            "s3://known-models/qwen3-8b",
            131_072,
            "131072 is beyond the 40960 positions of qwen3-8b; set train.seq_len",
        ),
        ("s3://bucket/Qwen3-8B-Base", 32_768, ""),
        ("s3://known-models/qwen3-8b", 40_960, ""),
    ],
)
def test_rows_beyond_positions_that_are_not_known_are_warned_of(
    path: str, length: int, words: str
) -> None:
    config = smtrain.load_config(
        {**raw(), "model": {"path": path}, "train": {**raw()["train"], "seq_len": length}}
    )
    said = long_rows(config)
    assert [words in sentence for sentence in said] == [True] * bool(words)
    assert not words or "set train.seq_len" in said[0]


def test_what_does_not_fit_is_refused_by_how_much() -> None:
    plan = smtrain.plan(raw("Meta-Llama-3-70B", tp=8, pp=1))
    assert not plan.fits
    assert "short by 36." in plan.faults[0]
    assert plan.choices  # and what would fit is shown


def test_trn2_is_uncalibrated_and_its_price_a_guess() -> None:
    given = raw("Llama-3.1-8B", tp=4, pp=1, hosts=1)
    given["compute"]["instance_type"] = "ml.trn2.48xlarge"
    plan = smtrain.plan(given)
    assert not plan.calibrated
    assert plan.sequences_per_s is not None
    assert plan.sequences_per_s["high"] / plan.sequences_per_s["low"] > 3
    assert any(
        w.startswith("uncalibrated: no training run was published for ml.trn2.48xlarge")
        for w in plan.warnings
    )
    assert any("a guess" in w for w in plan.warnings)


def test_prices_can_be_overridden_and_assumptions_too(empty_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[[rows]]\ntype = "ml.trn1.32xlarge"\nregion = "us-east-1"\noption ='
        ' "on_demand"\ndollars_per_hour = 10.0\ndate = "2026-11-21"\nsource ='
        ' "contract"\n[assumptions]\nstartup_minutes = 0\n'
    )
    before, plan = smtrain.plan(raw()), smtrain.plan(raw(), prices=file)
    assert plan.dollars_by_item["train"] == pytest.approx(
        (before.dollars_by_item["train"] / 24.73 - 32 * 10 / 60) * 10
    )
    empty_home.mkdir()
    (empty_home / "prices.toml").write_text(file.read_text())
    assert smtrain.plan(raw()).dollars == plan.dollars
    file.write_text('[[rows]]\ntype = "ml.trn1.32xlarge"\n')
    with pytest.raises(ConfigError, match=r"mine\.toml: a row of prices is wrong"):
        smtrain.plan(raw(), prices=file)
    with pytest.raises(ConfigError, match=r"prices cannot be read"):
        Prices(tmp_path / "none.toml")


def test_a_run_that_its_limit_would_end_unsaved_is_warned_of() -> None:
    given = raw(save_interval=1000)
    given["compute"]["max_run"] = "4h"
    assert any("nothing would be kept" in w for w in smtrain.plan(given).warnings)
    given["train"]["save_interval"] = 20
    assert any("shorter than the run's" in w for w in smtrain.plan(given).warnings)


def test_a_limit_that_leaves_three_percent_is_warned_of() -> None:
    given = raw(save_interval=20)
    hours = smtrain.plan(given).hours
    assert hours is not None

    def told(times: float) -> list[str]:
        given["compute"]["max_run"] = int(hours * 3600 * times)
        return [w for w in smtrain.plan(given).warnings if "compute.max_run" in w]

    (thin,) = told(1.03)
    assert "leaves 3% more than the run's" in thin
    assert "raise it" in thin
    assert not told(1.3)


def test_a_dry_run_warns_of_it_too(tmp_path: Path) -> None:
    given = raw(save_interval=20)
    hours = smtrain.plan(given).hours
    assert hours is not None
    compute = {
        "role": "arn:aws:iam::111122223333:role/x",
        "region": "us-west-2",
        "max_run": int(hours * 3600 * 1.03),
    }
    given |= {"target": "aws", "output": {"s3_uri": "s3://bucket/prefix"}}
    given["compute"] |= compute
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
    done = typed("launch", str(tmp_path / "run.yaml"), "--stage", "train", "--dry-run")
    assert done.returncode == 0
    assert "warning: compute.max_run: " in done.stderr
    assert json.loads(done.stdout)


def test_spot_is_cheaper_only_if_saved_often() -> None:
    def dollars(spot: bool, interval: int) -> float:
        given = raw("Llama-2-7b-hf", tp=8, pp=1, hosts=16, save_interval=interval, steps=20_000)
        given["compute"] |= {"spot": spot, "max_run": "20d"}
        plan = smtrain.plan(given)
        return math.inf if plan.dollars is None else plan.dollars

    assert dollars(True, 50) < dollars(False, 50) < dollars(True, 20_000)


def test_the_proposed_save_interval_loses_least() -> None:
    shape = named_shape("llama-2-7b")
    assert shape is not None
    work, machine = Work(shape, 4096, 1024), Machine.of("ml.trn1.32xlarge", 16)
    a = Prices().assumptions
    best = saving(work, machine, None, 1e6, True, a)
    for factor in (0.3, 0.6, 1.8, 4):
        assert (
            saving(work, machine, best.best_interval_s * factor, 1e6, True, a).stretch
            > best.stretch
        )
    assert saving(work, machine, None, 1e6, False, a).best_interval_s > best.best_interval_s


def test_budget_and_deadline_choose_and_order() -> None:
    pool = [("ml.trn1.32xlarge", n) for n in (4, 8, 16, 32)]
    fast = smtrain.plan(raw(), machines=pool)
    cheap = smtrain.plan(raw(), machines=pool, rank_by="cost")
    assert fast.machines == "32 x ml.trn1.32xlarge"
    assert cheap.dollars is not None
    assert fast.dollars is not None
    assert fast.hours is not None
    assert cheap.dollars <= fast.dollars
    assert [c.dollars for c in cheap.choices] == sorted(
        c.dollars for c in cheap.choices if c.dollars is not None
    )
    dear = smtrain.plan(raw(), machines=pool, deadline_hours=fast.hours + 0.01)
    assert dear.machines == fast.machines
    held = smtrain.plan(raw(), machines=pool, budget=cheap.dollars * 1.001)
    assert held.dollars is not None
    assert held.dollars <= cheap.dollars * 1.001
    with pytest.raises(
        ConfigError, match="no mesh of these machines trains the model within the budget"
    ):
        smtrain.plan(raw(), machines=pool, budget=1.0)


def test_a_plan_says_what_each_limit_keeps_out() -> None:
    pool = [("ml.trn1.32xlarge", n) for n in (4, 8, 16, 32)]
    fast, cheap = (
        smtrain.plan(raw(), machines=pool),
        smtrain.plan(raw(), machines=pool, rank_by="cost"),
    )
    assert fast.dollars is not None
    assert cheap.dollars is not None
    assert fast.relaxed == ()
    held = smtrain.plan(raw(), machines=pool, budget=cheap.dollars * 1.001)
    (told,) = held.relaxed
    assert told.startswith(f"without the budget of ${cheap.dollars * 1.001:,.0f}: ")
    assert f"${fast.dollars:,.0f} ({fast.machines}" in told
    assert told in str(held)
    assert fast.hours is not None
    soon = smtrain.plan(raw(), machines=pool, deadline_hours=fast.hours + 0.01)
    assert f"${cheap.dollars:,.0f} ({cheap.machines}" in soon.relaxed[0]
    free = smtrain.plan(raw(), machines=pool, budget=1e9, deadline_hours=1e6)
    assert [told.partition(": ")[2] for told in free.relaxed] == [
        "nothing faster",
        "nothing cheaper",
    ]
    with pytest.raises(ConfigError) as error:
        smtrain.plan(raw(), machines=pool, budget=1.0)
    assert ", or without the budget of $1: " in error.value.faults[0]


def test_a_plan_says_what_a_larger_batch_would_give() -> None:
    given = raw("Llama-2-7b-hf", hosts=16)
    del given["parallel"], given["train"]["global_batch_size"]
    told = {
        most: smtrain.plan(given, train={"max_global_batch_size": most}).relaxed
        for most in (64, 65536)
    }
    assert re.fullmatch(
        r"with train.max_global_batch_size 128 for 64: \d+% more tokens a second \(.*\)",
        told[64][0],
    )
    assert told[65536] == (
        "with train.max_global_batch_size 131072 for 65536: no more tokens a second",
    )


def test_a_model_is_found_by_name_by_folder_or_not_at_all(model_folder: Path) -> None:
    assert (
        smtrain.plan(raw("Qwen2.5-7B", tp=4, pp=1), model="gpt-neox-20b").parameters
        == 20_554_567_680
    )
    given = raw(tp=1, pp=1, hosts=1, seq_len=128)
    assert smtrain.plan(given, model=str(model_folder)).parameters < 1e6
    for other in ("model.safetensors", "tokenizer.json"):
        (model_folder / other).unlink()
    assert smtrain.plan(given, model=str(model_folder)).parameters < 1e6, (
        "its config.json is enough"
    )
    with pytest.raises(ConfigError, match="nothing is known about the model in s3://bucket/mine/"):
        smtrain.plan(raw("mine"))
    with pytest.raises(ConfigError, match=r"nothing is known about ml\.p9\.2xlarge"):
        smtrain.plan(given, model="llama-2-7b", machines=[("ml.p9.2xlarge", 1)])
    given["compute"]["instance_type"] = "ml.m5.4xlarge"
    with pytest.raises(
        ConfigError, match=r"ml\.m5\.4xlarge has no accelerator, .*--machines ml\.trn1\.32xlarge:1"
    ):
        smtrain.plan(given, model="llama-2-7b")


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("Qwen/Qwen3-30B-A3B-Base", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("unsloth/gpt-oss-20b-BF16", "gpt-oss-20b"),
        ("EleutherAI/pythia-1.4b-deduped", "pythia-1.4b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-7B-v0.3", None),  # another vocabulary than v0.1
        ("Qwen/Qwen3-30B-A3B-FP8", None),
    ],
)
def test_the_name_of_a_tuned_model_tells_its_size(path: str, known: str | None) -> None:
    assert named_shape(f"s3://bucket/{path}/") == (named_shape(known) if known else None)


def test_the_command_prints_json_and_its_status_says_whether_it_fits(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(raw()))
    told = CliRunner().invoke(app, [str(file), "--json"])
    assert (told.exit_code, json.loads(told.stdout)["fits"]) == (0, True)
    told = CliRunner().invoke(app, [str(file), "--set", "parallel.tp=8", "--set", "parallel.pp=1"])
    assert told.exit_code == 1
    assert "DOES NOT FIT: memory" in told.stdout
    best = CliRunner().invoke(
        app, [str(file), "--best", "--machines", "ml.trn1.32xlarge:16", "--json"]
    )
    assert json.loads(best.stdout)["machines"] == "16 x ml.trn1.32xlarge"
    wrong = CliRunner().invoke(app, [str(file), "--machines", "many"])
    assert isinstance(wrong.exception, ConfigError)


@pytest.mark.parametrize(
    ("compute", "dollars", "shown"),
    [
        ({}, 24.73, "24.73 $/h ml.trn1.32xlarge on demand us-east-1 (2026-09-27"),
        ({"price": "reserved"}, 7.59, "7.59 $/h ml.trn1.32xlarge reserved us-east-1 (2023-12-12"),
        ({"spot": True}, 7.06, "7.06 $/h ml.trn1.32xlarge spot us-east-1 (a guess, 2026-11-20"),
        (
            {"price": 10.5},
            10.5,
            "10.50 $/h ml.trn1.32xlarge on demand us-east-1 (today, compute.price)",
        ),
        (
            {"price": 5, "spot": True},
            5.0,
            "5.00 $/h ml.trn1.32xlarge spot us-east-1 (today, compute.price)",
        ),
    ],
)
def test_the_price_is_of_the_kind_that_the_config_names_and_the_others_are_shown(
    compute: dict[str, Any], dollars: float, shown: str
) -> None:
    given = raw("Llama-2-7b-hf", tp=8, pp=1, hosts=2, save_interval=10)
    given["compute"] |= {"region": "us-east-1", **compute}
    plan = smtrain.plan(given)
    hours = plan.hours
    assert hours is not None
    assert plan.dollars_by_item["train"] == pytest.approx(hours * 2 * dollars)
    (used,) = [price for price in plan.prices if price.type == "ml.trn1.32xlarge"]
    assert str(used).startswith(shown)
    others = {price.option for price in plan.other_prices}
    assert others == {"on_demand", "spot", "reserved"} - {used.option}
    assert str(plan).count("not used: ") == 2


@pytest.mark.parametrize("price", ["cheap", -1, [1], True])
def test_another_price_is_refused_in_one_sentence(price: object) -> None:
    given = raw()
    given["compute"]["price"] = price
    with pytest.raises(ConfigError) as caught:
        smtrain.plan(given)
    (fault,) = caught.value.faults
    assert fault.startswith(
        f"compute.price: got {price!r}; it is on_demand, spot, reserved, training_plan, or dollars"
    )


def test_machines_are_named_by_texts_as_on_the_command_line(raw: dict[str, Any]) -> None:
    texts, pairs = ["ml.trn1.32xlarge:1"], [("ml.trn1.32xlarge", 1)]
    made = smtrain.plan(raw, machines=texts, best=True).to_dict()
    assert made == smtrain.plan(raw, machines=pairs, best=True).to_dict()
    for wrong in ("ml.trn1.32xlarge", "ml.trn1.32xlarge:0", ":4"):
        with pytest.raises(ConfigError, match=f"machines: '{wrong}' must look like"):
            smtrain.plan(raw, machines=[wrong])
