"""A control plane for every test process, and short ways to run jobs on it."""

from __future__ import annotations

import base64
import io
import itertools
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from smtrain.plane.client import Endpoint, running_endpoint, shut_down
from smtrain.plane.hosts import TAG, LocalHosts
from testing.plane import Plane
from tests import docker
from tests.processes import commands, wait_for

from .planes import begin, request_of

ROOT = Path(__file__).resolve().parents[2]
GROUP = "/aws/sagemaker/TrainingJobs"
GRACE = 1.5


def serve(home: Path, *options: str) -> Endpoint:
    """Start a server with a short grace and wait until it answers."""
    (home / "local").mkdir(parents=True, exist_ok=True)
    arguments = [
        "--home",
        str(home),
        "--grace",
        str(GRACE),
        "--extend",
        "testing.synthetic",
        *options,
    ]
    process = begin(arguments, home / "local/server.log")
    while not ((endpoint := running_endpoint(home)) and endpoint.pid == process.pid):
        assert process.poll() is None, (home / "local" / "server.log").read_text()
        time.sleep(0.05)
    process.returncode = 0  # it is ended by shut_down or by a kill of the test's
    return endpoint


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    home = tmp_path_factory.mktemp("home")
    yield serve(home)
    shut_down(home)


def refused(call: Callable[..., Any], **params: Any) -> tuple[str, str]:
    """Code and message of the error that a call ends with."""
    with pytest.raises(ClientError) as caught:
        call(**params)
    error = caught.value.response["Error"]
    return error["Code"], error["Message"]


StartServer = Callable[..., Endpoint]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Start (again) a server of this test's own home."""
    yield lambda *options: serve(tmp_path / "home", *options)
    shut_down(tmp_path / "home")


def within_limits(argv: list[str]) -> list[str]:
    """`PROGRAM -c SCRIPT ...` with the script in pieces that the API accepts: a line of at most 256
    characters.
    """
    if len(argv) < 3 or (len(argv[2]) <= 256 and "\n" not in argv[2]):
        return argv
    text = base64.b64encode(argv[2].encode()).decode()
    pieces = [text[i : i + 256] for i in range(0, len(text), 256)]
    if argv[0] == "bash":
        return ["bash", "-c", 'IFS=; eval "$(base64 -d <<< "$*")"', "bash", *pieces]
    joined = f"import base64, sys; text = ''.join(sys.argv[1:{len(pieces) + 1}])"
    start = f"{joined}; del sys.argv[1:{len(pieces) + 1}]; exec(base64.b64decode(text))"
    return [argv[0], "-c", start, *pieces, *argv[3:]]


class Client:
    """boto3 clients of an endpoint, and helpers for jobs and objects."""

    _numbers = itertools.count()
    kind = "sandbox"

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, self.bucket = endpoint, endpoint.bucket
        session = endpoint.session()
        self.s3, self.sagemaker, self.logs = (
            session.client(n) for n in ("s3", "sagemaker", "logs")
        )
        self.cloudwatch = session.client("cloudwatch")

    def request(self, command: str | list[str], **changes: Any) -> dict[str, Any]:
        """A CreateTrainingJob request; `changes` replace its top-level keys, `hosts` the instance
        count.
        """
        name = f"test-{time.time_ns()}-{next(self._numbers)}"
        argv = within_limits(["bash", "-c", command] if isinstance(command, str) else command)
        resources = {"InstanceCount": changes.pop("hosts", 1)}
        request = request_of(name, argv, resources=resources, **changes)
        return {k: v for k, v in request.items() if v is not None}

    def start(self, command: str | list[str], **changes: Any) -> str:
        request = self.request(command, **changes)
        self.sagemaker.create_training_job(**request)
        return str(request["TrainingJobName"])

    def describe(self, name: str) -> dict[str, Any]:
        return dict(self.sagemaker.describe_training_job(TrainingJobName=name))

    def wait(
        self, name: str, until: Callable[[dict[str, Any]], Any] | None = None
    ) -> dict[str, Any]:
        """Poll until the job has ended or `until` is true."""

        def reached() -> dict[str, Any] | None:
            job = self.describe(name)
            ended = job["TrainingJobStatus"] in ("Completed", "Failed", "Stopped")
            return job if ended or (until and until(job)) else None

        return wait_for(reached)

    def run(self, command: str | list[str], **changes: Any) -> dict[str, Any]:
        return self.wait(self.start(command, **changes))

    def completed(self, command: str | list[str], **changes: Any) -> dict[str, Any]:
        job = self.run(command, **changes)
        assert job["TrainingJobStatus"] == "Completed", (job.get("FailureReason"), self.lines(job))
        return job

    def lines(self, job: dict[str, Any] | str, host: str = "algo-1") -> list[str]:
        name = job if isinstance(job, str) else job["TrainingJobName"]
        streams = self.logs.describe_log_streams(
            logGroupName=GROUP, logStreamNamePrefix=f"{name}/{host}-"
        )
        if not streams["logStreams"]:
            return []
        stream = streams["logStreams"][0]["logStreamName"]
        events = self.logs.get_log_events(
            logGroupName=GROUP, logStreamName=stream, startFromHead=True
        )
        return [event["message"] for event in events["events"]]

    def wait_for_line(self, name: str, line: str, host: str = "algo-1") -> None:
        self.wait(name, lambda job: job["SecondaryStatus"] == "Training")
        wait_for(lambda: line in self.lines(name, host))

    def put(self, key: str, body: bytes | str = b"x") -> str:
        """Store an object; return the URI of its folder."""
        self.s3.put_object(Bucket=self.bucket, Key=key, Body=body)
        return f"s3://{self.bucket}/{key.rpartition('/')[0]}"

    def put_source(self, folder: str, script: str) -> str:
        """Store a train.py packed as SageMaker's toolkits expect it; return the archive's URI."""
        packed, body = io.BytesIO(), script.encode()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            entry = tarfile.TarInfo("train.py")
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body))
        return f"{self.put(f'{folder}/sourcedir.tar.gz', packed.getvalue())}/sourcedir.tar.gz"

    def get(self, key: str) -> bytes:
        return bytes(self.s3.get_object(Bucket=self.bucket, Key=key)["Body"].read())

    def keys(self, prefix: str) -> list[str]:
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", [])]


def follow(
    page: Callable[..., dict[str, Any]], token: str | None = None
) -> tuple[list[str], str | None]:
    """All messages of GetLogEvents, and the token at their end."""
    messages: list[str] = []
    while True:
        answer = page(startFromHead=True, **({"nextToken": token} if token else {}))
        messages += [event["message"] for event in answer["events"]]
        if token == answer["nextForwardToken"]:
            return messages, token
        token = answer["nextForwardToken"]


def channel(
    name: str, uri: str, mode: str = "File", distribution: str = "FullyReplicated"
) -> dict[str, Any]:
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": distribution}
    return {"ChannelName": name, "InputMode": mode, "DataSource": {"S3DataSource": source}}


def processes(mark: str) -> list[str]:
    """Command lines on this machine that contain `mark`."""
    lines = (line.replace(b"\0", b" ").decode(errors="replace") for line in commands().values())
    return [line for line in lines if mark in line]


def gone(mark: str) -> bool:
    for _ in range(200):
        if not processes(mark):
            return True
        time.sleep(0.05)
    return False


class ContainerClient(Client):
    """A client whose hosts are containers."""

    kind = "docker"

    def request(self, command: str | list[str], **changes: Any) -> dict[str, Any]:
        tags = [{"Key": TAG, "Value": LocalHosts("docker", **changes.pop("limits", {})).write()}]
        algorithm = {"TrainingImage": docker.IMAGE, **changes.pop("algorithm", {})}
        return super().request(command, **{"Tags": tags, "algorithm": algorithm, **changes})


KINDS = ["sandbox", pytest.param("docker", marks=pytest.mark.docker)]


def client_of(kind: str, endpoint: Endpoint) -> Client:
    """A client whose jobs run on hosts of this kind."""
    return ContainerClient(endpoint) if kind == "docker" else Client(endpoint)


@pytest.fixture(scope="session")
def client(endpoint: Endpoint) -> Client:
    return Client(endpoint)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Every kind of hosts."""
    return str(request.param)


@pytest.fixture
def on_hosts(kind: str, endpoint: Endpoint) -> Client:
    """A client for every kind of hosts."""
    return client_of(kind, endpoint)


@pytest.fixture(scope="session")
def in_docker(endpoint: Endpoint) -> Client:
    """A client whose jobs run in containers; its tests are marked docker."""
    return ContainerClient(endpoint)


@pytest.fixture
def plane(endpoint: Endpoint) -> Iterator[Plane]:
    """The switches of the test process's control plane, reset before and after."""
    plane = Plane(endpoint)
    plane.calm()
    yield plane
    plane.calm()
