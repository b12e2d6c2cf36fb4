"""Measure test files: seconds in a worker, and CPU seconds of all its processes.

The environment keeps durations.json.

A worker's processes are itself and those that inherited its mark: control planes, warm Pythons,
commands. A process that has ended counts if one of these waited for it.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

KEPT = Path(sys.prefix) / "durations.json"
MARK = "TESTS_WORKER"
SHOWN = 10
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Spent:
    """Durations of one test file: seconds in its worker, CPU seconds, and the number of tests."""

    wall: float = 0.0
    cpu: float = 0.0
    tests: int = 0


def known() -> dict[str, Spent]:
    """The durations that the last runs kept, by file; empty if there is no record or it is
    damaged.
    """
    try:
        content = json.loads(KEPT.read_text("utf-8"))
        return {file: Spent(**spent) for file, spent in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def keep(measured: dict[str, Spent]) -> None:
    """Replace the record of each measured file; every other file keeps its own."""
    files = {file: asdict(spent) for file, spent in sorted((known() | measured).items())}
    part = KEPT.with_name(f"{KEPT.name}.{os.getpid()}")
    part.write_text(json.dumps(files, indent=1), "utf-8")
    part.replace(KEPT)


def cpu_seconds(mark: str) -> float:
    """CPU seconds so far of this process and of all running ones whose environment has the mark."""
    word = f"{MARK}={mark}".encode()
    return sum(
        _used(pid)
        for pid in _pids()
        if pid == os.getpid() or word in _read(pid, "environ").split(b"\0")
    )


def _pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _read(pid: int, name: str) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def _used(pid: int) -> float:
    """User and system time of a process and of its children that it waited for: fields 14 to 17 of
    proc(5) stat.
    """
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return sum(map(int, fields[11:15])) / _TICK if fields else 0.0


def table(measured: dict[str, Spent]) -> Iterator[str]:
    """The slowest files, then CPU seconds by folder, as lines."""
    slowest = sorted(measured.items(), key=lambda item: -item[1].wall)[:SHOWN]
    yield (
        f"{'seconds':>8} {'CPU':>7} {'tests':>6}  the {len(slowest)} slowest of {len(measured)}"
        " files"
    )
    for file, spent in slowest:
        yield f"{spent.wall:8.1f} {spent.cpu:7.1f} {spent.tests:6}  {file}"
    folders: dict[str, float] = {}
    for file, spent in measured.items():
        folder = file.rpartition("/")[0]
        folders[folder] = folders.get(folder, 0) + spent.cpu
    shown = (
        f"{folder} {cpu:.0f}" for folder, cpu in sorted(folders.items(), key=lambda item: -item[1])
    )
    wall, cpu = (sum(getattr(spent, key) for spent in measured.values()) for key in ("wall", "cpu"))
    yield f"CPU seconds by folder, {cpu:.0f} in all ({wall:.0f} worker seconds): {', '.join(shown)}"


def longest_first(items: list[pytest.Item], root: Path, last: dict[str, float]) -> None:
    """Sort files by their last duration, so that no long one comes last while the other
    workers wait.

    A file without a record goes in front if it has a test marked slow, else behind. `scripts/test
    --changed` sets SMTRAIN_TEST_ORDER, and keeps the order of the arguments.
    """
    if os.environ.get("SMTRAIN_TEST_ORDER") == "given":
        return
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def seconds(item: pytest.Item) -> float:
        file = item.path.relative_to(root).as_posix() if item.path.is_relative_to(root) else ""
        return last.get(file, 1e9 if item.path in slow else 0.0)

    items.sort(key=lambda item: (-seconds(item), item.path.as_posix()))


class Durations:
    """The pytest plugin: CPU time is measured in the workers, wall time in the process that gets
    their reports.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.root = config.rootpath
        self.controls = not hasattr(config, "workerinput")
        # All workers must sort alike, also if another run of pytest writes its record meanwhile.
        last = getattr(config, "workerinput", {}).get("last")
        self.last: dict[str, float] = (
            {f: s.wall for f, s in known().items()} if last is None else last
        )
        self.mark = os.environ[MARK] = uuid.uuid4().hex
        self.before = cpu_seconds(self.mark)
        self.cpu: dict[str, float] = {}
        self.files: dict[str, Spent] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        longest_first(items, self.root, self.last)

    @pytest.hookimpl(optionalhook=True)  # of pytest-xdist
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["last"] = self.last

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.controls:
            spent = self.files.setdefault(report.nodeid.partition("::")[0], Spent())
            spent.wall += report.duration
            spent.tests += report.when == "setup"

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        yield
        if nextitem is None or nextitem.path != item.path:
            now = cpu_seconds(self.mark)
            file = item.nodeid.partition("::")[0]
            self.cpu[file] = self.cpu.get(file, 0) + max(0.0, now - self.before)
            self.before = now

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["cpu"] = self.cpu
        else:
            self.add(self.cpu)

    @pytest.hookimpl(optionalhook=True)  # of pytest-xdist
    def pytest_testnodedown(self, node: Any) -> None:
        self.add(getattr(node, "workeroutput", {}).get("cpu", {}))

    def add(self, cpu: dict[str, float]) -> None:
        for file, seconds in cpu.items():
            self.files.setdefault(file, Spent()).cpu += seconds

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.controls or not self.files:
            return
        keep(
            {
                file: Spent(round(s.wall, 2), round(s.cpu, 2), s.tests)
                for file, s in self.files.items()
            }
        )
        terminalreporter.section("durations")
        for line in table(self.files):
            terminalreporter.write_line(line)
