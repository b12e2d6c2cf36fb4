"""Faults of a cluster, applied to a running job; each returns whether it could be applied."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from smtrain.client.backends.slurm.backend import SlurmBackend
from smtrain.client.jobs.job import Job
from tests.client.backends.slurm.conftest import wait_for
from tests.client.backends.slurm.daemons import Slurm
from tests.processes import commands, parent, read

Fault = Callable[[Slurm, Job, random.Random], bool]
PROGRAMS = (b"train.py", b"launch.py")
"""An argument of each training rank and of each test stage."""


def queued(job: Job) -> str:
    """The ID of a job that has not ended."""
    place = job.target
    assert isinstance(place, SlurmBackend)
    return str(wait_for(lambda: place.queued_id(job.name)))


def with_environment(slurm: Slurm, *words: str) -> list[int]:
    """Processes of this cluster that were started with all these variables; another cluster may run
    here too.
    """
    wanted = {word.encode() for word in (f"SLURM_CONF={slurm.conf}", *words)}
    return [pid for pid in commands() if wanted <= set(read(pid, "environ").split(b"\0"))]


def kill_rank(slurm: Slurm, job: Job, chance: random.Random) -> bool:
    alive = [
        pid
        for pid in with_environment(slurm, f"TRAINING_JOB_NAME={job.name}")
        if any(word.endswith(PROGRAMS) for word in arguments(pid)[1:])
    ]
    with suppress(ProcessLookupError):
        if alive:
            os.kill(chance.choice(sorted(alive)), signal.SIGKILL)
    return bool(alive)


def time_wall(slurm: Slurm, job: Job, _: random.Random) -> bool:
    """The signal that Slurm sends before the time limit, now."""
    slurm.run("scancel", "--batch", "--signal=USR1", queued(job))
    return True


def requeue(slurm: Slurm, job: Job, _: random.Random) -> bool:
    slurm.run("scontrol", "requeue", queued(job))
    return True


def kill_node(slurm: Slurm, job: Job, chance: random.Random) -> bool:
    """Switch a node off until Slurm gives it up: kill its slurmd and everything that it runs."""
    node = chance.choice(slurm.nodes[:2])
    slurm.kill(node)
    ours = {
        *with_environment(slurm, f"TRAINING_JOB_NAME={job.name}", f"SLURMD_NODENAME={node}"),
        *batch_scripts(slurm, node),
    }
    for pid in {*ours, *filter(is_step, map(parent, ours))}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    try:
        wait_for(lambda: "down" in slurm.run("sinfo", "-h", "-N", "-n", node, "-o", "%T"))
    finally:
        slurm.start_node(node)
    return True


def kill_controller(slurm: Slurm, job: Job, _: random.Random) -> bool:
    slurm.wait_saved(queued(job))
    slurm.kill("slurmctld")
    slurm.start_controller()
    return True


FAULTS: tuple[Fault, ...] = (requeue, kill_controller, kill_rank, time_wall, kill_node)


def arguments(pid: int) -> list[bytes]:
    return read(pid, "cmdline").split(b"\0")


def batch_scripts(slurm: Slurm, node: str) -> list[int]:
    """Shells of batch scripts on a node, from its spool folder."""
    spool, script = f"{slurm.folder}/spool-{node}/".encode(), b"/slurm_script"
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [
        pid
        for pid in pids
        if any(word.startswith(spool) and word.endswith(script) for word in arguments(pid))
    ]


def is_step(pid: int) -> bool:
    return b"".join(arguments(pid)).startswith(b"slurmstepd")
