"""The SageMaker Python SDKs: which one is installed and used, and our request as its own
training-job object.

The request is made once, in client/launch/request.py. v3.py and v2.py turn it into a
`sagemaker.train.ModelTrainer` or a `sagemaker.pytorch.PyTorch` that sends exactly this request, and
that a user can change and run.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any, Literal

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.core.config import JobConfig
from smtrain.core.errors import ConfigError
from smtrain.core.extras import install, pause_collector

Generation = Literal["v3", "v2"]


def installed_sdk() -> Generation | None:
    """The SageMaker SDK installed here; nothing is imported to find out."""
    for generation, distribution in (("v3", "sagemaker-train"), ("v2", "sagemaker")):
        try:
            major = metadata.version(distribution).partition(".")[0]
        except metadata.PackageNotFoundError:
            continue
        if generation == "v3":
            return "v3"
        if major == "2":
            return "v2"
    return None


def sdk_for(target: SageMakerBackend, config: JobConfig) -> Generation | None:
    """The SDK that sends this config's requests to this target; None for boto3.

    `auto` uses the installed SDK on AWS, and boto3 locally: importing an SDK takes two seconds, and
    a local job only takes a few. Raises `ConfigError` if the SDK that the config names is not
    installed.
    """
    sdk = config.compute.sdk
    if sdk == "boto3":
        return None
    if sdk == "auto":
        return installed_sdk() if target.record.rented else None
    if (present := installed_sdk()) != sdk:
        extra = {"v3": "aws", "v2": "sdk-v2"}[sdk]
        raise ConfigError(
            f"compute.sdk: is {sdk}, and {present or 'no SageMaker SDK'} is installed; run"
            f" `{install(extra)}`",
            code="package.missing",
        )
    return sdk


def build(
    generation: Generation,
    target: SageMakerBackend,
    request: dict[str, Any],
    prepare: Callable[[], None] | None = None,
) -> Any:
    """The SDK's object for a request: `ModelTrainer` under v3, `PyTorch` under v2.

    `prepare` is called before the request is sent: it uploads what the job reads.
    """
    with pause_collector():
        if generation == "v3":
            from smtrain.client.sdk.v3 import trainer as make
        else:
            from smtrain.client.sdk.v2 import pytorch as make
    return make(target, request, prepare)


def submit(generation: Generation, target: SageMakerBackend, request: dict[str, Any]) -> None:
    """Send a request through an SDK's object and do not wait.

    Raises botocore's errors as they are.
    """
    job = build(generation, target, request)
    if generation == "v3":
        job.train(wait=False, logs=False)
    else:
        job.fit(wait=False, logs="None")
