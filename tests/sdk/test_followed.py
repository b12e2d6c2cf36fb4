"""A job that the installed SageMaker SDK submitted is followed like any other: from its log, not through the SDK."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import smtrain
from smtrain.follow.follower import Follower
from smtrain.job.logs import Line
from smtrain.local import plane
from smtrain.sdk import installed, submit

LINES = 500
PROGRAM = f"""
import os, socket
host = socket.gethostname()
for i in range({LINES}):
    print(f"{{host}} line {{i}}", flush=i % 50 == 0)
"""


def test_every_line_of_an_sdks_job_once_while_calls_fail_and_lines_are_late(
    plain: dict[str, Any], local_home: Path
) -> None:
    request = smtrain.request({**plain, "name": "of-an-sdk"}, stage="prepare", target="local")
    request["AlgorithmSpecification"]["ContainerEntrypoint"] = ["python"]
    request["AlgorithmSpecification"]["ContainerArguments"] = ["-c", PROGRAM]
    request["ResourceConfig"]["InstanceCount"] = 3
    generation = installed()
    assert generation
    job = smtrain.Job(request["TrainingJobName"], "local")
    control = plane(local_home)
    for channel in request["InputDataConfig"]:
        source = channel["DataSource"]["S3DataSource"]
        source["S3Uri"] = f"s3://{control.endpoint.bucket}/of-an-sdk/"
    job.target.s3.put_object(Bucket=control.endpoint.bucket, Key="of-an-sdk/x", Body=b"x")
    control.calm()
    control.delivery(late=1.0, reorder=0.2, late_streams=0.5, empty_pages=0.1, seed=3)
    try:
        submit(generation, job.target, request)
        control.faults(operations=["logs:*", "sagemaker:*"], throttle=0.1, errors=0.1, drops=0.1, seed=4)
        shown: dict[str, list[str]] = defaultdict(list)
        for event in Follower(job.target, job.name).events():
            if isinstance(event, Line):
                shown[event.host].append(event.text)
    finally:
        control.calm()
    assert job.status == "Completed"
    wrote = {f"algo-{n}": sorted(f"algo-{n} line {i}" for i in range(LINES)) for n in (1, 2, 3)}
    assert {host: sorted(lines) for host, lines in shown.items()} == wrote
