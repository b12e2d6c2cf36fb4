"""Jobs that only write known log lines: many hosts, many lines, no processes.

The server loads this module with `--extend testing.synthetic`; `testing.plane` makes the jobs.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from typing import Any

from smtrain.plane.client import BUCKET, ROLE
from smtrain.plane.server import schedules, validation
from smtrain.plane.server.control import (
    Check,
    Control,
    is_flag,
    is_number,
    is_text,
    is_whole_number,
    list_of,
    map_of,
)
from smtrain.plane.server.executor import Executor
from smtrain.plane.server.jobs import JobRecord, hosts_of
from smtrain.plane.server.logs_api import stream_of
from testing.plane import line_of

TAKES: dict[str, dict[str, Check]] = {
    "synthetic": {
        "name": is_text,
        "hosts": is_whole_number,
        "lines": is_whole_number,
        "seconds": is_number,
        "instance_type": is_text,
        "end": is_text,
        "reason": is_text,
        "last_words": map_of(list_of(is_text)),
        "held": is_flag,
    },
    "release": {"job": is_text},
    "schedules": {"ahead": is_number},
}
NEEDS: dict[str, tuple[str, ...]] = {"synthetic": ("name",), "release": ("job",)}
DEFAULTS: dict[str, Any] = {
    "hosts": 1,
    "lines": 100,
    "seconds": 0.0,
    "instance_type": "ml.trn1.32xlarge",
    "end": "Completed",
    "reason": None,
    "last_words": {},
}


def extend(control: Control, executor: Executor) -> None:
    """Add the calls `synthetic`, `release` and `schedules`."""
    held_runs: dict[str, SyntheticRun] = {}

    def make(options: dict[str, Any]) -> dict[str, Any]:
        options = {**DEFAULTS, **options}
        request = request_of(options)
        if fault := validation.fault_of("sagemaker", "CreateTrainingJob", request):
            raise ValueError(fault)
        if (
            options["end"] not in ("Completed", "Failed")
            or min(options["hosts"], options["lines"], options["seconds"]) < 0
        ):
            raise ValueError(
                "end is Completed or Failed; hosts, lines and seconds are not negative"
            )

        def start(job: JobRecord) -> SyntheticRun:
            run = SyntheticRun(executor, job, options)
            if options.get("held"):
                held_runs[job.name] = run
            return run

        job = executor.submit(request, start)
        if job is None:
            raise ValueError(f"a job named {options['name']} exists already")
        return {"name": job.name}

    def release(options: dict[str, Any]) -> dict[str, Any]:
        held_runs[options["job"]].released.set()
        return {}

    control.handlers |= {"synthetic": make, "release": release, "schedules": run_ahead}
    control.takes |= TAKES
    control.needs |= NEEDS


def run_ahead(options: dict[str, Any]) -> dict[str, Any]:
    """Run the schedules that are due in so many seconds from now; gives their names."""
    now = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(
        seconds=options.get("ahead", 0)
    )
    return {"ran": schedules.run_due(now)}


class SyntheticRun(threading.Thread):
    """The life of such a job.

    All its lines are written at once; each can be read from its own time on.
    """

    def __init__(self, executor: Executor, job: JobRecord, options: dict[str, Any]) -> None:
        super().__init__(name=f"synthetic-{job.name}", daemon=True)
        self.executor, self.job, self.options = executor, job, options
        self.stopping, self.released = threading.Event(), threading.Event()
        if not options.get("held"):
            self.released.set()
        for status in ("Downloading", "Training"):
            job.move(status)
        self._write()

    def ask_to_stop(self) -> None:
        self.stopping.set()
        self.released.set()

    def run(self) -> None:
        self.stopping.wait(self.options["seconds"])
        self.released.wait()
        if self.stopping.is_set():
            self.job.finish("Stopped")
        else:
            self.job.move("Uploading")
            self.job.finish(self.options["end"], None, self.options["reason"])
        self.executor.note_job_end(self.job)

    def _write(self) -> None:
        now, lines, seconds = time.time(), self.options["lines"], self.options["seconds"]
        folder = self.job.folder / "logs"
        folder.mkdir(exist_ok=True)
        for rank, (host, _, _) in enumerate(hosts_of(self.job.request)):
            name = f"{host}-{int(now)}"
            texts = [line_of(rank, i, lines) for i in range(lines)] + self.options[
                "last_words"
            ].get(host, [])
            moments = [now + seconds * i / len(texts) for i in range(len(texts))]
            pairs = [
                (int(moment * 1000), line) for moment, line in zip(moments, texts, strict=True)
            ]
            with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
                file.writelines(json.dumps(pair) + "\n" for pair in pairs)
            stream_of(f"{self.job.name}/{name}").append(pairs, moments)


def request_of(options: dict[str, Any]) -> dict[str, Any]:
    """The request that Describe shows for such a job."""
    return {
        "TrainingJobName": options["name"],
        "RoleArn": ROLE,
        "AlgorithmSpecification": {"TrainingImage": "none", "TrainingInputMode": "File"},
        "OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}/synthetic", "CompressionType": "NONE"},
        "ResourceConfig": {
            "InstanceType": options["instance_type"],
            "InstanceCount": options["hosts"],
            "VolumeSizeInGB": 1,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
        "Tags": [{"Key": "smtrain:stage", "Value": "train"}],
    }
