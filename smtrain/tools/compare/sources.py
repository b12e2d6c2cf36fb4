"""Where a training's numbers come from: a run, a job, files of ours or of other tools, a table in memory."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

from smtrain.client.backends.sagemaker.target import near_run
from smtrain.core.errors import DataError, JobError
from smtrain.core.extras import missing
from smtrain.core.facts.sagemaker import TargetName
from smtrain.core.near import near_path
from smtrain.core.protocol.requests import rate_changes
from smtrain.tools.compare.loglines import steps
from smtrain.tools.compare.series import Series, series

_EVENTS = "events.out.tfevents"
_NAMED = re.compile(r"([\w. -]{1,60})=(.+)")


def read(what: Any, target: TargetName | None = None) -> Series:
    """The series of a `Run`, a `Job`, a DataFrame or list of records, a path, or the name of a job or run.

    A string may carry a name of its own, `gpu=logs/a100.txt`. Raises DataError for files without steps, JobError for
    a name that is neither a file nor a job or run.
    """
    if isinstance(what, (str, Path)):
        label, where = _label(str(what))
        path = Path(where).expanduser()
        if path.exists():
            return _of_path(path, label or path.name)
        if "/" in where or where.endswith((".jsonl", ".csv", ".txt", ".log")):
            raise DataError(f"{where}: there is no such file or folder", code="data.not_found")
        return _of_name(where, label or where, target)
    if hasattr(what, "reset_index"):  # a pandas DataFrame, ours has steps as its index
        return series("table", "the table", what.reset_index().to_dict("records"))
    if isinstance(what, (list, tuple)):
        return series("records", "the list", what)
    if hasattr(what, "config") and hasattr(what, "results"):
        return _of_attempts([*[result.job for result in what.results if result.stage == "train"]], what.config.name)
    if hasattr(what, "records") and hasattr(what, "describe"):
        return _of_attempts([what], what.name)
    raise DataError(f"{what!r} is not a run, job, table or file of a training")


def _label(text: str) -> tuple[str, str]:
    match = _NAMED.fullmatch(text)
    if match is None or Path(text).exists():
        return "", text
    return match[1], match[2]


def _of_path(path: Path, name: str) -> Series:
    if path.is_dir():
        found = next((path / file for file in ("metrics.jsonl", "data/metrics.jsonl") if (path / file).exists()), None)
        if found is not None:
            return _of_path(found, name)
        if any(path.rglob(f"{_EVENTS}*")):
            return series(name, str(path), _events(path))
        raise DataError(f"{path} holds neither metrics.jsonl nor TensorBoard event files; name a folder that does")
    if path.name.startswith(_EVENTS):
        return series(name, str(path), _events(path))
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    if path.suffix == ".jsonl":
        return series(name, str(path), _json_lines(text))
    if path.suffix in (".csv", ".tsv"):
        return series(
            name, str(path), csv.DictReader(text.splitlines(), delimiter="\t" if path.suffix == ".tsv" else ",")
        )
    found_steps = list(steps(text.split("\n")))
    if not found_steps:
        raise DataError(
            f"{path} has no line of a training step that smtrain knows: smtrain's, Megatron-LM's, GPT-NeoX's or "
            "NeMo's; give a CSV file with the columns step and loss"
        )
    return series(name, str(path), found_steps)


def _json_lines(text: str) -> list[dict[str, Any]]:
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the last line of a job that was killed
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _events(path: Path) -> list[dict[str, float]]:
    """TensorBoard's scalars by step, with the time each was written."""
    try:
        from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
    except ImportError:
        raise DataError(missing("tensorboard")) from None
    runs: Any = EventMultiplexer(size_guidance={"scalars": 0})
    if path.is_dir():
        runs.AddRunsFromDirectory(str(path))
    else:
        runs.AddRun(str(path), "run")
    runs.Reload()
    by_step: dict[int, dict[str, float]] = {}
    for run, tags in runs.Runs().items():
        for tag in tags["scalars"]:
            for event in runs.Scalars(run, tag):
                row = by_step.setdefault(event.step, {"step": event.step, "time": event.wall_time})
                row.setdefault(tag, event.value)
    return list(by_step.values())


def _of_name(name: str, label: str, target: TargetName | None) -> Series:
    from botocore.exceptions import ClientError

    from smtrain.client.backends.choose import place_of
    from smtrain.client.backends.sagemaker.calls import unasked
    from smtrain.client.jobs.job import Job
    from smtrain.client.jobs.listing import jobs_of

    job, place = place_of(name, target)
    try:
        attempts = jobs_of(place, job, "train")
        if not attempts:
            attempts = [Job(job, place)]
            attempts[0].describe()
    except (ClientError, JobError) as error:
        if unasked(error):
            raise
        where = "here" if place.name == "local" else "on AWS"
        near = near_path(name) or (near_run(name) if place.name == "local" else "")
        raise JobError(
            f"{name}: there is no such file, and no run or job of this name {where}; {near}`smtrain list` lists "
            "the existing ones"
        ) from None
    return _of_attempts(attempts, label)


def _of_attempts(attempts: list[Any], name: str) -> Series:
    """The steps of all attempts (newest first); a step done twice counts last."""
    by_job = [(job, job.records) for job in reversed(attempts)]
    rows = [record for _, records in by_job for record in records]
    told = attempts[0].describe()
    given = told.get("HyperParameters", {})
    try:
        tokens = float(given["global_batch_size"]) * float(given["seq_len"])
    except (KeyError, ValueError):
        tokens = None
    changes: list[tuple[float, str, str]] = []
    if len(by_job) > 1:
        described = [*(job.describe() for job, _ in by_job[:-1]), told]
        firsts = [records[0]["step"] if records else None for _, records in by_job]
        changes = rate_changes(zip(described, firsts, strict=True))
    return series(name, name, rows, tokens, _dollars_per_hour(told, attempts[0].target), changes)


def _dollars_per_hour(told: dict[str, Any], target: Any) -> float | None:
    """Of all machines; None if no price is known, or the rate is this machine's."""
    from smtrain.client.follow.money import known_prices
    from smtrain.core.protocol.requests import groups_of

    if target.name == "local":
        return None
    option = "spot" if told.get("EnableManagedSpotTraining") else "on_demand"
    prices = known_prices(target.name)
    found = [(prices.find(kind, option, target.region_name()), count) for kind, count in groups_of(told)]
    return sum(p.dollars_per_hour * count for p, count in found if p) if all(p for p, _ in found) else None
