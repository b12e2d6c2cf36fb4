"""Tasks on a Ray cluster.

Ray retries the tasks of processes and machines that die, and uses machines that join late.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from smtrain.core.errors import SmtrainError, first_line
from smtrain.core.extras import missing_module, present
from smtrain.worker.data.prepare.spread.ray_address import answers, connection_fault, init_fault
from smtrain.worker.data.prepare.spread.work import TaskOutcome, outcomes

RETRIES = 2
"""Further tries of a task whose process or machine died; a share that crashes each time is set
aside.
"""
_MACHINE_LOSS_TRIES = 20  # tries of a task whose machine was lost
_AHEAD = 2
_LARGE = 2  # large tasks of a machine at a time, on our own clusters in one process
_LOOK_S = 1.0
_ANSWERS_WITHIN = (
    45.0  # Ray ends a driver whose cluster has not answered for 60 s, without a word of ours
)
TASK_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}  # a task has its cores
_PACKAGE = Path(__file__).resolve().parents[4]


class LostClusterError(SmtrainError):
    """The cluster is gone; what is done is kept."""


def require_ray() -> None:
    """Raise SmtrainError if the package is missing."""
    if not present("ray"):
        raise SmtrainError(f"data.machines: {missing_module('ray')}.", code="package.missing")


def ray_package() -> Any:
    """The package. Raises SmtrainError if it is missing."""
    require_ray()
    import ray

    return ray


class RayExecutor:
    """Runs tasks on the cluster at an address (`10.0.0.1:6379`, or `auto` for the one that this
    machine belongs to).

    With `ships_code` the package smtrain travels to the cluster, which then needs only its
    requirements. `alive` tells sooner than Ray that a cluster of our own is gone. `on_loss` gets a
    sentence, in a thread, if any other cluster is gone; it has to end the process, whose main
    thread Ray blocks then. `unit` are the cores that Ray counts as one CPU, and that a task with
    threads uses. Use it as a context manager: it connects and disconnects, and leaves the cluster
    as it was. `finished` counts the tasks whose outcome was taken. Raises SmtrainError if the
    cluster cannot be reached.
    """

    def __init__(
        self,
        address: str,
        *,
        ships_code: bool = False,
        alive: Callable[[], bool] = lambda: True,
        on_loss: Callable[[str], object] | None = None,
        unit: int = 1,
    ) -> None:
        self._unit = unit
        self._address, self._ships_code, self._alive, self._lost = (
            address,
            ships_code,
            alive,
            on_loss,
        )
        self._left = threading.Event()
        self.finished = 0

    def __enter__(self) -> RayExecutor:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if self._lost:
            os.environ.setdefault(
                "RAY_BACKEND_LOG_LEVEL", "error"
            )  # hides a warning for each retry
        ray = ray_package()
        # processes of a cluster of our own have it already, and need not be started for it
        environment = (
            {"env_vars": TASK_ENVIRONMENT, "py_modules": [str(_PACKAGE)]}
            if self._ships_code
            else None
        )
        deadline = time.monotonic() + _ANSWERS_WITHIN
        if fault := connection_fault(self._address, _ANSWERS_WITHIN):
            raise SmtrainError(self._unusable(fault))
        # Ray itself tries for some 14 minutes, in C++, so only a thread can end it
        limit = threading.Timer(max(1.0, deadline - time.monotonic()), self._give_up)
        limit.daemon = True
        limit.start()
        try:
            ray.init(
                self._address,
                runtime_env=environment,
                log_to_driver=False,
                configure_logging=False,
                include_dashboard=None,
            )
        except Exception as error:  # ConnectionError, RuntimeError, ray's own and gRPC's
            raise SmtrainError(self._unusable(init_fault(error))) from None
        finally:
            limit.cancel()
        if self._lost and "://" not in self._address:  # Ray's own client raises
            threading.Thread(
                target=self._watch, args=(ray.get_runtime_context().gcs_address,), daemon=True
            ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        ray_package().shutdown()

    def _unusable(self, reason: str) -> str:
        return f"data.ray_address: the Ray cluster at {self._address} cannot be used: {reason}."

    def _give_up(self) -> None:
        if self._lost:
            self._lost(
                self._unusable(
                    f"no connection within {_ANSWERS_WITHIN:.0f} s; check that `ray status` works"
                    " there"
                )
            )

    def _watch(self, address: str) -> None:
        """Call `on_loss` if nothing answers at the address for a while."""
        last_answer = time.monotonic()
        while not self._left.wait(_LOOK_S):
            if answers(address):
                last_answer = time.monotonic()
            elif self._lost and time.monotonic() - last_answer > _ANSWERS_WITHIN:
                self._lost(str(self._cluster_loss(f"no answer for {_ANSWERS_WITHIN:.0f} s")))
                return

    def _cluster_loss(self, reason: str) -> LostClusterError:
        remedy = "; start it again, and run the same command again to resume" if self._lost else ""
        return LostClusterError(f"the Ray cluster at {self._address} is gone ({reason}){remedy}.")

    def run(
        self,
        function: Callable[..., Any],
        common_arguments: tuple[Any, ...],
        items: Iterator[tuple[Any, tuple[Any, ...]]],
        on_wait: Callable[[], None],
        *,
        large: bool = False,
        threads: bool = False,
    ) -> Iterator[tuple[Any, TaskOutcome]]:
        """See `TaskExecutor`. Raises LostClusterError if the cluster is gone."""
        ray = ray_package()
        remote = ray.remote(outcomes)
        common_references = [ray.put(value) for value in common_arguments]
        tasks_in_flight: dict[Any, list[tuple[Any, tuple[Any, ...]]]] = {}
        machine_losses: Counter[Any] = Counter()

        def submit(group: list[tuple[Any, tuple[Any, ...]]]) -> None:
            take = max(1, machine_cpus * group_size // _LARGE) if large else share
            task = remote.options(num_cpus=take, max_retries=RETRIES)
            tasks_in_flight[
                task.remote(function, [arguments for _, arguments in group], *common_references)
            ] = group

        share = 1 if threads else round(1 / self._unit, 4)
        group_size = (
            min(_LARGE, self._unit) if large else 1
        )  # a whole machine may never be free on a shared cluster
        cpus, machine_cpus, last_look, has_more = 0, 1, 0.0, True
        try:
            while True:
                if not self._alive():
                    raise self._cluster_loss("its process ended")
                if time.monotonic() - last_look >= _LOOK_S:
                    cpus, machine_cpus = _cpus(ray)
                    last_look = time.monotonic()
                    on_wait()
                while has_more and len(tasks_in_flight) < max(2, _AHEAD * cpus / share):
                    task_group = list(islice(items, group_size))
                    if not task_group:
                        has_more = False
                        break
                    submit(task_group)
                if not tasks_in_flight:
                    return
                ready, _ = ray.wait(list(tasks_in_flight), num_returns=1, timeout=_LOOK_S)
                for reference in ready:
                    task_group = tasks_in_flight.pop(reference)
                    try:
                        results = _results(ray, reference, len(task_group))
                    except ray.exceptions.NodeDiedError:  # says nothing about the task
                        label = task_group[0][0]
                        machine_losses[label] += 1
                        if machine_losses[label] > _MACHINE_LOSS_TRIES:
                            raise
                        submit(task_group)
                        continue
                    for (label, _), result in zip(task_group, results, strict=True):
                        yield label, result
                        self.finished += 1
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:
            raise self._cluster_loss(first_line(error)) from None
        finally:
            for reference in tasks_in_flight if self._alive() else ():
                ray.cancel(reference, force=True)


def _cpus(ray: Any) -> tuple[int, int]:
    """CPUs of the cluster, and the fewest of a machine."""
    alive = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    alive = [cpus for cpus in alive if cpus]
    return sum(alive), min(alive, default=1)


def _results(ray: Any, reference: Any, count: int) -> list[TaskOutcome]:
    try:
        results: list[TaskOutcome] = ray.get(reference)
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
        return [TaskOutcome(error=first_line(error), has_crashed=True)] * count
    return results
