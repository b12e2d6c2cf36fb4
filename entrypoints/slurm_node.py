"""One node of a Slurm job: srun starts `python slurm_node.py STAGE` once a node, and it acts as a
SageMaker host.

It makes the node's /opt/ml on the shared folder (links to inputs, checkpoints and results), runs
the launcher in it, puts the time before every line, and forwards SIGTERM. Standard library only: no
package is there yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from cluster_host import interface_to, link_folders, link_inputs, make_folders, run

FOLDER = Path(__file__).resolve().parent
SCHEME = "file://"
GRAPHS, GRAPHS_COMPLETE = (
    "NEURON_COMPILE_CACHE_URL",
    "smtrain-complete.json",
)  # as config.schema has it


def make_host(
    job: Path, request: dict[str, Any], rank: int, hosts: int, interface: str | None
) -> Path:
    """Make the folder for this node's /opt/ml; deletes remains of an earlier attempt in it."""
    ml = job / "nodes" / f"algo-{rank + 1}"
    make_folders(ml, rank, hosts, interface)
    inputs_record = job / "inputs.json"  # written by s3_inputs.py
    from_s3 = json.loads(inputs_record.read_text("utf-8")) if inputs_record.exists() else {}
    uris = {
        c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"]
        for c in request["InputDataConfig"]
    }
    remedy = (
        "check that cluster.shared is mounted on every node, and that it was not removed; a launch"
        " copies it there"
    )
    link_inputs(
        ml,
        [(n, Path(from_s3.get(uri) or uri.removeprefix(SCHEME))) for n, uri in uris.items()],
        remedy,
    )
    links = {"model": job / "output/model", "output/data": job / "output/data"}
    if checkpoints := request.get("CheckpointConfig"):
        links["checkpoints"] = Path(checkpoints["S3Uri"].removeprefix(SCHEME))
    link_folders(ml, links)
    return ml


def first_node() -> str:
    """The address of node 0, which runs the batch script and srun."""
    launching = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    return os.environ.get("SMTRAIN_MASTER_ADDR") or launching or socket.gethostname()


def own_graphs(shared_folder: str) -> str:
    """The folder of compiled graphs for this node's processes.

    A complete cache is copied to the node's own disk, because the compiler's locks are slow on a
    shared file system; any other cache is used as it is.
    """
    if not shared_folder.startswith("/") or not Path(shared_folder, GRAPHS_COMPLETE).exists():
        return shared_folder
    node_folder = Path(tempfile.mkdtemp(prefix="smtrain-graphs-"))
    shutil.copytree(shared_folder, node_folder, dirs_exist_ok=True)
    return str(node_folder)


def say_full(ml: Path, reason: str) -> None:
    """Write the cause of a failure on a full disk, using the space that the batch script has
    reserved for it.
    """
    with contextlib.suppress(OSError):
        (ml.parent.parent / ".reserve").unlink(missing_ok=True)
        (ml / "output").mkdir(exist_ok=True)
        (ml / "output/failure").write_text(
            f"{ml}: {reason}; make room in cluster.shared, then launch again to resume from its"
            " last checkpoint",
            "utf-8",
        )


def attend(command: list[str], log: Path, environment: dict[str, str], stop_mark: Path) -> int:
    """Run the launcher and log each line with its time; returns its exit status, or 128 + the
    signal.

    A stage that saved because it was told to stop ends with status 0: the file `stop_mark` tells
    the batch script that it is not done. The file `failed` next to it marks the node that failed
    before it was told to stop.
    """
    with open(log, "ab", buffering=0) as out:
        status, reason = run(command, out, environment, stop_mark.touch)
    if status and not stop_mark.exists():
        with contextlib.suppress(OSError):
            stop_mark.with_name("failed").touch()
        if reason:
            say_full(stop_mark.parent, reason)
    return status


def main() -> None:
    job, stage = Path(os.environ["SMTRAIN_JOB_FOLDER"]), sys.argv[1]
    rank, hosts = (
        int(os.environ.get("SLURM_NODEID", "0")),
        int(os.environ.get("SLURM_JOB_NUM_NODES", "1")),
    )
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
    if stage == "train" and (node_graphs := own_graphs(graphs)) != graphs:
        environment[GRAPHS] = node_graphs
    command = [sys.executable, str(FOLDER / "launch.py"), stage]
    try:
        status = attend(command, job / f"logs/algo-{rank + 1}.log", environment, ml / "told")
    finally:
        if environment.get(GRAPHS, "") != graphs:
            shutil.rmtree(environment[GRAPHS], ignore_errors=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
