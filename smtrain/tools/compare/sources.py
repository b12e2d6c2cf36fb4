"""Read a training's numbers: from a run, a job, files of ours or of other tools, or a table in
memory.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from smtrain.client.backends.sagemaker.backend import unknown_run
from smtrain.core.errors import DataError, JobError
from smtrain.core.extras import missing_module
from smtrain.core.files import open_named, parse_json
from smtrain.core.protocol.log_lines import step_record
from smtrain.core.protocol.requests import rate_changes
from smtrain.core.suggest import near_path
from smtrain.core.targets import TargetName
from smtrain.tools.compare.series import Series, series

_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
_ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+\s*\|")
_FIELD = re.compile(rf"([A-Za-z][\w ()/-]*?)\s*:\s*({_NUMBER})(?=[A-Z|\s]|$)")
_EPOCH = re.compile(r"Epoch\s+(\d+):.*?(\d+)/(\d+|\?)\s*\[")
_PAIR = re.compile(rf"([A-Za-z_][\w /]*)=({_NUMBER})")
_STEP_LINE = re.compile(r"\bstep=\d{1,15} .*")
_EVENTS = "events.out.tfevents"
_LONGEST = 1 << 20
"""Characters of the longest line; a longer one counts as several."""
_NAME_AND_VALUE = re.compile(r"([\w. -]{1,60})=(.+)")


def read(training: Any, target: TargetName | None = None) -> Series:
    """Read a `Run`, a `Job`, a DataFrame or list of records, a path, or the name of a job or run.

    A string may carry a name, `gpu=logs/a100.txt`. Raises DataError for files without
    steps, JobError for a name of no file, job or run.
    """
    if isinstance(training, (str, Path)):
        label, source = _label(str(training))
        path = Path(source).expanduser()
        if path.exists():
            return _series_of_path(path, label or path.name)
        if "/" in source or source.endswith((".jsonl", ".csv", ".txt", ".log")):
            raise DataError(
                f"{source}: there is no such file or folder; {near_path(path)}name a log or"
                " metrics.jsonl, or a run of `smtrain list`",
                code="data.not_found",
            )
        return _series_of_name(source, label or source, target)
    if hasattr(training, "reset_index"):  # a pandas DataFrame, ours has steps as its index
        return series("table", "the table", training.reset_index().to_dict("records"))
    if isinstance(training, (list, tuple)):
        return series("records", "the list", training)
    if hasattr(training, "config") and hasattr(training, "results"):
        jobs = [result.job for result in training.results if result.stage == "train"]
        return replace(
            _series_of_attempts(jobs, training.config.name),
            objective=training.config.train.objective,
        )
    if hasattr(training, "records") and hasattr(training, "describe"):
        return _series_of_attempts([training], training.name)
    raise DataError(
        f"{training!r} is not a training; give the name of a run or job, a Run or Job, a file of"
        " metrics or a table of steps",
        code="data.not_found",
    )


def _label(text: str) -> tuple[str, str]:
    match = _NAME_AND_VALUE.fullmatch(text)
    if match is None or Path(text).exists():
        return "", text
    return match[1], match[2]


def _series_of_path(path: Path, name: str) -> Series:
    if path.is_dir():
        metrics = next(
            (
                path / file
                for file in ("metrics.jsonl", "data/metrics.jsonl")
                if (path / file).exists()
            ),
            None,
        )
        if metrics is not None:
            return _series_of_path(metrics, name)
        if any(path.rglob(f"{_EVENTS}*")):
            return series(name, str(path), _series_of_events(path))
        raise DataError(
            f"{path} holds no metrics.jsonl and no TensorBoard event files; name a folder that"
            " does",
            code="data.not_found",
        )
    if path.name.startswith(_EVENTS):
        return series(name, str(path), _series_of_events(path))
    try:
        # newline: progress bars write \r
        with (
            open_named(path) as file,
            io.TextIOWrapper(file, "utf-8", "replace", newline="\n") as lines,
        ):
            return _series_of_lines(iter(lambda: lines.readline(_LONGEST), ""), path, name)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None


def _series_of_lines(lines: Iterable[str], path: Path, name: str) -> Series:
    if path.suffix == ".jsonl":
        return series(name, str(path), _json_lines(lines))
    if path.suffix in (".csv", ".tsv"):
        split = (row for line in lines for row in line.splitlines())
        return series(
            name, str(path), csv.DictReader(split, delimiter="\t" if path.suffix == ".tsv" else ",")
        )
    records = steps(lines)
    first = next(records, None)
    if first is None:
        raise DataError(
            f"{path} has no line of a training step that smtrain knows: smtrain's, Megatron-LM's,"
            " GPT-NeoX's or NeMo's; give a CSV file with the columns step and loss"
        )
    return series(name, str(path), itertools.chain([first], records))


def _json_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            row = parse_json(line)
        except ValueError:
            continue  # the last line of a job that was killed
        if isinstance(row, dict):
            yield row


def _series_of_events(path: Path) -> list[dict[str, float]]:
    """TensorBoard's scalars by step, with the time each was written."""
    try:
        from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
    except ImportError:
        raise DataError(missing_module("tensorboard")) from None
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


def _series_of_name(name: str, label: str, target: TargetName | None) -> Series:
    from botocore.exceptions import ClientError

    from smtrain.client.backends.choose import backend_of_job
    from smtrain.client.jobs.job import Job
    from smtrain.client.jobs.listing import jobs_of
    from smtrain.core.aws_errors import is_unanswered

    job, place = backend_of_job(name, target)
    try:
        attempts = jobs_of(place, job, "train")
        if not attempts:
            attempts = [Job(job, place)]
            attempts[0].describe()
    except (ClientError, JobError) as error:
        if is_unanswered(error):
            raise
        nowhere = f"{name}: there is no such file, and no run or job"
        raise unknown_run(nowhere, name, place, near_path(name)) from None
    return _series_of_attempts(attempts, label)


def _series_of_attempts(attempts: list[Any], name: str) -> Series:
    """The steps of all attempts (newest first); the last record of a step counts."""
    by_job = [(job, job.records) for job in reversed(attempts)]
    rows = [record for _, records in by_job for record in records]
    description = attempts[0].describe()
    parameters = description.get("HyperParameters", {})
    try:
        tokens = float(parameters["global_batch_size"]) * float(parameters["seq_len"])
    except (KeyError, ValueError):
        tokens = None
    if "batch_ramp" in parameters:
        tokens = None  # a step has no fixed number
    changes: list[tuple[float, str, str]] = []
    if len(by_job) > 1:
        descriptions = [*(job.describe() for job, _ in by_job[:-1]), description]
        firsts = [records[0]["step"] if records else None for _, records in by_job]
        changes = rate_changes(zip(descriptions, firsts, strict=True))
    price, objective = (
        _dollars_per_hour(description, attempts[0].target),
        parameters.get("objective", ""),
    )
    joined_series = series(
        attempts[0].name, attempts[0].name, rows, tokens, price, changes, objective
    )
    return replace(
        joined_series, name=name, beginnings=1
    )  # an attempt without a checkpoint begins again


def _dollars_per_hour(description: dict[str, Any], target: Any) -> float | None:
    """The price of all machines; None if it is unknown, or the machine is the user's own."""
    from smtrain.client.follow.job_cost import known_prices
    from smtrain.core.protocol.requests import groups_of

    if target.record.here:
        return None
    option = "spot" if description.get("EnableManagedSpotTraining") else "on_demand"
    prices = known_prices(target.name)
    prices_and_counts = [
        (prices.find(kind, option, target.region_name()), count)
        for kind, count in groups_of(description)
    ]
    return (
        sum(p.dollars_per_hour * count for p, count in prices_and_counts if p)
        if all(p for p, _ in prices_and_counts)
        else None
    )


def steps(lines: Iterable[str]) -> Iterator[dict[str, float]]:
    """The numbers of every line about a step, by the tool's own names and `step`; other lines are
    skipped.

    Progress bars overwrite themselves with carriage returns: each state counts as a line.
    """
    for line in lines:
        for state in line.replace("\n", "").split("\r"):
            numbers = _step_of_line(state) or _step_of_megatron(state) or _step_of_nemo(state)
            if numbers:
                yield numbers


def _step_of_line(line: str) -> dict[str, float] | None:
    match = _STEP_LINE.search(line)
    return step_record(match[0]) if match else None


def _step_of_megatron(line: str) -> dict[str, float] | None:
    match = _ITERATION.search(line)
    if match is None:
        return None
    fields = (_FIELD.search(part) for part in line[match.end() :].split("|"))
    return {"step": float(match[1])} | {
        number[1].strip(): float(number[2]) for number in fields if number
    }


def _step_of_nemo(line: str) -> dict[str, float] | None:
    """Lightning's bar.

    It prints global_step with few digits and from 0, so the bar's own count is used.
    """
    match = _EPOCH.search(line)
    pairs = {name.strip(): float(value) for name, value in _PAIR.findall(line)} if match else {}
    if match is None or "reduced_train_loss" not in pairs:
        return None
    pairs.pop("loss", None)  # the bar's running mean
    step = pairs.pop("global_step", None)
    completed_steps = float(match[2])
    exact = match[1] == "0" or step is None
    return pairs | {"step": completed_steps if exact else (step or 0.0) + 1}
