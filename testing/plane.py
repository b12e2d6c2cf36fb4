"""A control plane with test instruments: the switches of `smtrain.plane.switches`, and synthetic
jobs.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smtrain.core.protocol.log_lines import step_line
from smtrain.plane import switches
from smtrain.plane.client import EXTENSION, ensure_running

os.environ.setdefault(
    EXTENSION, "testing.synthetic"
)  # for servers that this process and its commands start


STEP_EVERY = 10


@dataclass(frozen=True)
class SyntheticJob:
    """A job that only writes lines, and the lines it writes."""

    name: str
    hosts: int
    lines: int
    last_words: Mapping[str, Sequence[str]]

    def expected(self, host: str) -> list[str]:
        """All lines of a host (`algo-3`), in order."""
        rank = int(host.rpartition("-")[2]) - 1
        return [line_of(rank, i, self.lines) for i in range(self.lines)] + list(
            self.last_words.get(host, ())
        )

    def digest(self, host: str) -> str:
        """sha256 (hex) of a host's lines, joined by newlines."""
        return digest_of(self.expected(host))


def line_of(rank: int, number: int, lines: int) -> str:
    """Line `number` (from 0) of the host of this rank; every tenth of the first host's is a
    training step's.
    """
    if rank == 0 and number % STEP_EVERY == 0:
        step, steps = number // STEP_EVERY + 1, (lines + STEP_EVERY - 1) // STEP_EVERY
        numbers = {
            "step": step,
            "loss": 10 / (step + 1) + 1,
            "grad_norm": 0.5,
            "lr": 1e-4,
            "tokens_per_s": 1000.0,
            "mfu": 0.4,
        }
        return step_line(numbers, steps)
    mark = hashlib.md5(f"{rank} {number}".encode(), usedforsecurity=False).hexdigest()
    return f"algo-{rank + 1} line {number:06d} {mark}"


def digest_of(lines: Sequence[str]) -> str:
    """sha256 (hex) of lines joined by newlines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class Plane(switches.Plane):
    """A running control plane that has loaded `testing.synthetic`."""

    def synthetic_job(
        self,
        *,
        hosts: int = 1,
        lines: int = 100,
        name: str = "",
        last_words: Mapping[str, Sequence[str]] | None = None,
        **options: Any,
    ) -> SyntheticJob:
        """Make a job without processes, each of whose hosts writes `lines` lines, then its
        `last_words`.

        Options: `seconds` that the lines are spread over, `instance_type`, `end` (Completed or
        Failed) with a `reason`, and `held`: it runs until it is stopped or released.
        """
        words = {host: list(texts) for host, texts in (last_words or {}).items()}
        name = name or f"synthetic-{time.time_ns()}"
        self.call("synthetic", name=name, hosts=hosts, lines=lines, last_words=words, **options)
        return SyntheticJob(name, hosts, lines, words)

    def release(self, job: SyntheticJob) -> None:
        """Let a held job end."""
        self.call("release", job=job.name)


def plane(home: Path | None = None) -> Plane:
    """The control plane of this home, started if none runs."""
    return Plane(ensure_running(home))
