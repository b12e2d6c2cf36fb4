"""Warm pools: a job's machines kept for the next one that asks for the same, with their cache folder.

A pool belongs to the job that left it and is part of that job's record: when it began, until when it is kept, and what
became of it. It ends by time without anybody watching: its status is a function of the clock.
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
    """Where a job's pool keeps what a host had in its cache folder."""
    return job.folder / "pool" / host


def keep(job: JobRecord) -> None:
    """Make a pool of the machines of a job that has just ended, if it asked for one."""
    seconds = keep_alive(job.request)
    if not seconds:
        return
    with job.lock:
        job.state["pool"] = {"since": time.time(), "seconds": seconds, "until": time.time() + seconds}
        job.record()


def keep_alive(request: dict[str, Any]) -> int:
    return int(request["ResourceConfig"].get("KeepAlivePeriodInSeconds") or 0)


def matching(request: dict[str, Any], jobs: Iterable[JobRecord]) -> JobRecord | None:
    """The job whose pool a request gets: one that matches and is kept the longest."""
    if not keep_alive(request):
        return None
    kept = [job for job in jobs if job.pool_status() == "Available" and first_difference(request, job.request) is None]
    return max(kept, key=lambda job: job.state["pool"]["until"], default=None)


def reuse(pool: JobRecord, job: JobRecord) -> None:
    """Hand a pool over: its job says by whom it was reused, its cache becomes the new job's."""
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
    """Keep an available pool until so long after it began."""
    with job.lock:
        job.state["pool"].update(seconds=seconds, until=job.state["pool"]["since"] + seconds)
        job.record()


def sweep(jobs: Iterable[JobRecord]) -> None:
    """Remove the cache of pools that are over."""
    for job in jobs:
        if job.pool_status() == "Terminated" and (job.folder / "pool").exists():
            remove(job.folder / "pool")


def take_cache(job: JobRecord, ml: Path, host: str) -> None:
    """Give a host the cache folder that its machine had before, or an empty one."""
    target, kept = ml / CACHE, cache_folder(job, host)
    target.parent.mkdir(parents=True, exist_ok=True)
    if kept.is_dir():
        shutil.move(kept, target)
    else:
        target.mkdir(exist_ok=True)


def leave_cache(job: JobRecord, ml: Path, host: str) -> None:
    """Keep a host's cache folder for the job that reuses the pool."""
    kept = cache_folder(job, host)
    kept.parent.mkdir(parents=True, exist_ok=True)
    if (ml / CACHE).is_dir():
        shutil.move(ml / CACHE, kept)


def fault_of(request: dict[str, Any]) -> str | None:
    """What SageMaker does not keep warm."""
    if not keep_alive(request):
        return None
    if request.get("EnableManagedSpotTraining"):
        return "KeepAlivePeriodInSeconds is not supported with managed spot training"
    if request["ResourceConfig"].get("InstanceGroups"):
        return "KeepAlivePeriodInSeconds is not supported with InstanceGroups"
    if len(hosts_of(request)) == 0:
        return "KeepAlivePeriodInSeconds needs instances"
    return None
