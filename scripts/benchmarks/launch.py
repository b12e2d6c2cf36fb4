"""From `launch()` to CreateTrainingJob on the wire, compared with the bare SageMaker SDK doing the
same upload.

Both sides upload the same two objects (the source bundle and the stage's config) to the local
control plane's S3, under a new prefix each time, and then send the same request, which is caught
before it leaves: no job runs. `bare` is the hand-written equivalent with the installed SDK: a
session, two uploads, a ModelTrainer (v3) or an Estimator (v2), a start without waiting; its
telemetry and its check of the role in IAM are off, which favours it. `cold` is a fresh process from
its first import on, `warm` the median of five further launches in that process, each with its own
session. Each round has both sides in alternating order; a ratio is the median of the rounds',
`over_sdk` the greater one of cold and warm. `api_calls` is the number of our HTTP requests,
CreateTrainingJob included. `smtrain check`, which a launch on AWS runs first, is left out on our
side, because the SDK has nothing like it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from typing import Any

from smtrain.stages import keys_of

ROLE = "arn:aws:iam::123456789012:role/SmtrainLocal"
BUCKET = "smtrain-bench"
WARM = 5  # launches of one process after its first; their median counts


class RequestSent(Exception):  # noqa: N818
    """CreateTrainingJob has reached the wire."""


def config_of(prefix: str) -> dict[str, Any]:
    """A train stage that needs no previous stage."""
    return {
        "name": f"bench-{prefix}",
        "target": "aws",
        "model": {"path": f"s3://{BUCKET}/model", "init": "scratch"},
        "data": {"prepared": f"s3://{BUCKET}/tokens/"},
        "parallel": {"tp": 2},
        "compute": {"instance_type": "ml.trn1.2xlarge", "instance_count": 4, "role": ROLE},
        "output": {"s3_uri": f"s3://{BUCKET}/{prefix}"},
    }


def launch_by_smtrain(prefix: str) -> None:
    """`smtrain.launch`."""
    import smtrain

    smtrain.launch(config_of(prefix), wait=False, check=False, say=lambda _: None)


def bare(prefix: str, request: dict[str, Any], files: dict[str, str]) -> None:
    """The same written by hand: `files` maps local paths to key prefixes."""
    import boto3

    algorithm, resources = request["AlgorithmSpecification"], request["ResourceConfig"]
    if _sdk() == "v3":
        from sagemaker.core.helper.session_helper import Session
        from sagemaker.core.telemetry import telemetry_logging
        from sagemaker.core.training.configs import (
            CheckpointConfig,
            Compute,
            InputData,
            OutputDataConfig,
            S3DataSource,
            StoppingCondition,
        )
        from sagemaker.train import ModelTrainer

        telemetry_logging._send_telemetry_request = lambda *a: None
        session = Session(
            boto_session=boto3.Session(), default_bucket="another"
        )  # else the SDK asks STS for one
        for path, key in files.items():
            session.upload_data(path, bucket=BUCKET, key_prefix=key)
        ModelTrainer(
            sagemaker_session=session,
            role=ROLE,
            base_job_name=request["TrainingJobName"],
            training_image=algorithm["TrainingImage"],
            training_input_mode="FastFile",
            hyperparameters=request["HyperParameters"],
            environment=request["Environment"],
            compute=Compute(
                instance_type=resources["InstanceType"], instance_count=resources["InstanceCount"]
            ),
            output_data_config=OutputDataConfig(
                s3_output_path=request["OutputDataConfig"]["S3OutputPath"]
            ),
            stopping_condition=StoppingCondition(max_runtime_in_seconds=86400),
            checkpoint_config=CheckpointConfig(s3_uri=request["CheckpointConfig"]["S3Uri"]),
            input_data_config=[
                InputData(
                    channel_name=channel["ChannelName"],
                    data_source=S3DataSource(
                        s3_data_type="S3Prefix",
                        s3_data_distribution_type="FullyReplicated",
                        s3_uri=channel["DataSource"]["S3DataSource"]["S3Uri"],
                    ),
                )
                for channel in request["InputDataConfig"]
            ],
        ).train(wait=False, logs=False)
    else:
        from sagemaker.estimator import Estimator
        from sagemaker.inputs import TrainingInput
        from sagemaker.session import Session
        from sagemaker.telemetry import telemetry_logging

        telemetry_logging._send_telemetry_request = lambda *a: None
        session = Session(
            boto_session=boto3.Session(), default_bucket="another"
        )  # else the SDK asks STS for one
        for path, key in files.items():
            session.upload_data(path, bucket=BUCKET, key_prefix=key)
        Estimator(
            algorithm["TrainingImage"],
            ROLE,
            resources["InstanceCount"],
            resources["InstanceType"],
            sagemaker_session=session,
            base_job_name=request["TrainingJobName"],
            input_mode="FastFile",
            hyperparameters=request["HyperParameters"],
            environment=request["Environment"],
            output_path=request["OutputDataConfig"]["S3OutputPath"],
            checkpoint_s3_uri=request["CheckpointConfig"]["S3Uri"],
        ).fit(
            {
                channel["ChannelName"]: TrainingInput(
                    channel["DataSource"]["S3DataSource"]["S3Uri"], input_mode=channel["InputMode"]
                )
                for channel in request["InputDataConfig"]
            },
            wait=False,
        )


def worker(side: str, request: dict[str, Any], files: dict[str, str]) -> None:
    """One cold launch in this process, then warm ones; prints seconds and HTTP requests as JSON."""
    began = time.perf_counter()
    import botocore.httpsession

    send = botocore.httpsession.URLLib3Session.send
    calls: list[str] = []

    def send_and_count(self: Any, http_request: Any) -> Any:
        target = http_request.headers.get("X-Amz-Target")
        name = (
            (target.decode() if isinstance(target, bytes) else target)
            if target
            else f"{http_request.method} {http_request.url}"
        )
        calls.append(
            name.rpartition(".")[2] if target else name.split("?")[0].split(" ")[0] + " S3"
        )
        if name.endswith("CreateTrainingJob"):
            raise RequestSent
        return send(self, http_request)

    botocore.httpsession.URLLib3Session.send = send_and_count  # type: ignore[assignment,method-assign]
    result: dict[str, Any] = {}
    warm = []
    for number in range(1 + WARM):
        calls.clear()
        prefix = f"{side}-{uuid.uuid4().hex[:8]}"
        began = time.perf_counter() if number else began
        with contextlib.suppress(RequestSent):
            (
                launch_by_smtrain(prefix)
                if side == "ours"
                else bare(prefix, request, {path: f"{prefix}/{key}" for path, key in files.items()})
            )
        took = time.perf_counter() - began
        if number:
            warm.append(took)
        else:
            result["cold"] = took
        result["calls"] = list(calls)
    result["warm"] = statistics.median(warm)
    print(json.dumps(result))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(**json.loads(options.worker))
        return
    import tempfile
    from pathlib import Path

    import smtrain
    from smtrain.client.launch.bundle import build_bundle
    from smtrain.plane.client import ensure_running

    plane = ensure_running()
    with contextlib.suppress(plane.session().client("s3").exceptions.BucketAlreadyOwnedByYou):
        plane.session().client("s3").create_bucket(Bucket=BUCKET)
    environment = {
        **os.environ,
        **plane.environment(),
        "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
        "PYTHONWARNINGS": "ignore",
        "SAGEMAKER_VALIDATE_ROLE": (
            "false"
        ),  # the SDK's own switch: v3 would simulate the role's policies in IAM
    }
    runs_by_side: dict[str, list[dict[str, Any]]] = {"ours": [], "bare": []}
    with tempfile.TemporaryDirectory() as folder:
        bundle, config = Path(folder, "bundle.tar.gz"), Path(folder, "config.json")
        bundle.write_bytes(build_bundle().data)
        config.write_text(
            json.dumps(keys_of(smtrain.load_config(config_of("x")), "train"), indent=2)
        )
        request = smtrain.request(config_of("x"), set_=[f"compute.region={plane.region}"])
        files = {str(bundle): "code", str(config): "configs"}
        for round_ in range(options.rounds + 1):
            # The order changes from round to round, so that other load on the machine affects both.
            for side in (list(runs_by_side), list(runs_by_side)[::-1])[round_ % 2]:
                work = json.dumps({"side": side, "request": request, "files": files})
                command = [sys.executable, __file__, "--worker", work]
                worker_process = subprocess.run(
                    command, env=environment, capture_output=True, text=True
                )
                if worker_process.returncode:
                    sys.exit(worker_process.stderr)
                if round_:  # the first round fills the page cache
                    runs_by_side[side].append(json.loads(worker_process.stdout.splitlines()[-1]))

    def ratio(phase: str) -> float:
        pairs = zip(runs_by_side["ours"], runs_by_side["bare"], strict=True)
        return round(statistics.median(a[phase] / b[phase] for a, b in pairs), 3)

    def seconds(side: str, phase: str) -> float:
        return round(statistics.median(row[phase] for row in runs_by_side[side]), 3)

    result = {
        "over_sdk": max(ratio("cold"), ratio("warm")),
        "over_sdk_cold": ratio("cold"),
        "over_sdk_warm": ratio("warm"),
        "api_calls": len(runs_by_side["ours"][-1]["calls"]),
        "api_calls_bare": len(runs_by_side["bare"][-1]["calls"]),
        **{
            f"{side}_{phase}_s": seconds(side, phase)
            for side in runs_by_side
            for phase in ("cold", "warm")
        },
        "calls": runs_by_side["ours"][-1]["calls"],
        "calls_bare": runs_by_side["bare"][-1]["calls"],
        "sdk": _sdk(),
    }
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:16} {value}")


def _sdk() -> str:
    from smtrain.client.sdk import installed_sdk

    sdk = installed_sdk()
    if sdk is None:
        raise SystemExit("scripts/bench launch: no SageMaker SDK is installed to compare with")
    return sdk


if __name__ == "__main__":
    main()
