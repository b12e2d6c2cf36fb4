"""A real Slurm of some nodes on this machine, without systemd or cgroups (Debian's slurmctld,
slurmd, munge; root).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from tests.ports import free_port

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "squeue",
    "scancel",
    "sinfo",
)
READY = 60.0


def lacking() -> str | None:
    """The reason why Slurm cannot run here; None if it can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"no {', '.join(absent)} here (apt-get install slurmctld slurmd slurm-client munge)"
    return None if os.geteuid() == 0 else "slurmd needs root"


def cannot(reason: str) -> NoReturn:
    """Skip a test that cannot run here; fail if SMTRAIN_SLURM=required."""
    (pytest.fail if os.environ.get("SMTRAIN_SLURM") == "required" else pytest.skip)(reason)


class Slurm:
    """Slurm's daemons as processes of ours, each ended by its ID."""

    def __init__(self, folder: Path, nodes: int = 3) -> None:
        self.folder, self.nodes = folder, [f"node{number + 1}" for number in range(nodes)]
        self.conf = folder / "slurm.conf"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for name in ("state", "log", "munge"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge").chmod(0o755)
        key = self.folder / "munge/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self.conf.write_text(self._conf(), "utf-8")
        files = [f"--{name}={self.folder}/munge/{file}" for name, file in _MUNGE.items()]
        self._spawn("munged", ["munged", "--foreground", "--force", *files])
        self._until((self.folder / "munge/socket").exists, "munged")
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        self._until(self._idle, "slurmd")

    def start_controller(self) -> None:
        self._spawn("slurmctld", ["slurmctld", "-D"])

    def start_node(self, node: str, hidden: Path | None = None) -> None:
        """`hidden`: a folder that the node sees as an empty disk."""
        own = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            'mount -t tmpfs smtrain-test "$0" && exec "$@"',
            str(hidden),
        ]
        self._spawn(node, [*(own if hidden else ()), "slurmd", "-D", "-N", node])

    def kill(self, name: str) -> None:
        """kill -9 of one daemon."""
        self.processes[name].kill()
        self.processes.pop(name).wait()

    def end(self, name: str) -> None:
        """Stop one daemon as its service would, so that it saves its state."""
        self.processes[name].terminate()
        self.processes.pop(name).wait()

    def wait_saved(self, job: str) -> None:
        """Wait until slurmctld has saved the state of jobs. It saves some seconds after a change,
        so a job gets a comment; twice, as it may have begun to save before the first.
        """
        state = self.folder / "state/job_state"
        for turn in range(2):
            before = state.stat().st_mtime_ns if state.exists() else 0

            def saved(before: int = before, comment: str = f"{turn}-{time.time_ns()}") -> bool:
                with suppress(
                    subprocess.SubprocessError
                ):  # while Slurm requeues a job, it accepts no comment
                    self.run("scontrol", "update", f"JobId={job}", f"Comment={comment}")
                with suppress(OSError):  # between two names
                    return state.stat().st_mtime_ns > before
                return False

            self._until(saved, "slurmctld's state")

    def stop(self) -> None:
        with suppress(subprocess.SubprocessError):
            self.run("scancel", "--full", "--user", "root")
        for name in [*self.nodes, "slurmctld", "munged"]:
            if process := self.processes.pop(name, None):
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60
        )
        done.check_returncode()
        return done.stdout

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        with open(self.folder / f"log/{name}.out", "ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _idle(self) -> bool:
        try:
            states = set(
                self.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
            )  # a row for each partition
        except subprocess.CalledProcessError:
            return False
        return len(states) == len(self.nodes) and all(state.endswith(" idle") for state in states)

    def _until(self, condition: object, what: str) -> None:
        assert callable(condition)
        deadline = time.monotonic() + READY
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come up; see {self.folder}/log")
            time.sleep(0.1)

    def _conf(self) -> str:
        ports = [free_port() for _ in range(len(self.nodes) + 1)]
        host = socket.gethostname().partition(".")[0]
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4"
            " State=UNKNOWN"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        ]
        return (
            _CONF.format(host=host, port=ports[0], folder=self.folder)
            + "\n".join(lines)
            + "\n"
            + _PARTITIONS
        )


_MUNGE = {
    "key-file": "key",
    "socket": "socket",
    "pid-file": "pid",
    "log-file": "log",
    "seed-file": "seed",
}
_PARTITIONS = """\
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=ALL MaxTime=60 State=UP
PartitionName=closed Nodes=ALL State=DOWN
"""
# cred_expire shortens the two minutes that a requeued job waits; the scheduler looks often.
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=100000,bf_interval=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MinJobAge=300
SlurmdParameters=config_overrides
"""
