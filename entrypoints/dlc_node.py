"""One pod of a PAI-DLC job: every pod runs `python dlc_node.py STAGE [COMMAND...]`, and acts as a
SageMaker host.

It makes the folder that the stage takes for /opt/ml on the pod's own disk, runs the launcher or the
user's command in it, puts the time before every line, and copies the results to the mounted storage
at the end. OSS mounts take no append, and a rename there is a copy: only checkpoints are written to
the mount directly, file by file, their manifest last. Standard library only: no package is there
yet.

PAI-DLC's WORLD_SIZE is the number of pods and RANK that of this one, which is not what
torch.distributed means by them
(https://www.alibabacloud.com/help/en/pai/general-environment-variables, 2026-04-01).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import uploads
from cluster_host import (
    host_name,
    interface_to,
    link_folders,
    link_inputs,
    make_folders,
    read_failure,
    run,
)
from launch import accelerator

FOLDER = Path(__file__).resolve().parent
OF_DLC = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")
"""Variables of PAI-DLC that torchrun and libraries would take for their own."""
NAME_SECONDS = 600
"""Longest wait for the name of the first pod, which resolves some time after the pods have started.
"""
RESULTS = {"model": "output/model", "output/data": "output/data"}
"""Folders below /opt/ml, each with its place below the job's folder."""
STOP_STATUS = 3
"""Exit status of a pod that was told to end: its saved work is unfinished."""


def await_name(name: str, seconds: float = NAME_SECONDS) -> None:
    """Wait until a host's name resolves. Raises SystemExit if that takes too long."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(name, None)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"the first pod {name} cannot be found ({error}); launch the job again to"
                    " resume from its last checkpoint"
                ) from None
        time.sleep(1)


def too_few(ml: Path, count: str) -> str | None:
    """The reason why this pod cannot train with its GPUs, whose number PAI-DLC says; None if it
    can.
    """
    config = json.loads((ml / "input/data/config/config.json").read_text("utf-8"))
    processes = int(config["compute"]["processes_per_instance"])
    if not accelerator() or not count.isdecimal() or int(count) >= processes:
        return None
    return (
        f"this pod has {count} GPUs, and the run takes {processes} on each; choose another"
        " pai.ecs_spec or raise pai.resources.gpu, or lower compute.processes_per_instance"
    )


def store(ml: Path, job: Path) -> None:
    """Copy the results from the pod's disk to the job's folder, each file from its beginning to its
    end.

    A link counts if it leads to a file of the pod's own folder: no other file of the pod is a
    result.
    """
    root = ml.resolve()
    for folder, place in RESULTS.items():
        for path in sorted((ml / folder).rglob("*")):
            if path.is_file() and path.resolve().is_relative_to(root):
                target = job / place / path.relative_to(ml / folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "rb") as source, open(target, "wb") as target_file:
                    shutil.copyfileobj(source, target_file, 16 << 20)


def say_why(job: Path, rank: int, reason: str) -> None:
    """Print the cause of a failure, and leave it for `smtrain status`."""
    print(reason, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        (job / "failures").mkdir(parents=True, exist_ok=True)
        (job / "failures" / host_name(rank)).write_text(reason, "utf-8")


def variables(
    ml: Path, stage: str, environment: Mapping[str, str], *, is_user_command: bool
) -> dict[str, str]:
    """The environment of the launcher, or (`is_user_command`) of the user's command, which gets
    PAI-DLC's variables as they are.
    """
    if is_user_command:
        return {
            **environment,
            "SMTRAIN_INPUTS": str(ml / "input/data"),
            "SMTRAIN_OUTPUT": str(ml / "model"),
        }
    return {
        **{name: value for name, value in environment.items() if name not in OF_DLC},
        "SMTRAIN_ML_ROOT": str(ml),
        "SMTRAIN_MASTER_ADDR": environment.get("MASTER_ADDR", "127.0.0.1"),
        "SMTRAIN_MASTER_PORT": environment.get("MASTER_PORT", "23456"),
        "SMTRAIN_INSTALL": f"install smtrain[train] in the image (compute.image) for stage {stage}",
    }


def attend(job: Path, ml: Path, stage: str, command: list[str]) -> int:
    """Run the stage, or the user's command, and store its output; returns the pod's exit
    status.
    """
    stop_requests: list[bool] = []
    with open(1, "wb", buffering=0, closefd=False) as out:
        environment = variables(ml, stage, os.environ, is_user_command=bool(command))
        launcher = [sys.executable, str(FOLDER / "launch.py"), stage]
        status, _ = run(
            command or launcher,
            out,
            environment,
            lambda: stop_requests.append(True),
            new_session=bool(command),
        )
    store(ml, job)
    rank = int(os.environ.get("RANK", "0"))
    if status and not stop_requests:
        say_why(job, rank, read_failure(ml) or f"it ended with status {status}")
    elif stop_requests:
        say_why(
            job, rank, "it was told to end, and saved its work if it could; launch again to resume"
        )
    return STOP_STATUS if stop_requests and not status else status


def main() -> None:
    stage, command = sys.argv[1], sys.argv[2:]
    job, folders = Path(os.environ["SMTRAIN_JOB_FOLDER"]), json.loads(os.environ["SMTRAIN_FOLDERS"])
    rank, hosts = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    ml = Path(tempfile.mkdtemp(prefix="smtrain-")) / "ml"
    try:
        first = os.environ.get("MASTER_ADDR", "127.0.0.1")
        await_name(first)
        make_folders(ml, rank, hosts, interface_to(first))
        inputs = [(name, Path(path)) for name, path in folders["inputs"].items()]
        link_inputs(
            ml,
            inputs,
            "check pai.storage and pai.data; a launch copies there what is on your machine",
        )
        for name in RESULTS:
            (ml / name).mkdir(parents=True)
        link_folders(
            ml, {"checkpoints": Path(folders["checkpoints"])} if folders.get("checkpoints") else {}
        )
        if (
            stage == "train"
            and not command
            and (reason := too_few(ml, os.environ.get("NPROC_PER_NODE", "")))
        ):
            raise SystemExit(reason)
        names = [host_name(number) for number in range(hosts)]
        if command and (
            reason := uploads.damage(ml, names, host_name(rank))
        ):  # else the launcher does this
            raise SystemExit(reason)
        status = attend(job, ml, stage, command)
    except (OSError, SystemExit) as error:
        say_why(job, rank, str(error))
        sys.exit(1)
    finally:
        shutil.rmtree(ml.parent, ignore_errors=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
