"""What of a host's accelerators is used, as their makers' own tools say it: nvidia-smi (NVML) and neuron-monitor.

Both run beside the training and write what they see again and again; nothing is started anew for a reading. The format
of neuron-monitor: its user guide, "The JSON output format", Neuron 2.29.
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
"""So many periods after its last word a tool has fallen silent, and says nothing of now."""
_GPU = ["--query-gpu=index,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits"]
Reading = Callable[[str], dict[str, float] | None]


class DeviceUse:
    """The last that a tool said; nothing where the machine has none of these tools, or the tool has no devices."""

    def __init__(self, period: int) -> None:
        """`period`: seconds between a tool's words."""
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
            self._listener.join(_STALE)  # whom the tool itself has started may hold its pipe
        if self._settings:
            self._settings.unlink(missing_ok=True)

    def _run(self, command: Sequence[str], reading: Reading) -> None:
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                encoding="utf-8", errors="replace",
            )  # fmt: skip
        except OSError:  # it is there and does not run: training matters more
            return
        self._listener = threading.Thread(target=self._listen, args=(self._process, reading), daemon=True)
        self._listener.start()

    def _listen(self, process: subprocess.Popen[str], reading: Reading) -> None:
        assert process.stdout
        with process.stdout as lines:
            for line in lines:
                if found := reading(line):
                    self._last, self._at = found, time.monotonic()


class Gpus:
    """Lines of nvidia-smi, one a GPU: `0, 97, 61234, 81559` (%, MiB, MiB). A field it cannot tell is `[N/A]`."""

    def __init__(self) -> None:
        self._rows: dict[str, list[float | None]] = {}

    def __call__(self, line: str) -> dict[str, float] | None:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4:
            return None
        self._rows[fields[0]] = [_number(field) for field in fields[1:]]
        busy = [row[0] for row in self._rows.values() if row[0] is not None]
        filled = [row[1] / row[2] for row in self._rows.values() if row[1] is not None and row[2]]
        found = {"device": sum(busy) / len(busy) / 100} if busy else {}
        return found | ({"device_memory": sum(filled) / len(filled)} if filled else {})


def neuron_settings(period: int) -> dict[str, Any]:
    """neuron-monitor's settings: of every process on the Neuron cores what is read here, and no more."""
    metrics = [{"type": "neuroncore_counters"}, {"type": "memory_used"}]
    return {
        "period": f"{period}s",
        "neuron_runtimes": [{"tag_filter": ".*", "metrics": metrics}],
        "system_metrics": [],
    }


def neuron(line: str) -> dict[str, float] | None:
    """A line of neuron-monitor: one JSON object. A core that nobody uses counts as idle."""
    try:
        told = json.loads(line)
        hardware = told["neuron_hardware_info"]
        reports = [one["report"] for one in told["neuron_runtime_data"] or ()]
        cores = hardware["neuron_device_count"] * hardware["neuroncore_per_device_count"]
        # every process tells of all cores that it holds: what others do on them is 0 there
        shares = [
            core["neuroncore_utilization"]
            for report in reports
            for core in (report.get("neuroncore_counters", {}).get("neuroncores_in_use") or {}).values()
        ]
        found = {"device": min(1.0, sum(shares) / cores / 100)} if cores else {}
        memory = hardware["neuron_device_count"] * hardware.get("neuron_device_memory_size", 0)
        used = [r["memory_used"]["neuron_runtime_used_bytes"]["neuron_device"] for r in reports if "memory_used" in r]
        return found | ({"device_memory": sum(used) / memory} if memory and (used or not reports) else {})
    except (ValueError, KeyError, TypeError, AttributeError):  # another version's form
        return None


def _number(field: str) -> float | None:
    try:
        return float(field)
    except ValueError:
        return None
