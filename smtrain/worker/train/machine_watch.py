"""What of its machine a host uses while it trains: a file of all readings, and a line in the log once a minute."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from smtrain.core.protocol.log_lines import machine_line
from smtrain.core.text import Say
from smtrain.worker.train.device_use import DeviceUse
from smtrain.worker.train.machine_counters import MachineCounters

EVERY = 10
"""Seconds between readings."""
SAID = 6
"""Readings to a line of the log; the first reading has one of its own."""


def log_line(text: str) -> None:
    """Write a line in one piece: ranks share the log."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class MachineWatch:
    """Reads in a thread until it is closed. `machine-<host>.jsonl` has every reading, with its time since 1970."""

    def __init__(
        self, folder: Path, host: str, counters: MachineCounters, devices: Callable[[int], DeviceUse] = DeviceUse,
        say: Say = log_line,
    ) -> None:  # fmt: skip
        self._path, self._say = folder / f"machine-{host}.jsonl", say
        self._counters, self._devices = counters, devices(EVERY)
        self._unsaid: list[dict[str, float]] = []
        self._taken, self._refused = 0, False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="machine", daemon=True)
        self._thread.start()

    def take(self) -> None:
        """Read once."""
        numbers = self._counters.read() | self._devices.read()
        if not numbers:
            return
        self._taken += 1
        self._unsaid.append(numbers)
        self._keep({"time": time.time(), **numbers})
        if self._taken == 1 or len(self._unsaid) >= SAID:
            self._tell()

    def close(self) -> None:
        """Read for the last time, and end."""
        self._over.set()
        self._thread.join(EVERY)
        if not self._thread.is_alive():  # else a disk or a tool hangs, which is no reason to hang, too
            self.take()
            if self._unsaid:
                self._tell()
        self._devices.close()

    def _watch(self) -> None:
        while not self._over.wait(EVERY):
            self.take()

    def _tell(self) -> None:
        self._say(machine_line(mean(self._unsaid)))
        self._unsaid = []

    def _keep(self, record: Mapping[str, float]) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({key: round(value, 4) for key, value in record.items()}) + "\n")
        except OSError as error:
            if not self._refused:
                self._say(f"{self._path} cannot be written ({error.strerror}); training goes on")
            self._refused = True


def mean(readings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number over those that have it."""
    names = dict.fromkeys(name for reading in readings for name in reading)
    values = {name: [reading[name] for reading in readings if name in reading] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}
