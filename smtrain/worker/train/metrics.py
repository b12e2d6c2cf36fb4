"""What a step leaves behind: one line for people and CloudWatch, one JSON line, TensorBoard scalars, a progress bar."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from smtrain.core.facts import instance
from smtrain.core.protocol.log_lines import step_line
from smtrain.core.tracking.buffer import Buffered, TrackedStep
from smtrain.worker.engine.base import StepResult
from smtrain.worker.train.validation import Judged

LIVE = 10
"""Seconds between writes of TensorBoard's files, where they are copied while the job runs."""


def peak_flops(instance_type: str) -> float | None:
    """Dense matrix-multiply peak of one training process, in operations a second; None for a CPU.

    Neuron cores, and GPUs that are what the instance type has: the table in core/facts/instances.toml. Any other device
    has no number to cite, so a square matrix multiplication is timed here, and MFU is relative to that.
    """
    row = instance(instance_type)
    neuron = torch.accelerator.is_available() and "neuron" in str(torch.accelerator.current_accelerator())
    chip = row.get("chip") if row else None
    gpu = bool(chip) and torch.cuda.is_available() and str(chip) in torch.cuda.get_device_name()
    if row and (gpu or neuron or Path("/dev/neuron0").exists()):  # torch knows no accelerator of PyTorch/XLA's
        return float(row["core_tflops"]) * 1e12
    if not torch.accelerator.is_available():
        return None
    n, best = 4096, 0.0
    a = torch.randn(n, n, device=torch.accelerator.current_accelerator(), dtype=torch.bfloat16)
    for _ in range(8):
        began = time.perf_counter()
        (a @ a).sum().item()
        best = max(best, 2 * n**3 / (time.perf_counter() - began))
    return best


def _opened(path: Path) -> IO[str]:
    """Open a file of lines to append to, without the half line that a full disk or a kill left at its end."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


class MetricsLog:
    """Writes the records of one rank (rank 0); every other rank has none."""

    def __init__(
        self, folder: Path, *, total_steps: int, first_step: int, tokens_per_step: int,
        flops_per_token: float, peak: float | None, live: Path | None = None, trackers: Sequence[Buffered] = (),
    ) -> None:  # fmt: skip
        """`peak` is the whole mesh's, in operations a second; None: MFU is not logged.

        `live` gets TensorBoard's files too, and soon.
        """
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._jsonl = _opened(folder / "metrics.jsonl")
        self._boards: list[Any] = [SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)]
        if live is not None:
            self._boards.append(SummaryWriter(str(live), purge_step=first_step, flush_secs=LIVE))
        self._trackers = trackers
        self._tokens, self._flops, self._peak = tokens_per_step, flops_per_token, peak
        self._since, self._last_step = time.perf_counter(), first_step - 1
        self._total = total_steps
        self._waited = 0.0
        self._bar: Any = None
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[loss]}"))
            self._task = self._bar.add_task("train", total=total_steps, completed=first_step - 1, loss="")
            self._bar.start()

    def log(self, step: int, result: StepResult, lr: float, waited: float, judged: Judged | None = None) -> None:
        """Record one step, and how the model did after it on held-out text.

        Rates are the mean since the record before, without the time of the validation. `waited` is seconds for data in
        all so far. A step that was skipped has `skipped` in place of its norm, which is no number.
        """
        now = time.perf_counter()
        worked = now - self._since - (judged.seconds if judged else 0.0)
        rate = self._tokens * (step - self._last_step) / worked
        data_wait = (waited - self._waited) / worked
        self._since, self._last_step, self._waited = now, step, waited
        scaling = result.scaling
        told = {} if scaling is None else {"loss_scale": scaling.scale}
        told |= {"skipped": 1} if result.skipped else {"grad_norm": result.grad_norm}
        record = {
            "step": step, "loss": result.loss, **told, "lr": lr,
            "tokens_per_s": rate, **({"mfu": rate * self._flops / self._peak} if self._peak else {}),
            "data_wait": data_wait, **(judged.numbers() if judged else {}),
        }  # fmt: skip
        self._write(step, f"loss {result.loss:.4f}", record)

    def log_validation(self, step: int, judged: Judged) -> None:
        """Record how the model does on held-out text where no step was done just before."""
        self._since += judged.seconds
        self._write(step, "", {"step": step, **judged.numbers()})

    def _write(self, step: int, shown: str, record: dict[str, Any]) -> None:
        line = step_line(record, self._total)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=shown)
            self._bar.console.print(line, highlight=False, soft_wrap=True)
        else:
            # One write: a log collector must never see half a line.
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
        self._jsonl.write(json.dumps(record) + "\n")
        self._jsonl.flush()
        for tracker in self._trackers:
            tracker.log(TrackedStep(step, int(time.time() * 1000), record))
        for name, value in record.items():
            tag = f"validation/{name.removeprefix('val_')}" if name.startswith("val_") else f"train/{name}"
            for board in self._boards if name != "step" else ():
                board.add_scalar(tag, value, step)

    def close(self) -> None:
        """Flush everything to disk."""
        if self._bar is not None:
            self._bar.stop()
        self._jsonl.close()
        for board in self._boards:
            board.close()
