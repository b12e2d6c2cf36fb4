"""The storage of a cluster's jobs in S3, with the credentials of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from smtrain.client.backends.base import Body
from smtrain.client.backends.kubernetes.pod import job_folder
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.backends.sagemaker.calls import named_region
from smtrain.client.backends.sagemaker.s3 import has_content, list_prefix, send
from smtrain.core.errors import JobError
from smtrain.core.protocol.owner import Fence, Owner
from smtrain.core.protocol.uris import split_uri
from smtrain.core.text import Say

REGION = "us-east-1"
"""The region of S3 and of estimated prices if nothing names one."""
_WORDS = ("stop", "failures/", "logs/", "hosts/")
"""Files of an earlier job with the same name, which a new job would read as its own."""


@dataclass(frozen=True)
class Storage:
    """S3 as the jobs of a cluster use it."""

    @cached_property
    def place(self) -> SageMakerBackend:
        """The client of S3."""
        return SageMakerBackend("aws", self.region)

    @property
    def region(self) -> str:
        return named_region() or REGION

    def put(self, uri: str, files: Sequence[tuple[str, Body]], say: Say) -> None:
        """Upload files below a URI unless they are there with the same content."""
        from botocore.exceptions import ClientError

        bucket, prefix = split_uri(uri)
        try:
            remote_objects = {item["Key"]: item for item in list_prefix(self.place, uri)}
            for name, body in files:
                item = remote_objects.get(prefix + name)
                if item is None or not has_content(self.place, bucket, item, body):
                    send(self.place, bucket, prefix + name, body)
        except ClientError as error:
            raise JobError(
                f"{uri} cannot be written ({error.response['Error'].get('Code')}); check"
                " kubernetes.storage and your permissions s3:ListBucket and s3:PutObject",
                code="aws.refused",
            ) from None

    def write(self, uri: str, content: bytes) -> None:
        """Write one object."""
        bucket, key = split_uri(uri)
        send(self.place, bucket, key, content)

    def remove(self, uris: Iterable[str]) -> None:
        """Delete objects."""
        for uri in uris:
            bucket, key = split_uri(uri)
            self.place.s3.delete_object(Bucket=bucket, Key=key)

    def forget_attempt(self, request: Mapping[str, Any]) -> None:
        """Delete the files of an earlier job with the same name, which the user has deleted."""
        folder = job_folder(request)
        bucket, _ = split_uri(folder)
        for word in _WORDS:
            keys = [str(item["Key"]) for item in list_prefix(self.place, f"{folder}/{word}")]
            self.remove(f"s3://{bucket}/{key}" for key in keys)

    def claim(
        self, request: Mapping[str, Any], status: Callable[[str], str | None]
    ) -> Fence | None:
        """Make a train job the only one that writes the run's checkpoints; `status` gives the status
        of another job of the cluster.

        Raises `OwnerError` if another job is in progress.
        """
        checkpoints = request.get("CheckpointConfig")
        if not checkpoints or request["HyperParameters"]["stage"] != "train":
            return None
        deadline = time.time() + request["StoppingCondition"]["MaxRuntimeInSeconds"]
        owner = Owner(request["TrainingJobName"], until=deadline)
        fence = Fence(self.place.s3, checkpoints["S3Uri"], owner, lambda job, _region: status(job))
        fence.claim()
        return fence

    def failure(self, folder: str) -> str:
        """The cause that the first failing pod has left; empty without one."""
        bucket, _ = split_uri(folder)
        with suppress(JobError):
            keys = sorted(str(item["Key"]) for item in self.place.listing(f"{folder}/failures/"))
            if keys:
                return self.place.read(f"s3://{bucket}/{keys[0]}").decode(errors="replace")
        return ""
