"""`smtrain status JOB`: where a job stands."""

from __future__ import annotations

from smtrain.cli import options

app = options.app()


@app.command()
def status(job: options.JobName, target: options.At = options.TargetOption.local) -> None:
    """Show a job: state, progress, checkpoints, failure."""
    from smtrain.config.units import spell
    from smtrain.job.handle import Job
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
    for uri in handle.checkpoints:
        print(f"checkpoint:  {uri}")
    print(f"output:      {handle.output}")
    if reason := told.get("FailureReason"):
        print(f"failure:     {reason}")
