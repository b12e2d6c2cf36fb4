"""The one place where a CreateTrainingJob request leaves this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smtrain.client.backends.sagemaker.target import Target
from smtrain.core.config import JobConfig

if TYPE_CHECKING:
    pass


def create(target: Target, request: dict[str, Any], config: JobConfig) -> None:
    """Send the request once: through the SageMaker SDK that `compute.sdk` means, else through boto3.

    Raises botocore's own `ClientError` or `ParamValidationError` untouched, so that the caller can tell a capacity or
    quota error from a fault of the request.
    """
    from smtrain.client.sdk import chosen, submit

    if generation := chosen(target, config):
        submit(generation, target, request)
    else:
        target.sagemaker.create_training_job(**request)
