"""`smtrain logs JOB`: what the hosts wrote."""

from __future__ import annotations

import re
from typing import Annotated, Optional

import typer

from smtrain.cli import options
from smtrain.errors import JobError

app = options.app()


@app.command()
def logs(
    job: options.JobName,
    target: options.At = options.TargetOption.local,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    host: Annotated[Optional[str], typer.Option(help="Only this host, e.g. algo-2.")] = None,  # noqa: UP045
    grep: Annotated[Optional[str], typer.Option(help="Only lines that match this regular expression.")] = None,  # noqa: UP045
) -> None:
    """Print what a job's hosts wrote."""
    from smtrain.job.handle import Job

    try:
        wanted = re.compile(grep) if grep else None
    except re.error as error:
        raise JobError(f"--grep {grep}: is not a regular expression ({error})") from None
    handle = Job(job, target.value)
    hosts = handle.describe()["ResourceConfig"]["InstanceCount"]
    if host is not None and host not in {f"algo-{n + 1}" for n in range(hosts)}:
        raise JobError(f"--host {host}: {job} has algo-1" + (f" to algo-{hosts}" if hosts > 1 else " alone"))
    if follow:
        handle.follow(host=host, grep=grep)
        return
    for line in handle.lines(host):
        if not wanted or wanted.search(line.text):
            print(f"{line.host} | {line.text}" if hosts > 1 else line.text)
