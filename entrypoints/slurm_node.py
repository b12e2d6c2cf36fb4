"""One node of a Slurm job: srun starts `python slurm_node.py STAGE` once a node, and it acts as a SageMaker host.

It makes the node's /opt/ml on the shared folder (links to inputs, checkpoints and results), runs the launcher in it,
puts the time before every line, and forwards SIGTERM. Standard library only: no package is there yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCHEME = "file://"
LINE_BYTES = 256 << 10
GRAPHS, GRAPHS_COMPLETE = "NEURON_COMPILE_CACHE_URL", "smtrain-complete.json"  # as config.schema has it


def make_host(job: Path, request: dict[str, Any], rank: int, hosts: int, interface: str | None) -> Path:
    """Make the folder that is this node's /opt/ml; deletes what an earlier attempt left in it."""
    names = [f"algo-{number + 1}" for number in range(hosts)]
    ml = job / "nodes" / names[rank]
    shutil.rmtree(ml, ignore_errors=True)
    for folder in ("input/config", "input/data", "output", "code"):
        (ml / folder).mkdir(parents=True)
    resources: dict[str, Any] = {"current_host": names[rank], "hosts": names}
    if interface:
        resources["network_interface_name"] = interface
    (ml / "input/config/resourceconfig.json").write_text(json.dumps(resources), "utf-8")
    copied = job / "inputs.json"  # written by s3_inputs.py
    from_s3 = json.loads(copied.read_text("utf-8")) if copied.exists() else {}
    for channel in request["InputDataConfig"]:
        uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
        source = Path(from_s3.get(uri) or uri.removeprefix(SCHEME))
        place = ml / "input/data" / channel["ChannelName"]
        if source.is_file():  # a channel is a folder
            place.mkdir()
            place = place / source.name
        elif not source.exists():
            raise SystemExit(
                f"{source}: channel {channel['ChannelName']} is not there on {socket.gethostname()}; check that "
                "cluster.shared is mounted on every node, and that it was not removed; a launch copies it there"
            )
        place.symlink_to(source)
    links = {"model": job / "output/model", "output/data": job / "output/data"}
    if checkpoints := request.get("CheckpointConfig"):
        links["checkpoints"] = Path(checkpoints["S3Uri"].removeprefix(SCHEME))
    for name, target in links.items():
        target.mkdir(parents=True, exist_ok=True)
        (ml / name).symlink_to(target.resolve())
    return ml


def interface_to(address: str) -> str | None:
    """The network interface by which this node reaches an address; None if that cannot be found out."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24]) == own:  # SIOCGIFADDR
                    return name
    return None


def first_node() -> str:
    """The address of node 0, which runs the batch script and srun."""
    launching = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    return os.environ.get("SMTRAIN_MASTER_ADDR") or launching or socket.gethostname()


def own_graphs(shared: str) -> str:
    """The folder of compiled graphs for this node's processes.

    A complete cache is copied to the node's own disk, because the compiler's locks are slow on a shared file system;
    any other cache is used as it is.
    """
    if not shared.startswith("/") or not Path(shared, GRAPHS_COMPLETE).exists():
        return shared
    own = Path(tempfile.mkdtemp(prefix="smtrain-graphs-"))
    shutil.copytree(shared, own, dirs_exist_ok=True)
    return str(own)


def say_full(ml: Path, why: str) -> None:
    """Write the cause of a failure on a full disk, using the space that the batch script has reserved for it."""
    with contextlib.suppress(OSError):
        (ml.parent.parent / ".reserve").unlink(missing_ok=True)
        (ml / "output").mkdir(exist_ok=True)
        (ml / "output/failure").write_text(
            f"{ml}: {why}; make room in cluster.shared, then launch again to resume from its last checkpoint", "utf-8"
        )


def run(command: list[str], log: Path, environment: dict[str, str], told: Path) -> int:
    """Run the launcher and log each line with its time; returns its exit status, or 128 + the signal.

    A stage that saved because it was told to stop ends with status 0: the file `told` tells the batch script that it is
    not done. The file `failed` next to it marks the node that failed before it was told to stop.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)

    def stop(_number: int, _frame: object) -> None:
        told.touch()
        process.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    output = process.stdout
    assert output
    lost, why = 0, ""
    with open(log, "ab", buffering=0) as out:
        for line in iter(lambda: output.readline(LINE_BYTES), b""):  # a longer line continues in the next entry
            stamp = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z").encode()
            entry = stamp + b" " + line.rstrip(b"\r\n") + b"\n"
            if lost:
                entry = stamp + f" ({lost} lines were lost here: {why})\n".encode() + entry
            try:
                written = out.write(entry)
                lost = 0 if written == len(entry) else lost + 1
            except OSError as error:  # a full disk: drop the line; the stage itself decides whether to stop
                lost, why = lost + 1, str(error.strerror)
    status = process.wait()
    if status and not told.exists():
        with contextlib.suppress(OSError):
            told.with_name("failed").touch()
        if lost:
            say_full(told.parent, why)
    return status if status >= 0 else 128 - status


def main() -> None:
    job, stage = Path(os.environ["SMTRAIN_JOB_FOLDER"]), sys.argv[1]
    rank, hosts = int(os.environ.get("SLURM_NODEID", "0")), int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    request = json.loads((job / "request.json").read_text("utf-8"))
    first = first_node()
    try:
        ml = make_host(job, request, rank, hosts, interface_to(first))
    except SystemExit as why:
        with contextlib.suppress(OSError):
            (job / f"nodes/algo-{rank + 1}/output/failure").write_text(str(why), "utf-8")
        raise
    environment = {
        **os.environ,
        "SMTRAIN_ML_ROOT": str(ml),
        "SMTRAIN_MASTER_ADDR": first,
        "SMTRAIN_INSTALL": "install smtrain[train] in the nodes' Python (cluster.venv)",
    }
    graphs = os.environ.get(GRAPHS, "")
    if stage == "train" and (own := own_graphs(graphs)) != graphs:
        environment[GRAPHS] = own
    command = [sys.executable, str(HERE / "launch.py"), stage]
    try:
        status = run(command, job / f"logs/algo-{rank + 1}.log", environment, ml / "told")
    finally:
        if environment.get(GRAPHS, "") != graphs:
            shutil.rmtree(environment[GRAPHS], ignore_errors=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
