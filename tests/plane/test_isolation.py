"""EnableNetworkIsolation: the hosts of a job reach each other, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from smtrain.core.protocol.entrypoints import entrypoints_folder

from .conftest import ROOT, Client, StartServer, channel, refused

LOOK = """
import json, os, socket
from pathlib import Path
found = {"interfaces": [line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]}
try:
    socket.create_connection(("127.0.0.1", PORT), timeout=10).close()
    found["plane"] = "reached"
except OSError as error:
    found["plane"] = type(error).__name__
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    try:
        probe.connect(("192.0.2.1", 9))
        found["outside"] = "reached"
    except OSError as error:
        found["outside"] = error.strerror
found["credentials"] = sorted(name for name in os.environ if "KEY" in name or "ENDPOINT" in name)
found["data"] = Path("/opt/ml/input/data/train/a").read_text()
Path("/opt/ml/model/m").write_text("made without a network")
print(json.dumps(found))
"""


@pytest.mark.parametrize("mode", ["File", "FastFile"])
def test_an_isolated_job_sees_its_data_and_no_network(client: Client, mode: str) -> None:
    uri = client.put(f"isolated-{mode}/a", "data")
    program = LOOK.replace("PORT", str(urlsplit(client.endpoint.url).port))
    name = client.start(
        ["python", "-c", program],
        EnableNetworkIsolation=True,
        InputDataConfig=[channel("train", uri, mode)],
    )
    job = client.wait(name)
    assert job["TrainingJobStatus"] == "Completed", client.lines(job)
    assert job["EnableNetworkIsolation"] is True
    seen = json.loads(client.lines(job)[-1])
    assert seen.pop("outside") == "Network is unreachable"
    assert seen == {
        "interfaces": ["lo"],
        "plane": "ConnectionRefusedError",
        "credentials": [],
        "data": "data",
    }
    assert job["ModelArtifacts"]["S3ModelArtifacts"]


GATHER = """
import json, os, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
ranks = [None] * dist.get_world_size()
dist.all_gather_object(ranks, os.environ["GROUP_RANK"] + "." + os.environ["LOCAL_RANK"])
listening = {}
for name in ("tcp", "tcp6"):
    rows = [line.split() for line in Path("/proc/net/" + name).read_text().splitlines()[1:]]
    listening |= {f"socket:[{row[9]}]": row[1].split(":")[0] for row in rows if row[3] == "0A"}
addresses = set()
for pid in (os.getpid(), os.getppid()):
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            addresses.add(listening.get(os.readlink(entry)))
        except OSError:
            pass
dist.barrier()
print(json.dumps([ranks, sorted(addresses - {None})]), flush=True)
"""


@pytest.mark.full  # the gate has hosts of isolated jobs speak to each other without torch, below
def test_two_hosts_of_an_isolated_job_train_together(client: Client) -> None:
    """With torchrun as the launcher starts it; it and the ranks listen only on 127.0.0.1."""
    command = (
        f"cat > t.py <<'END'\n{GATHER}END\nexec {sys.executable} {entrypoints_folder()}/forking.py"
        " --nnodes=2 --nproc_per_node=1 --master_addr=algo-1 --master_port=$SMTRAIN_MASTER_PORT"
        " --node_rank=$((${HOSTNAME#algo-} - 1)) t.py"
    )
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    job = client.run(command, hosts=2, EnableNetworkIsolation=True, Environment=environment)
    assert job["TrainingJobStatus"] == "Completed", client.lines(job)
    for host in ("algo-1", "algo-2"):
        [seen] = [
            line for line in client.lines(job, host) if line.startswith("[[")
        ]  # torchrun may say more
        assert json.loads(seen) == [["0.0", "1.0"], ["0100007F"]]


def test_isolated_jobs_at_once_do_not_meet(client: Client) -> None:
    """Each has its own network: both bind one port, and each second host finds its own first
    host.
    """
    program = """
import os, socket, time
if socket.gethostname() == "algo-1":
    with socket.create_server(("algo-1", 7777)) as server:
        for _ in range(2):
            peer, _ = server.accept()
            print("heard", peer.recv(100).decode(), flush=True)
            time.sleep(0.5)
else:
    for _ in range(2):
        while True:
            try:
                peer = socket.create_connection(("algo-1", 7777))
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
        peer.sendall(os.environ["TRAINING_JOB_NAME"].encode())
"""
    names = [
        client.start(["python", "-c", program], hosts=2, EnableNetworkIsolation=True)
        for _ in range(2)
    ]
    for name in names:
        assert client.wait(name)["TrainingJobStatus"] == "Completed", client.lines(name)
        assert client.lines(name) == [f"heard {name}"] * 2


def test_where_there_are_no_namespaces_it_is_refused(start_server: StartServer) -> None:
    client = Client(start_server("--no-namespaces"))
    code, message = refused(
        client.sagemaker.create_training_job, **client.request("true", EnableNetworkIsolation=True)
    )
    assert code == "ValidationException"
    assert message.startswith("EnableNetworkIsolation cannot be honoured: ")
    assert client.completed("true", EnableNetworkIsolation=False)


AS_USER = """
import os, sys, time
from pathlib import Path
from smtrain.plane.client import ensure_running, shut_down
sys.path.insert(0, os.getcwd())
from tests.plane.conftest import Client
home = Path(sys.argv[1])
try:
    client = Client(ensure_running(home))
    look = "tail -n +3 /proc/net/dev | cut -d: -f1; getent hosts algo-2"
    job = client.run(look, hosts=2, EnableNetworkIsolation=True)
    print(os.getuid(), job["TrainingJobStatus"], job.get("FailureReason"), *client.lines(job, "algo-2"), sep="|")
finally:
    shut_down(home)
"""


def test_who_is_not_root_gets_it_in_a_user_namespace(tmp_path: Path) -> None:
    """The usual case on a laptop: the hosts join the user namespace of the job's network."""
    become = (
        ["unshare", "--user", "--map-user=1000", "--map-group=1000"] if os.getuid() == 0 else []
    )
    if become and subprocess.run([*become, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel gives no user namespace")
    done = subprocess.run(
        [*become, sys.executable, "-c", AS_USER, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    uid, status, reason, *lines = done.stdout.strip().split("|")
    assert (uid != "0", status, reason) == (True, "Completed", "None"), done.stderr
    assert [line.split() for line in lines] == [["lo"], ["127.0.0.1", "algo-2"]]
