"""`smtrain.report`: a run's page, written to a file."""

from __future__ import annotations

import os
from pathlib import Path

from smtrain.client.jobs.job import Job
from smtrain.core.errors import ConfigError
from smtrain.core.facts.sagemaker import TargetName
from smtrain.core.public import public
from smtrain.tools.report.gather import gather
from smtrain.tools.report.page import GENERATOR, failed, page

_MARK = f'<meta name="generator" content="{GENERATOR}">'


@public
def report(
    run: str, out: str | Path | None = None, *, target: TargetName | None = None, overwrite: bool = False
) -> Path:
    """Write a run's report: one HTML page that fetches nothing from anywhere.

    It has what ran, the curves, validation, evaluation, the cost by stage and what of it paid for no step, the
    environment, and the config that runs it again. A report that is there is replaced.

    Args:
        run: The run's name, or the name or ARN of one of its jobs.
        out: The file to write. Default: `<run>.html` in the working directory.
        target: `local` or `aws`. Default: where a job of that name is, first here, then on AWS.
        overwrite: Replace a file that is no report.

    Returns:
        The file.

    Raises:
        ConfigError: `out` is an empty name or a folder.
        JobError: There is no such run, or `out` is a file that is no report.

    Examples:
        >>> smtrain.report("llama").name
        'llama.html'
    """
    if out is not None and (not str(out).strip() or Path(out).is_dir()):
        raise ConfigError([f"out: {str(out)!r} is not a file name; give one such as report.html"])
    found = gather(run, target)
    file = Path(out) if out is not None else Path(f"{found.name}.html")
    refuse_other(file, overwrite)
    why = [str(Job(job.name, found.target).explain()) for job in failed(found)]
    text = page(found, why)
    beside = file.with_name(f".{file.name}.part")
    try:
        beside.write_text(text, "utf-8")
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)
    return file


def refuse_other(file: Path, overwrite: bool) -> None:
    """Raise `ConfigError` where a file is there that is no report of ours."""
    if overwrite or not file.exists():
        return
    with file.open("rb") as content:
        head = content.read(4096)
    if _MARK.encode() not in head:
        raise ConfigError([f"{file}: exists and is not a report; name another file, or use --overwrite"])
