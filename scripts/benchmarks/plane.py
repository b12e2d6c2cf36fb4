"""Memory of the local control plane, resident, over many small jobs and one with much output, and
its response time meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from smtrain.plane.client import Endpoint, ensure_running, shut_down  # noqa: E402
from tests.plane.planes import request_of  # noqa: E402

SMALL = "for n in $(seq 100); do echo step=$n loss=0.$n; done; echo model > /opt/ml/model/weights"
LINE = "f'step={n} loss={1 / (n + 1):.6f} ' + 'x' * 70 + '\\n'"
FLOOD = f"import sys; any(sys.stdout.write({LINE}) is None for n in range(LINES))"


def main() -> None:
    """Run the jobs and print the plane's memory after each part, and its peak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--megabytes", type=int, default=1000, help="of output of the large job")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["SMTRAIN_HOME"] = home
        try:
            figures = measure(ensure_running(), options)
        finally:
            shut_down()
    print(
        json.dumps(figures)
        if options.json
        else "\n".join(f"{name:24} {value}" for name, value in figures.items())
    )


def measure(endpoint: Endpoint, options: argparse.Namespace) -> dict[str, Any]:
    """MB of the plane after a third, two thirds and all of the small jobs, then while the large one
    writes.
    """
    client = endpoint.session().client("sagemaker")
    run(client, "first", ["bash", "-c", SMALL])
    figures: dict[str, Any] = {"start_mb": resident(endpoint.pid)}
    for n in range(options.jobs):
        run(client, f"small-{n}", ["bash", "-c", SMALL])
        if (n + 1) % max(1, options.jobs // 3) == 0:
            figures[f"after_{n + 1}_jobs_mb"] = resident(endpoint.pid)
    peak, slowest, flood_ended = Peak(endpoint.pid), 0.0, threading.Event()
    began = time.monotonic()
    with peak:
        program = FLOOD.replace("LINES", str(options.megabytes * 10_000))
        thread = threading.Thread(target=lambda: run_flood(flood_ended, client, program))
        thread.start()
        probe_client = endpoint.session().client("sagemaker")
        while not flood_ended.wait(0.5):
            call_start = time.monotonic()
            probe_client.list_training_jobs(MaxResults=1)
            slowest = max(slowest, time.monotonic() - call_start)
        thread.join()
    figures["flood_seconds"] = round(time.monotonic() - began, 1)
    figures["flood_peak_mb"], figures["after_flood_mb"] = peak.megabytes, resident(endpoint.pid)
    figures["slowest_answer_s"] = round(slowest, 3)
    growth_mb = figures[f"after_{options.jobs}_jobs_mb"] - figures["start_mb"]
    figures["growth_per_job_kb"] = round(growth_mb * 1000 / options.jobs, 1)
    return figures


def run_flood(flood_ended: threading.Event, client: Any, program: str) -> None:
    """Run the one large job, and signal its end in any case."""
    try:
        run(client, "flood", [sys.executable, "-c", program])
    finally:
        flood_ended.set()


def run(client: Any, name: str, command: list[str]) -> None:
    """Run one job to its end."""
    pieces = [command[2][i : i + 200] for i in range(0, len(command[2]), 200)]
    entry = (
        [command[0], "-c", 'eval "$(IFS=; echo "$*")"', "bash", *pieces]
        if command[0] == "bash"
        else None
    )
    entry = entry or [command[0], "-c", "import sys; exec(''.join(sys.argv[1:]))", *pieces]
    metrics = {"MetricDefinitions": [{"Name": "loss", "Regex": r"loss=(\S+)"}]}
    limit = {"MaxRuntimeInSeconds": 3600}
    client.create_training_job(
        **request_of(name, entry, algorithm=metrics, StoppingCondition=limit)
    )
    while (job := client.describe_training_job(TrainingJobName=name))[
        "TrainingJobStatus"
    ] == "InProgress":
        time.sleep(0.05)
    assert job["TrainingJobStatus"] == "Completed", job.get("FailureReason")


def resident(pid: int) -> int:
    """Resident MB of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1_000_000


class Peak:
    """Peak memory of a process while this is open, sampled ten times a second."""

    def __init__(self, pid: int) -> None:
        self.pid, self.megabytes = pid, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.1):
            self.megabytes = max(self.megabytes, resident(self.pid))


if __name__ == "__main__":
    main()
