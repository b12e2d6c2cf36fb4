"""Utilisation of a host's accelerators, from nvidia-smi (NVML) or neuron-monitor.

The tool runs as long as the training and prints a reading every few seconds. neuron-monitor's
format: its user guide, "The JSON output format", Neuron 2.29.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_STALE = 3.5
"""Periods after which the last reading is too old to show."""
_GPU = [
    "--query-gpu=index,utilization.gpu,memory.used,memory.total",
    "--format=csv,noheader,nounits",
]
Reading = Callable[[str], dict[str, float] | None]


class DeviceUse:
    """The tool's last reading; empty if this machine has no such tool, or no devices."""

    def __init__(self, period: int) -> None:
        """`period`: seconds between readings."""
        self._period, self._last, self._at = period, dict[str, float](), 0.0
        self._process: subprocess.Popen[str] | None = None
        self._listener: threading.Thread | None = None
        self._settings: Path | None = None
        if shutil.which("nvidia-smi"):
            self._run(["nvidia-smi", *_GPU, "-l", str(period)], Gpus())
        elif shutil.which("neuron-monitor"):
            with tempfile.NamedTemporaryFile(
                "w", prefix="smtrain-neuron-monitor-", suffix=".json", delete=False
            ) as file:
                json.dump(neuron_settings(period), file)
            self._settings = Path(file.name)
            self._run(["neuron-monitor", "-c", file.name], neuron)

    def read(self) -> dict[str, float]:
        """`device` and `device_memory`, shares of 1 over all devices of the host."""
        return dict(self._last) if time.monotonic() - self._at < _STALE * self._period else {}

    def close(self) -> None:
        """End the tool."""
        if self._process:
            self._process.kill()  # it keeps nothing
            self._process.wait()
        if self._listener:
            self._listener.join(_STALE)  # a child of the tool may still hold the pipe open
        if self._settings:
            self._settings.unlink(missing_ok=True)

    def _run(self, command: Sequence[str], reading: Reading) -> None:
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                errors="replace",
            )
        except OSError:  # the tool is installed but does not run: no reason to stop a training
            return
        self._listener = threading.Thread(
            target=self._listen, args=(self._process, reading), daemon=True
        )
        self._listener.start()

    def _listen(self, process: subprocess.Popen[str], reading: Reading) -> None:
        assert process.stdout
        with process.stdout as lines:
            for line in lines:
                if shares := reading(line):
                    self._last, self._at = shares, time.monotonic()


class Gpus:
    """Reads nvidia-smi, one line a GPU: `0, 97, 61234, 81559` (%, MiB, MiB); an unknown field is
    `[N/A]`.
    """

    def __init__(self) -> None:
        self._rows: dict[str, list[float | None]] = {}

    def __call__(self, line: str) -> dict[str, float] | None:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4:
            return None
        self._rows[fields[0]] = [_number(field) for field in fields[1:]]
        busy = [row[0] for row in self._rows.values() if row[0] is not None]
        memory_shares = [
            row[1] / row[2] for row in self._rows.values() if row[1] is not None and row[2]
        ]
        shares = {"device": sum(busy) / len(busy) / 100} if busy else {}
        return shares | (
            {"device_memory": sum(memory_shares) / len(memory_shares)} if memory_shares else {}
        )


def neuron_settings(period: int) -> dict[str, Any]:
    """neuron-monitor's settings: only the metrics read here, for every process on the Neuron
    cores.
    """
    metrics = [{"type": "neuroncore_counters"}, {"type": "memory_used"}]
    return {
        "period": f"{period}s",
        "neuron_runtimes": [{"tag_filter": ".*", "metrics": metrics}],
        "system_metrics": [],
    }


def neuron(line: str) -> dict[str, float] | None:
    """Read a line of neuron-monitor: one JSON object. A core that no process uses is idle."""
    try:
        reading = json.loads(line)
        hardware = reading["neuron_hardware_info"]
        reports = [process["report"] for process in reading["neuron_runtime_data"] or ()]
        cores = hardware["neuron_device_count"] * hardware["neuroncore_per_device_count"]
        # Each process reports its cores only, so the sum over processes is what all cores do.
        busy = [
            core["neuroncore_utilization"]
            for report in reports
            for core in (
                report.get("neuroncore_counters", {}).get("neuroncores_in_use") or {}
            ).values()
        ]
        shares = {"device": min(1.0, sum(busy) / cores / 100)} if cores else {}
        memory = hardware["neuron_device_count"] * hardware.get("neuron_device_memory_size", 0)
        used = [
            r["memory_used"]["neuron_runtime_used_bytes"]["neuron_device"]
            for r in reports
            if "memory_used" in r
        ]
        return shares | (
            {"device_memory": sum(used) / memory} if memory and (used or not reports) else {}
        )
    except (ValueError, KeyError, TypeError, AttributeError):  # another version's format
        return None


def _number(field: str) -> float | None:
    try:
        return float(field)
    except ValueError:
        return None
