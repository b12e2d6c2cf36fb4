"""From a stage's plan to a job that has machines: exactly once, and with retries if the config asks
for them.

A job's name tells its work, so a taken name is the same work: of an earlier call, of
another process, or of a call of ours whose answer was lost. It is joined, not done twice. If AWS
has no machines, or a quota is exhausted, the stage is tried again as `compute.capacity_wait`,
`compute.fallback_instance_types` and `compute.quota_wait` say.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from smtrain.client.backends.choose import queue, sagemaker
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.backends.sagemaker.quotas import Refusal
from smtrain.client.backends.sagemaker.retry import Backoff
from smtrain.client.jobs.job import Job
from smtrain.client.launch import pools, regions
from smtrain.client.launch.inputs import upload_all
from smtrain.client.launch.ownership import claim
from smtrain.client.launch.pools import capacity_backoff
from smtrain.client.launch.prefix_siblings import refuse_siblings
from smtrain.client.launch.regions import Way
from smtrain.client.launch.stages import Chain, StagePlan
from smtrain.client.launch.wheels import wheel_uploads
from smtrain.client.sdk.session import answer_was_lost
from smtrain.core.config import JobConfig
from smtrain.core.config.units import spell
from smtrain.core.errors import JobError
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.protocol.requests import groups_of, spare_types
from smtrain.core.text import Say

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

    from smtrain.core.protocol.owner import Fence


def submit(chain: Chain, plan: StagePlan, say: Say, *, again: bool = False) -> Job:
    """The job that does a plan's work: one that runs already, or a new one, whose inputs are
    uploaded first.

    With `again` a new one is made although another runs. Returns once the request is accepted or,
    if capacity is waited for, once the job has machines. Raises `JobError` if that fails. Ctrl-C
    names the job that it leaves.
    """
    if plan.running_job and not again:
        say(
            f"{plan.running_job.name} is running already; joining"
            f" it{plan.stale_note(plan.running_job)}"
        )
        return plan.running_job
    if writer := plan.writer:
        raise JobError(
            f"{writer.name} is writing checkpoints of run {chain.config.name!r}; wait for it, stop"
            f" it with `smtrain stop {writer.name}`, or give this run another name"
        )
    refuse_siblings(chain.config, plan.request, sagemaker(chain.target))
    if plan.stage == "train" and chain.config.compute.keep_alive:
        pools.announce_reuse(
            sagemaker(chain.target), plan.request, say, wait=chain.config.compute.pool_wait
        )
    compute = chain.config.compute
    tries_regions = plan.stage == "train" and bool(compute.fallback_regions)
    ways = _ways(chain, plan, say)
    waits_for_machines = bool(compute.capacity_wait or len(ways) > 1)
    patience: Backoff | None = None
    while True:
        for way in ways:
            if tries_regions and (fault := regions.quota_fault(way.chain, way.plan)):
                way.leave(fault, say)
                continue
            if way.earlier_keys is None:
                way.earlier_keys = way.copies.keys()
                upload(way.chain, way.plan, say)
                way.copies.make(say)
            patience = patience or capacity_backoff(compute.capacity_wait, chain.target.pace)
            try:
                job = _Attempt(way.chain, way.plan, say, again).create()
            except JobError as error:
                if error.code != "aws.quota" or not tries_regions:
                    raise
                way.leave(str(error), say)
                continue
            if not waits_for_machines or _has_machines(job, say):
                if tries_regions:
                    say(f"{job.name} runs in {way.region}, the cheapest region that has room")
                return job
            say(f"{job.name}: AWS has no {_types(way.plan)} now")
            if tries_regions:
                way.leave(f"no {_types(way.plan)}", say)
            name = _next_name(way.plan, job.name)
            way.plan = replace(way.plan, request={**way.plan.request, "TrainingJobName": name})
        patience = patience or capacity_backoff(compute.capacity_wait, chain.target.pace)
        pause = patience.pause()
        if pause is None:
            kinds = ", ".join(dict.fromkeys(_types(way.plan) for way in ways))
            if tries_regions:
                places = ", ".join(dict.fromkeys(way.region for way in ways))
                raise JobError(
                    f"no region had {kinds} and quota for it ({places}); name further regions in"
                    " compute.fallback_regions, or wait longer with compute.capacity_wait",
                    code="aws.capacity",
                )
            raise JobError(
                f"AWS had no {kinds} for {spell(time.monotonic() - patience.began)}; try later or"
                " another region, wait longer with compute.capacity_wait, or name other types in"
                " compute.fallback_instance_types",
                code="aws.capacity",
            )
        say(
            f"next try in {spell(pause)}, for {spell(patience.remaining_s)} more"
            " (compute.capacity_wait)"
        )
        _sleep(pause, say)


def _ways(chain: Chain, plan: StagePlan, say: Say) -> list[Way]:
    """The stage on each machine type that smtrain tries, in each region, in order."""
    if plan.stage == "train" and chain.config.compute.fallback_regions and chain.home is None:
        by_region = regions.ways_by_dollars(chain, plan.stage, say)
    else:
        by_region = [Way.of(chain, plan)]
    ways = []
    for way in by_region:
        ways.append(way)
        if not spare_types(way.plan.request):  # else SageMaker itself chooses
            ways += [Way.of(*fallback) for fallback in _fallbacks(way.chain, way.plan)]
    return ways


def running_fallback(chain: Chain, plan: StagePlan) -> StagePlan:
    """The plan, or that of a fallback type whose job runs or has done the stage already."""
    if plan.completed_job or plan.running_job:
        return plan
    fallback_plans = (
        fallback_plan
        for _, fallback_plan in _fallbacks(chain, plan)
        if fallback_plan.completed_job or fallback_plan.running_job
    )
    return next(fallback_plans, plan)


def _fallbacks(chain: Chain, plan: StagePlan) -> list[tuple[Chain, StagePlan]]:
    """The same stage on each fallback type; only the train stage has any."""
    if plan.stage != "train" or not chain.config.compute.fallback_instance_types:
        return []
    from smtrain.client.planner.fallback import variants

    chains = [Chain(fallback, chain.target, look=chain.look) for fallback in variants(chain.config)]
    for fallback in chains:
        fallback.home, fallback.lent = chain.home, chain.lent
    return [(fallback, fallback.plan(plan.stage)) for fallback in chains]


def _types(plan: StagePlan) -> str:
    """The instance types that a request may get, in words."""
    (kind, _), *_ = groups_of(plan.request)
    return " or ".join([kind, *spare_types(plan.request)])


def _next_name(plan: StagePlan, name: str) -> str:
    """The name of the attempt after the one of this name."""
    number = name.removeprefix(plan.base_name).removeprefix("-")
    return f"{plan.base_name}-{int(number or 1) + 1}"


class _Attempt:
    """One job to be created, under the first free name."""

    def __init__(self, chain: Chain, plan: StagePlan, say: Say, again: bool) -> None:
        self.chain, self.plan, self.say, self.again = chain, plan, say, again
        self.target, self.request = sagemaker(chain.target), plan.request
        self.patience = capacity_backoff(chain.config.compute.quota_wait, chain.target.pace)
        self.fence: Fence | None = None

    def create(self) -> Job:
        from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

        while True:
            name = self.request["TrainingJobName"]
            if self.plan.stage == "train":
                self.fence = claim(self.target, self.chain.config, self.request)
            try:
                create(self.target, self.request, self.chain.config)
            except KeyboardInterrupt:
                self.say(
                    f"interrupted while {name} was being created; `smtrain status {name}` says"
                    " whether it exists"
                )
                raise
            except ParamValidationError as error:
                self._let_go()
                raise JobError(f"{name} was refused: {error}", code="aws.refused") from None
            except ClientError as error:
                code = error.response.get("Error", {}).get("Code")
                answer = error.response.get("ResponseMetadata", {})
                if code == "ResourceInUse":
                    if job := self._join_or_rename(name, error):
                        return job
                elif code == "ResourceLimitExceeded":
                    self._await_quota(Refusal(self.target, error.response["Error"]["Message"]))
                elif answer.get("HTTPStatusCode", 400) >= 500:
                    return self._find_created(name, error)
                else:
                    self._let_go()
                    raise JobError(f"{name} was refused: {error}", code="aws.refused") from None
            except BotoCoreError as error:
                return self._find_created(name, error)
            else:
                return self._job(name)

    def _let_go(self) -> None:
        """Give the checkpoints back: there will be no job of the name that they were claimed
        for.
        """
        if self.fence:
            self.fence.release()

    def _job(self, name: str) -> Job:
        job = Job(name, self.target)
        job.known_status = "InProgress"
        return job

    def _join_or_rename(self, name: str, error: ClientError) -> Job | None:
        """The job to join if a name is in use; None if the next name is to be tried."""
        job = Job(name, self.target)
        if answer_was_lost(error, job.describe()):
            return job
        if not self.again and job.known_status not in ("Failed", "Stopped"):
            note = (
                "has done this already" if job.known_done else "was started meanwhile; joining it"
            )
            self.say(f"{name} {note}")
            return job
        self.request = {**self.request, "TrainingJobName": _next_name(self.plan, name)}
        return None

    def _find_created(self, name: str, error: Exception) -> Job:
        """The job that a call without a proper answer created; raises `JobError` if it created
        none.
        """
        job = Job(name, self.target)
        try:
            job.describe()
        except Exception:
            raise JobError(
                f"{name} could not be created: {error}; the same command tries again"
            ) from None
        self.say(f"{name} exists, though AWS did not say so when it was created ({error})")
        return job

    def _await_quota(self, refusal: Refusal) -> None:
        """Wait for instances in use; raises `JobError` if no waiting was requested, or if it took
        too long.
        """
        name = self.request["TrainingJobName"]
        pause = self.patience.pause()
        if pause is None:
            self._let_go()
            waited_s = self.chain.config.compute.quota_wait
            suffix = f" after {spell(waited_s)} of waiting" if waited_s else ""
            raise JobError(f"{name} was refused{suffix}: {refusal.sentence()}", code="aws.quota")
        self.say(
            f"{refusal.short()}; next try in {spell(pause)}, for {spell(self.patience.remaining_s)}"
            " more (quota_wait)"
        )
        _sleep(pause, self.say)


def _has_machines(job: Job, say: Say) -> bool:
    """Wait until a job has machines; False if it gets none."""
    began = said_at = time.monotonic()
    interval_s = 30 * job.target.pace.look
    try:
        while True:
            description = job.describe_patiently()
            if job.known_status in FINAL_STATUSES:
                return not str(description.get("FailureReason", "")).startswith("CapacityError")
            if description["SecondaryStatus"] not in (
                "Starting",
                "Pending",
                "LaunchingMLInstances",
            ):
                return True
            if time.monotonic() - said_at >= interval_s:
                said_at = time.monotonic()
                say(
                    f"{job.name}: {description['SecondaryStatus']} for {spell(said_at - began)},"
                    " waiting for machines"
                )
            time.sleep(job.target.pace.look)
    except KeyboardInterrupt:
        job_arguments = f"{job.name} --target {job.target.name}"
        say(
            f"left {job.name}, which waits for machines; follow it with `smtrain logs"
            f" {job_arguments} --follow`, stop it with `smtrain stop {job_arguments}`"
        )
        raise


def _sleep(seconds: float, say: Say) -> None:
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        say("stopped waiting; no job is running, and the same command waits again")
        raise


def create(target: SageMakerBackend, request: dict[str, Any], config: JobConfig) -> None:
    """Send the request once: through the SageMaker SDK that `compute.sdk` selects, else through
    boto3.

    Raises botocore's own `ClientError` or `ParamValidationError` untouched, so that the caller can
    tell a capacity or quota error from a fault of the request.
    """
    from smtrain.client import sdk  # either SageMaker SDK takes a second to import

    if generation := sdk.sdk_for(target, config):
        sdk.submit(generation, target, request)
    else:
        target.sagemaker.create_training_job(**request)


def upload(chain: Chain, plan: StagePlan, say: Say) -> None:
    """Upload the code and the inputs of a stage; files that are there already are skipped. Raises
    `JobError` if that fails.
    """
    if chain.target.record.queues:
        place = queue(chain.target)
        for item in plan.uploads:
            place.put(item.uri, item.files, say)
        return
    target = sagemaker(chain.target)
    upload_all(target, list(plan.uploads), say)
    upload_all(target, wheel_uploads(plan.request, target, say), say)
