"""`launch` one stage, or `run` them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smtrain.client.backends.choose import backend_of
from smtrain.client.config.load import Source
from smtrain.client.jobs.checkpoints import saved_steps
from smtrain.client.jobs.job import Job
from smtrain.client.launch import compiled_graphs, notify, queued_backends, regions
from smtrain.client.launch.request import Request
from smtrain.client.launch.stages import Chain, StagePlan
from smtrain.client.launch.submit import running_fallback, submit
from smtrain.client.planner.resolve import load_config, with_tags
from smtrain.client.runs.run import Run, StageResult
from smtrain.core.config import JobConfig, Stage
from smtrain.core.config.units import spell
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.git import TAG, describe_commit
from smtrain.core.interrupts import Interrupted
from smtrain.core.protocol.log_lines import Line
from smtrain.core.public_api import public
from smtrain.core.targets import TargetName
from smtrain.core.text import Say
from smtrain.stages import stages_of

if TYPE_CHECKING:
    from smtrain.client.follow.show import View

LaunchCheck = Callable[[Chain, Sequence[Stage], Say], None]
AfterRun = Callable[[Chain, Say], None]


@public
def request(
    source: Source | None = None,
    *,
    stage: Stage = "train",
    target: TargetName | None = None,
    set_: Sequence[str] = (),
    **sections: Any,
) -> dict[str, Any]:
    """The CreateTrainingJob request that `launch` would send for a first attempt.

    Sends nothing, starts nothing.

    Args:
        source: The config: a YAML file's path, a mapping, or a `JobConfig`. None: `sections` are
            all of it.
        stage: The stage that it is for.
        target: the name of a target, in place of the config's `target`.
        set_: `a.b=value` texts, as `--set` takes them; the value is read as YAML. Wins over
            `source` and `sections`.
        **sections: The config's sections as mappings, merged into what `source` says.

    Returns:
        The request, which a notebook shows as one line that opens.

    Raises:
        ConfigError: The config is wrong.
        JobError: Account, region or role cannot be told.

    Examples:
        >>> request = smtrain.request("llama.yaml", stage="train")
        >>> request["ResourceConfig"]["InstanceType"], request["ResourceConfig"]["InstanceCount"]
        ('ml.trn1.2xlarge', 2)
    """
    config = load_config(source, set_=set_, target=target, **sections)
    return Request(Chain(config, backend_of(config, target), look=False).plan(stage).request)


def launch_stage(
    config: JobConfig,
    stage: Stage,
    *,
    target: TargetName | None,
    wait: bool,
    again: bool,
    precheck: LaunchCheck | None,
    say: Say,
    view: View | None,
) -> Job:
    """Start one stage of a config, as `smtrain.launch` does; precheck: the checks before it, None
    for none.
    """
    chain = regions.locate(_chain(config, target, say), stage)
    plan = running_fallback(chain, chain.plan(stage))
    if plan.completed_job and not again:
        repeats = plan.stale_note(plan.completed_job) or "; --again (again=True) repeats it"
        say(
            f"{plan.completed_job.name} has done this already (output"
            f" {plan.completed_job.output}){repeats}"
        )
        return plan.completed_job
    if precheck and not plan.running_job:
        _require_checkpoints(chain, [stage])
        precheck(chain, [stage], say)
    notify.require_notifiable(chain, [stage], say)
    job = _start(chain, plan, say, again=again)
    if wait and _follow_job(job, say, view):
        with notify.told_of(chain, stage, job, say):
            job.check()
        notify.notify_finished(chain, stage, job, say)
    return job


def run_list(
    sources: Sequence[Any],
    sections: Mapping[str, Any],
    *,
    target: TargetName | None,
    again: bool,
    precheck: LaunchCheck | None,
    on_end: AfterRun | None,
    set_: Sequence[str],
    say: Say,
    on_line: Callable[[Line], None] | None,
    view: View | None,
) -> list[Run]:
    """Take several configs through all their stages, one after the other."""
    from smtrain.client.runs.series import (
        load_series,
        overview,
        run_series,
    )  # brings the whole planner

    links = load_series(sources, set_=set_, target=target, **sections)
    say(overview(links))
    run_one = partial(
        run_stages,
        target=target,
        again=again,
        precheck=precheck,
        on_end=on_end,
        say=say,
        on_line=on_line,
        view=view,
        wait=True,
    )
    return run_series(links, run_one, say, precheck)


def run_stages(
    config: JobConfig,
    *,
    target: TargetName | None,
    again: bool,
    precheck: LaunchCheck | None,
    on_end: AfterRun | None,
    say: Say,
    on_line: Callable[[Line], None] | None,
    view: View | None,
    wait: bool,
) -> Run:
    """Take one config through all its stages, as `smtrain.run` does.

    precheck: the checks before it, None for none. after: called when all stages have ended well.
    """
    chain = _chain(config, target, say)
    run = Run(chain.config)
    stages = stages_of(config, chain.target.name)
    if precheck:
        _require_checkpoints(chain, stages)
        precheck(chain, [stage for stage in stages if not chain.has_job(stage)], say)
    if chain.target.record.chains:
        notify.require_notifiable(chain, stages, say)
        _queue(chain, stages, run, say, on_line, view, again=again, wait=wait)
        if wait:
            notify.notify_finished(chain, run.results[-1].stage, run.results[-1].job, say)
        return run
    if not wait:
        raise ConfigError(
            ["wait: only a Slurm cluster runs a chain by itself; leave it out for another target"],
            code="config.combination",
        )
    notify.require_notifiable(chain, stages, say)
    for number, stage in enumerate(stages, 1):
        chain = regions.locate(chain, stage)
        plan = running_fallback(chain, chain.plan(stage))
        start_time = time.monotonic()
        heading = f"[{number}/{len(stages)}] {stage}"
        if plan.completed_job and not again:
            say(
                f"{heading}: done before by"
                f" {plan.completed_job.name}{plan.stale_note(plan.completed_job)}"
            )
            job, is_skipped = plan.completed_job, True
        else:
            name = plan.running_job.name if plan.running_job else plan.request["TrainingJobName"]
            say(f"{heading}: {name}{plan.stale_note(plan.running_job) if plan.running_job else ''}")
            job, is_skipped = _start(chain, plan, say, again=again), False
            with notify.told_of(chain, stage, job, say):
                _follow(job, say, on_line, view)
        seconds = time.monotonic() - start_time
        if not is_skipped:
            say(f"{heading}: done in {spell(seconds)}")
        output_uri = chain.checkpoints if stage == "train" else job.output
        run.results.append(StageResult(stage, job, seconds, output_uri, is_skipped))
    if not all(result.skipped for result in run.results):
        if on_end:
            on_end(chain, say)
        notify.notify_finished(chain, run.results[-1].stage, run.results[-1].job, say)
    return run


def _chain(config: JobConfig, target: TargetName | None, say: Say) -> Chain:
    chain = Chain(config, backend_of(config, target))
    if chain.image_note:
        say(chain.image_note)
    return chain


def _require_checkpoints(chain: Chain, stages: Sequence[Stage]) -> None:
    """Raise `ConfigError` or `JobError` if stages would start from a checkpoint that does not
    exist.
    """
    step = chain.config.checkpoint.step
    first = next((stage for stage in stages if stage in ("train", "export")), None)
    if first is None or chain.has_started(first) or (first == "train" and step is None):
        return
    try:
        steps = [
            int(checkpoint.name.rpartition("_")[2])
            for checkpoint in saved_steps(chain.target, chain.checkpoints)
            if checkpoint.is_complete
        ]
    except JobError:  # this caller may not list them; the job may
        return
    if first == "export" and not steps:
        raise JobError(
            f"stage export reads the checkpoints of stage train, and {chain.checkpoints} has none;"
            " launch stage train first, or `smtrain run` the whole chain",
            code="checkpoint.missing",
        )
    if first == "train" and step not in steps:
        raise ConfigError(
            [
                f"checkpoint.step: {step} is not a whole checkpoint of this run (those are:"
                f" {', '.join(map(str, steps)) or 'none'}); name one of them, or leave it out to"
                " resume from the newest"
            ],
            code="checkpoint.missing",
        )


def _queue(
    chain: Chain,
    stages: Sequence[Stage],
    run: Run,
    say: Say,
    on_line: Callable[[Line], None] | None,
    view: View | None,
    *,
    again: bool,
    wait: bool,
) -> None:
    """Submit all stages at once; if `wait`, follow them one after the other."""
    for stage, job in queued_backends.submit_chain(chain, stages, say, again=again).items():
        start_time, is_skipped = time.monotonic(), job.known_done
        if wait and not is_skipped:
            with notify.told_of(chain, stage, job, say):
                _follow(job, say, on_line, view)
        output_uri = chain.checkpoints if stage == "train" else job.output
        run.results.append(
            StageResult(stage, job, time.monotonic() - start_time, output_uri, is_skipped)
        )


def _start(chain: Chain, plan: StagePlan, say: Say, *, again: bool) -> Job:
    if chain.target.record.queues:
        return queued_backends.submit(chain, plan, say, again=again)[0]
    if plan.stage == "train" and not plan.running_job:
        compiled_graphs.announce_compiling(chain.target, chain.config, plan.request, say)
    return submit(chain, plan, say, again=again)


def _follow_job(job: Job, say: Say, view: View | None, **view_changes: Any) -> bool:
    """Follow a job on the terminal; imported here, as starting a job does not need rich."""
    from smtrain.client.follow.show import View, follow

    return follow(job, replace(view or View(), **view_changes), say)


def _follow(job: Job, say: Say, on_line: Callable[[Line], None] | None, view: View | None) -> None:
    if on_line is None:
        if not _follow_job(job, say, view, keep=False):
            say("run the same again: finished stages are skipped, and it joins this one")
            raise Interrupted(
                f"interrupted: {job.name} keeps running; the same call joins it again"
            )
    else:
        for event in job.events():
            if isinstance(event, Line):
                on_line(event)
    job.check()


def with_commit_tag(config: JobConfig, folder: Path | None = None) -> JobConfig:
    """The config with the folder's commit as a tag of its jobs; unchanged without a commit, or if
    it has such a tag.
    """
    if TAG in config.tags or (commit := describe_commit(folder)) is None:
        return config
    return with_tags(config, **{TAG: commit})
