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
from smtrain.client.launch import graphs
from smtrain.client.launch.one_job import upload
from smtrain.client.launch.stages import Chain, StagePlan
from smtrain.core.config.schema import Stage
from smtrain.core.errors import JobError
from smtrain.core.text import Say


def submit_chain(
    chain: Chain, stages: Sequence[Stage], say: Say, *, again: bool = False
) -> dict[Stage, Job]:
    """A job for every stage: done before, running, or submitted now after the one before it."""
    jobs: dict[Stage, Job] = {}
    after: str | None = None
    for number, stage in enumerate(stages, 1):
        plan = chain.plan(stage)
        heading = f"[{number}/{len(stages)}] {stage}"
        if plan.done and not again:
            say(f"{heading}: done before by {plan.done.name}{plan.stale_note(plan.done)}")
            jobs[stage] = plan.done
            continue
        jobs[stage], after = submit(chain, plan, say, again=again, after=after)
        chain.promised[stage] = jobs[stage].name
        say(
            f"{heading}: {jobs[stage].name}"
            + (f" ({chain.target.record.service} job {after})" if after else "")
        )
    return jobs


def submit(
    chain: Chain, plan: StagePlan, say: Say, *, again: bool = False, after: str | None = None
) -> tuple[Job, str | None]:
    """The job that does a plan's work, and its ID in the queue: an existing one, or a new one,
    whose inputs are copied first. Raises `JobError` if the queue refuses it.
    """
    place = queue(chain.target)
    if plan.running and not again:
        return plan.running, place.queued_id(plan.running.name)
    if other := plan.writer:
        raise JobError(
            f"{other.name} is writing checkpoints of run {chain.config.name!r}; wait for it, stop"
            f" it with `smtrain stop {other.name}`, or give this run another name"
        )
    if plan.stage == "train" and "compile" not in chain.promised:
        graphs.announce(place, chain.config, plan.request, say)
    upload(chain, plan, say)
    name = plan.request["TrainingJobName"]
    id_ = place.submit(plan.request, [after] if after else [], say)
    if id_ is None:
        say(f"{name} was started meanwhile; joining it")
        id_ = place.queued_id(name)
    job = Job(name, place)
    job.known_status = "InProgress"
    return job, id_
