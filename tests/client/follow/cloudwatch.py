"""CloudWatch Logs of one job in this process: a test decides when events arrive and when calls
fail.
"""

from __future__ import annotations

import datetime
from typing import Any

from botocore.exceptions import ClientError, EndpointConnectionError

from smtrain.client.backends.sagemaker.backend import SageMakerBackend

GROUP = "/aws/sagemaker/TrainingJobs"
BEGAN = datetime.datetime(2026, 11, 21, 12, tzinfo=datetime.timezone.utc)


def error(operation: str, code: str, status: int = 400) -> ClientError:
    response: Any = {
        "Error": {"Code": code, "Message": code},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(response, operation)


class Logs:
    """FilterLogEvents over the events that have arrived, in the order of time, `page` events at a
    time.
    """

    def __init__(self, page: int = 3) -> None:
        self.arrived: list[dict[str, Any]] = []
        self.page = page
        self.failures: list[Exception] = []

    def arrive(self, stream: str, timestamp: int, message: str) -> None:
        self.arrived.append({"logStreamName": stream, "timestamp": timestamp, "message": message})

    def filter_log_events(
        self,
        *,
        logGroupName: str,
        logStreamNamePrefix: str,
        startTime: int,
        nextToken: str = "0",
        filterPattern: str | None = None,
    ) -> dict[str, Any]:
        assert logGroupName == GROUP
        if self.failures:
            raise self.failures.pop()
        events = [
            event
            for event in self.arrived
            if event["logStreamName"].startswith(logStreamNamePrefix)
            and event["timestamp"] >= startTime
        ]
        events.sort(key=lambda event: event["timestamp"])
        first = int(nextToken)
        answer: dict[str, Any] = {"events": events[first : first + self.page]}
        if first + self.page < len(events):
            answer["nextToken"] = str(first + self.page)
        return answer


class SageMaker:
    """DescribeTrainingJob returns the next of a list of descriptions; the last one repeatedly."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)
        self.failures: list[Exception] = []

    def describe_training_job(self, *, TrainingJobName: str) -> dict[str, Any]:
        if self.failures:
            raise self.failures.pop()
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def description(
    status: str, *changes: str, secondary: str | None = None, hosts: int = 1, **more: Any
) -> dict[str, Any]:
    """A DescribeTrainingJob answer."""
    at = [BEGAN + datetime.timedelta(minutes=i) for i in range(len(changes) + 1)]
    transitions = [
        {
            "Status": name,
            "StartTime": at[i],
            **({"EndTime": at[i + 1]} if i + 1 < len(changes) else {}),
        }
        for i, name in enumerate(changes)
    ]
    return {
        "TrainingJobName": "job",
        "TrainingJobArn": "arn:aws:sagemaker:us-east-1:123456789012:training-job/job",
        "TrainingJobStatus": status,
        "SecondaryStatus": secondary or (changes[-1] if changes else status),
        "SecondaryStatusTransitions": transitions,
        "CreationTime": BEGAN,
        "LastModifiedTime": at[-1],
        "ResourceConfig": {
            "InstanceType": "ml.trn1.32xlarge",
            "InstanceCount": hosts,
            "VolumeSizeInGB": 1,
        },
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/out"},
        **more,
    }


def target(logs: Any, sagemaker: Any = None) -> SageMakerBackend:
    """A target with these clients."""
    made = SageMakerBackend("local")
    made.__dict__.update(logs=logs, sagemaker=sagemaker)  # fills the cached properties
    return made


def unreachable() -> Exception:
    return EndpointConnectionError(endpoint_url="https://logs.us-east-1.amazonaws.com")
