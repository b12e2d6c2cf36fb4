"""Measure the speed of this machine once for each kind of run, and keep it in $SMTRAIN_HOME.

A measurement of a busy machine is kept apart, with the load, until the machine is quiet.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

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

FILE, BUSY_FILE = "probe.json", "probe-busy.json"
SECONDS = 120.0
"""Time limit of a measurement; it takes some 5 seconds on two cores."""

BUSY = 0.7
"""Load per core above which the machine is busy: a measurement then is that of a shared machine."""


@dataclass(frozen=True)
class Speed:
    """The speed of each training process on this machine, or why it is unknown."""

    entry: MachineEntry | None
    reason: str = ""
    """The reason if it is unknown, with the remedy."""
    load: float = 0.0
    """Load average per core while it was measured; 0 if the machine was quiet."""

    def busy_note(self) -> str:
        """The difference between this speed and that of a run now; empty if nothing differs."""
        if self.entry is None:
            return ""
        if self.load:
            return (
                f"busy: other programs used this machine while its speed was measured"
                f" ({_spell_load(self.load)}), so the run may be up to"
                f" {self.load + 1:.0f} times faster; when the machine is quiet, the next"
                " `smtrain plan` measures it again"
            )
        if (load := load_here()) > BUSY:
            return (
                f"busy: other programs use this machine now ({_spell_load(load)}), and its speed"
                f" was measured when it was quiet; the run may be up to {load + 1:.0f} times slower"
                " while they last"
            )
        return ""


def load_here() -> float:
    """Load average of the last minute per core; 0 if the system has none."""
    try:
        return os.getloadavg()[0] / cores_here()
    except (AttributeError, OSError):
        return 0.0


def _spell_load(load: float) -> str:
    return f"load average {load * cores_here():.1f} on {cores_here()} cores"


def speed_of(config: JobConfig, *, measure: bool = True) -> Speed:
    """The speed of this machine for a config's processes and number format; without `measure`, only
    if kept. A measurement of the busy machine is replaced when it is quiet.
    """
    processes, number = _devices(config), "bf16" if config.train.precision == "bf16" else "fp32"
    key = _key(processes, number)
    entry, load = _load_measurements().get(key), 0.0
    if entry is None and (busy_entry := _load_busy_measurements().get(key)):
        load, entry = busy_entry
    if (entry is None or (load and load_here() <= BUSY)) and measure:
        if not present("torch"):
            return Speed(
                None, f"the speed of this machine cannot be measured: {missing_module('torch')}"
            )
        say("measuring this machine, once: matrix multiplication, some 5 seconds", error=True)
        load = current_load if (current_load := load_here()) > BUSY else 0.0
        with spinner("measuring this machine"):
            measurement = _measure(processes, number)
        if isinstance(measurement, str):
            return Speed(None, f"the speed of this machine could not be measured ({measurement})")
        entry = measurement
        if load:
            _save_busy_measurement(key, load, entry)
        else:
            _save_measurement(key, entry)
    if entry is None:
        return Speed(
            None, "the speed of this machine is not measured yet; `smtrain plan CONFIG` measures it"
        )
    share = processes / config.world_size  # more processes than devices share these
    return Speed(
        entry.model_copy(update={"devices": config.world_size, "tflops": entry.tflops * share}),
        load=load,
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


def _load_busy_measurements() -> dict[str, tuple[float, MachineEntry]]:
    """The load per core and the measurement, by key; a file that cannot be read counts as empty."""
    try:
        rows = read_object(_file().with_name(BUSY_FILE))
        return {
            key: (float(row["load"]), MachineEntry.model_validate(row["entry"]))
            for key, row in rows.items()
        }
    except (OSError, ValueError, AttributeError, KeyError, TypeError, ValidationError):
        return {}


def _save_measurement(key: str, entry: MachineEntry) -> None:
    plain = {
        name: measurement.model_dump(exclude_none=True)
        for name, measurement in {**_load_measurements(), key: entry}.items()
    }
    _save(_file(), plain)


def _save_busy_measurement(key: str, load: float, entry: MachineEntry) -> None:
    plain = {
        name: {"load": load, "entry": measurement.model_dump(exclude_none=True)}
        for name, (load, measurement) in {
            **_load_busy_measurements(),
            key: (load, entry),
        }.items()
    }
    _save(_file().with_name(BUSY_FILE), plain)


def _save(file: Path, plain: dict[str, Any]) -> None:
    with contextlib.suppress(
        OSError, SmtrainError
    ):  # if the home takes no file, each run measures again
        home()
        write_atomically(file, json.dumps(plain, indent=2), sync=False)


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
