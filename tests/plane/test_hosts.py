"""A script's view of its host: /opt/ml, its config, its environment, the other hosts."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import Client, StartServer, channel, gone, processes


def shown(client: Client, expression: str, host: str = "algo-1", **changes: Any) -> Any:
    """Run a Python expression as a job; return its value."""
    program = (
        f"import json, os, socket, sys\nfrom pathlib import Path\nprint(json.dumps({expression}))"
    )
    job = client.completed(["python", "-c", program], **changes)
    return json.loads(client.lines(job, host)[-1])


def test_config_files(client: Client) -> None:
    uri = client.put("config-files/a")
    request = {
        "hosts": 2,
        "HyperParameters": {"lr": "0.1", "name": "it's"},
        "InputDataConfig": [channel("train", uri)],
    }
    read = "{p.name: json.loads(p.read_text()) for p in Path('/opt/ml/input/config').iterdir()}"
    files = shown(client, read, host="algo-2", **request)
    assert files["hyperparameters.json"] == {"lr": "0.1", "name": "it's"}
    assert files["resourceconfig.json"] == {
        "current_host": "algo-2",
        "current_instance_type": "ml.m5.large",
        "current_group_name": "homogeneousCluster",
        "hosts": ["algo-1", "algo-2"],
        "instance_groups": [
            {
                "instance_group_name": "homogeneousCluster",
                "instance_type": "ml.m5.large",
                "hosts": ["algo-1", "algo-2"],
            }
        ],
        "network_interface_name": "lo",
    }
    assert files["inputdataconfig.json"]["train"]["TrainingInputMode"] == "File"
    assert files["inputdataconfig.json"]["train"]["S3DistributionType"] == "FullyReplicated"


def test_instance_groups_number_their_hosts_on(client: Client) -> None:
    groups = [
        {"InstanceGroupName": "a", "InstanceType": "ml.m5.large", "InstanceCount": 1},
        {"InstanceGroupName": "b", "InstanceType": "ml.c5.xlarge", "InstanceCount": 1},
    ]
    read = "json.loads(Path('/opt/ml/input/config/resourceconfig.json').read_text())"
    resources = {"InstanceGroups": groups, "VolumeSizeInGB": 1}
    seen = shown(client, read, host="algo-2", ResourceConfig=resources)
    assert (seen["current_host"], seen["current_group_name"]) == ("algo-2", "b")
    assert seen["current_instance_type"] == "ml.c5.xlarge"
    assert [group["hosts"] for group in seen["instance_groups"]] == [["algo-1"], ["algo-2"]]


def test_environment_is_the_requests_and_nothing_of_the_shells(client: Client) -> None:
    env = shown(
        client, "dict(os.environ)", Environment={"MY_SETTING": "x y", "AWS_REGION": "elsewhere"}
    )
    assert env["MY_SETTING"] == "x y"
    assert env["AWS_REGION"] == "us-east-1"
    assert env["AWS_ENDPOINT_URL"] == client.endpoint.url
    assert env["TRAINING_JOB_ARN"].endswith(":training-job/" + env["TRAINING_JOB_NAME"])
    assert int(env["SMTRAIN_MASTER_PORT"]) > 0
    assert "SMTRAIN_ML_ROOT" not in env
    assert not {key for key in os.environ if key.startswith("PYTEST")} & env.keys()


def test_the_leader_is_process_one_of_its_host(client: Client) -> None:
    assert shown(client, "[os.getpid(), os.getcwd(), socket.gethostname()]") == [
        1,
        "/opt/ml/code",
        "algo-1",
    ]


def test_two_hosts_reach_each_other_by_name(client: Client) -> None:
    program = """
import os, socket, time
port = int(os.environ["SMTRAIN_MASTER_PORT"])
if socket.gethostname() == "algo-1":
    server = socket.create_server(("algo-1", port))
    peer, _ = server.accept()
    print("heard", peer.recv(100).decode())
else:
    while True:
        try:
            peer = socket.create_connection(("algo-1", port))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    peer.sendall(b"algo-2 at " + socket.gethostbyname("algo-2").encode())
"""
    job = client.completed(["python", "-c", program], hosts=2)
    assert client.lines(job) == ["heard algo-2 at 127.0.0.1"]


def test_hosts_and_jobs_do_not_see_each_others_files(client: Client) -> None:
    """Two jobs of two hosts write one absolute path at the same time; each reads back its own."""
    command = "p=/opt/ml/model/who; echo $TRAINING_JOB_NAME $HOSTNAME > $p; sleep 1; cat $p"
    names = [client.start(command, hosts=2) for _ in range(2)]
    for name in names:
        assert client.wait(name)["TrainingJobStatus"] == "Completed"
        for host in ("algo-1", "algo-2"):
            assert client.lines(name, host) == [f"{name} {host}"]


def test_the_machine_is_left_as_it_was(client: Client) -> None:
    before = (
        Path("/etc/hosts").read_text(),
        Path("/proc/mounts").read_text(),
        sorted(os.listdir("/opt")),
    )
    client.completed("touch /opt/ml/x; ls /opt; cat /etc/hosts")
    assert (
        Path("/etc/hosts").read_text(),
        Path("/proc/mounts").read_text(),
        sorted(os.listdir("/opt")),
    ) == before


def test_without_namespaces_the_root_is_in_a_variable(start_server: StartServer) -> None:
    client = Client(start_server("--no-namespaces"))
    mark = f"98{time.time_ns()}"
    uri = client.put("in/a.txt", "hello")
    job = client.completed(
        'cat "$SMTRAIN_ML_ROOT/input/data/train/a.txt"; echo; echo m > "$SMTRAIN_ML_ROOT/model/w";'
        f" setsid sleep {mark} & sleep {mark} & sleep 0.2",
        InputDataConfig=[channel("train", uri, "FastFile")],
    )
    notes = client.lines(job)
    assert "SMTRAIN_ML_ROOT" in notes[0]
    assert "FastFile" in notes[1]
    assert "downloaded instead of mounted as FastFile" in notes[1]
    assert notes[2] == "hello"
    assert job["ModelArtifacts"]["S3ModelArtifacts"].endswith("/output/model.tar.gz")
    # No kernel ends the children here: the supervisor does, at the job's end and at the control
    # plane's.
    assert gone(mark)
    name = client.start(f"setsid sleep {mark} & echo ready; sleep {mark}")
    client.wait_for_line(name, "ready")
    assert processes(mark)
    os.kill(client.endpoint.pid, signal.SIGKILL)
    assert gone(mark)


@pytest.mark.parametrize("command", [["no-such-program", "x"], ["/etc/passwd", "x"]])
def test_an_entrypoint_that_cannot_run(client: Client, command: list[str]) -> None:
    job = client.run(command)
    assert job["TrainingJobStatus"] == "Failed"
    assert job["FailureReason"].endswith("exit code: 127")
    assert command[0] in job["FailureReason"] or "denied" in job["FailureReason"]
