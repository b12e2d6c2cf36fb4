"""`smtrain status JOB`: state, progress and results of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smtrain.cli import options
from smtrain.core.text import say

if TYPE_CHECKING:
    from smtrain.client.jobs.job import Job

app = options.app()


@app.command()
def status(job: options.JobName, target: options.KnownJobTarget = None) -> None:
    """Show a job: state, progress, cost, checkpoints, and why it failed.

    $ smtrain status my-run  # the run's job that runs, has failed or waits next, or its newest
    $ smtrain status my-run-train-1a2b3c4d --target aws  # one job on AWS
    """
    from datetime import datetime, timezone
    from statistics import median

    from smtrain.client.follow.curve import sparkline
    from smtrain.client.follow.progress import Progress
    from smtrain.client.planner import plan_tag
    from smtrain.core.config.units import spell
    from smtrain.core.protocol.requests import full_status

    handle = options.job_named(job, target)
    description, current_time = handle.describe(), datetime.now(timezone.utc)
    progress = Progress(
        handle.name, handle.target.name, handle.target.region_name(), job=description
    )
    cost = progress.cost(current_time)
    say(f"job:         {handle.name}")
    say(f"status:      {full_status(description)}")
    if cost:
        say(f"machines:    {cost.machines}")
    for change in description.get("SecondaryStatusTransitions", []):
        took = (
            f"{spell((change['EndTime'] - change['StartTime']).total_seconds())}"
            if change.get("EndTime")
            else "..."
        )
        say(
            f"             {change['StartTime'].astimezone():%H:%M:%S} {change['Status']:12} {took}"
        )
    changes = description.get("SecondaryStatusTransitions", [])
    if changes and not changes[-1].get("EndTime") and (message := changes[-1].get("StatusMessage")):
        say(f"             {message}")
    if cost:
        say(f"cost:        {cost}")
    if records := handle.records:
        progress.last = records[-1]
        losses = [r["loss"] for r in records if "loss" in r]
        numbers = "  ".join(f"{name} {value}" for name, value in progress.numbers()[1:])
        say(f"step:        {progress.last['step']:.0f}  {numbers}  {sparkline(losses, 40)}")
        for text in handle.warnings:
            say(f"warning:     {text}")
    if planned_run := plan_tag.read(handle.target.tags(description)):
        rates = [r["tokens_per_s"] for r in records if "tokens_per_s" in r]
        say(f"plan:        {plan_tag.compare(planned_run, median(rates) if rates else None)}")
    for line in list_outputs(handle, description):
        say(line)
    if (explanation := handle.explain()).has_failed:
        say(explanation)


def list_outputs(job: Job, description: dict[str, Any]) -> list[str]:
    """The outputs of the job so far, their URIs, and the command that copies or continues each."""
    from smtrain.client.jobs.job import Job
    from smtrain.client.jobs.results import export_job_name, parts
    from smtrain.core.facts.sagemaker import FINAL_STATUSES
    from smtrain.core.protocol.requests import stage_of

    has_ended, copy = (
        description["TrainingJobStatus"] in FINAL_STATUSES,
        f"smtrain download {job.name} FOLDER",
    )
    stage = (stage_of(job.name) or ("", ""))[1]
    checkpoints = parts(job, "checkpoints", description)
    lines = [
        f"checkpoint:  step {int(part.folder.rpartition('_')[2])}, {part.uri}"
        for part in checkpoints
    ]
    if checkpoints:
        lines.append(f"             {copy} --what checkpoints")
    elif stage == "train":
        absence = (
            "none: it saved none, or a later job of the run pruned them"
            if has_ended
            else "none yet"
        )
        lines.append(f"checkpoint:  {absence}")
    for part in parts(job, "metrics", description):
        lines += [f"metrics:     {part.uri}", f"             {copy} --what metrics"]
    for part in parts(job, "model", description):
        heading = "model:" if stage == "export" else "output:"
        lines += [f"{heading:12} {part.uri}", f"             {copy}"]
    if stage == "train" and has_ended:
        if export := export_job_name(job, description):
            model = Job(export, job.target).output
            lines += [f"model:       {model}", f"             smtrain download {export} FOLDER"]
        elif description["TrainingJobStatus"] == "Completed":
            lines.append(
                "next:        `smtrain run CONFIG`, with the config of this job, exports the model"
            )
        elif checkpoints:
            lines.append(
                "next:        the command that started this job resumes from the last checkpoint"
            )
    return lines
