"""Names that SageMaker, CloudWatch and Service Quotas use."""

from __future__ import annotations

FINAL_STATUSES = ("Completed", "Failed", "Stopped")
"""Final values of TrainingJobStatus (API_DescribeTrainingJob)."""

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
"""CloudWatch's log group of all training jobs, and the namespace of their metrics."""
ENDPOINT_LOGS = "/aws/sagemaker/Endpoints"
"""Prefix of the log groups of endpoints."""

# Quotas as Service Quotas itself names them (Amazon SageMaker; read 2026-11 in published listings
# of accounts). Of the names for spot below the first three only the first half was seen; a quota
# without an entry limits nothing.
TRAINING, SPOT, WARM_POOL = (
    "{type} for training job usage",
    "{type} for spot training job usage",
    "{type} for training warm pool usage",
)
PER_JOB, PER_SPOT_JOB = (
    "Maximum number of instances per training job",
    "Maximum instances per spot training job",
)
ALL_JOBS, ALL_SPOT_JOBS = (
    "Number of instances across all training jobs",
    "Number of instances across all spot training jobs",
)
RUN_TIME, VOLUME = (
    "Longest run time for a training job",
    "Size of EBS volume for a training job instance",
)


def quota_command(code: str, value: float, region: str | None) -> str:
    """The command that requests a higher quota from AWS."""
    return (
        "aws service-quotas request-service-quota-increase --service-code sagemaker --quota-code"
        f" {code} --desired-value {value:g} --region {region}"
    )
