"""Backends with a queue.

One that chains gets all stages at once, each after the one before.

A stage is planned before those that it reads from have run, since a job's name determines the
prefix of its result. Nothing waits here: if there are no machines, the queue waits, and the client
may be gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from smtrain.client.backends.choose import queue
from smtrain.client.jobs.job import Job
from smtrain.client.launch import compiled_graphs
from smtrain.client.launch.stages import Chain, StagePlan
from smtrain.client.launch.submit import upload
from smtrain.core.config.schema import Stage
from smtrain.core.errors import JobError
from smtrain.core.text import Say


def submit_chain(
    chain: Chain, stages: Sequence[Stage], say: Say, *, again: bool = False
) -> dict[Stage, Job]:
    """A job for every stage: done before, running, or submitted now after the one before it."""
    jobs: dict[Stage, Job] = {}
    predecessor: str | None = None
    for number, stage in enumerate(stages, 1):
        plan = chain.plan(stage)
        heading = f"[{number}/{len(stages)}] {stage}"
        if plan.completed_job and not again:
            say(
                f"{heading}: done before by"
                f" {plan.completed_job.name}{plan.stale_note(plan.completed_job)}"
            )
            jobs[stage] = plan.completed_job
            continue
        jobs[stage], predecessor = submit(chain, plan, say, again=again, predecessor=predecessor)
        chain.promised[stage] = jobs[stage].name
        say(
            f"{heading}: {jobs[stage].name}"
            + (f" ({chain.target.record.service} job {predecessor})" if predecessor else "")
        )
    return jobs


def submit(
    chain: Chain, plan: StagePlan, say: Say, *, again: bool = False, predecessor: str | None = None
) -> tuple[Job, str | None]:
    """The job that does a plan's work, and its ID in the queue: an existing one, or a new one,
    whose inputs are copied first. Raises `JobError` if the queue refuses it.
    """
    place = queue(chain.target)
    if plan.running_job and not again:
        return plan.running_job, place.queued_id(plan.running_job.name)
    if writer := plan.writer:
        raise JobError(
            f"{writer.name} is writing checkpoints of run {chain.config.name!r}; wait for it, stop"
            f" it with `smtrain stop {writer.name}`, or give this run another name"
        )
    if plan.stage == "train" and "compile" not in chain.promised:
        compiled_graphs.announce_compiling(place, chain.config, plan.request, say)
    upload(chain, plan, say)
    name = plan.request["TrainingJobName"]
    id_ = place.submit(plan.request, [predecessor] if predecessor else [], say)
    if id_ is None:
        say(f"{name} was started meanwhile; joining it")
        id_ = place.queued_id(name)
    job = Job(name, place)
    job.known_status = "InProgress"
    return job, id_
