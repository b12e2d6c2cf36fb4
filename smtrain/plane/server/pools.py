"""Warm pools: a job's machines, with their cache folder, kept for the next job with the same needs.

A pool is part of the record of the job that left it: its start, its end, and the job that reused
it. No thread ends it; its status is a function of the clock.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from smtrain.core.facts.warm_pools import WARM_POOL_CACHE, first_difference
from smtrain.plane.files import remove
from smtrain.plane.server.jobs import JobRecord, hosts_of

CACHE = WARM_POOL_CACHE.removeprefix("/opt/ml/")
VARIABLE = "SAGEMAKER_MANAGED_WARMPOOL_CACHE_DIRECTORY"


def cache_folder(job: JobRecord, host: str) -> Path:
    """The folder in which a job's pool keeps a host's cache."""
    return job.folder / "pool" / host


def keep_machines(job: JobRecord) -> None:
    """Keep the machines of a job that has just ended, if it asked for a pool."""
    seconds = keep_alive(job.request)
    if not seconds:
        return
    with job.lock:
        job.state["pool"] = {
            "since": time.time(),
            "seconds": seconds,
            "until": time.time() + seconds,
        }
        job.record()


def keep_alive(request: dict[str, Any]) -> int:
    return int(request["ResourceConfig"].get("KeepAlivePeriodInSeconds") or 0)


def find_matching(request: dict[str, Any], jobs: Iterable[JobRecord]) -> JobRecord | None:
    """The job whose pool a request gets: of those that match, the one kept the longest."""
    if not keep_alive(request):
        return None
    pools = [
        job
        for job in jobs
        if job.pool_status() == "Available" and first_difference(request, job.request) is None
    ]
    return max(pools, key=lambda job: job.state["pool"]["until"], default=None)


def reuse(pool: JobRecord, job: JobRecord) -> None:
    """Hand a pool over: record the job that reuses it, and move the cache to that job."""
    with pool.lock:
        pool.state["pool"].update(ended=time.time(), reused_by=job.name)
        pool.record()
    if (pool.folder / "pool").is_dir():
        shutil.move(pool.folder / "pool", job.folder / "pool")


def give_back(pool: JobRecord, job: JobRecord) -> None:
    """Undo `reuse`: the job could not be started."""
    with pool.lock:
        if pool.state["pool"].pop("reused_by", None) == job.name:
            del pool.state["pool"]["ended"]
            pool.record()
            if (job.folder / "pool").is_dir():
                shutil.move(job.folder / "pool", pool.folder / "pool")


def release(job: JobRecord) -> None:
    """End a pool now."""
    with job.lock:
        job.state["pool"]["until"] = time.time()
        job.record()
    sweep([job])


def prolong(job: JobRecord, seconds: int) -> None:
    """Keep an available pool until so many seconds after its start."""
    with job.lock:
        job.state["pool"].update(seconds=seconds, until=job.state["pool"]["since"] + seconds)
        job.record()


def sweep(jobs: Iterable[JobRecord]) -> None:
    """Remove the caches of pools that have ended."""
    for job in jobs:
        if job.pool_status() == "Terminated" and (job.folder / "pool").exists():
            remove(job.folder / "pool")


def take_cache(job: JobRecord, ml: Path, host: str) -> None:
    """Give a host its machine's cache folder, or an empty one."""
    target, stored_folder = ml / CACHE, cache_folder(job, host)
    target.parent.mkdir(parents=True, exist_ok=True)
    if stored_folder.is_dir():
        shutil.move(stored_folder, target)
    else:
        target.mkdir(exist_ok=True)


def leave_cache(job: JobRecord, ml: Path, host: str) -> None:
    """Keep a host's cache folder for the job that reuses the pool."""
    stored_folder = cache_folder(job, host)
    stored_folder.parent.mkdir(parents=True, exist_ok=True)
    if (ml / CACHE).is_dir():
        shutil.move(ml / CACHE, stored_folder)


def fault_of(request: dict[str, Any]) -> str | None:
    """The reason why SageMaker would not keep a request's machines warm; None if it would."""
    if not keep_alive(request):
        return None
    if request.get("EnableManagedSpotTraining"):
        return "KeepAlivePeriodInSeconds is not supported with managed spot training"
    if request["ResourceConfig"].get("InstanceGroups"):
        return "KeepAlivePeriodInSeconds is not supported with InstanceGroups"
    if len(hosts_of(request)) == 0:
        return "KeepAlivePeriodInSeconds needs instances"
    return None
