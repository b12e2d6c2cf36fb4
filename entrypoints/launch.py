"""The container's first process: `python launch.py STAGE` installs what is missing and becomes the stage.

Training runs under torchrun, and SIGTERM is handed to the training processes from here: torchrun would kill them 30 s
after, of the 120 s that SageMaker gives, and end in an error. Standard library only: it runs before anything is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
MASTER_PORT = "7777"  # what the SageMaker toolkits use


def missing(requirements: Path) -> list[str]:
    """The lines of a requirements file that the installed packages do not satisfy."""
    from importlib import metadata

    lines = [line.strip() for line in requirements.read_text("utf-8").splitlines() if line.strip()]
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return lines
    lacking = []
    for line in lines:
        wanted = Requirement(line)
        try:
            if not wanted.specifier.contains(metadata.version(wanted.name), prereleases=True):
                lacking.append(line)
        except metadata.PackageNotFoundError:
            lacking.append(line)
    return lacking


def command(stage: str, ml: Path) -> list[str]:
    """What to become: the stage's script, under torchrun for training."""
    script = str(HERE / f"{stage}.py")
    if stage != "train":
        return [sys.executable, script]
    resources = json.loads((ml / "input/config/resourceconfig.json").read_text("utf-8"))
    config = json.loads((ml / "input/data/config/config.json").read_text("utf-8"))
    hosts, current = resources["hosts"], resources["current_host"]
    processes = config["compute"]["processes_per_instance"]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", resources.get("network_interface_name", "eth0"))
    return [
        sys.executable, "-m", "torch.distributed.run",
        f"--nnodes={len(hosts)}", f"--nproc_per_node={processes}", f"--node_rank={hosts.index(current)}",
        f"--master_addr={address(hosts[0])}",
        f"--master_port={os.environ.get('SMTRAIN_MASTER_PORT', MASTER_PORT)}",
        script,
    ]  # fmt: skip


def supervise(arguments: list[str]) -> int:
    """Run torchrun to its end; gives its exit status, 128 + the signal that killed it.

    SIGTERM goes to the training processes, which save and leave by themselves; before there are any, to torchrun.
    """
    torchrun = subprocess.Popen(arguments)

    def stop(_number: int, _frame: object) -> None:
        for pid in children(torchrun.pid) or [torchrun.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    status = torchrun.wait()
    return status if status >= 0 else 128 - status


def children(parent: int) -> list[int]:
    """The processes that a process has started and that live."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The command in parentheses may hold anything; state and parent come after it.
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    found.append(int(entry.name))
    return found


def address(host: str) -> str:
    """The first host's name, or this machine where the sandbox could not give hosts names of their own."""
    try:
        socket.gethostbyname(host)
    except OSError:
        return "127.0.0.1" if "SMTRAIN_ML_ROOT" in os.environ else host
    return host


def main() -> None:
    """Install, then become the stage."""
    stage = sys.argv[1]
    ml = Path(os.environ.get("SMTRAIN_ML_ROOT", "/opt/ml"))
    if lacking := missing(HERE / "requirements.txt"):
        print(f"installing {', '.join(lacking)}", flush=True)
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *lacking], check=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars of libraries are noise in a log
    arguments = command(stage, ml)
    if stage != "train":
        os.execv(arguments[0], arguments)  # noqa: S606
    sys.exit(supervise(arguments))


if __name__ == "__main__":
    main()
