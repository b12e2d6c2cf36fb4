"""kill -9 of every process of a job, with and without namespaces, in containers: all ends, and the
job says why.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from smtrain.plane.client import shut_down
from smtrain.plane.server.processes import MARK
from tests import docker
from tests.processes import commands, read, wait_for, wait_for_end

from .conftest import Client, StartServer, client_of, gone, processes, serve

HOSTS = [
    pytest.param(("sandbox",), id="namespaces"),
    pytest.param(("sandbox", "--no-namespaces"), id="without"),
    pytest.param(("docker",), id="docker", marks=pytest.mark.docker),
]
SUPERVISORS = ("smtrain.plane.server.sandbox", "smtrain.plane.server.containers.supervisor")


@pytest.fixture(scope="module", params=HOSTS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    kind, *options = request.param
    home = tmp_path_factory.mktemp("home")
    yield client_of(kind, serve(home, *options))
    shut_down(home)


class Tree:
    """A job whose leader has started a rank in a new session, as torchrun does."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.mark = f"96{time.time_ns()}"
        # bash waits: it does not become one of the two.
        command = (
            f"setsid sleep {self.mark} & echo $! > /dev/null; echo ready; sleep {self.mark}; echo"
            " after"
        )
        self.name = self.client.start(command)
        self.client.wait_for_line(self.name, "ready")
        wait_for(lambda: len(self._sleeping()) == 2)

    def _sleeping(self) -> list[int]:
        return [
            pid for pid, words in _words().items() if words[:1] == ["sleep"] and self.mark in words
        ]

    def pid(self, target: str) -> int:
        running = [(pid, words, " ".join(words)) for pid, words in _words().items()]
        return {
            "supervisor": [
                p for p, w, line in running if {*SUPERVISORS} & {*w} and self.name in line
            ],
            "leader": [p for p, w, line in running if w[0] == "bash" and self.mark in line],
            "rank": [p for p in self._sleeping() if os.getsid(p) == p],
        }[target][0]


def _words() -> dict[int, list[str]]:
    return {pid: line.decode(errors="replace").split("\0") for pid, line in commands().items()}


@pytest.mark.parametrize("target", ["supervisor", "leader"])
def test_killed_it_leaves_nothing_and_the_job_says_why(server: Client, target: str) -> None:
    tree = Tree(server)
    os.kill(tree.pid(target), signal.SIGKILL)
    job = tree.client.wait(tree.name)
    assert gone(tree.mark)
    assert job["TrainingJobStatus"] == "Failed"
    assert (
        job["FailureReason"]
        == {
            "supervisor": (
                "InternalServerError: the process that ran host algo-1 ended with SIGKILL; all that"
                " it had started was ended"
            ),
            "leader": "AlgorithmError: ready, exit code: 137",
        }[target]
    )
    assert "after" not in tree.client.lines(tree.name)


def test_a_killed_rank_is_the_leaders_to_see_and_stop_ends_the_rest(server: Client) -> None:
    tree = Tree(server)
    os.kill(tree.pid("rank"), signal.SIGKILL)
    assert tree.client.describe(tree.name)["TrainingJobStatus"] == "InProgress"
    tree.client.sagemaker.stop_training_job(TrainingJobName=tree.name)
    assert tree.client.wait(tree.name)["TrainingJobStatus"] == "Stopped"
    assert gone(tree.mark)


@pytest.mark.sample(1)
def test_stop_ends_a_host_whose_supervisor_does_nothing_any_more(server: Client) -> None:
    tree = Tree(server)
    os.kill(tree.pid("supervisor"), signal.SIGSTOP)
    tree.client.sagemaker.stop_training_job(TrainingJobName=tree.name)
    assert tree.client.wait(tree.name)["TrainingJobStatus"] == "Stopped"
    assert gone(tree.mark)


@pytest.mark.parametrize("hosts", HOSTS)
def test_plane_and_supervisor_killed_at_once_the_next_plane_ends_what_is_left(
    start_server: StartServer, hosts: tuple[str, ...]
) -> None:
    kind, *options = hosts
    endpoint = start_server(*options)
    tree = Tree(client_of(kind, endpoint))
    supervisor = tree.pid("supervisor")
    os.kill(supervisor, signal.SIGSTOP)  # it cannot see the plane end
    os.kill(endpoint.pid, signal.SIGKILL)
    wait_for_end(endpoint.pid)
    os.kill(supervisor, signal.SIGKILL)
    start_server(*options)
    assert not processes(tree.mark), "when it answers, they are gone"
    if kind == "docker":
        assert not docker.left(endpoint.home)
    assert "restarted while the job ran" in tree.client.describe(tree.name)["FailureReason"]


# Not of a container: it is known by its labels, and shows the job no variable of ours.
@pytest.mark.parametrize("server", HOSTS[:2], indirect=True)
def test_every_process_of_a_host_carries_its_mark(server: Client) -> None:
    tree = Tree(server)
    variable = f"{MARK}={server.endpoint.home / 'local/jobs' / tree.name / 'hosts/algo-1'}".encode()
    for target in ("supervisor", "leader", "rank"):
        assert variable in read(tree.pid(target), "environ").split(b"\0")
    tree.client.sagemaker.stop_training_job(TrainingJobName=tree.name)
    tree.client.wait(tree.name)
