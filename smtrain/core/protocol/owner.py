"""Ensure that only one job at a time writes a run's checkpoints, by a record in S3 with conditional
writes.

`checkpoints.owner.json` is next to the prefix, and is written only if it does not exist yet
(If-None-Match) or has not changed since it was read (If-Match): S3 accepts one of two concurrent
writers. The client takes it for a job before it sends CreateTrainingJob; rank 0 of the job renews
it while it trains, and checks it before it writes each manifest. Another job gets it only after its
owner has ended: according to SageMaker, or because it was not renewed for long.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from smtrain.core.errors import JobError
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.files import parse_json
from smtrain.core.protocol.uris import split_uri

FORMAT, VERSION = "smtrain-owner", 1
CLAIM = 600.0
"""Seconds for which a job keeps the record if its CreateTrainingJob was not answered."""
LEASE = 3600.0
"""Seconds after its last renewal for which a job keeps the record if its status cannot be read."""
RENEWAL_SECONDS = 300.0
"""Seconds between two renewals."""
LONGEST = 30 * 86400.0
"""Seconds, longer than any job of SageMaker."""

Status = Callable[[str, str], "str | None"]
"""TrainingJobStatus of a job in a region; None without such a job.

Raises if SageMaker cannot be asked.
"""


class OwnerError(JobError):
    """Another job owns the checkpoints."""


@dataclass(frozen=True)
class Owner:
    """The contents of the record."""

    job: str | None
    """None if the last owner released it."""
    region: str = ""
    account: str = ""
    renewed: bool = False
    """Whether the job itself wrote it, and renews it every five minutes."""
    until: float = 0.0
    """Time (seconds since 1970) by which the job has certainly ended, by the limits of its request.
    """

    def to_json(self) -> bytes:
        return (json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}) + "\n").encode()

    @classmethod
    def parse(cls, text: bytes, uri: str) -> Owner:
        try:
            content = parse_json(text)
            if (content.pop("format"), content.pop("version")) != (FORMAT, VERSION):
                raise ValueError("it is from another version")
            return cls(**content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise JobError(
                f"{uri} cannot be read ({error}), so the job that writes the checkpoints is"
                " unknown; delete it once no job of the run is in progress"
            ) from None


@dataclass(frozen=True)
class _Seen:
    """The record as read: contents, ETag, and its age in seconds and the time, both by S3's
    clock.
    """

    owner: Owner
    etag: str
    age: float
    now: float


def owner_uri(checkpoints: str) -> str:
    """The URI next to the prefix, whose contents are synced to every host."""
    return f"{checkpoints.rstrip('/')}.owner.json"


class Fence:
    """The record of one checkpoint prefix, used for one job."""

    def __init__(self, s3: Any, checkpoints: str, me: Owner, status: Status) -> None:
        self.uri, self.me, self._s3, self._status = owner_uri(checkpoints), me, s3, status
        self._bucket, self._key = split_uri(self.uri)
        self._etag: str | None = None

    def claim(self) -> None:
        """Make the job the owner.

        Raises `OwnerError` with the name of another owner, and ClientError of S3.
        """
        if not self._write(self.me, None):  # False if there is a record already
            self._take()

    def _take(self) -> None:
        for _ in range(5):
            record = self._read()
            if record and record.owner.job not in (None, self.me.job):
                self._refuse_unless_ended(record)
            if self._write(self.me, record.etag if record else None):
                return
        raise OwnerError(f"{self.uri} changes faster than it can be claimed; try again")

    def refuse_other_owner(self) -> None:
        """Raise the errors of `claim` without writing."""
        record = self._read()
        if record and record.owner.job not in (None, self.me.job):
            self._refuse_unless_ended(record)

    def keep(self) -> None:
        """Renew the record, by the job itself. Raises `OwnerError` if another job has it."""
        self.me = replace(self.me, renewed=True)
        record = self._read()
        if record and record.owner.job == self.me.job:
            self.me = replace(self.me, until=max(self.me.until, record.owner.until))
        self._take()

    def check(self) -> None:
        """Raise `OwnerError` if another job owns the checkpoints; a missing record counts as
        ours.
        """
        record = self._read()
        if record and record.owner.job not in (None, self.me.job):
            raise OwnerError(self._lost_message(record.owner))

    def release(self) -> None:
        """Release the record of `claim` for a job that was never created, unless another job has
        taken it.
        """
        if self._etag is not None:
            self._write(replace(self.me, job=None), self._etag)

    def _refuse_unless_ended(self, record: _Seen) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        owner = record.owner
        assert owner.job is not None
        try:
            status = self._status(owner.job, owner.region)
        except (BotoCoreError, ClientError) as error:
            if (owner.renewed and record.age > LEASE) or record.now > owner.until:
                return
            raise OwnerError(
                f"{owner.job} (account {owner.account}, {owner.region}) owns the run's checkpoints"
                f" and cannot be looked up ({error}); wait until it has ended, or give this run"
                " another name"
            ) from None
        if status in FINAL_STATUSES or (status is None and record.age > CLAIM):
            return
        if status is None:
            raise OwnerError(
                f"{owner.job} took the run's checkpoints {record.age:.0f} s ago and is being"
                f" created; follow that job, or try again in {CLAIM - record.age:.0f} s if its"
                " launch was cut off"
            )
        raise OwnerError(self._lost_message(owner))

    def _lost_message(self, owner: Owner) -> str:
        return (
            f"{owner.job} is writing checkpoints of this run; wait for it, stop it with `smtrain"
            f" stop {owner.job}`, or give this run another name"
        )

    def _read(self) -> _Seen | None:
        try:
            answer = self._s3.get_object(Bucket=self._bucket, Key=self._key)
        except self._s3.exceptions.ClientError as error:
            if error.response["Error"].get("Code") in ("NoSuchKey", "NoSuchBucket", "404"):
                return None
            raise
        now = _date(answer["ResponseMetadata"]["HTTPHeaders"].get("date"), answer["LastModified"])
        age = (now - answer["LastModified"]).total_seconds()
        return _Seen(
            Owner.parse(answer["Body"].read(), self.uri), answer["ETag"], age, now.timestamp()
        )

    def _write(self, owner: Owner, etag: str | None) -> bool:
        """Write if nothing has changed; False if S3 refuses."""
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        try:
            answer = self._s3.put_object(
                Bucket=self._bucket, Key=self._key, Body=owner.to_json(), **condition
            )
        except self._s3.exceptions.ClientError as error:
            code = error.response["Error"].get("Code")
            if code in (
                "PreconditionFailed",
                "ConditionalRequestConflict",
                "412",
                "409",
                "NoSuchKey",
            ):
                return False
            raise
        self._etag = answer["ETag"]
        return True


def container_fence(checkpoints: str, job: str, region: str, account: str) -> tuple[Any, Fence]:
    """An S3 client with short timeouts, and the fence of the job in this container.

    Raises ImportError if the image has no boto3. No other code in a container needs it: only S3
    knows who else writes, and what has arrived.
    """
    import boto3
    from botocore.config import Config

    short = Config(
        connect_timeout=5, read_timeout=15, retries={"mode": "standard", "total_max_attempts": 2}
    )
    session = boto3.Session()  # boto3's shared one may have been made under another environment
    s3 = session.client("s3", config=short)
    status = status_of(
        lambda region_name: session.client(
            "sagemaker", region_name=region_name or None, config=short
        )
    )
    return s3, Fence(
        s3, checkpoints, Owner(job, region, account, until=time.time() + LONGEST), status
    )


def status_of(sagemaker: Callable[[str], Any]) -> Status:
    """`Status` by DescribeTrainingJob; `sagemaker` gives a client for a region."""

    def status(job: str, region: str) -> str | None:
        client = sagemaker(region)
        try:
            return str(client.describe_training_job(TrainingJobName=job)["TrainingJobStatus"])
        except client.exceptions.ClientError as error:
            answer = error.response["Error"]
            if (
                answer.get("Code") == "ResourceNotFound"
                or "not found" in answer.get("Message", "").lower()
            ):
                return None
            raise

    return status


def _date(header: str | None, otherwise: datetime) -> datetime:
    """The time of an answer by S3's clock."""
    from email.utils import parsedate_to_datetime

    try:
        return parsedate_to_datetime(header or "")
    except ValueError:
        return otherwise
