"""Machine use while a host trains: a file with all readings, and a line in the log once a
minute.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from smtrain.core.protocol.log_lines import machine_line
from smtrain.core.text import Say
from smtrain.worker.output import log_line
from smtrain.worker.train.device_use import DeviceUse

READ_INTERVAL = 10
"""Seconds between readings."""
READINGS_PER_LINE = 6
"""Readings that make a line of the log; the first has a separate line."""
_SECTOR = 512  # bytes, whatever the disk's own are


class MachineWatch:
    """Reads in a thread until it is closed.

    `machine-<host>.jsonl` has every reading, with its time since 1970.
    """

    def __init__(
        self,
        folder: Path,
        host: str,
        counters: MachineCounters,
        devices: Callable[[int], DeviceUse] = DeviceUse,
        say: Say = log_line,
    ) -> None:
        self._path, self._say = folder / f"machine-{host}.jsonl", say
        self._counters, self._devices = counters, devices(READ_INTERVAL)
        self._unreported: list[dict[str, float]] = []
        self._reading_count, self._has_write_error = 0, False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="machine", daemon=True)
        self._thread.start()

    def take(self) -> None:
        """Read once."""
        numbers = self._counters.read() | self._devices.read()
        if not numbers:
            return
        self._reading_count += 1
        self._unreported.append(numbers)
        self._keep({"time": time.time(), **numbers})
        if self._reading_count == 1 or len(self._unreported) >= READINGS_PER_LINE:
            self._tell()

    def close(self) -> None:
        """Read for the last time, and end."""
        self._over.set()
        self._thread.join(READ_INTERVAL)
        if not self._thread.is_alive():  # else a disk or a tool hangs, and we would hang with it
            self.take()
            if self._unreported:
                self._tell()
        self._devices.close()

    def _watch(self) -> None:
        while not self._over.wait(READ_INTERVAL):
            self.take()

    def _tell(self) -> None:
        self._say(machine_line(mean(self._unreported)))
        self._unreported = []

    def _keep(self, record: Mapping[str, float]) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps({key: round(value, 4) for key, value in record.items()}) + "\n"
                )
        except OSError as error:
            if not self._has_write_error:
                self._say(f"{self._path} cannot be written ({error.strerror}); training continues")
            self._has_write_error = True


def mean(readings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number over those that have it."""
    names = dict.fromkeys(name for reading in readings for name in reading)
    values = {name: [reading[name] for reading in readings if name in reading] for name in names}
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


@dataclass
class MachineCounters:
    """Processor time, memory, network and disk use from /proc and /sys; what a system does not tell
    is left out.
    """

    disk: Path
    """A path on the disk whose use is read."""
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    _previous: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._previous = dict(self._read_counters())

    def read(self) -> dict[str, float]:
        """Shares of 1 (`cpu`, `memory`, `disk`) and bytes a second (`net_in`, ...) since the
        reading before.
        """
        counters = dict(self._read_counters())
        growth = {
            name: value - self._previous[name]
            for name, value in counters.items()
            if name in self._previous
        }
        self._previous = counters
        reading: dict[str, float] = {}
        if (cpu_ticks := growth.get("cpu_all", 0.0)) > 0:
            reading["cpu"] = min(1.0, max(0.0, 1 - growth["cpu_idle"] / cpu_ticks))
        with suppress(OSError, ValueError, KeyError):
            reading["memory"] = self._memory()
        with suppress(OSError):
            use = shutil.disk_usage(self.disk)
            reading["disk"] = 1 - use.free / use.total if use.total else 0.0
        if (elapsed_seconds := growth.get("time", 0.0)) > 0:
            # A counter goes back if its device was removed and added again.
            reading |= {
                name: max(0.0, growth[name]) / elapsed_seconds
                for name in growth
                if name.startswith(("net_", "disk_"))
            }
        return reading

    def _read_counters(self) -> Iterator[tuple[str, float]]:
        """Counters that only grow."""
        yield "time", time.monotonic()
        with suppress(OSError, ValueError, IndexError):
            ticks = [float(word) for word in self._text("stat").split("\n", 1)[0].split()[1:9]]
            yield "cpu_all", sum(ticks)
            yield "cpu_idle", ticks[3] + ticks[4]  # waiting for a disk is idle, too
        with suppress(OSError, ValueError, IndexError):
            bytes_received, bytes_sent = self._network()
            yield "net_in", bytes_received
            yield "net_out", bytes_sent
        with suppress(OSError, ValueError, IndexError):
            read, bytes_written = self._disks()
            yield "disk_read", read
            yield "disk_write", bytes_written

    def _memory(self) -> float:
        rows = (line.split() for line in self._text("meminfo").splitlines())
        sizes = {row[0]: float(row[1]) for row in rows if len(row) > 1}
        return 1 - sizes["MemAvailable:"] / sizes["MemTotal:"]

    def _network(self) -> tuple[float, float]:
        """Bytes in and out of the machine, without the loopback."""
        rows = {
            name.strip(): columns.split()
            for name, _, columns in self._rows("net/dev", ":")
            if name.strip() != "lo"
        }
        # Bridges and tunnels count the bytes of the real cards a second time.
        real = {
            name: row
            for name, row in rows.items()
            if (self.sys / "class/net" / name / "device").exists()
        }
        cards = (real or rows).values()
        bytes_received, bytes_sent = (
            sum(float(row[0]) for row in cards),
            sum(float(row[8]) for row in cards),
        )
        # The kernel does not see what passes through an EFA device.
        for port in self.sys.glob("class/infiniband/*/ports/*/hw_counters"):
            with suppress(OSError, ValueError):
                came, went = (float((port / name).read_text()) for name in ("rx_bytes", "tx_bytes"))
                bytes_received, bytes_sent = bytes_received + came, bytes_sent + went
        return bytes_received, bytes_sent

    def _disks(self) -> tuple[float, float]:
        """Bytes read from and written to whole disks; partitions and volumes would count twice."""
        rows = [line.split() for line in self._text("diskstats").splitlines()]
        whole_disks = [
            row
            for row in rows
            if len(row) > 9 and (self.sys / "block" / row[2] / "device").exists()
        ]
        return _SECTOR * sum(float(row[5]) for row in whole_disks), _SECTOR * sum(
            float(row[9]) for row in whole_disks
        )

    def _rows(self, name: str, mark: str) -> Iterator[tuple[str, str, str]]:
        return (line.partition(mark) for line in self._text(name).splitlines() if mark in line)

    def _text(self, name: str) -> str:
        return (self.proc / name).read_text("utf-8", "replace")
