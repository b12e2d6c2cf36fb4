"""`smtrain status JOB`: where a job stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smtrain.cli import options

if TYPE_CHECKING:
    from smtrain.job.handle import Job

app = options.app()


@app.command()
def status(job: options.JobName, target: options.At = options.TargetOption.local) -> None:
    """Show a job: state, progress, checkpoints, failure."""
    from statistics import median

    from smtrain.config.units import spell
    from smtrain.job.handle import Job
    from smtrain.planner import ticket
    from smtrain.report.sparkline import sparkline

    handle = Job(job, target.value)
    told = handle.describe()
    resources = told["ResourceConfig"]
    print(f"job:         {handle.name}")
    print(f"status:      {told['TrainingJobStatus']} ({told['SecondaryStatus']})")
    print(f"machines:    {resources['InstanceCount']} x {resources['InstanceType']}")
    for change in told.get("SecondaryStatusTransitions", []):
        took = f"{spell((change['EndTime'] - change['StartTime']).total_seconds())}" if change.get("EndTime") else "..."
        print(f"             {change['StartTime'].astimezone():%H:%M:%S} {change['Status']:12} {took}")
    if "BillableTimeInSeconds" in told:
        print(f"billable:    {spell(told['BillableTimeInSeconds'] * resources['InstanceCount'])}")
    if records := handle.metrics:
        last = records[-1]
        print(
            f"step:        {last['step']:.0f}  loss {last['loss']:.4f}  {sparkline([r['loss'] for r in records], 40)}"
        )
    if planned := ticket.read(_tags(handle, told["TrainingJobArn"])):
        rates = [r["tokens_per_s"] for r in records if "tokens_per_s" in r]
        print(f"plan:        {ticket.compare(planned, median(rates) if rates else None)}")
    for uri in handle.checkpoints:
        print(f"checkpoint:  {uri}")
    print(f"output:      {handle.output}")
    if reason := told.get("FailureReason"):
        print(f"failure:     {reason}")


def _tags(job: Job, arn: str) -> list[dict[str, str]]:
    """The job's tags; none where this caller may not read them."""
    from botocore.exceptions import ClientError

    try:
        tags: list[dict[str, str]] = job.target.sagemaker.list_tags(ResourceArn=arn)["Tags"]
    except ClientError:
        return []
    return tags
