"""Packages that a job installs at its start because its image lacks them, and the time that took last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from smtrain.client.launch import wheels
from smtrain.client.preflight.context import Absent, Context, Unread
from smtrain.client.preflight.findings import Finding
from smtrain.core.config import Stage
from smtrain.core.facts.sagemaker import LOG_GROUP
from smtrain.core.protocol import log_lines
from smtrain.core.protocol.entrypoints import WORDS
from smtrain.stages import STAGES

if TYPE_CHECKING:
    from smtrain.client.launch.image_inspect import Contents

LOOKED_AT = 3
"""The number of jobs whose logs are read at most."""
FIRST_HOURS_MS = 6 * 3600_000
"""A job has started by this time after its creation; later lines are not read."""


def libraries(
    contents: Contents, stages: Sequence[Stage], needs: Sequence[str] = (), about: str = "libraries", it: str = "it"
) -> Iterator[Finding]:
    """Packages that stages import and the image lacks; `needs`: those of the data (core/protocol/data_packages.py)."""
    required, remedy = contents.lacking["requirements"], "`smtrain image build` adds it"
    lacks = {
        line.partition("#")[0].strip(): [s for s in stages if line in required[s]]
        for s in stages
        for line in required[s]
    }
    for line, concerned in lacks.items():
        which = "every stage needs" if len(concerned) == len(stages) else f"stage {', '.join(concerned)} needs"
        yield Finding(about, "fault", f"{it} has no {line}, which {which}", remedy)
    for need in needs:
        for line in required[WORDS[need]]:
            lacks[line] = []
            yield Finding(about, "fault", f"{it} has no {line}, which {need} needs", remedy)
    if late := travelling(contents, stages):
        yield Finding(
            about, "ok", f"{it} lacks {', '.join(late)}, which travel with the code, and every host installs them "
            "at every start; `smtrain image build` puts them in",
        )  # fmt: skip
    if not lacks and not late:
        yield Finding(about, "ok", f"{it} has every library of the stages: a job installs nothing when it starts")


def travelling(contents: Contents, stages: Sequence[Stage]) -> list[str]:
    """Packages that these stages install from wheels in the bundle."""
    lines = (line for stage in stages for line in contents.lacking["wheels"][stage])
    return sorted({line.partition("==")[0] for line in lines})


def last_time(context: Context) -> Iterator[Finding]:
    """The installation time of the newest job of the run that installed something; nothing if no log has it."""
    try:
        newest = _newest(context)
    except Unread:
        return  # this is only a figure, not a condition of the run
    if newest:
        job, what, seconds = newest
        yield Finding("image", "ok", f"{job} installed {what} when it started, in {seconds:.1f} s")


def _newest(context: Context) -> tuple[str, str, float] | None:
    name = context.config.name
    listed = context.ask(
        "sagemaker", "list_training_jobs", NameContains=f"{name}-", SortBy="CreationTime", SortOrder="Descending",
        MaxResults=50,
    )  # fmt: skip
    starts = tuple(f"{name}-{stage}-" for stage in STAGES if wheels.names(stage))
    jobs = [job for job in listed["TrainingJobSummaries"] if job["TrainingJobName"].startswith(starts)]
    for job in jobs[:LOOKED_AT]:
        created = int(job["CreationTime"].timestamp() * 1000)
        try:
            page = context.ask(
                "logs", "filter_log_events", absent=["ResourceNotFoundException"], logGroupName=LOG_GROUP,
                logStreamNamePrefix=f"{job['TrainingJobName']}/", filterPattern=log_lines.INSTALLED_PATTERN,
                startTime=created, endTime=created + FIRST_HOURS_MS,
            )  # fmt: skip
        except Absent:
            return None
        installations = [
            installed for event in page["events"] if (installed := log_lines.installed(event["message"].strip()))
        ]
        if installations:
            # The slowest host delays the run.
            return (job["TrainingJobName"], *max(installations, key=lambda one: one[1]))
    return None
