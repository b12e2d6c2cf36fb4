"""Jobs that only write log lines: many hosts, many lines, no processes. What they write is known beforehand."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

from smtrain.plane.server.jobs import JobRecord, hosts_of
from smtrain.plane.testing.synthetic_lines import line_of

if TYPE_CHECKING:
    from smtrain.plane.server.executor import Executor


class SyntheticRun(threading.Thread):
    """The life of such a job: all lines are there at once, each readable from its own moment on."""

    def __init__(self, executor: Executor, job: JobRecord, asked: dict[str, Any]) -> None:
        super().__init__(name=f"synthetic-{job.name}", daemon=True)
        self.executor, self.job = executor, job
        self.lines, self.seconds = int(asked["lines"]), float(asked["seconds"])
        self.end, self.reason = asked["end"], asked["reason"]
        self.last_words: dict[str, list[str]] = asked["last_words"]
        self.stopping, self.released = threading.Event(), threading.Event()
        if not asked.get("held"):
            self.released.set()
        for status in ("Downloading", "Training"):
            job.move(status)
        self._write()

    def ask_to_stop(self) -> None:
        self.stopping.set()
        self.released.set()

    def release(self) -> None:
        self.released.set()

    def run(self) -> None:
        self.stopping.wait(self.seconds)
        self.released.wait()
        stopped = self.stopping.is_set()
        if not stopped:
            self.job.move("Uploading")
        self.job.finish("Stopped" if stopped else self.end, None, None if stopped else self.reason)
        self.executor.done(self.job)

    def _write(self) -> None:
        from smtrain.plane.server.streams import stream_of

        now = time.time()
        folder = self.job.folder / "logs"
        folder.mkdir(exist_ok=True)
        for rank, (host, _, _) in enumerate(hosts_of(self.job.request)):
            name = f"{host}-{int(now)}"
            texts = [line_of(rank, i, self.lines) for i in range(self.lines)] + self.last_words.get(host, [])
            moments = [now + self.seconds * i / len(texts) for i in range(len(texts))]
            pairs = [(int(moment * 1000), text) for moment, text in zip(moments, texts, strict=True)]
            with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
                file.writelines(json.dumps(pair) + "\n" for pair in pairs)
            stream_of(f"{self.job.name}/{name}").append(pairs, moments)


def request_of(asked: dict[str, Any], role: str, bucket: str) -> dict[str, Any]:
    """What Describe shows as the request of such a job."""
    return {
        "TrainingJobName": asked["name"],
        "RoleArn": role,
        "AlgorithmSpecification": {"TrainingImage": "none", "TrainingInputMode": "File"},
        "OutputDataConfig": {"S3OutputPath": f"s3://{bucket}/synthetic", "CompressionType": "NONE"},
        "ResourceConfig": {
            "InstanceType": asked["instance_type"],
            "InstanceCount": int(asked["hosts"]),
            "VolumeSizeInGB": 1,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
        "Tags": [{"Key": "smtrain:stage", "Value": "train"}],
    }
