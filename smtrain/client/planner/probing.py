"""Measure the speed of this machine once for each kind of run, and keep it in $SMTRAIN_HOME."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from smtrain.core.config import JobConfig
from smtrain.core.config.compute import MachineEntry
from smtrain.core.errors import SmtrainError
from smtrain.core.extras import missing_module, present
from smtrain.core.files import home, home_path, read_object, write_atomically
from smtrain.core.machine import cores_here, gpus_here, processor_here
from smtrain.core.spinner import spinner
from smtrain.core.text import say
from smtrain.version import __version__

FILE = "probe.json"
SECONDS = 120.0
"""Time limit of a measurement; it takes some 5 seconds on two cores."""

BUSY = 0.7
"""Load per core above which a measurement is not kept."""


@dataclass(frozen=True)
class Speed:
    """The speed of each training process on this machine, or why it is unknown."""

    entry: MachineEntry | None
    reason: str = ""
    """The reason if it is unknown, with the remedy."""


def speed_of(config: JobConfig, *, measure: bool = True) -> Speed:
    """The speed of this machine for a config's processes and number format; without `measure`, only
    if kept.
    """
    processes, number = _devices(config), "bf16" if config.train.precision == "bf16" else "fp32"
    key = _key(processes, number)
    entry = _load_measurements().get(key)
    if entry is None and measure:
        if not present("torch"):
            return Speed(
                None, f"the speed of this machine cannot be measured: {missing_module('torch')}"
            )
        say("measuring this machine, once: matrix multiplication, some 5 seconds", error=True)
        busy = os.getloadavg()[0] > BUSY * cores_here()
        with spinner("measuring this machine"):
            measurement = _measure(processes, number)
        if isinstance(measurement, str):
            return Speed(None, f"the speed of this machine could not be measured ({measurement})")
        entry = measurement
        if busy:
            say(
                "this machine is busy with other things, so the measurement is not kept", error=True
            )
        else:
            _save_measurement(key, entry)
    if entry is None:
        return Speed(
            None, "the speed of this machine is not measured yet; `smtrain plan CONFIG` measures it"
        )
    share = processes / config.world_size  # more processes than devices share these
    return Speed(
        entry.model_copy(update={"devices": config.world_size, "tflops": entry.tflops * share})
    )


def _devices(config: JobConfig) -> int:
    """Processes that can compute at the same time: at most the number of GPUs, or of processor
    cores.
    """
    return max(1, min(config.world_size, gpus_here() or cores_here()))


def _key(processes: int, number: str) -> str:
    """Identifies machine, software and kind of run: a change in any of them is measured again."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    machine = f"{processor_here()}, {cores_here()} cores, {gpus_here()} GPUs"
    return f"{machine}; torch {torch}, smtrain {__version__}; {processes} processes, {number}"


def _file() -> Path:
    return home_path() / FILE


def _load_measurements() -> dict[str, MachineEntry]:
    """All kept measurements; a file that cannot be read counts as empty and is replaced."""
    try:
        entries = read_object(_file())
        return {key: MachineEntry.model_validate(entry) for key, entry in entries.items()}
    except (OSError, ValueError, AttributeError, ValidationError):
        return {}


def _save_measurement(key: str, entry: MachineEntry) -> None:
    plain = {
        name: measurement.model_dump(exclude_none=True)
        for name, measurement in {**_load_measurements(), key: entry}.items()
    }
    with contextlib.suppress(
        OSError, SmtrainError
    ):  # if the home takes no file, each run measures again
        home()
        write_atomically(_file(), json.dumps(plain, indent=2), sync=False)


def _measure(processes: int, number: str) -> MachineEntry | str:
    """Measure in another process, so that torch is not imported here; a text says why that
    failed.
    """
    command = [sys.executable, "-m", "smtrain.worker.train.probe", str(processes), number]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    try:
        return MachineEntry.model_validate(json.loads(process.stdout))
    except ValueError:
        last = [line for line in process.stderr.splitlines() if line.strip()]
        return last[-1] if last else f"it ended with status {process.returncode}"
