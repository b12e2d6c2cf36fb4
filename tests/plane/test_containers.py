"""Hosts that are containers: their environment, their isolation, and the errors without Docker."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from smtrain.cli.dispatch import forget, in_flags
from smtrain.cli.options import keys_of
from smtrain.core.errors import LocalError
from smtrain.plane import docker
from smtrain.plane.client import server_environment
from smtrain.plane.docker import BORROWS, connect
from smtrain.plane.hosts import TAG, LocalHosts, read
from smtrain.plane.server.containers import scratch_image
from smtrain.plane.server.containers.job import lay_opt_ml
from testing.plane import Plane
from tests import docker as test_docker
from tests.processes import commands, wait_for, wait_for_end

from .conftest import Client, ContainerClient, channel, gone, refused

PROBE = """
import json, os, resource, signal, socket, sys
from pathlib import Path
def text(path):
    return Path(path).read_text()
def connects(host, port):
    try:
        socket.create_connection((host, port), timeout=2).close()
        return True
    except OSError:
        return False
seen = {
    "pid": os.getpid(), "host": socket.gethostname(), "arguments": sys.argv[1:], "env": dict(os.environ),
    "config": {p.name: json.loads(p.read_text()) for p in Path("/opt/ml/input/config").iterdir()},
    "folders": sorted(p.name for p in Path("/opt/ml").iterdir() if not p.name.startswith(".")),
    "data": text("/opt/ml/input/data/train/a"),
    "names": {name: socket.gethostbyname(name) for name in ("algo-1", "algo-2")},
    "interfaces": sorted(line.split(":")[0].strip() for line in text("/proc/net/dev").splitlines()[2:]),
    "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
    "stack": resource.getrlimit(resource.RLIMIT_STACK)[0],
    "mounts": sorted({line.split()[1] for line in text("/proc/mounts").splitlines() if line.startswith("/dev/")}),
}
"""


def probe(client: Client, more: str = "", **changes: Any) -> dict[str, Any]:
    """The view of the second of two hosts; `more` is added to the program."""
    uri = client.put("probe/a", "data")
    changes = {"InputDataConfig": [channel("train", uri)], "hosts": 2, **changes}
    program = f"{PROBE}{more}\nprint(json.dumps(seen))"
    job = client.completed(["python", "-c", program, "one", "t wo"], **changes)
    return dict(json.loads(client.lines(job, "algo-2")[-1]))


@pytest.mark.docker
def test_a_container_finds_what_sagemaker_promises(in_docker: Client) -> None:
    """The pages "How Amazon SageMaker AI Runs Your Training Image" and "...

    Provides Training Information".
    """
    seen = probe(in_docker, HyperParameters={"lr": "0.1"}, Environment={"MINE": "x y"})
    assert (seen["pid"], seen["host"], seen["arguments"][-2:]) == (1, "algo-2", ["one", "t wo"])
    assert seen["data"] == "data"
    assert {"input", "model", "output", "checkpoints", "code"} <= set(seen["folders"])
    assert seen["config"]["hyperparameters.json"] == {"lr": "0.1"}
    resources = seen["config"]["resourceconfig.json"]
    assert (resources["current_host"], resources["hosts"]) == ("algo-2", ["algo-1", "algo-2"])
    assert resources["network_interface_name"] in seen["interfaces"] == ["eth0", "lo"]
    assert seen["config"]["inputdataconfig.json"]["train"]["TrainingInputMode"] == "File"
    assert len(set(seen["names"].values())) == 2
    assert seen["shm"] > 1 << 30
    assert seen["stack"] == 64 << 20
    env = seen["env"]
    assert env["MINE"] == "x y"
    assert env["TRAINING_JOB_ARN"].endswith(":training-job/" + env["TRAINING_JOB_NAME"])
    assert env["AWS_REGION"] == "us-east-1"
    assert env["PATH"].startswith(f"{sys.prefix}/bin:"), "the image's own"
    ours = {name for name in env if name.startswith(("SMTRAIN", "PYTEST", "VIRTUAL_ENV"))}
    assert not ours
    assert "AWS_PROFILE" not in env


@pytest.mark.docker
def test_inside_s3_is_reached_and_the_control_plane_is_not(in_docker: Client) -> None:
    asks = """
import boto3
from botocore.exceptions import ClientError
seen["who"] = boto3.client("sts").get_caller_identity()["Account"]
seen["object"] = boto3.client("s3").get_object(Bucket=BUCKET, Key="probe/a")["Body"].read().decode()
link = boto3.client("s3").generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": "probe/a"})
import urllib.request
seen["link"] = urllib.request.urlopen(link).read().decode()
try:
    boto3.client("sagemaker").list_training_jobs()
    seen["jobs"] = "answered"
except ClientError as error:
    seen["jobs"] = error.response["ResponseMetadata"]["HTTPStatusCode"]
""".replace("BUCKET", repr(in_docker.bucket))
    seen = probe(in_docker, asks)
    assert (seen["object"], seen["link"], seen["jobs"]) == ("data", "data", 403)
    assert seen["who"] == in_docker.endpoint.account
    assert seen["env"]["AWS_ENDPOINT_URL"] != in_docker.endpoint.url


@pytest.fixture
def listener() -> Iterator[int]:
    """A port that listens on all addresses of this machine."""
    with socket.create_server(("", 0)) as server:
        thread = threading.Thread(target=_accept, args=(server,), daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def _accept(server: socket.socket) -> None:
    while True:
        try:
            server.accept()[0].close()
        except OSError:
            return


def _addresses() -> list[str]:
    output = subprocess.run(
        ["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True
    ).stdout
    return [line.split()[3].partition("/")[0] for line in output.splitlines()]


@pytest.mark.docker
def test_an_isolated_container_reaches_its_peers_and_nothing_else(
    in_docker: Client, listener: int
) -> None:
    """A job with a network reaches a port of this machine at its gateway, which shows that the test
    can fail.
    """
    look = f"""
import struct
route = [line.split() for line in text("/proc/net/route").splitlines()[1:]]
gateways = [socket.inet_ntoa(struct.pack("<L", int(row[2], 16))) for row in route if row[2] != "00000000"]
seen["gateways"] = gateways
seen["open"] = [a for a in gateways + {_addresses()!r} if not a.startswith("127.") and connects(a, {listener})]
seen["dns"] = []
for server in ("127.0.0.11", *gateways):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.settimeout(2)
        query = bytes.fromhex("abcd01000001000000000000") + b"\\x07example\\x03com\\x00" + bytes.fromhex("00010001")
        try:
            asker.sendto(query, (server, 53))
            answer = asker.recv(512)
            if answer[7] or not answer[3] & 15:  # an answer, or no error
                seen["dns"].append(server)
        except OSError:
            pass
try:
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    seen["raw"] = True
except OSError:
    seen["raw"] = False
"""
    free = probe(in_docker, look)
    assert set(free["gateways"]) <= set(free["open"]), "a test that cannot fail"
    seen = probe(in_docker, look, EnableNetworkIsolation=True)
    assert (seen["open"], seen["dns"], seen["raw"]) == ([], [], False)
    assert len(set(seen["names"].values())) == 2, "the hosts have each other"
    assert not {name for name in seen["env"] if "KEY" in name or "ENDPOINT" in name}
    assert urlsplit(in_docker.endpoint.url).port not in (None, listener)


@pytest.mark.docker
@pytest.mark.parametrize("isolated", [False, True])
def test_fastfile_is_mounted_into_the_container(in_docker: Client, isolated: bool) -> None:
    if os.getuid() != 0:
        pytest.skip("who is not root cannot mount for a container")
    uri = in_docker.put("lazy/a", "read late")
    read_it = "cat /opt/ml/input/data/t/a; echo; grep -c smtrain-fastfile /proc/mounts"
    job = in_docker.completed(
        read_it, InputDataConfig=[channel("t", uri, "FastFile")], EnableNetworkIsolation=isolated
    )
    assert in_docker.lines(job) == ["read late", "1"]
    assert str(in_docker.endpoint.home) not in Path("/proc/mounts").read_text()


@pytest.mark.docker
def test_limits_hold_and_memory_that_runs_out_is_told_apart_from_a_kill(in_docker: Client) -> None:
    """One host of two, in a child of process 1: SageMaker's sentence, and the cause that `explain`
    knows.
    """
    eat = (
        "import os; host = os.uname().nodename; x = bytearray(300 << 20) if host == 'algo-2' else"
        " None"
    )
    wait = f'{sys.executable} -c "{eat}"; code=$?; [ $HOSTNAME = algo-2 ] || sleep 600; exit $code'
    job = in_docker.run(wait, hosts=2, limits={"memory": "64m"})
    assert job["FailureReason"].startswith(
        "ClientError: Please use an instance type with more memory"
    )
    quota = (  # of either generation
        "cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null"
    )
    job = in_docker.run(
        f"exec 2>&1; {quota}; sh -c 'kill -9 $$'; echo killed; exit 137",
        limits={"memory": "64m", "cpus": "0.5"},
    )
    assert job["FailureReason"] == "AlgorithmError: killed, exit code: 137"
    assert in_docker.lines(job)[0].split()[0] == "50000", "half of a core"


@pytest.mark.docker
def test_without_an_entrypoint_the_image_trains(in_docker: Client) -> None:
    """`docker run IMAGE train`: the job fails with a reason if the image has no such program."""
    request = in_docker.request("true")
    for key in ("ContainerEntrypoint", "ContainerArguments"):
        del request["AlgorithmSpecification"][key]
    in_docker.sagemaker.create_training_job(**request)
    job = in_docker.wait(request["TrainingJobName"])
    assert job["TrainingJobStatus"] == "Failed"
    assert '"train": executable file not found in $PATH' in job["FailureReason"]
    assert job["FailureReason"].endswith(", exit code: 127")


@pytest.mark.docker
def test_an_image_that_is_not_here_or_of_another_processor_is_refused(in_docker: Client) -> None:
    def refusal(image: str) -> str:
        request = in_docker.request("true", algorithm={"TrainingImage": image})
        code, message = refused(in_docker.sagemaker.create_training_job, **request)
        assert code == "ValidationException"
        return message

    assert "nowhere:1 is not on this machine" in refusal("nowhere:1")
    client = connect()
    other = "s390x" if client.info()["Architecture"] != "s390x" else "amd64"
    for name, changes, word in (
        ("smtrain-test-borrows:1", [f"LABEL {BORROWS}=/etc"], "borrows /etc"),
        ("smtrain-test-other:1", [], f"is for {other}"),
    ):
        repository, _, tag = name.partition(":")
        if word.startswith("is for"):
            made = _image_of(other, name)
            client.images.load(made)
        else:
            client.api.import_image_from_data(b"\0" * 10240, repository, tag, changes=changes)
        try:
            assert word in refusal(name)
        finally:
            client.images.remove(name, force=True)


def _image_of(architecture: str, name: str) -> bytes:
    """An empty image for a processor, as `docker save` writes one."""
    layer = b"\0" * 10240
    config = json.dumps(
        {
            "architecture": architecture,
            "os": "linux",
            "config": {},
            "rootfs": {
                "type": "layers",
                "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"],
            },
        }
    ).encode()
    manifest = json.dumps(
        [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    ).encode()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path, body in (
            ("config.json", config),
            ("layer.tar", layer),
            ("manifest.json", manifest),
        ):
            entry = tarfile.TarInfo(path)
            entry.size = len(body)
            tar.addfile(entry, io.BytesIO(body))
    return packed.getvalue()


def test_where_docker_does_not_answer_it_says_how_and_auto_takes_the_sandbox(
    start_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    assert "DOCKER_HOST" in server_environment()
    client = Client(start_server())
    wanted = {"Tags": [{"Key": TAG, "Value": "run_in=docker"}]}
    code, message = refused(
        client.sagemaker.create_training_job, **client.request("true", **wanted)
    )
    assert code == "ValidationException"
    assert (
        f"Docker does not answer at unix://{tmp_path}/nothing.sock (No such file or directory)"
        in message
    )
    assert message.endswith("set DOCKER_HOST, or leave out local.run_in")
    assert "\n" not in message
    job = client.completed("echo here", Tags=[{"Key": TAG, "Value": "run_in=auto"}])
    lines = client.lines(job)
    assert lines[0].startswith(
        "smtrain: this host is a sandbox, not a container: Docker does not answer"
    )
    assert lines[1:] == ["here"]


@pytest.mark.parametrize(
    ("tool", "start", "allowed"),
    [
        (
            "Docker",
            "start it (`sudo systemctl start docker`",
            "join its group (`sudo usermod -aG docker $USER`",
        ),
        (
            "podman",
            "start its service (`systemctl start podman.socket`",
            "set DOCKER_HOST to a service of your own",
        ),
    ],
)
def test_remedies_are_those_of_what_is_asked_and_of_what_was_typed(
    tool: str, start: str, allowed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`leave out --docker` for a run with that option; no such remedy for `smtrain image`."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/{tool.lower()}.sock")
    with pytest.raises(LocalError) as caught:
        docker.connect()
    keys_of(None, docker=True)
    message = in_flags(str(caught.value))
    forget()
    assert message.startswith(
        f"{tool} does not answer at unix://{tmp_path}/{tool.lower()}.sock (No such file or"
        " directory): "
    )
    assert f": {start}" in message
    assert message.endswith(", or leave out --docker")
    with pytest.raises(LocalError, match=r", or set DOCKER_HOST$"):
        docker.connect("")
    refused = docker.sentence(PermissionError(13, "Permission denied"), "making an image")
    assert refused.startswith(f"making an image failed: {tool} said: ")
    denied = docker.sentence(ConnectionRefusedError(111, "Connection refused"), "making an image")
    assert denied.startswith(f"making an image failed: {tool} does not answer at ")
    assert f"{tool.lower()} system prune" in docker.sentence(
        OSError("no space left on device"), "pulling"
    )
    with closed_to_us(tmp_path), pytest.raises(LocalError) as caught:
        docker.connect("")
    assert str(caught.value).startswith(
        f"you may not use {tool} at unix://{tmp_path}/{tool.lower()}.sock: {allowed}"
    )


@contextlib.contextmanager
def closed_to_us(folder: Path) -> Iterator[None]:
    """Forbid this process to enter a folder, also as root."""
    folder.chmod(0)
    was = os.geteuid()
    try:
        if was == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(was)
        folder.chmod(0o700)


@pytest.mark.docker
def test_the_control_plane_can_be_told_for_requests_that_do_not_say_it(start_server: Any) -> None:
    """The requests of SDKs have no tag of ours. The setting outlives the control plane."""
    endpoint = start_server()
    Plane(endpoint).hosts(run_in="docker", image=test_docker.IMAGE)
    os.kill(endpoint.pid, signal.SIGKILL)
    wait_for_end(endpoint.pid)
    client = Client(start_server())
    job = client.completed("cat /proc/1/comm; echo $HOSTNAME $SMTRAIN_MASTER_PORT")
    assert client.lines(job)[-1] == "algo-1"
    boxed = client.completed(
        "echo ${SMTRAIN_MASTER_PORT:+port}", Tags=[{"Key": TAG, "Value": "run_in=sandbox"}]
    )
    assert client.lines(boxed) == ["port"]


@pytest.mark.docker
def test_what_a_crash_left_is_removed_by_clean(
    start_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control plane and supervisor are killed at once."""
    endpoint = start_server()
    client = ContainerClient(endpoint)
    uri = client.put("left/a", "x")
    name = client.start("echo ready; sleep 600", InputDataConfig=[channel("t", uri, "FastFile")])
    client.wait_for_line(name, "ready")
    supervisors = [
        pid
        for pid, line in commands().items()
        if b"containers.supervisor" in line and name.encode() in line
    ]
    for pid in supervisors:
        os.kill(pid, signal.SIGSTOP)
    os.kill(endpoint.pid, signal.SIGKILL)
    wait_for_end(endpoint.pid)
    for pid in supervisors:
        os.kill(pid, signal.SIGKILL)
    assert len(test_docker.left(endpoint.home)) == 2
    done = subprocess.run(
        [sys.executable, "-m", "smtrain", "local", "clean"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SMTRAIN_HOME": str(endpoint.home)},
    )
    assert done.returncode == 0, done.stderr
    assert "1 container, 1 network" in done.stdout
    assert not test_docker.left(endpoint.home)
    wait_for(lambda: str(endpoint.home) not in Path("/proc/mounts").read_text())


class Daemon:
    """A second Docker, to be killed."""

    def __init__(self, root: Path) -> None:
        self.root, self.address = root, f"unix://{root}/s"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        root = self.root
        # In separate namespaces: bridge, firewall and mounts of the machine's Docker are not its
        # to touch.
        command = [
            "unshare",
            "--net",
            "--mount",
            "dockerd",
            "--data-root",
            f"{root}/data",
            "--exec-root",
            f"{root}/exec",
            "--pidfile",
            f"{root}/pid",
            "--host",
            self.address,
        ]
        with open(root / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        while not _answers():
            if self.process.poll() is not None:
                pytest.skip("no second Docker here: " + (root / "log").read_text().splitlines()[-1])

    def kill(self) -> None:
        assert self.process
        self.process.kill()
        self.process.wait()
        (self.root / "pid").unlink()

    def end(self) -> None:
        if self.process:
            self.process.terminate()
            self.process.wait()


def _answers() -> bool:
    """Whether Docker answers at `DOCKER_HOST`."""
    with contextlib.suppress(LocalError):
        connect()
        return True
    time.sleep(0.2)
    return False


@pytest.fixture
def own_daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    if os.getuid() or not shutil.which("dockerd"):
        pytest.skip("dockerd is not installed here, or this is not root")
    with tempfile.TemporaryDirectory() as folder:  # a socket's path may be short alone
        daemon = Daemon(Path(folder))
        try:
            monkeypatch.setenv("DOCKER_HOST", daemon.address)
            daemon.start()
            scratch_image.make(connect(), test_docker.IMAGE)
            yield daemon
        finally:
            daemon.end()


@pytest.mark.docker
def test_a_killed_docker_fails_its_jobs_and_leaves_nothing_once_it_is_back(
    own_daemon: Daemon, start_server: Any
) -> None:
    client = ContainerClient(start_server())
    # Isolated: what is in another network namespace finds no address of this machine to ask for S3.
    name = client.start("sleep 9753124 & echo ready; wait", hosts=2, EnableNetworkIsolation=True)
    client.wait_for_line(name, "ready")
    client.wait_for_line(name, "ready", "algo-2")
    own_daemon.kill()
    job = client.wait(name)
    assert job["TrainingJobStatus"] == "Failed"
    assert "Docker ended while the container ran" in job["FailureReason"]
    assert gone("sleep 9753124")
    own_daemon.start()
    home = client.endpoint.home
    done = subprocess.run(
        [sys.executable, "-m", "smtrain", "local", "clean"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SMTRAIN_HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr
    assert not test_docker.left(home)
    assert client.lines(client.completed("echo on", EnableNetworkIsolation=True)) == ["on"]


def test_what_an_image_has_in_opt_ml_stays_below_the_hosts_folder(tmp_path: Path) -> None:
    ml, packed = tmp_path / "ml", tmp_path / "image.tar"
    for name in ("model", "input", "code"):
        (ml / name).mkdir(parents=True)
    entries = [
        ("ml/", None),
        ("ml/model/hidden", b"x"),
        ("ml/code/", None),
        ("ml/code/train.sh", b"run"),
        ("ml/own/", None),
        ("ml/own/a", b"a"),
        ("ml/code/up", "../own"),
        ("ml/out", "/etc"),
        ("ml/code/up/b", b"b"),
        ("ml/out/evil", b"x"),
        ("ml/code/../../evil", b"x"),
    ]
    with tarfile.open(packed, "w") as tar:
        for name, content in entries:
            entry = tarfile.TarInfo(name)
            entry.mode = 0o755
            if content is None:
                entry.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
            else:
                entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content if isinstance(content, bytes) else b""))
    lay_opt_ml(packed, ml)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"image.tar", "ml/code/train.sh", "ml/own/a", "ml/own/b"}
    assert os.access(ml / "code/train.sh", os.X_OK)
    assert os.readlink(ml / "out") == "/etc"
    assert not Path("/etc/evil").exists()


def test_the_tag_says_what_is_asked_for() -> None:
    hosts = LocalHosts("docker", "512m", "2")
    assert read([{"Key": TAG, "Value": hosts.write()}]) == hosts
    assert read([{"Key": "other", "Value": "run_in=docker"}]) == LocalHosts() == read([])
    assert read([{"Key": TAG, "Value": "run_in=docker colour=red ="}]) == LocalHosts("docker")
