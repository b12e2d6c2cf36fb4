"""The lines of a job that only writes lines: what each host writes, known beforehand."""

from __future__ import annotations

import hashlib

from smtrain.core.protocol.log_lines import step_line

STEP_EVERY = 10


def line_of(rank: int, number: int, lines: int) -> str:
    """Line `number` (from 0) of the host of this rank; every tenth of the first host's is a training step's."""
    if rank == 0 and number % STEP_EVERY == 0:
        step, steps = number // STEP_EVERY + 1, (lines + STEP_EVERY - 1) // STEP_EVERY
        numbers = {
            "step": step, "loss": 10 / (step + 1) + 1, "grad_norm": 0.5, "lr": 1e-4, "tokens_per_s": 1000.0, "mfu": 0.4,
        }  # fmt: skip
        return step_line(numbers, steps)
    mark = hashlib.md5(f"{rank} {number}".encode(), usedforsecurity=False).hexdigest()
    return f"algo-{rank + 1} line {number:06d} {mark}"
