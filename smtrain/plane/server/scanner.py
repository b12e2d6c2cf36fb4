"""Metric expressions, matched by a separate process, as a user's expression may run for ever.

The process has a limit of processor time for each expression, not of wall time, which depends on
the machine's load. It imports only the standard library and ends with its standard input.
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
"""Processor time of one expression for the lines of one call, rounded up to a whole second."""
SILENT_SECONDS = 60.0
"""Wall time after which the process is killed: it was stopped, or hangs in a system call."""
MEMORY_BYTES = 2 << 30
SLOW = "it takes too long for some lines"


class Scanner:
    """The process, started when it is first needed and again if it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def find(self, patterns: list[str], lines: list[str]) -> list[list[str] | str]:
        """Matches of the first group of each pattern in the lines, or the reason why a pattern
        cannot be used.

        Raises OSError if the process cannot be started.
        """
        answers: list[list[str] | str] = []
        with self._lock:
            while len(answers) < len(patterns):
                answers += self._answers(patterns[len(answers) :], lines)
        return answers

    def _answers(self, patterns: list[str], lines: list[str]) -> list[list[str] | str]:
        """Answers up to the pattern at which the process died or hung, which is the last answer."""
        process, answers = self._ensure_process(), list[list[str] | str]()
        try:
            self._ask(process, lines)
            for pattern in patterns:
                self._ask(process, pattern)
                assert process.stdout
                ready, _, _ = select.select([process.stdout], [], [], SILENT_SECONDS)
                line = process.stdout.readline() if ready else b""
                if not line:
                    died = process.wait() if ready else 0
                    answers.append(
                        SLOW if died in (0, -signal.SIGXCPU) else "the process that tried it died"
                    )
                    self.close()
                    break
                answers.append(json.loads(line))
        except BaseException:
            self.close()
            raise
        return answers

    def _ask(self, process: subprocess.Popen[bytes], message: list[str] | str) -> None:
        assert process.stdin
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()

    def _ensure_process(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self._process

    def close(self) -> None:
        """Kill the process; the next call starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe
                with contextlib.suppress(OSError):  # unflushed bytes have no reader
                    pipe.close()
            self._process = None


def _matches(pattern: str, lines: list[str]) -> Iterator[str]:
    regex = re.compile(pattern)
    if regex.groups:
        for line in lines:
            yield from (
                text for match in regex.finditer(line) if (text := match.group(1)) is not None
            )


def _answer(pattern: str, lines: list[str]) -> list[str] | str:
    # The kernel kills this process at the limit. A Python signal handler would not run: `re` does
    # not return to it.
    limit = math.ceil(time.process_time()) + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    try:
        return list(_matches(pattern, lines))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Read lists of lines and patterns; answer each pattern with its matches in the last list."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    lines: list[str] = []
    for line in sys.stdin.buffer:
        value = json.loads(line)
        if isinstance(value, list):
            lines = value
        else:
            print(json.dumps(_answer(value, lines)), flush=True)


if __name__ == "__main__":
    main()
