"""`smtrain.tune`: train one config with several values within a budget, and find the best."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from smtrain.client.backends.choose import backend_of, sagemaker
from smtrain.client.config.load import Source
from smtrain.client.launch.inputs import upload_all
from smtrain.client.launch.stages import Chain
from smtrain.client.launch.wheels import wheel_uploads
from smtrain.client.planner.plan import plan
from smtrain.client.planner.resolve import load_config
from smtrain.client.prices import HOUR, Prices, option_of, own_prices, price_given
from smtrain.core import text
from smtrain.core.config import JobConfig, Stage
from smtrain.core.digests import digest
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.files import home, only_writer, replacing_files
from smtrain.core.interrupts import resumable_interrupt
from smtrain.core.public_api import public
from smtrain.core.targets import TARGETS, TargetName
from smtrain.core.text import Say
from smtrain.stages import stage_named, stages_before, stages_of
from smtrain.tools.check import look_first
from smtrain.tools.run import launch
from smtrain.tools.tune import managed
from smtrain.tools.tune.loop import TrialLoop, TuningLimits, finished_outputs
from smtrain.tools.tune.search import search_of
from smtrain.tools.tune.space import Axis, axes_of, grid, try_ends, with_values
from smtrain.tools.tune.trials import Tuning, TuningRecord


@resumable_interrupt("interrupted: started jobs keep running, and the same call resumes the tuning")
@public
def tune(
    source: Source | None = None,
    *,
    over: Sequence[str],
    max_jobs: int = 12,
    parallel: int = 1,
    budget: float | None = None,
    early_stop: bool = True,
    out: str | Path | None = None,
    target: TargetName | None = None,
    check: bool = True,
    set_: Sequence[str] = (),
    say: Say = text.say,
    **sections: Any,
) -> Tuning:
    """Train a config several times with other values, and say which are best.

    The lowest last val_loss is best, or loss without train.validation. The stages before train run
    once for all. On AWS a SageMaker tuning job runs the trials; here and on a Slurm cluster this
    call does, and can be resumed after an interruption.

    Args:
        source: The config: a YAML file's path, a mapping, or a `JobConfig`. None: `sections` are
            all of it.
        over: What to change, as `train.lr=log:1e-5..1e-3`, `train.weight_decay=0..0.2` or
            `train.warmup_steps=10,50,100`. If every key has values, each combination is tried.
        max_jobs: Most trials.
        parallel: Trials at a time.
        budget: US dollars for all trials, by the planner's estimate. Default:
            `compute.price_limit`.
        early_stop: Stop a trial whose val_loss is worse than the median of all other trials at its
            step.
        out: The folder for best.yaml, trials.json and, with matplotlib, tuning.png. Default: no
            files.
        target: the name of a target, in place of the config's `target`.
        check: On AWS, run `smtrain.check` first, and start nothing if it finds a fault.
        set_: `a.b=value` texts, as `--set` takes them; the value is read as YAML. Wins over
            `source` and `sections`.
        say: Called with each line.
        **sections: The config's sections as mappings, merged into `source`.

    Returns:
        The trials and the best of them; `print` it for the table.

    Raises:
        ConfigError: The config or `over` is wrong.
        JobError: The budget would be exceeded, a stage before train failed, or all trials fail.

    Examples:
        >>> smtrain.tune("llama.yaml", over=["train.lr=1e-4,3e-4"], budget=0.01)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        smtrain.core.errors.JobError: 2 trials cost some $...
    """
    config, axes = _resolve_search(source, over, max_jobs, parallel, budget, set_, target, sections)
    place = backend_of(config, target)
    limits = _limits(config, axes, max_jobs, parallel, budget, early_stop)
    search = (
        search_of(axes, limits.max_jobs, config.train.seed) if not place.record.rented else None
    )
    if out is not None and Path(out).is_file():
        raise ConfigError(f"out: {out} is a file; name a folder", code="config.wrong_value")
    earlier = [stage for stage in stages_of(config, place.name) if stage in stages_before("train")]
    if check:
        look_first(Chain(config, place), [*earlier, "train"], say)
    for stage in earlier:
        launch(config, stage=stage, target=place.name, check=False, say=say)
    chain = Chain(config, place)
    objective = _objective(config)
    if search is None:
        name, trials = _on_aws(chain, axes, objective, limits, say)
    else:
        shared_stages: list[Stage] = [stage for stage in earlier if stage_named(stage).is_shared]
        record = TuningRecord(home() / "tuning" / f"{config.name}-{_key(chain, axes)[:8]}.json")
        name = record.path.stem
        with only_writer(record.path, JobError):
            trials = TrialLoop(
                chain,
                finished_outputs(chain, shared_stages),
                objective,
                search,
                limits,
                record,
                say,
            ).run()
    tuning = Tuning(name, objective, axes, tuple(trials))
    return tuning if out is None else _write_files(tuning, config, Path(out))


@public
def tuning_job(
    source: Source | None = None,
    *,
    over: Sequence[str],
    max_jobs: int = 12,
    parallel: int = 1,
    budget: float | None = None,
    early_stop: bool = True,
    target: TargetName | None = None,
    set_: Sequence[str] = (),
    **sections: Any,
) -> dict[str, Any]:
    """The CreateHyperParameterTuningJob request that `tune` would send to AWS.

    Sends nothing; arguments as there.
    """
    config, axes = _resolve_search(source, over, max_jobs, parallel, budget, set_, target, sections)
    limits = _limits(config, axes, max_jobs, parallel, budget, early_stop)
    return _request(
        Chain(config, backend_of(config, target), look=False), axes, _objective(config), limits
    )


def describe_trials(
    source: Source | None = None,
    *,
    over: Sequence[str],
    max_jobs: int = 12,
    parallel: int = 1,
    budget: float | None = None,
    early_stop: bool = True,
    target: TargetName | None = None,
    set_: Sequence[str] = (),
    **sections: Any,
) -> list[str]:
    """Lines about the trials that `tune` would run itself: their stages, their values, their limits.

    Starts nothing; arguments as there.
    """
    config, axes = _resolve_search(source, over, max_jobs, parallel, budget, set_, target, sections)
    limits = _limits(config, axes, max_jobs, parallel, budget, early_stop)
    earlier = [
        stage for stage in stages_of(config, config.target) if stage in stages_before("train")
    ]
    lines = [
        f"would run {' and '.join(earlier) or 'no stage'} once, then {limits.max_jobs} trials of"
        f" {config.train.steps:,} steps, {limits.parallel} at a time, judged by"
        f" {_objective(config)}"
        + (", and stop those behind the median" if limits.early_stop else "")
    ]
    if any(axis.is_range for axis in axes):
        return [*lines, *(f"  {axis}" for axis in axes)]
    trials = (" ".join(f"{key}={value}" for key, value in values.items()) for values in grid(axes))
    return [*lines, *(f"  {trial}" for trial in trials)]


def _resolve_search(
    source: Source | None,
    axis_texts: Sequence[str],
    max_jobs: int,
    parallel: int,
    budget: float | None,
    set_: Sequence[str],
    target: TargetName | None,
    sections: dict[str, Any],
) -> tuple[JobConfig, tuple[Axis, ...]]:
    """The config and the search space; raises `ConfigError` with their faults."""
    faults = [
        f"{key}: got {n}; a number above 0 is needed"
        for key, n in (("max_jobs", max_jobs), ("parallel", parallel))
        if n < 1
    ]
    if budget is not None and not 0 < budget < float("inf"):
        faults.append(f"budget: got {budget}; a number of dollars above 0 is needed")
    if faults:
        raise ConfigError(faults, code="config.wrong_value")
    axes = axes_of([axis_texts] if isinstance(axis_texts, str) else axis_texts)
    config = load_config(source, set_=set_, target=target, **sections)
    if not TARGETS[config.target].sagemaker and (
        range_texts := [str(axis) for axis in axes if axis.is_range]
    ):
        raise ConfigError(
            f"--over {range_texts[0]}: target {config.target} tries combinations alone; name"
            " values, with commas between",
            code="config.combination",
        )
    try_ends(config, axes)
    if not any(axis.is_range for axis in axes) and (count := len(grid(axes))) > max_jobs:
        raise ConfigError(
            f"max_jobs: {count} combinations are asked for, and {max_jobs} trials allowed; allow "
            f"{count}, or leave out values",
            code="config.combination",
        )
    return config, axes


def _objective(config: JobConfig) -> str:
    return "val_loss" if config.train.validation else "loss"


def _key(chain: Chain, axes: Sequence[Axis]) -> str:
    """A digest of everything that makes another tuning: the train job, the target, the keys and
    values.
    """
    return digest([chain.base_name("train"), chain.target.name, [str(axis) for axis in axes]])


def _limits(
    config: JobConfig,
    axes: Sequence[Axis],
    max_jobs: int,
    parallel: int,
    budget: float | None,
    early_stop: bool,
) -> TuningLimits:
    """The limits of the trials; raises `JobError` if they would exceed the budget, before anything
    starts.
    """
    count = max_jobs if any(axis.is_range for axis in axes) else len(grid(axes))
    stops_early = early_stop and config.train.validation is not None
    budget = config.compute.price_limit if budget is None else budget
    if budget is None:
        return TuningLimits(count, parallel, stops_early)
    try:
        planned_dollars = plan(config, target=config.target).dollars_by_item
    except ConfigError as error:
        raise JobError(
            f"cannot estimate the cost of a trial, so --budget cannot be enforced: {error}"
        ) from None
    if "train" not in planned_dollars:
        raise JobError(
            "cannot estimate the cost of a trial, so --budget cannot be enforced: give its"
            " machines' price in $SMTRAIN_HOME/prices.toml, or leave the budget out"
        )
    trial_dollars = max(_train_dollars(config, axis, value) for axis in axes for value in axis.ends)
    shared_dollars = sum(planned_dollars.get(stage, 0.0) for stage in stages_before("train"))
    total = shared_dollars + count * trial_dollars
    if total > budget:
        fitting = int((budget - shared_dollars) // trial_dollars) if budget > shared_dollars else 0
        remedy = (
            f"--max-jobs {fitting} would stay below it"
            if fitting
            else "not even one would stay below it"
        )
        raise JobError(
            f"{count} trials cost some ${total:,.2f} (${trial_dollars:,.2f} each,"
            f" ${shared_dollars:,.2f} once), above the budget of ${budget:,.2f}; {remedy}"
        )
    return TuningLimits(count, parallel, stops_early, trial_dollars, budget - shared_dollars)


def _train_dollars(config: JobConfig, axis: Axis, value: str) -> float:
    """The cost of a trial at one end of an axis, which matters for keys such as `train.steps`."""
    return plan(with_values(config, {axis.key: value}), target=config.target).dollars_by_item.get(
        "train", 0.0
    )


def _request(
    chain: Chain, axes: Sequence[Axis], objective: str, limits: TuningLimits
) -> dict[str, Any]:
    config = chain.config
    seconds = None
    if limits.budget is not None:
        # A second limit for trials that take longer than planned: the service ends the tuning after
        # this time.
        compute = config.compute
        prices = Prices(own_prices(), price_given(compute))
        price = prices.find(compute.instance_type, option_of(compute), compute.region)
        if price is not None:
            rate = price.dollars_per_hour * compute.instance_count * limits.parallel
            seconds = int(limits.budget / rate * HOUR)
    train_plan = chain.plan("train")
    request = {
        **train_plan.request,
        "TrainingJobName": train_plan.base_name,
    }  # not that of a later attempt
    return managed.tuning_request(
        config,
        request,
        axes,
        objective,
        max_jobs=limits.max_jobs,
        parallel=limits.parallel,
        early_stop=limits.early_stop,
        seconds=seconds,
    )


def _on_aws(
    chain: Chain, axes: Sequence[Axis], objective: str, limits: TuningLimits, say: Say
) -> tuple[str, list[Any]]:
    place, train_plan = sagemaker(chain.target), chain.plan("train")
    upload_all(place, list(train_plan.uploads), say)
    upload_all(place, wheel_uploads(train_plan.request, place, say), say)
    name = managed.create(place, _request(chain, axes, objective, limits), say)
    return name, managed.follow(place, name, [axis.key for axis in axes], say)


def _write_files(tuning: Tuning, config: JobConfig, folder: Path) -> Tuning:
    """The tuning with its files: the trials, the best config, and a picture if matplotlib is
    installed.
    """
    from dataclasses import replace

    trials, best_config, picture = "trials.json", "best.yaml", "tuning.png"
    with (
        only_writer(folder / trials, JobError),
        replacing_files(folder, trials, best_config, picture) as new,
    ):
        (new / trials).write_text(json.dumps(tuning.to_dict(), indent=2) + "\n", "utf-8")
        if best := tuning.best:
            values = with_values(config, best.values).model_dump(mode="json", exclude_unset=True)
            (new / best_config).write_text(yaml.safe_dump(values, sort_keys=False), "utf-8")
        with suppress(ConfigError):  # without matplotlib there is still the table
            tuning.plot().savefig(new / picture, dpi=150)
        names = [name for name in (trials, best_config, picture) if (new / name).exists()]
    return replace(tuning, files=tuple(folder / name for name in names))
