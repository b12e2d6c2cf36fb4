"""What a test or a demonstration does to a running control plane: make it fail, be late, run out of machines.

    plane = smtrain.plane.testing.switches.plane()
    plane.faults(throttle=0.3, seed=1)
    plane.delivery(late=2.0, reorder=0.05)
    job = plane.synthetic_job(hosts=32, lines=10_000)

Every setting is of the running server and gone when it ends; `calm` ends them all.
"""

from __future__ import annotations

import hashlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smtrain.core.errors import LocalError
from smtrain.plane.client import CONTROL, CONTROL_PATH, Endpoint, control_token, ensure_running
from smtrain.plane.testing.synthetic_lines import line_of


@dataclass(frozen=True)
class SyntheticJob:
    """A job that only writes lines, and what it writes."""

    name: str
    hosts: int
    lines: int
    last_words: Mapping[str, Sequence[str]]

    def expected(self, host: str) -> list[str]:
        """All lines of a host (`algo-3`), in order."""
        rank = int(host.rpartition("-")[2]) - 1
        return [line_of(rank, i, self.lines) for i in range(self.lines)] + list(self.last_words.get(host, ()))

    def digest(self, host: str) -> str:
        """sha256 (hex) of a host's lines, joined by newlines."""
        return digest_of(self.expected(host))


def digest_of(lines: Sequence[str]) -> str:
    """sha256 (hex) of lines joined by newlines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class Plane:
    """A running control plane and its switches. Every method raises `LocalError` for a setting that makes no sense."""

    endpoint: Endpoint

    def faults(
        self, *, operations: str | Sequence[str] = "*", throttle: float = 0.0, errors: float = 0.0, drops: float = 0.0,
        after: float = 0.0, rate: float | None = None, times: int | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        """From now on let calls of these operations (`logs:*`, `sagemaker:CreateTrainingJob`) go wrong.

        `throttle`, `errors` (5xx) and `drops` (no answer) are fractions of all calls; of the failed and dropped ones
        the fraction `after` takes effect all the same. `rate` throttles what passes so many calls a second. `times`
        ends the rule after so many faults. Rules add up; of those that fit an operation the newest decides alone.
        """
        wanted = [operations] if isinstance(operations, str) else list(operations)
        self.call(
            "faults", operations=wanted, throttle=throttle, errors=errors, drops=drops, after=after, rate=rate,
            times=times, seed=seed,
        )  # fmt: skip

    def counts(self) -> dict[str, dict[str, int]]:
        """By operation: calls, and how many of them were throttled, failed and dropped; since the last `calm`."""
        told: dict[str, dict[str, int]] = self.call("faults")["counts"]
        return told

    def delivery(
        self, *, late: float = 0.0, reorder: float = 0.0, late_streams: float = 0.0, empty_pages: float = 0.0,
        seed: int = 0,
    ) -> None:  # fmt: skip
        """How log events written from now on arrive, as `smtrain.plane.server.streams.Delivery` says."""
        self.call("delivery", late=late, reorder=reorder, late_streams=late_streams, empty_pages=empty_pages, seed=seed)

    def synthetic_job(
        self, *, hosts: int = 1, lines: int = 100, seconds: float = 0.0, name: str | None = None,
        instance_type: str = "ml.trn1.32xlarge", end: str = "Completed", reason: str | None = None,
        last_words: Mapping[str, Sequence[str]] | None = None, held: bool = False,
    ) -> SyntheticJob:  # fmt: skip
        """Make a job without processes, each of whose hosts writes `lines` lines evenly over `seconds`.

        It ends as `end` (Completed or Failed, the latter with `reason`); `last_words` are further lines by host.
        With `held` it goes on after them until it is stopped or `release`d.
        """
        words = {host: list(said) for host, said in (last_words or {}).items()}
        told = self.call(
            "synthetic", name=name or f"synthetic-{time.time_ns()}", hosts=hosts, lines=lines, seconds=seconds,
            instance_type=instance_type, end=end, reason=reason, last_words=words, held=held,
        )  # fmt: skip
        return SyntheticJob(told["name"], hosts, lines, words)

    def release(self, job: SyntheticJob) -> None:
        """Let a held job end."""
        self.call("release", job=job.name)

    def grace(self, seconds: float) -> None:
        """Seconds between SIGTERM and SIGKILL, 120 on AWS."""
        self.call("grace", seconds=seconds)

    def no_capacity(
        self, instance_type: str, *, seconds: float | None = None, attempts: int | None = None, pending: float = 0.2,
        spot_only: bool = False,
    ) -> None:  # fmt: skip
        """No machines of this type for `seconds` from now or for `attempts` jobs; with neither, until `calm`.

        A job waits in Pending for `pending` seconds and fails with SageMaker's CapacityError; a spot job waits until
        its MaxWaitTimeInSeconds. With InstancePreferences the first type that there is gets the job.
        """
        self.call(
            "capacity", instance_type=instance_type, seconds=seconds, attempts=attempts, pending=pending,
            spot_only=spot_only,
        )  # fmt: skip

    def quota(self, name: str, value: float) -> None:
        """Set a quota by its name (`ml.trn1.32xlarge for training job usage`); all are 1000 before."""
        self.call("quotas", values={name: value})

    def spot(self, *, after: Sequence[float] = (), away: float = 0.2, saving: float = 0.65) -> None:
        """How spot jobs that start from now on fare.

        The n-th attempt is interrupted `after[n]` seconds into training, machines are back `away` seconds later, and
        billable seconds are smaller than training seconds by the fraction `saving`.
        """
        self.call("spot", after=list(after), away=away, saving=saving)

    def interrupt(self, job: str) -> None:
        """Take a running spot job's machines back: SIGTERM, the grace, then Interrupted, Restarting and once more."""
        self.call("interrupt", job=job, kind="spot")

    def break_down(self, job: str) -> None:
        """Let a running job's machines fail without notice: InternalServerError, or RetryStrategy's next try."""
        self.call("interrupt", job=job, kind="fault")

    def hosts(self, *, run_in: str = "", image: str = "", memory: str = "", cpus: str = "") -> None:
        """What hosts are of requests that do not say it (`sandbox`, `docker`, `auto`), and the image that they get.

        Kept over restarts; with nothing it is the sandbox again.
        """
        self.call("hosts", run_in=run_in, image=image, memory=memory, cpus=cpus)

    def calm(self) -> None:
        """Forget every fault and every other setting but the grace; jobs and logs stay."""
        self.call("faults", clear=True)
        for what in ("delivery", "spot"):
            self.call(what)
        for what in ("capacity", "quotas"):
            self.call(what, clear=True)

    def call(self, what: str, **asked: Any) -> dict[str, Any]:
        """One control call over HTTP."""
        request = urllib.request.Request(  # noqa: S310 - a URL of our own on 127.0.0.1
            f"{self.endpoint.url}{CONTROL_PATH}{what}",
            data=json.dumps(asked).encode(),
            headers={"Authorization": f"{CONTROL}{control_token(self.endpoint.secret_key)}"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=300) as reply:
                told: dict[str, Any] = json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode(errors="replace")
            raise LocalError(f"the local control plane refused {what!r}: {said}") from None
        except OSError as error:  # URLError is one
            raise LocalError(
                f"the local control plane at {self.endpoint.url} does not answer ({error}); "
                "`smtrain local status` says whether it runs"
            ) from None
        return told


def plane(home: Path | None = None) -> Plane:
    """The control plane of this home, started if none runs."""
    return Plane(ensure_running(home))
