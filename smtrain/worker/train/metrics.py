"""Record each step: a line for people and CloudWatch, a JSON line, TensorBoard, trackers, and a
progress bar.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import torch

from smtrain.core.config import JobConfig
from smtrain.core.config.section import Secret
from smtrain.core.errors import SmtrainError
from smtrain.core.facts import instance
from smtrain.core.facts.engines import lnc_of
from smtrain.core.protocol.container import Container
from smtrain.core.protocol.log_lines import step_line
from smtrain.core.tracking.buffer import Buffered, open_trackers
from smtrain.core.tracking.settings import (
    VARIABLE,
    TrackedRun,
    TrackedStep,
    id_of,
    parameters,
    parse,
)
from smtrain.worker.engine.base import StepResult
from smtrain.worker.output import log_line
from smtrain.worker.train.probe import matmul_rate
from smtrain.worker.train.validation import ValidationResult

LIVE = 10
"""Seconds between writes of TensorBoard's files that are copied while the job runs."""
FLUSH = 30.0
"""Seconds that a job waits at its end for trackers."""


def peak_flops(instance_type: str) -> float | None:
    """Dense matrix-multiply peak of one training process, in operations a second; None for a CPU.

    Neuron cores and the instance type's own GPUs are in core/facts/instances.toml. For any other
    device there is no number to cite, so we measure large products as doctor and `plan --probe` do,
    and MFU is relative to that.
    """
    row = instance(instance_type)
    neuron = torch.accelerator.is_available() and "neuron" in str(
        torch.accelerator.current_accelerator()
    )
    chip = row.get("chip") if row else None
    gpu = bool(chip) and torch.cuda.is_available() and str(chip) in torch.cuda.get_device_name()
    if row and (
        gpu or neuron or Path("/dev/neuron0").exists()
    ):  # torch.accelerator does not know PyTorch/XLA
        share = lnc_of(instance_type, os.environ) / float(row.get("logical_cores", 1))
        return float(row["core_tflops"]) * 1e12 * share
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    assert device is not None
    best = matmul_rate(device, "bf16", torch.accelerator.synchronize)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # or the matrices' memory stays cut into blocks that no step needs
    return best


def _open_for_append(path: Path) -> IO[str]:
    """Open a file of lines to append to; drop the half line that a full disk or a kill left at its
    end.
    """
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


class MetricsLog:
    """Writes the records of rank 0; other ranks have none."""

    def __init__(
        self,
        folder: Path,
        *,
        total_steps: int,
        first_step: int,
        samples: int,
        seq_len: int,
        ramp: bool,
        flops_per_token: float,
        peak: float | None,
        live: Path | None = None,
        trackers: Sequence[Buffered] = (),
    ) -> None:
        """`peak` is the whole mesh's, in operations a second; with None MFU is not logged.

        `samples` are those before the first step; with a `ramp` each record says how many its step
        has. `live` is a second folder for TensorBoard's files, written every few seconds.
        """
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._jsonl = _open_for_append(folder / "metrics.jsonl")
        self._boards: list[Any] = [
            SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        ]
        if live is not None:
            self._boards.append(SummaryWriter(str(live), purge_step=first_step, flush_secs=LIVE))
        self._trackers = trackers
        self._seq_len, self._flops, self._peak, self._ramp = seq_len, flops_per_token, peak, ramp
        self._since, self._samples = time.perf_counter(), samples
        self._total = total_steps
        self._wait_seconds, self._padding = 0.0, 0
        self._bar: Any = None
        if sys.stdout.isatty():
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            columns = (
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, TextColumn("{task.fields[loss]}"))
            self._task = self._bar.add_task(
                "train", total=total_steps, completed=first_step - 1, loss=""
            )
            self._bar.start()

    def log(
        self,
        step: int,
        result: StepResult,
        lr: float,
        wait_seconds: float,
        samples: range,
        validation: ValidationResult | None = None,
        padding: int | None = None,
    ) -> None:
        """Record one step with its samples, and the validation after it.

        Rates count all positions of the rows, as the plan does; `padding` are those without a token
        in the run's batches so far, whose share since the last record is logged.
        Rates are the mean from the time at which the device had the last record's numbers to the
        time at which it had these, without the time of the validation. `wait_seconds` is the total
        time that the run had waited for data when the step began. A skipped step has `skipped`
        instead of its norm, which is not finite.
        """
        validation_seconds = validation.seconds if validation else 0.0
        ready = time.perf_counter() - validation_seconds if result.ready is None else result.ready
        work_seconds = ready - self._since
        positions = self._seq_len * (samples.stop - self._samples)
        rate = positions / work_seconds
        data_wait = (wait_seconds - self._wait_seconds) / work_seconds
        # The validation came after these numbers, so the next record's time would have it.
        self._since = ready + validation_seconds
        self._samples, self._wait_seconds = samples.stop, wait_seconds
        scaling = result.scaling
        numbers = {} if scaling is None else {"loss_scale": scaling.scale}
        numbers |= {"skipped": 1} if result.is_skipped else {"grad_norm": result.grad_norm}
        numbers |= {"param_norm": result.param_norms.total} if result.param_norms else {}
        numbers |= {"batch": len(samples)} if self._ramp else {}
        numbers |= result.pairs.numbers() if result.pairs else {}
        numbers |= result.routing.numbers() if result.routing else {}
        record = {
            "step": step,
            "loss": result.loss,
            **numbers,
            "lr": lr,
            "tokens_per_s": rate,
            **({"mfu": rate * self._flops / self._peak} if self._peak else {}),
            **({} if padding is None else {"padding": (padding - self._padding) / positions}),
            "data_wait": data_wait,
            **(validation.numbers() if validation else {}),
        }
        self._padding = padding or 0
        self._write(step, f"loss {result.loss:.4f}", record)
        for name, norm in result.param_norms.parts.items() if result.param_norms else ():
            for board in self._boards:
                board.add_scalar(f"param_norm/{name}", norm, step)

    def log_validation(self, step: int, validation: ValidationResult) -> None:
        """Record a validation before the first step."""
        self._since += validation.seconds
        self._write(step, "", {"step": step, **validation.numbers()})

    def _write(self, step: int, loss_text: str, record: dict[str, Any]) -> None:
        line = step_line(record, self._total)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=loss_text)
            self._bar.console.print(line, highlight=False, soft_wrap=True)
        else:
            log_line(line)
        self._jsonl.write(json.dumps(record) + "\n")
        self._jsonl.flush()
        for tracker in self._trackers:
            tracker.log(TrackedStep(step, int(time.time() * 1000), record))
        for name, value in record.items():
            tag = (
                f"validation/{name.removeprefix('val_')}"
                if name.startswith("val_")
                else f"train/{name}"
            )
            for board in self._boards if name != "step" else ():
                board.add_scalar(tag, value, step)

    def close(self) -> None:
        """Flush everything to disk."""
        if self._bar is not None:
            self._bar.stop()
        self._jsonl.close()
        for board in self._boards:
            board.close()


def trackers_of(config: JobConfig, container: Container) -> list[Buffered]:
    """The trackers that this job is to feed (`track.by: job`), opened without waiting for them."""
    track = parse(os.environ.get(VARIABLE))
    if track is None or track.by != "job":
        return []
    run_uri = (
        os.environ.get("SMTRAIN_CHECKPOINTS", config.name)
        .removesuffix("/")
        .removesuffix("/checkpoints")
    )
    settings = parameters(config.model_dump(mode="json", exclude_defaults=True))
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    tracked_run = TrackedRun(
        config.name, container.job, id_of(run_uri), stamp, settings, {"smtrain.job": container.job}
    )
    return open_trackers(track, tracked_run, container.output_data_dir, log_line, _secret())


def close_trackers(trackers: list[Buffered], status: str | None) -> None:
    """Send what is left within `FLUSH` seconds; print how many steps could not be sent."""
    deadline = time.monotonic() + FLUSH
    for tracker in trackers:
        if unsent_count := tracker.close(status, max(0.1, deadline - time.monotonic())):
            log_line(f"{unsent_count} steps could not be tracked; metrics.jsonl has them")


def _secret() -> Callable[[Secret], str]:
    """The entry scripts' reader of secrets; this package imports no AWS client."""
    try:
        read: Callable[[Secret], str] = import_module("token_by_name").read
    except ModuleNotFoundError:

        def read(secret: Secret) -> str:
            raise SmtrainError(
                f"the secret {secret.secret or secret.ssm} can only be read inside a job"
            )

    return read
