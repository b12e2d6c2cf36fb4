"""The lines of a job's log: write and parse the numbers of steps and machines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

STEP_PATTERN = '"step="'
"""CloudWatch's filter pattern for lines of steps."""
SOFTWARE, PROFILE, MACHINE = "software: ", "profile: ", "machine: "
"""Beginnings of the lines with a train job's versions, with the time of each part of a step, and
with a host's use of its machine.
"""
WARNING = "warning: at step "
"""Beginning of a line with a finding about a training's health, told once in an attempt."""
INSTALLED_PATTERN = '"installed "'
"""CloudWatch's filter pattern for the line with the packages that a host installed when it started.
"""
_INSTALL_LINE = re.compile(r"^installed (.+) in ([0-9]{1,6}\.[0-9]) s$")
_STEP = re.compile(r"^step=(\d{1,15}) ")
_FORMATS = {
    "loss": ".6f",
    "grad_norm": ".4f",
    "lr": ".4e",
    "tokens_per_s": ".1f",
    "mfu": ".4f",
    "padding": ".4f",
    "data_wait": ".4f",
    "loss_scale": ".0f",
    "skipped": ".0f",
    "param_norm": ".4f",
    "batch": ".0f",
    "val_loss": ".6f",
    "val_ppl": ".4f",
    "val_accuracy": ".4f",
    "val_margins": ".6f",
    "rewards/chosen": ".6f",
    "rewards/rejected": ".6f",
    "rewards/margins": ".6f",
    "rewards/accuracies": ".4f",
    "logps/chosen": ".4f",
    "logps/rejected": ".4f",
    "experts/aux_loss": ".4f",
    "experts/entropy": ".4f",
    "experts/load_max": ".3f",
    "experts/load_min": ".3f",
    "experts/dropped": ".4f",
}
PAIR_NUMBERS = tuple(name for name in _FORMATS if name.startswith(("rewards/", "logps/")))
"""Numbers of a step on pairs of answers, under TRL's names."""
ROUTING_NUMBERS = tuple(name for name in _FORMATS if name.startswith("experts/"))
"""Numbers of a step of a mixture of experts: a fixed few, as SageMaker takes 40 metrics of a job.
"""
_MACHINE_FORMATS = {
    "cpu": ".4f",
    "memory": ".4f",
    "disk": ".4f",
    "net_in": ".0f",
    "net_out": ".0f",
    "disk_read": ".0f",
    "disk_write": ".0f",
    "device": ".4f",
    "device_memory": ".4f",
}
MACHINE_NUMBERS = tuple(_MACHINE_FORMATS)
"""Numbers of a host's machine: shares of 1, and bytes per second (`net_*`, `disk_read`,
`disk_write`).
"""
_PAIR = re.compile(r"([\w/]+)=([-+]?(?:[0-9.]+(?:[eE][-+]?\d+)?|nan|inf))\b")


@dataclass(frozen=True)
class Line:
    """One line of a host's log."""

    host: str
    timestamp: int
    """Milliseconds since 1970."""
    text: str


def host_of(stream: str) -> str:
    """`algo-2` of a stream named `<job>/algo-2-<epoch>`."""
    return "-".join(stream.rpartition("/")[2].split("-")[:2])


def step_line(numbers: Mapping[str, float], last: int) -> str:
    """The log line of a step: `step`, the other numbers in order, and the run's last step `of`.

    Raises `KeyError` for a number without a format.
    """
    pairs = [
        f"{name}={value:{_FORMATS[name]}}" for name, value in numbers.items() if name != "step"
    ]
    return " ".join([f"step={int(numbers['step'])}", *pairs, f"of={last}"])


def step_record(text: str) -> dict[str, float] | None:
    """The numbers of a `step=...` line; None for other lines.

    A last step `of` is left out unless it is finite.
    """
    if not _STEP.match(text):
        return None
    numbers = {key: float(value) for key, value in _PAIR.findall(text)}
    return {key: value for key, value in numbers.items() if key != "of" or isfinite(value)}


def warning(text: str) -> str | None:
    """The finding of a line about a training's health; None for other lines."""
    return text.removeprefix("warning: ") if text.startswith(WARNING) else None


def parse_install(text: str) -> tuple[str, float] | None:
    """The packages that a host installed when it started (entrypoints/launch.py), and the seconds
    that it took; None for other lines.
    """
    match = _INSTALL_LINE.match(text)
    return (match[1], float(match[2])) if match else None


def machine_line(numbers: Mapping[str, float]) -> str:
    """The log line with a host's use of its machine: the known ones of MACHINE_NUMBERS."""
    fields = [
        f"{name}={numbers[name]:{form}}"
        for name, form in _MACHINE_FORMATS.items()
        if name in numbers
    ]
    return MACHINE + " ".join(fields)


def machine_record(text: str) -> dict[str, float] | None:
    """The numbers of a `machine: ...` line; None for other lines."""
    if not text.startswith(MACHINE):
        return None
    numbers = {key: float(value) for key, value in _PAIR.findall(text) if key in _MACHINE_FORMATS}
    return {key: value for key, value in numbers.items() if isfinite(value)} or None


def step_records(lines: Iterable[Line]) -> list[dict[str, float]]:
    """The numbers of all `step=...` lines, one mapping per step, in order; the last line of a
    repeated step counts.
    """
    records: dict[float, dict[str, float]] = {}
    for line in lines:
        if record := step_record(line.text):
            # the line of a validation has only its own numbers
            previous_record = {} if "loss" in record else records.get(record["step"], {})
            records[record["step"]] = {**previous_record, **record}
    return [records[step] for step in sorted(records)]
