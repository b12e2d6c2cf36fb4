"""One pod of a job on Kubernetes: every pod runs `python kubernetes_node.py STAGE`, and acts as a
SageMaker host.

It downloads the inputs and the checkpoints from S3, waits until all pods are there, runs the
launcher, puts the time before every line, uploads checkpoints while it runs and the results at the
end. A file `stop` in the job's folder ends it like SIGTERM, and leaves the pods and their logs.
Only boto3 must be installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from checkpoint_sync import CheckpointSync
from cluster_host import (
    host_name,
    interface_to,
    link_inputs,
    make_folders,
    read_failure,
    run,
)
from gang import RESTART_STATUS, Gang, stop_tree
from launch import children
from s3_inputs import ATTEMPTS, sync_prefix

FOLDER = Path(__file__).resolve().parent
RESULTS = {"model": "output/model", "output/data": "output/data"}
"""Folders below /opt/ml, each with its place below the job's folder."""
STOP_STATUS = 3
"""Exit status of a pod that `smtrain stop` ended: the job must not start it again."""
TAKEN_STATUS = 143
"""Exit status of a pod that the cluster ended: another pod resumes."""
REFUSED_STATUS = 78
"""Exit status of a pod that no restart helps (EX_CONFIG of sysexits.h)."""
LOOK_SECONDS = 2.0
AGENT_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables of HyperPod's elastic agent, which the launcher must not take for those of torchrun."""


class JobFolder:
    """The folder of the job in S3."""

    def __init__(self, client: Any, uri: str) -> None:
        self.client = client
        self.bucket, _, self.prefix = uri.removeprefix("s3://").partition("/")

    def exists(self, name: str) -> bool:
        """Whether it holds a file; False if S3 does not answer now."""
        with contextlib.suppress(Exception):
            self.client.head_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}")
            return True
        return False

    def write(self, name: str, text: str) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}", Body=text.encode())

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}")

    def upload(self, path: Path, name: str) -> None:
        self.client.upload_file(str(path), self.bucket, f"{self.prefix}/{name}")


def store(ml: Path, job: JobFolder) -> None:
    """Upload the results. A link counts if it leads to a file of the pod's own folder."""
    root = ml.resolve()
    for folder, place in RESULTS.items():
        for path in sorted((ml / folder).rglob("*")):
            if path.is_file() and path.resolve().is_relative_to(root):
                job.upload(path, f"{place}/{path.relative_to(ml / folder).as_posix()}")


class Log:
    """The log of this pod: its output, and a file to upload when the pod ends."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._lock = file, threading.Lock()
        self._file = open(file, "ab", buffering=0)  # noqa: SIM115

    def write(self, entry: bytes) -> int:
        """Write whole lines, each after its time."""
        with self._lock:
            sys.stdout.buffer.write(entry)
            sys.stdout.buffer.flush()
            return self._file.write(entry)

    def say(self, text: str) -> None:
        """Write a sentence of this program."""
        stamp = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        self.write(f"{stamp.replace('+00:00', 'Z')} {text}\n".encode())


class Pod:
    """This pod: its rank, its folder for /opt/ml, and why it ends."""

    def __init__(self, client: Any, stage: str) -> None:
        environment = os.environ
        self.client, self.stage = client, stage
        self.job = JobFolder(client, environment["SMTRAIN_JOB_FOLDER"])
        index = environment.get("JOB_COMPLETION_INDEX")
        self.rank = int(index or environment.get("GROUP_RANK", "0"))
        self.is_ranked = index is not None
        """Whether the cluster knows the rank too. HyperPod's elastic agent chooses it."""
        self.hosts = int(environment["SMTRAIN_HOSTS"])
        address = environment.get("SMTRAIN_MASTER_ADDR") or environment.get("MASTER_ADDR")
        self.first = address or "127.0.0.1"
        self.ml = Path(tempfile.mkdtemp(prefix="smtrain-")) / "ml"
        self.host = f"{host_name(self.rank)}-{environment.get('SMTRAIN_POD_UID', '0')[:8]}"
        self.log = Log(self._log_path())
        self.gang = Gang(
            self.rank,
            self.hosts,
            (self.first, int(environment.get("SMTRAIN_GANG_PORT", "7776"))),
            self.log.say,
        )
        self.sync: CheckpointSync | None = None
        self.stop_status = 0
        """Nonzero once the pod was told to end."""
        self.lost_reason = ""

    def _log_path(self) -> Path:
        """HyperPod's agent starts this program again in the same pod, whose log then has the lines
        of both attempts.
        """
        if self.is_ranked:
            return self.ml.parent / "pod.log"
        return Path(tempfile.gettempdir()) / f"smtrain-{self.host}.log"

    def announce(self) -> None:
        """Leave the rank for the client, unless the cluster knows it. A log of an earlier attempt in
        this pod goes, as the pod's own log is complete again only at the end.
        """
        if not self.is_ranked:
            self.job.delete(f"logs/{self.host}.log")
            self.job.write(f"hosts/{self.host}", "")

    def watch_for_stop(self) -> None:
        """End this pod when the job's folder has a file `stop`."""
        while not self.job.exists("stop"):
            time.sleep(LOOK_SECONDS)
        self.stop_status = STOP_STATUS
        os.kill(os.getpid(), signal.SIGTERM)

    def tell(self) -> None:
        """Note that the pod was told to end."""
        self.stop_status = self.stop_status or TAKEN_STATUS

    def lose(self, reason: str) -> None:
        """End all processes of this pod: another pod is lost, and all begin again."""
        self.lost_reason = reason
        threading.Thread(target=self._kill_processes, daemon=True).start()

    def _kill_processes(self) -> None:
        """Kill until this pod ends, as the launcher may be about to start."""
        while True:
            stop_tree(os.getpid(), children)
            time.sleep(0.1)

    def prepare(self) -> None:
        """Make the folders, and download the inputs and the checkpoints."""
        folders = json.loads(os.environ["SMTRAIN_FOLDERS"])
        make_folders(self.ml, self.rank, self.hosts, None)
        inputs = []
        for name, uri in folders["inputs"].items():
            if uri.startswith("s3://"):
                path = sync_prefix(self.client, uri, self.ml.parent / "inputs", self.log.say)
            else:
                path = Path(uri.removeprefix("file://"))
            inputs.append((name, path))
        link_inputs(self.ml, inputs, "check kubernetes.data, whose volumes hold the paths")
        for name in RESULTS:
            (self.ml / name).mkdir(parents=True)
        if folders.get("checkpoints"):
            self.sync = CheckpointSync(
                self.client, folders["checkpoints"], self.ml / "checkpoints", self.log.say
            )
            self.sync.pull()

    def attend(self) -> int:
        """Run the launcher between all pods' begin and end; returns the pod's exit status."""
        self.gang.on_loss = self.lose
        self.gang.begin()
        if interface := interface_to(self.first):
            make_resources(self.ml, interface)
        if self.sync:
            self.sync.start()
        environment = {
            **{name: text for name, text in os.environ.items() if name not in AGENT_VARIABLES},
            "SMTRAIN_ML_ROOT": str(self.ml),
            "SMTRAIN_MASTER_ADDR": self.first,
            "SMTRAIN_INSTALL": (
                f"install smtrain[train] in the image (compute.image) for stage {self.stage}"
            ),
        }
        if self.lost_reason:
            return RESTART_STATUS
        command = [sys.executable, str(FOLDER / "launch.py"), self.stage]
        status, _ = run(command, self.log, environment, self.tell)  # type: ignore[arg-type]
        if self.sync:
            self.sync.finish()
        if self.lost_reason:
            self.log.say(f"{self.lost_reason}; all pods begin again")
            return RESTART_STATUS
        store(self.ml, self.job)
        if self.stop_status:
            return self.stop_status
        if status:
            self.say_why(read_failure(self.ml) or f"it ended with status {status}")
            return status
        self.gang.end()
        return RESTART_STATUS if self.lost_reason else 0

    def say_why(self, reason: str) -> None:
        """Print the cause of a failure, and leave it for `smtrain status`."""
        self.log.say(reason)
        with contextlib.suppress(Exception):
            self.job.write(f"failures/{host_name(self.rank)}", reason)

    def leave_log(self) -> None:
        """Upload the log, which the node may rotate or delete."""
        with contextlib.suppress(Exception):
            self.job.upload(self.log.path, f"logs/{self.host}.log")


def make_resources(ml: Path, interface: str) -> None:
    """Add the network interface to the description of the hosts."""
    file = ml / "input/config/resourceconfig.json"
    resources = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**resources, "network_interface_name": interface}), "utf-8")


def main() -> None:
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3", config=Config(retries={"mode": "standard", "total_max_attempts": ATTEMPTS})
    )
    pod = Pod(client, sys.argv[1])

    def end_early(_number: int, _frame: object) -> None:
        pod.tell()
        os._exit(pod.stop_status)  # nothing has begun that could be saved

    signal.signal(signal.SIGTERM, end_early)
    threading.Thread(target=pod.watch_for_stop, daemon=True).start()
    status = 1
    try:
        pod.announce()
        pod.prepare()
        status = pod.attend()
    except SystemExit as error:
        pod.say_why(str(error))
        status = REFUSED_STATUS
    except Exception as error:
        pod.say_why(f"{type(error).__name__}: {error}")
    finally:
        pod.leave_log()
        shutil.rmtree(pod.ml.parent, ignore_errors=True)
    sys.stdout.flush()
    os._exit(status)  # threads wait for other pods


if __name__ == "__main__":
    main()
