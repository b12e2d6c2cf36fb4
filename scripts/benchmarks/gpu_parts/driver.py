"""Run parts one after the other, each in its own process with its own time limit, and keep every
line at once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

RESULT = "RESULT "
"""Begins a line of a part's output that holds a result as JSON; other lines go to the log."""
MIN_SECONDS = 8.0
"""Seconds that must be left for a part to be started."""
Line = dict[str, Any]


class Driver:
    """`command` makes the command of a part; `keep` gets each result as it comes, in this
    process.
    """

    def __init__(
        self,
        parts: dict[str, float],
        command: Callable[[str], Sequence[str]],
        seconds: float,
        folder: Path,
        keep: Callable[[Line], None],
        ahead: int | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        """`parts` are time limits by name, in order; `ahead` parts import while another one
        measures.
        """
        self._parts, self._command, self._keep = parts, command, keep
        self._end = time.monotonic() + seconds
        self._ahead = max(1, min(4, (os.cpu_count() or 1) // 2)) if ahead is None else ahead
        self._env = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        self._log = (folder / "log.txt").open("ab")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> None:
        """Run every part; a part that fails or is late gives one line with the reason."""
        names = list(self._parts)
        try:
            for at, name in enumerate(names):
                seconds_left = self._end - time.monotonic()
                if seconds_left < MIN_SECONDS:
                    self._keep({"part": name, "skipped": "no time was left"})
                    continue
                for next_part in names[at : at + 1 + self._ahead]:
                    self._start(next_part)
                self._measure(name, min(self._parts[name], seconds_left))
        finally:
            for process in self._processes.values():
                _kill(process)
                if process.stdout is not None:
                    process.stdout.close()
            self._log.close()

    def _start(self, name: str) -> None:
        """Start a part's process, which imports and then waits for a line."""
        if name not in self._processes:
            self._processes[name] = subprocess.Popen(
                list(self._command(name)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )

    def _measure(self, name: str, limit: float) -> None:
        """Let a part begin; its limit counts from the end of its imports."""
        process, began = self._processes[name], time.monotonic()
        state = _Reader(name, process, self._log, self._keep)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it failed before; its exit code says so
            process.stdin.write(b"go\n")
            process.stdin.flush()
        has_imported = state.imported.wait(max(0.0, self._end - MIN_SECONDS - time.monotonic()))
        limit = min(limit, max(0.0, self._end - time.monotonic())) if has_imported else 0.0
        reason = ""
        try:
            if process.wait(limit):
                reason = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            reason = (
                f"took longer than {limit:.0f} s"
                if has_imported
                else "no time was left after its imports"
            )
        _kill(process)  # also processes that it started, which would keep its output open
        state.join()
        if reason.startswith("exit code"):
            reason = state.last or reason
        if reason:
            self._keep({"part": name, "failed": reason})
        self._keep({"part": name, "seconds": round(time.monotonic() - began, 1)})


class _Reader:
    """Reads a part's output in a thread: results are kept, every line is logged."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], log: Any, keep: Callable[[Line], None]
    ) -> None:
        self.imported = threading.Event()
        self.last = ""
        self._name, self._process, self._log, self._keep = name, process, log, keep
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for text in self._lines():
            if text.startswith(RESULT):
                line = json.loads(text.removeprefix(RESULT))
                if line.get("imported"):
                    self.imported.set()
                else:
                    self._keep({"part": self._name, **line})
            elif text.strip():
                self.last = text.strip()[:300]
        self.imported.set()  # also if the process failed before

    def _lines(self) -> Iterator[str]:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for raw in output:
                self._log.write(raw)
                self._log.flush()
                yield raw.decode(errors="replace").rstrip("\n")

    def join(self) -> None:
        self._thread.join(60)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a part with all processes that it started: inductor has some that compile."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    if process.stdin is not None:
        with suppress(BrokenPipeError):  # a line that it never read
            process.stdin.close()


def child_command(name: str, toy: bool) -> list[str]:
    """The command of a part."""
    return [
        sys.executable,
        "-m",
        "scripts.benchmarks.gpu_parts.child",
        name,
        *(["--toy"] if toy else []),
    ]
