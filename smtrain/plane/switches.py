"""Switches of a running control plane: failing calls, late logs, missing machines, quotas,
interruptions, hosts.

    plane = smtrain.plane.switches.plane()
    plane.faults(throttle=0.3, seed=1)
    plane.delivery(late=2.0, reorder=0.05)

A setting lasts until the server ends or `calm` is called.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smtrain.core.errors import LocalError
from smtrain.plane.client import CONTROL, CONTROL_PATH, Endpoint, control_token, ensure_running


@dataclass(frozen=True)
class Plane:
    """A running control plane and its switches.

    Every method raises `LocalError` for an invalid setting.
    """

    endpoint: Endpoint

    def faults(
        self,
        *,
        operations: str | Sequence[str] = "*",
        throttle: float = 0.0,
        errors: float = 0.0,
        drops: float = 0.0,
        after: float = 0.0,
        rate: float | None = None,
        times: int | None = None,
        seed: int = 0,
    ) -> None:
        """Let calls of these operations (`logs:*`, `sagemaker:CreateTrainingJob`) fail from now on.

        `throttle`, `errors` (5xx) and `drops` (no answer) are fractions of all calls; of the failed
        and dropped ones the fraction `after` takes effect all the same. More than `rate` calls a
        second are throttled. `times` ends the rule after so many faults. Rules add up; the newest
        one that fits an operation decides.
        """
        patterns = [operations] if isinstance(operations, str) else list(operations)
        self.call(
            "faults",
            operations=patterns,
            throttle=throttle,
            errors=errors,
            drops=drops,
            after=after,
            rate=rate,
            times=times,
            seed=seed,
        )

    def counts(self) -> dict[str, dict[str, int]]:
        """By operation: calls, and how many of them were throttled, failed and dropped; since the
        last `calm`.
        """
        counts: dict[str, dict[str, int]] = self.call("faults")["counts"]
        return counts

    def delivery(
        self,
        *,
        late: float = 0.0,
        reorder: float = 0.0,
        late_streams: float = 0.0,
        empty_pages: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Set how log events written from now on arrive; `smtrain.plane.server.logs_api.Delivery`
        says what each is.
        """
        self.call(
            "delivery",
            late=late,
            reorder=reorder,
            late_streams=late_streams,
            empty_pages=empty_pages,
            seed=seed,
        )

    def grace(self, seconds: float) -> None:
        """Set the seconds between SIGTERM and SIGKILL, 120 on AWS."""
        self.call("grace", seconds=seconds)

    def no_capacity(
        self,
        instance_type: str,
        *,
        seconds: float | None = None,
        attempts: int | None = None,
        pending: float = 0.2,
        spot_only: bool = False,
        region: str | None = None,
    ) -> None:
        """Have no machines of this type for `seconds` from now or for `attempts` jobs; without
        either, until `calm`.

        A job waits in Pending for `pending` seconds and fails with SageMaker's CapacityError; a
        spot job waits until its MaxWaitTimeInSeconds. With InstancePreferences the first type that
        is available gets the job. `region` limits the shortage to one region.
        """
        self.call(
            "capacity",
            instance_type=instance_type,
            seconds=seconds,
            attempts=attempts,
            pending=pending,
            spot_only=spot_only,
            region=region,
        )

    def quota(self, name: str, value: float, *, region: str | None = None) -> None:
        """Set a quota by its name (`ml.trn1.32xlarge for training job usage`), in one region or in
        all; the default is 1000.
        """
        self.call("quotas", values={name: value}, region=region)

    def spot(self, *, after: Sequence[float] = (), away: float = 0.2, saving: float = 0.65) -> None:
        """Set the interruptions of spot jobs that start from now on.

        The n-th attempt is interrupted `after[n]` seconds into training, machines are back `away`
        seconds later, and billable seconds are smaller than training seconds by the fraction
        `saving`.
        """
        self.call("spot", after=list(after), away=away, saving=saving)

    def interrupt(self, job: str) -> None:
        """Take a running spot job's machines back: SIGTERM, the grace, then Interrupted, Restarting
        and once more.
        """
        self.call("interrupt", job=job, kind="spot")

    def break_down(self, job: str) -> None:
        """Let a running job's machines fail without notice: InternalServerError, or RetryStrategy's
        next try.
        """
        self.call("interrupt", job=job, kind="fault")

    def hosts(self, *, run_in: str = "", image: str = "", memory: str = "", cpus: str = "") -> None:
        """Set the kind of hosts (`sandbox`, `docker`, `auto`) and the image for requests that do
        not say it.

        Kept over restarts; without arguments it is the sandbox again.
        """
        self.call("hosts", run_in=run_in, image=image, memory=memory, cpus=cpus)

    def calm(self) -> None:
        """Undo every fault and every other setting but the grace; jobs and logs stay."""
        self.call("faults", clear=True)
        for name in ("delivery", "spot"):
            self.call(name)
        for name in ("capacity", "quotas"):
            self.call(name, clear=True)

    def call(self, name: str, /, **options: Any) -> dict[str, Any]:
        """Make a control call over HTTP."""
        request = urllib.request.Request(  # noqa: S310 - a URL of our own on 127.0.0.1
            f"{self.endpoint.url}{CONTROL_PATH}{name}",
            data=json.dumps(options).encode(),
            headers={"Authorization": f"{CONTROL}{control_token(self.endpoint.secret_key)}"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=300) as response:
                answer: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                reason = error.read().decode(errors="replace")
            raise LocalError(f"the local control plane refused {name!r}: {reason}") from None
        except OSError as error:  # URLError is one
            raise LocalError(
                f"the local control plane at {self.endpoint.url} does not answer ({error}); "
                "`smtrain local status` says whether it runs",
                code="local.unreachable",
            ) from None
        return answer


def plane(home: Path | None = None) -> Plane:
    """The control plane of this home, started if none runs."""
    return Plane(ensure_running(home))
