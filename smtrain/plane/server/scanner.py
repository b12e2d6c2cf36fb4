"""Metric expressions, tried on lines by a process of its own: a user's expression may run for ever.

The process has a limit of processor time for each expression, not of time that passes: a busy machine is no fault of
an expression. It imports the standard library alone and ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

CPU_SECONDS = 1
"""Processor time that one expression may take for the lines of one call, to the next whole second."""
SILENT_SECONDS = 60.0
"""How long an answer is waited for before the process is ended: it was stopped, or hangs in one call."""
MEMORY_BYTES = 2 << 30
SLOW = "it takes too long for some lines"


class Scanner:
    """The process, started when it is first needed and again when it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def find(self, patterns: list[str], lines: list[str]) -> list[list[str] | str]:
        """Matches of the first group of each pattern in the lines, in their order; a text says why a pattern cannot
        be tried. Raises OSError if no process can be started."""
        found: list[list[str] | str] = []
        with self._lock:
            while len(found) < len(patterns):
                found += self._answers(patterns[len(found) :], lines)
        return found

    def _answers(self, patterns: list[str], lines: list[str]) -> list[list[str] | str]:
        """Answers as far as the process gets; of a pattern with which it died or hung, that is the answer."""
        process, found = self._running(), list[list[str] | str]()
        try:
            self._ask(process, lines)
            for pattern in patterns:
                self._ask(process, pattern)
                assert process.stdout
                ready, _, _ = select.select([process.stdout], [], [], SILENT_SECONDS)
                line = process.stdout.readline() if ready else b""
                if not line:
                    died = process.wait() if ready else 0
                    found.append(SLOW if died in (0, -signal.SIGXCPU) else "the process that tried it died")
                    self.close()
                    break
                found.append(json.loads(line))
        except BaseException:
            self.close()
            raise
        return found

    def _ask(self, process: subprocess.Popen[bytes], what: list[str] | str) -> None:
        assert process.stdin
        process.stdin.write(json.dumps(what).encode() + b"\n")
        process.stdin.flush()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        return self._process

    def close(self) -> None:
        """End the process; the next call starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe
                with contextlib.suppress(OSError):  # what was not flushed finds no reader
                    pipe.close()
            self._process = None


def _matches(pattern: str, lines: list[str]) -> Iterator[str]:
    compiled = re.compile(pattern)
    if compiled.groups:
        for line in lines:
            yield from (text for match in compiled.finditer(line) if (text := match.group(1)) is not None)


def _answer(pattern: str, lines: list[str]) -> list[str] | str:
    # The kernel ends this process then. A signal handler of ours would not: some expressions never let Python look.
    limit = math.ceil(time.process_time()) + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    try:
        return list(_matches(pattern, lines))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Keep what comes as a list of lines, and answer each pattern that comes after it in one line."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    lines: list[str] = []
    for asked in sys.stdin.buffer:
        told = json.loads(asked)
        if isinstance(told, list):
            lines = told
        else:
            print(json.dumps(_answer(told, lines)), flush=True)


if __name__ == "__main__":
    main()
