"""A job's checkpoint prefix in S3, as rank 0 sees it: which job owns it, and what has arrived
there.

SageMaker syncs /opt/ml/checkpoints to S3 in any order, deletions too. A container that cannot reach
S3 (network isolation, a VPC without an endpoint) trains all the same: the name of its folder keeps
its files apart, and it keeps one more checkpoint because it cannot look.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from smtrain.core.errors import SmtrainError
from smtrain.core.interrupts import poll
from smtrain.core.protocol.checkpoints import RECORDS
from smtrain.core.protocol.container import Container
from smtrain.core.protocol.lineage import Lineage, lines_in
from smtrain.core.protocol.owner import RENEWAL_SECONDS, Fence, OwnerError, container_fence
from smtrain.core.protocol.uris import objects_at, split_uri
from smtrain.core.text import Say
from smtrain.worker.checkpoint import manifest
from smtrain.worker.engine.nxd import completeness

VARIABLE = "SMTRAIN_CHECKPOINTS"
"""The run's checkpoint prefix, in a job whose container has a network."""


class Destination:
    """A job's checkpoint prefix; a run in a shell has none, so what its disk holds has arrived."""

    def __init__(self, container: Container, lineage: Lineage, say: Say) -> None:
        """Take ownership of the checkpoints.

        Raises `OwnerError`, which names the owner, if another job has them.
        """
        self.lineage, self._say, self._in_job = lineage, say, bool(container.job)
        self._uri = os.environ.get(VARIABLE, "") if container.job else ""
        self._uploaded_names: set[str] = set()
        self._s3: Any = None
        self._fence: Fence | None = None
        self._closed = threading.Event()
        self._shared = self._uri.startswith("/")
        """Every host sees this file system, so what is whole has arrived."""
        if self._uri and not self._shared:
            self._reach(container.job)

    def _reach(self, job: str) -> None:
        arn = os.environ.get("TRAINING_JOB_ARN", "::::::").split(":")
        try:
            s3, fence = container_fence(self._uri, job, arn[3], arn[4])
            fence.keep()
            self._s3, self._fence = s3, fence
        except OwnerError:
            raise
        except (
            Exception
        ) as error:  # boto3, network or permissions: train on, the folder's own name is enough
            self._say(
                f"the owner of the checkpoints in {self._uri} cannot be asked for from here"
                f" ({_short(error)}); this job writes to a folder of its name"
            )
            return
        threading.Thread(target=self._renew, name="owner of the checkpoints", daemon=True).start()

    def require_owner(self) -> None:
        """Raise `OwnerError` if the checkpoints belong to another job now."""
        if self._fence is None:
            return
        try:
            self._fence.check()
        except SmtrainError:
            raise
        except Exception as error:
            self._say(
                f"the owner of the checkpoints could not be asked for ({_short(error)}); training"
                " continues"
            )

    def has_arrived(self, checkpoint: Path) -> bool:
        """Whether a checkpoint, whole on the hosts' disks, is whole in S3 too.

        Without access to S3 we assume that all but the newest are.
        """
        name = self.lineage.name(checkpoint)
        if not self._in_job or self._shared or name in self._uploaded_names:
            return True
        older = checkpoint != self.lineage.checkpoints()[-1][1]
        if self._s3 is None:
            return older
        try:
            is_uploaded = self._is_there(checkpoint, name)
        except Exception as error:
            self._say(
                f"whether {name} has arrived in {self._uri} could not be asked ({_short(error)})"
            )
            return older
        if is_uploaded:
            self._uploaded_names.add(name)
        return is_uploaded

    @property
    def unfinished_checkpoints(self) -> set[str]:
        """Checkpoints of other jobs without a record, if there is no owner to ask: a job may still
        be writing them.

        Pruning them here would delete them in S3 too, although their job may have completed them by
        then.
        """
        if not self._in_job or self._shared or self._fence:
            return set()
        other_checkpoints = lines_in(self.lineage.root).all_steps(self.lineage.parts[1:])
        return {
            name
            for _, name in other_checkpoints
            if not any((self.lineage.root / name / record).exists() for record in RECORDS.values())
        }

    def wait(self, seconds: float) -> None:
        """Wait until the newest checkpoint has arrived; not at all without access to S3."""
        if self._s3 is not None:
            poll(
                lambda: all(
                    self.has_arrived(folder) for _, folder in self.lineage.checkpoints()[-1:]
                ),
                0.5,
                seconds,
            )

    def close(self) -> None:
        self._closed.set()

    def _is_there(self, checkpoint: Path, name: str) -> bool:
        uri = f"{self._uri.rstrip('/')}/{name}/"
        bucket, prefix = split_uri(uri)
        sizes = {
            item["Key"][len(prefix) :]: item["Size"]
            for item in objects_at(self._s3.list_objects_v2, uri)
        }
        record = next(file for file in RECORDS.values() if (checkpoint / file).exists())
        if record not in sizes:
            return False
        body = self._s3.get_object(Bucket=bucket, Key=prefix + record)["Body"].read()
        if body != (checkpoint / record).read_bytes():
            return False
        fault = manifest.fault if record == manifest.NAME else completeness.fault
        return fault(checkpoint, sizes) is None

    def _renew(self) -> None:
        while not self._closed.wait(RENEWAL_SECONDS):
            assert self._fence is not None
            try:
                self._fence.keep()
            except OwnerError:
                return  # `require_owner` raises it before the next manifest
            except Exception as error:
                self._say(
                    f"the ownership of the checkpoints could not be renewed ({_short(error)});"
                    " training continues"
                )


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
