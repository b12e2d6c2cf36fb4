"""Choose the next trial: every combination of a grid, or Optuna's proposals for ranges.

A choice depends only on the trials so far, so that a resumed tuning makes the same ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from smtrain.core.errors import ConfigError
from smtrain.core.extras import missing_module, present
from smtrain.tools.tune.space import Axis, Values, grid
from smtrain.tools.tune.trials import Trial

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

Search = Callable[[Sequence[Trial]], "Values | None"]
"""The values of the next trial; None if there is nothing left to try."""
_TRIES = 20
"""Attempts to get a proposal that has not been tried yet."""


def search_of(axes: Sequence[Axis], max_jobs: int, seed: int) -> Search:
    """A grid if every key has values, else Optuna; raises `ConfigError` if it is not installed."""
    if not any(axis.is_range for axis in axes):
        return _Combinations(grid(axes))
    if not present("optuna"):
        raise ConfigError(
            f"--over: {missing_module('optuna')}; or name values in place of ranges, which are"
            " tried one by one",
            code="package.missing",
        )
    return _Proposals(axes, max_jobs, seed)


class _Combinations:
    """A grid's combinations in order."""

    def __init__(self, combinations: list[Values]) -> None:
        self._combinations = combinations

    def __call__(self, trials: Sequence[Trial]) -> Values | None:
        past_values = [trial.values for trial in trials]
        return next((values for values in self._combinations if values not in past_values), None)


class _Proposals:
    """Optuna's tree-structured Parzen estimator; its first third of trials are random."""

    def __init__(self, axes: Sequence[Axis], max_jobs: int, seed: int) -> None:
        self._axes, self._random, self._seed = axes, max(3, max_jobs // 3), seed

    def __call__(self, trials: Sequence[Trial]) -> Values | None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        past_values = [trial.values for trial in trials]
        ranges = {axis.key: _distribution(axis) for axis in self._axes}
        for attempt in range(_TRIES):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                sampler = optuna.samplers.TPESampler(
                    seed=self._seed + len(trials) + 1000 * attempt,
                    n_startup_trials=self._random,
                    constant_liar=True,
                )
                study = optuna.create_study(direction="minimize", sampler=sampler)
                for trial in trials:
                    study.add_trial(self._optuna_trial(trial, ranges))
                proposal = study.ask(ranges)
            values = {
                axis.key: (axis.spell if axis.is_range else str)(proposal.params[axis.key])
                for axis in self._axes
            }
            if values not in past_values:
                return values
        return None

    def _optuna_trial(self, trial: Trial, ranges: dict[str, BaseDistribution]) -> FrozenTrial:
        """A trial in Optuna's terms. A trial without an objective counts as failed."""
        from optuna.trial import TrialState, create_trial

        params: dict[str, Any] = {
            axis.key: (int if axis.is_integer else float if axis.is_range else str)(
                trial.values[axis.key]
            )
            for axis in self._axes
        }
        has_value = trial.value is not None and isfinite(trial.value)
        steps = {step: value for step, value in trial.curve if isfinite(value)}
        if trial.status == "finished" and has_value:
            return create_trial(
                state=TrialState.COMPLETE,
                params=params,
                distributions=ranges,
                value=trial.value,
                intermediate_values=steps,
            )
        state = {"running": TrialState.RUNNING, "stopped early": TrialState.PRUNED}.get(
            trial.status, TrialState.FAIL
        )
        return create_trial(
            state=state, params=params, distributions=ranges, intermediate_values=steps
        )


def _distribution(axis: Axis) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not axis.is_range:
        return CategoricalDistribution(axis.values)
    if axis.is_integer:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return FloatDistribution(axis.low, axis.high, log=axis.log)
