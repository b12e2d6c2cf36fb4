"""What a host's kernel counts: processor time, memory, bytes over the network and to and from disks."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_SECTOR = 512  # bytes, whatever the disk's own are


@dataclass
class MachineCounters:
    """Reads /proc and /sys. What a system does not say is left out, so on one without them nothing is said at all."""

    disk: Path
    """The share used is that of the disk that holds it."""
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    _before: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._before = dict(self._counted())

    def read(self) -> dict[str, float]:
        """Shares of 1 (`cpu`, `memory`, `disk`) and bytes a second (`net_in`, ...), each since the reading before."""
        now = dict(self._counted())
        grown = {name: value - self._before[name] for name, value in now.items() if name in self._before}
        self._before = now
        found: dict[str, float] = {}
        if (every := grown.get("cpu_all", 0.0)) > 0:
            found["cpu"] = min(1.0, max(0.0, 1 - grown["cpu_idle"] / every))
        with suppress(OSError, ValueError, KeyError):
            found["memory"] = self._memory()
        with suppress(OSError):
            use = shutil.disk_usage(self.disk)
            found["disk"] = 1 - use.free / use.total if use.total else 0.0
        if (passed := grown.get("time", 0.0)) > 0:
            # a counter that went back is that of a device that came anew
            found |= {name: max(0.0, grown[name]) / passed for name in grown if name.startswith(("net_", "disk_"))}
        return found

    def _counted(self) -> Iterator[tuple[str, float]]:
        """What only grows."""
        yield "time", time.monotonic()
        with suppress(OSError, ValueError, IndexError):
            ticks = [float(word) for word in self._text("stat").split("\n", 1)[0].split()[1:9]]
            yield "cpu_all", sum(ticks)
            yield "cpu_idle", ticks[3] + ticks[4]  # waiting for a disk is idle, too
        with suppress(OSError, ValueError, IndexError):
            received, sent = self._network()
            yield "net_in", received
            yield "net_out", sent
        with suppress(OSError, ValueError, IndexError):
            read, written = self._disks()
            yield "disk_read", read
            yield "disk_write", written

    def _memory(self) -> float:
        rows = (line.split() for line in self._text("meminfo").splitlines())
        sizes = {row[0]: float(row[1]) for row in rows if len(row) > 1}
        return 1 - sizes["MemAvailable:"] / sizes["MemTotal:"]

    def _network(self) -> tuple[float, float]:
        """Bytes in and out of the machine: what its processes tell each other is none of them."""
        rows = {name.strip(): rest.split() for name, _, rest in self._rows("net/dev", ":") if name.strip() != "lo"}
        # beside a machine's own cards there may be bridges and tunnels that count the same bytes again
        real = {name: row for name, row in rows.items() if (self.sys / "class/net" / name / "device").exists()}
        counted = (real or rows).values()
        received, sent = sum(float(row[0]) for row in counted), sum(float(row[8]) for row in counted)
        # what passes an EFA device passes the kernel by
        for port in self.sys.glob("class/infiniband/*/ports/*/hw_counters"):
            with suppress(OSError, ValueError):
                came, went = (float((port / name).read_text()) for name in ("rx_bytes", "tx_bytes"))
                received, sent = received + came, sent + went
        return received, sent

    def _disks(self) -> tuple[float, float]:
        """Bytes read from and written to whole disks; partitions and volumes would count twice."""
        rows = [line.split() for line in self._text("diskstats").splitlines()]
        whole = [row for row in rows if len(row) > 9 and (self.sys / "block" / row[2] / "device").exists()]
        return _SECTOR * sum(float(row[5]) for row in whole), _SECTOR * sum(float(row[9]) for row in whole)

    def _rows(self, name: str, mark: str) -> Iterator[tuple[str, str, str]]:
        return (line.partition(mark) for line in self._text(name).splitlines() if mark in line)

    def _text(self, name: str) -> str:
        return (self.proc / name).read_text("utf-8", "replace")
