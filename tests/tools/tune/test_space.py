"""Values of `--over`, and those that are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import smtrain
from smtrain.core.errors import ConfigError, JobError
from smtrain.tools.tune.space import Axis, axes_of, grid, with_values
from smtrain.tools.tune.trials import Trial, is_hopeless
from smtrain.tools.tune.tune import describe_trials


def test_ranges_values_and_powers() -> None:
    rate, warm, decay = axes_of(
        ["train.lr=log:1e-5..1e-3", "train.warmup_steps=10,50", "train.weight_decay=0..0.2"]
    )
    assert (rate.low, rate.high, rate.log, rate.is_integer) == (1e-5, 1e-3, True, False)
    assert warm.values == ("10", "50")
    assert decay.ends == ("0", "0.2")
    (steps,) = axes_of(["train.warmup_steps=log:1..100"])
    assert steps.is_integer
    assert steps.spell(7.6) == "8"
    assert grid(axes_of(["train.lr=1e-4,3e-4", "train.seed=1,2"])) == [
        {"train.lr": rate, "train.seed": seed} for rate in ("1e-4", "3e-4") for seed in ("1", "2")
    ]


@given(st.floats(1e-12, 1e9), st.floats(1e-12, 1e9), st.floats(0, 1))
def test_a_number_of_a_range_never_leaves_it(one: float, other: float, share: float) -> None:
    low, high = (float(f"{end:.6g}") for end in sorted((one, other)))
    axis = Axis("train.lr", low=low, high=high)
    text = axis.spell(low + share * (high - low))
    assert low <= float(text) <= high
    assert axis.spell(float(text)) == text, "it is read back as it was given"


def test_a_dry_run_lists_the_trials_and_starts_nothing() -> None:
    config = {"model": {"path": "demo://tiny-llama"}, "data": {"path": "demo://python-stdlib"}}
    lines = describe_trials(config, over=["train.lr=1e-4,3e-4", "train.seed=1,2"], target="local")
    assert lines[0].startswith("would run prepare and convert once, then 4 trials of ")
    assert lines[0].endswith("steps, 1 at a time, judged by loss")
    assert lines[1:3] == ["  train.lr=1e-4 train.seed=1", "  train.lr=1e-4 train.seed=2"]
    assert describe_trials(config, over=["train.lr=1e-4..3e-4"], target="local")[1:] == [
        "  train.lr=0.0001..0.0003"
    ]


WRONG = {
    "train.lr=1e-4": "one value is no choice; give two or more, or set train.lr in the config",
    "train.lr": "must look like",
    "=1": "must look like",
    "train.lr=": "must look like",
    "train.lr=1e-4,,2": "between two commas",
    "train.lr=1,1": "given twice",
    "train.lr=1e-3..1e-4": "must go up",
    "train.lr=log:0..1": "begin above 0",
    "train.lr=low..high": "is not a number",
    "train.lr=1..inf": "not a number to train with",
    "train.warmup_steps=1.5..3": "whole numbers",
    "train.schedule=0..1": "takes no numbers",
    "train.stochastic_rounding=0..1": "takes no numbers",
    "train.lrr=1,2": "no key train.lrr",
    "train.adapter=1,2": "holds further keys",
    "compute.instance_count=1,2": "only keys of train and parallel",
    "train.validation.interval=1,2": "judged by the validation",
    "train.dpo.beta=0.1,0.2": "losses of different train.dpo cannot be compared",
    "train.lr=-1,1e-4": "train.lr",
    "train.seq_len=16,32": "stage prepare makes, which all trials share",
    "parallel.tp=1,2": "stage convert makes, which all trials share",
}


@pytest.mark.parametrize("over", WRONG)
def test_what_is_wrong_is_a_sentence_with_the_text(raw: dict[str, Any], over: str) -> None:
    with pytest.raises(ConfigError) as raised:
        smtrain.tune(raw, over=[over])
    (fault,) = raised.value.faults
    assert fault.startswith("--over")
    assert WRONG[over] in fault


def test_limits_that_cannot_be_kept_are_refused_before_anything_starts(
    raw: dict[str, Any], tmp_path: Any
) -> None:
    rates = ["train.lr=1e-4,2e-4,3e-4"]
    wrongs: tuple[tuple[dict[str, Any], str], ...] = (
        ({"max_jobs": 2}, "3 combinations"),
        ({"max_jobs": 0}, "max_jobs"),
        ({"parallel": 0}, "parallel"),
        ({"budget": -1}, "budget"),
        ({"over": []}, "names no key"),
        ({"over": [*rates, "train.lr=1e-5..1e-4"]}, "given twice"),
    )
    for wrong, said in wrongs:
        with pytest.raises(ConfigError, match=said):
            smtrain.tune(raw, **{"over": rates, **wrong})
    slurm = raw | {"target": "slurm", "cluster": {"shared": str(tmp_path)}}
    with pytest.raises(ConfigError, match="combinations alone"):
        smtrain.tune(slurm, over=["train.lr=1e-5..1e-4"])
    # three at some $0.40
    with pytest.raises(JobError, match=r"3 trials cost some \$.*--max-jobs 1 would stay below it"):
        smtrain.tune(
            raw | {"compute": raw["compute"] | {"instance_count": 1}, "parallel": {}},
            over=rates,
            budget=0.5,
        )
    with pytest.raises(JobError, match="not even one"):
        smtrain.tune(raw, over=rates, budget=0.01)
    with pytest.raises(JobError, match="above the budget"):
        smtrain.tune(raw | {"compute": raw["compute"] | {"price_limit": 0.01}}, over=rates)


def test_a_trials_values_are_typed_by_the_schema(raw: dict[str, Any]) -> None:
    config = with_values(smtrain.load_config(raw), {"train.lr": "1e-05", "train.warmup_steps": "3"})
    assert (config.train.lr, config.train.warmup_steps) == (1e-05, 3)
    assert config.data == smtrain.load_config(raw).data


def finished(*values: float) -> list[Trial]:
    return [
        Trial(n, {}, status="finished", curve=[(0, 9.0), (10, v), (20, v - 1)])
        for n, v in enumerate(values)
    ]


def test_a_trial_behind_the_median_is_hopeless_but_not_too_early() -> None:
    behind = Trial(9, {}, curve=[(0, 9.0), (10, 6.0)])
    assert is_hopeless(behind, finished(3.0, 5.0, 8.0), steps=20)
    assert not is_hopeless(behind, finished(3.0, 7.0, 8.0), steps=20), "it is not behind the median"
    assert not is_hopeless(behind, finished(3.0, 5.0), steps=20), "two do not make a median"
    assert not is_hopeless(behind, finished(3.0, 5.0, 8.0), steps=100), (
        "a slow warm-up may be behind at first"
    )
    assert not is_hopeless(Trial(9, {}, curve=[(0, 9.0)]), finished(3.0, 5.0, 8.0), steps=20)


def test_a_range_of_shares_is_no_range_of_whole_numbers() -> None:
    (share,) = axes_of(["train.warmup_steps=0.01..0.1"])
    (steps,) = axes_of(["train.warmup_steps=0..1"])
    assert (share.is_integer, steps.is_integer) == (False, True)
