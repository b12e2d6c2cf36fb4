"""`smtrain status JOB`: where a job stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smtrain.cli import options
from smtrain.text import say

if TYPE_CHECKING:
    from smtrain.job.handle import Job

app = options.app()


@app.command()
def status(job: options.JobName, target: options.Where = None) -> None:
    """Show a job: state, progress, cost, checkpoints, and why it failed."""
    from datetime import datetime, timezone
    from statistics import median

    from smtrain.config.units import spell
    from smtrain.follow.progress import Progress
    from smtrain.job.handle import Job
    from smtrain.planner import ticket
    from smtrain.report.sparkline import sparkline

    handle = Job(job, options.name_of(target))
    told, now = handle.describe(), datetime.now(timezone.utc)
    progress = Progress(handle.name, handle.target.name, handle.target.region_name(), told=told)
    cost = progress.cost(now)
    say(f"job:         {handle.name}")
    say(f"status:      {told['TrainingJobStatus']} ({told['SecondaryStatus']})")
    if cost:
        say(f"machines:    {cost.machines}")
    for change in told.get("SecondaryStatusTransitions", []):
        took = f"{spell((change['EndTime'] - change['StartTime']).total_seconds())}" if change.get("EndTime") else "..."
        say(f"             {change['StartTime'].astimezone():%H:%M:%S} {change['Status']:12} {took}")
    if cost:
        say(f"cost:        {cost}")
    if records := handle.records:
        progress.last = records[-1]
        losses = [r["loss"] for r in records if "loss" in r]
        numbers = "  ".join(f"{name} {value}" for name, value in progress.numbers()[1:])
        say(f"step:        {progress.last['step']:.0f}  {numbers}  {sparkline(losses, 40)}")
    if planned := ticket.read(_tags(handle, told["TrainingJobArn"])):
        rates = [r["tokens_per_s"] for r in records if "tokens_per_s" in r]
        say(f"plan:        {ticket.compare(planned, median(rates) if rates else None)}")
    for uri in handle.checkpoints:
        say(f"checkpoint:  {uri}")
    say(f"output:      {handle.output}")
    if (why := handle.explain()).failed:
        say(why)


def _tags(job: Job, arn: str) -> list[dict[str, str]]:
    """The job's tags; none where this caller may not read them."""
    from botocore.exceptions import ClientError

    try:
        tags: list[dict[str, str]] = job.target.sagemaker.list_tags(ResourceArn=arn)["Tags"]
    except ClientError:
        return []
    return tags
