"""Make a job the owner of its run's checkpoints before it is created, so that a run has one
writer.
"""

from __future__ import annotations

import time
from typing import Any

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.core.config import JobConfig
from smtrain.core.errors import JobError
from smtrain.core.protocol.owner import Fence, Owner, owner_uri, status_of
from smtrain.stages.base import checkpoint_uri

DAY = 86400.0


def claim(target: SageMakerBackend, config: JobConfig, request: dict[str, Any]) -> Fence:
    """Take the run's checkpoints for a job.

    Raises `JobError` with the owner's name if another job has them.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    uri, fence = checkpoint_uri(config), _fence(target, config, owner_of(config, request))
    try:
        fence.claim()
    except ClientError as error:
        raise JobError(
            f"{owner_uri(uri)} cannot be used ({error.response['Error'].get('Code')}), so two jobs"
            " could write the run's checkpoints at once; allow yourself s3:GetObject and"
            " s3:PutObject on it (`smtrain iam policy`)",
            code="aws.refused",
        ) from None
    except BotoCoreError as error:
        raise JobError(
            f"{owner_uri(uri)} cannot be reached ({error}); the same command tries again",
            code="aws.unreachable",
        ) from None
    return fence


def require_owner(target: SageMakerBackend, config: JobConfig, job: str) -> None:
    """Raise `OwnerError` if another job than this one has the run's checkpoints; ClientError as
    S3.
    """
    _fence(target, config, Owner(job)).refuse_other_owner()


def _fence(target: SageMakerBackend, config: JobConfig, me: Owner) -> Fence:
    return Fence(
        target.s3, checkpoint_uri(config), me, status_of(lambda region: _sagemaker(target, region))
    )


def owner_of(config: JobConfig, request: dict[str, Any]) -> Owner:
    """The owner record of a train request's job, whose account is its role's."""
    limits = request["StoppingCondition"]
    retries = request.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0)
    longest = limits.get("MaxWaitTimeInSeconds") or limits["MaxRuntimeInSeconds"] * (1 + retries)
    account = str(request["RoleArn"]).split(":")[4]
    # A day more, for the wait for machines and for clocks that differ.
    return Owner(
        request["TrainingJobName"],
        config.compute.region or "",
        account,
        until=time.time() + longest + DAY,
    )


def _sagemaker(target: SageMakerBackend, region: str) -> Any:
    if target.record.here or region in ("", target.region_name()):
        return target.sagemaker
    return SageMakerBackend(target.name, region).sagemaker
