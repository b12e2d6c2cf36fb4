"""Run the trials from this process: on the local control plane, or on a Slurm cluster.

A trial is a separate run, named by its values, so that a finished job is found again by its name.
It reads the outputs of the earlier stages, which all trials share.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from smtrain.client.jobs.job import Job
from smtrain.client.launch import queued_backends
from smtrain.client.launch.stages import Chain
from smtrain.client.launch.submit import running_fallback, submit
from smtrain.core.config import JobConfig, Stage
from smtrain.core.digests import digest
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.text import Say, with_article
from smtrain.tools.tune.search import Search
from smtrain.tools.tune.space import Values, with_values
from smtrain.tools.tune.trials import FINISHED_FIRST, Trial, TuningRecord, is_hopeless

_NAME = 36  # characters of a run's name


@dataclass(frozen=True)
class TuningLimits:
    """Limits of a tuning."""

    max_jobs: int
    parallel: int
    early_stop: bool
    trial_dollars: float | None = None
    """The planner's cost of a trial."""
    budget: float | None = None
    """Dollars for all trials."""


def trial_run(config: JobConfig, values: Values) -> str:
    """Name of a trial's run, which depends only on its values."""
    mark = f"-t{digest([config.name, values])[:7]}"
    return f"{config.name[: _NAME - len(mark)].rstrip('-')}{mark}"


class TrialLoop:
    """Keep `parallel` trials running until `max_jobs` have run."""

    def __init__(
        self,
        base: Chain,
        shared_outputs: dict[Stage, str],
        objective: str,
        search: Search,
        limits: TuningLimits,
        record: TuningRecord,
        say: Say,
    ) -> None:
        self.base, self.shared, self.objective, self.search = (
            base,
            shared_outputs,
            objective,
            search,
        )
        self.limits, self.record, self.say = limits, record, say
        self.trials = record.read()
        self._jobs: dict[int, Job] = {}
        self._stopping: set[int] = set()
        self._said_budget = False

    def run(self) -> list[Trial]:
        """Run all trials and return them. Raises `JobError` if the first ones all fail."""
        for trial in self._running_trials():  # of an interrupted call; its failed jobs are resumed
            self._start(trial)
        while True:
            for trial in self._running_trials():
                self._poll(trial)
            self._refuse_if_all_fail()
            while (
                len(self._running_trials()) < self.limits.parallel
                and (values := self._next()) is not None
            ):
                trial = Trial(len(self.trials) + 1, values, trial_run(self.base.config, values))
                self.trials.append(trial)
                self.record.write(
                    self.trials
                )  # before its job exists, which is found again by its name
                self._start(trial)
            if not self._running_trials():
                return self.trials
            time.sleep(max(1.0, self.base.target.pace.poll))

    def _running_trials(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.status == "running"]

    def _next(self) -> Values | None:
        if len(self.trials) >= self.limits.max_jobs:
            return None
        budget, trial_dollars = self.limits.budget, self.limits.trial_dollars
        if budget is not None and trial_dollars is not None:
            spent_dollars = sum(
                trial_dollars if trial.dollars is None else trial.dollars for trial in self.trials
            )
            if spent_dollars + trial_dollars > budget:
                if not self._said_budget:
                    self.say(
                        f"no further trial: ${spent_dollars:,.2f} are spent or promised, one more"
                        f" costs some ${trial_dollars:,.2f}, and the budget is ${budget:,.2f}"
                    )
                self._said_budget = True
                return None
        return self.search(self.trials)

    def _start(self, trial: Trial) -> None:
        values = ", ".join(f"{key}={value}" for key, value in trial.values.items())
        try:
            config = with_values(self.base.given, trial.values | self._own_values(trial))
            chain = Chain(config, self.base.target)
            chain.lent = dict(self.shared)
            plan = running_fallback(chain, chain.plan("train"))
            if plan.completed_job:
                job = plan.completed_job
            elif self.base.target.record.queues:
                job, _ = queued_backends.submit(chain, plan, _say_nothing)
            else:
                job = submit(chain, plan, _say_nothing)
        except ConfigError as error:  # these values exclude each other; the next ones may not
            trial.status, trial.reason = "failed", "; ".join(error.faults)
            self.say(f"trial {trial.number}: {values}: {trial.reason}")
        else:
            trial.job, self._jobs[trial.number] = job.name, job
            self.say(
                f"trial {trial.number}: {values}:"
                f" {job.name}{' has done this already' if plan.completed_job else ''}"
            )
        self.record.write(self.trials)

    def _own_values(self, trial: Trial) -> Values:
        """Keys that separate a trial's run: its name, and its folder of checkpoints if the config
        has one.
        """
        uri = self.base.given.checkpoint.s3_uri
        return {
            "name": trial.run,
            **({"checkpoint.s3_uri": f"{uri.rstrip('/')}/{trial.run}"} if uri else {}),
        }

    def _poll(self, trial: Trial) -> None:
        job = self._jobs[trial.number]
        job.describe_patiently()
        has_ended = job.known_status in FINAL_STATUSES
        trial.curve = [
            (int(record["step"]), record[self.objective])
            for record in job.records
            if self.objective in record
        ]
        if trial.curve:
            trial.value = trial.curve[-1][1]
        if has_ended:
            self._end(trial, job)
        elif (
            self.limits.early_stop
            and trial.number not in self._stopping
            and is_hopeless(trial, self.trials, self.base.config.train.steps)
        ):
            self.say(
                f"trial {trial.number}: {self.objective} {trial.value:.4f} is worse than the"
                " median; stopping it"
            )
            self._stopping.add(trial.number)
            job.stop()

    def _end(self, trial: Trial, job: Job) -> None:
        trial.dollars = job.cost().dollars
        if job.known_status == "Completed":
            trial.status = "finished"
            if trial.value is None or not isfinite(trial.value):
                trial.status, trial.reason = (
                    "failed",
                    f"it ended without {with_article(self.objective)} of finite value",
                )
        elif job.known_status == "Stopped":
            trial.status = "stopped early" if trial.number in self._stopping else "stopped"
        else:
            trial.status, trial.reason = "failed", str(job.explain()).splitlines()[0]
        value = "" if trial.value is None else f", {self.objective} {trial.value:.4f}"
        self.say(f"trial {trial.number}: {trial.status}{value}")
        self.record.write(self.trials)

    def _refuse_if_all_fail(self) -> None:
        """Stop early: a mistake in the config makes every trial fail."""
        if len(self.trials) >= FINISHED_FIRST and all(
            trial.status == "failed" for trial in self.trials
        ):
            first = self.trials[0]
            raise JobError(
                f"all of the first {len(self.trials)} trials failed, trial {first.number} because:"
                f" {first.reason}; mend that, delete {self.record.path} and try again"
            )


def finished_outputs(chain: Chain, stages: Sequence[Stage]) -> dict[Stage, str]:
    """Outputs of the finished stages that all trials share."""
    return {stage: uri for stage in stages if (uri := chain.output(stage)) is not None}


def _say_nothing(*_: object, **__: object) -> None:
    """Say nothing: a trial's own uploads are small."""
