"""The cost of a tracker that hangs: an MLflow server that never answers, behind the queue that jobs
use.

Blocks of steps with and without it alternate in one process; `over` is the median of their ratios
minus 1, `in_log` the share of a step spent in the call itself.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

from smtrain.core.config.track import Track
from smtrain.core.tracking.buffer import open_trackers
from smtrain.core.tracking.settings import TrackedRun, TrackedStep


def main() -> None:
    """Train with a hanging tracker and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--blocks", type=int, default=200, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=5, help="of a block")
    parser.add_argument("--width", type=int, default=256, help="of the trained layers")
    options = parser.parse_args()
    figures = measure(options.blocks, options.steps, options.width)
    print(
        json.dumps(figures)
        if options.json
        else "\n".join(f"{name:15} {value}" for name, value in figures.items())
    )


class SilentPort:
    """A port that accepts every connection and never answers."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.called = threading.Event()
        self._held: list[socket.socket] = []
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        while True:
            self._held.append(self.socket.accept()[0])
            self.called.set()


def measure(blocks: int, steps: int, width: int) -> dict[str, float]:
    """Medians over pairs of blocks, which share all other load on the machine."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(6)))
    optimizer, rows = torch.optim.AdamW(model.parameters()), torch.randn(64, width)

    def step() -> float:
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    server, messages = SilentPort(), list[str]()
    job = TrackedRun("bench", "bench-train-1", "bench", "1", {}, {})
    with tempfile.TemporaryDirectory() as folder:
        track = Track(mlflow=f"http://127.0.0.1:{server.port}", by="job")
        (tracker,) = open_trackers(track, job, Path(folder), messages.append, lambda _: "")
        began = time.process_time()
        tracker.log(TrackedStep(0, 0, {"loss": step()}))
        if not server.called.wait(120):  # its libraries are loaded by then, during the first steps
            raise SystemExit(f"the tracker never asked its server: {messages}")
        start = time.process_time() - began
        wall: list[float] = []
        processor: list[float] = []
        logging = stepping = 0.0
        step_number = 0
        for block in range(blocks):
            seconds_by_kind: dict[bool, tuple[float, float]] = {}
            for is_tracked in (True, False) if block % 2 else (False, True):
                at, used = time.perf_counter(), time.process_time()
                for _ in range(steps):
                    loss = step()
                    if is_tracked:
                        step_number += 1
                        log_start = time.perf_counter()
                        tracker.log(
                            TrackedStep(
                                step_number,
                                step_number,
                                {"loss": loss, "grad_norm": 1.0, "lr": 1e-4},
                            )
                        )
                        logging += time.perf_counter() - log_start
                seconds_by_kind[is_tracked] = time.perf_counter() - at, time.process_time() - used
                stepping += seconds_by_kind[is_tracked][0] if not is_tracked else 0.0
            wall.append(seconds_by_kind[True][0] / seconds_by_kind[False][0])
            processor.append(seconds_by_kind[True][1] / seconds_by_kind[False][1])
        kept_steps = tracker.close(None, 0.1)
    return {
        "step_ms": round(1000 * stepping / (blocks * steps), 3),
        "over": round(statistics.median(wall) - 1, 5),
        "over_cpu": round(statistics.median(processor) - 1, 5),
        "in_log": round(logging / stepping, 6),
        "kept": kept_steps,
        "start_cpu_s": round(start, 2),
    }


if __name__ == "__main__":
    main()
