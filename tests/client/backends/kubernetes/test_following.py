"""The follower reads every line of a job once, whatever the API does: a property test with a
scripted API in this process.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smtrain.client.backends.kubernetes.backend import KubernetesBackend
from smtrain.client.backends.kubernetes.cluster_api import (
    ClusterApi,
    ClusterError,
    ClusterLostError,
)
from smtrain.client.backends.kubernetes.manifest import REQUEST
from smtrain.client.follow.follower import Follower
from smtrain.core.config.kubernetes import Kubernetes
from smtrain.core.protocol.log_lines import Line

BEGIN_MS = 1_767_225_600_000  # 2026-01-01
NAME = "own-train-00000000"
FOLDER = f"s3://bucket/smtrain/own/jobs/{NAME}"


def stamp(ms: int, digits: str = "") -> str:
    """A time as a pod writes it; with more digits as the node does."""
    text = datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(timespec="milliseconds")
    return text.replace("+00:00", f"{digits}Z")


@dataclass
class ScriptedPod:
    """A pod: all its lines, those in the newest file of its log, and its end."""

    rank: int
    uid: str
    is_ranked: bool
    """Whether the cluster knows its rank; if not, the pod has left it in the storage."""
    lines: list[tuple[int, str]] = field(default_factory=list)
    newest_file: list[tuple[int, str]] = field(default_factory=list)
    has_ended: bool = False
    is_stored: bool = False
    is_deleted: bool = False

    def item(self) -> dict[str, Any]:
        state = {"terminated": {"exitCode": 0}} if self.has_ended else {"running": {}}
        index = {"batch.kubernetes.io/job-completion-index": str(self.rank)}
        labels = index if self.is_ranked else {}
        return {
            "metadata": {
                "name": f"pod-{self.uid}",
                "uid": self.uid,
                "labels": labels,
                "creationTimestamp": stamp(BEGIN_MS),
            },
            "status": {
                "phase": "Succeeded" if self.has_ended else "Running",
                "containerStatuses": [{"name": "stage", "state": state}],
            },
        }


class ScriptedCluster(ClusterApi):
    """The API and the storage of one job. Each look at the job runs the next step of the script."""

    def begin(self, script: list[tuple[Any, ...]], *, is_ranked: bool) -> None:
        state = {"script": list(script), "now": BEGIN_MS, "faults": [], "is_over": False}
        pods = [ScriptedPod(rank, f"{rank:08x}", is_ranked) for rank in range(2)]
        self.__dict__.update(state, pods=pods)

    def step(self) -> None:
        state = self.__dict__
        if not state["script"]:
            for pod in state["pods"]:
                pod.has_ended = True
                pod.is_stored = True
            state["is_over"] = True
            return
        word, *values = state["script"].pop(0)
        if word == "fault":
            state["faults"].append(values[0])
            return
        pod = next(pod for pod in reversed(state["pods"]) if pod.rank == values[0])
        if word == "write":
            for gap_ms, text in values[1]:
                state["now"] += gap_ms
                pod.lines.append((state["now"], text))
                pod.newest_file.append((state["now"], text))
        elif word == "rotate":
            pod.newest_file.clear()
        elif word == "replace":
            pod.has_ended = pod.is_stored = True
            pod.is_deleted = values[1]
            uid = f"{len(state['pods']):08x}"
            state["pods"].append(ScriptedPod(pod.rank, uid, pod.is_ranked))

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        state = self.__dict__
        pods = [pod for pod in state["pods"] if not pod.is_deleted]
        fault = state["faults"].pop() if state["faults"] else ""
        if fault == "gone" and query.get("continue"):
            raise ClusterError("The provided continue parameter is too old", 410, "Expired")
        if fault == "dropped":
            raise ClusterLostError("the connection was dropped")
        if path.endswith("/log"):
            pod = next(pod for pod in pods if path.endswith(f"pod-{pod.uid}/log"))
            return "".join(
                f"{stamp(ms, '123456')} {stamp(ms)} {text}\n"
                for ms, text in pod.newest_file
                if stamp(ms) >= str(query.get("sinceTime", ""))[:19]
            ).encode()
        if path.endswith("/pods"):  # a page has one pod
            at = int(query.get("continue") or 0)
            token = str(at + 1) if at + 1 < len(pods) else ""
            items = [pod.item() for pod in pods[at : at + 1]]
            return json.dumps({"items": items, "metadata": {"continue": token}}).encode()
        self.step()
        return json.dumps(self._job_item()).encode()

    def _job_item(self) -> dict[str, Any]:
        request = {"OutputDataConfig": {"S3OutputPath": FOLDER.rpartition("/")[0]}}
        metadata = {"name": NAME, "uid": "u", "creationTimestamp": stamp(BEGIN_MS)}
        metadata["annotations"] = {REQUEST: json.dumps(request)}  # type: ignore[assignment]
        complete = {"type": "Complete", "status": "True", "lastTransitionTime": stamp(BEGIN_MS)}
        conditions = [complete] if self.__dict__["is_over"] else []
        return {
            "kind": "Job",
            "metadata": metadata,
            "spec": {},
            "status": {"conditions": conditions},
        }

    # ---- the storage
    region = "us-east-1"

    @property
    def place(self) -> ScriptedCluster:
        return self

    def listing(self, uri: str) -> list[dict[str, Any]]:
        prefix = uri.removeprefix("s3://bucket/")
        if uri.endswith("/hosts/"):
            pods = self.__dict__["pods"]
            return [{"Key": f"{prefix}algo-{pod.rank + 1}-{pod.uid}"} for pod in pods]
        return [
            {"Key": f"{prefix}algo-{pod.rank + 1}-{pod.uid}.log", "ETag": pod.uid}
            for pod in self.__dict__["pods"]
            if pod.is_stored
        ]

    def read(self, uri: str) -> bytes:
        pod = next(pod for pod in self.__dict__["pods"] if uri.endswith(f"{pod.uid}.log"))
        return "".join(f"{stamp(ms)} {text}\n" for ms, text in pod.lines).encode()


RANK = st.integers(0, 1)
LINES = st.lists(st.tuples(st.sampled_from([0, 1, 700, 25_000]), st.sampled_from("ab")), max_size=4)
STEP = st.one_of(
    st.tuples(st.just("write"), RANK, LINES),
    st.tuples(st.just("rotate"), RANK),
    st.tuples(st.just("replace"), RANK, st.booleans()),
    st.tuples(st.just("fault"), st.sampled_from(["gone", "dropped"])),
)


def scripted_backend(script: list[tuple[Any, ...]], *, is_ranked: bool) -> KubernetesBackend:
    """A backend whose API and storage follow a script."""
    section = Kubernetes(storage="s3://bucket/smtrain")
    backend, cluster = KubernetesBackend(section), ScriptedCluster(section)
    cluster.begin(script, is_ranked=is_ranked)
    backend.__dict__["cluster"] = backend.__dict__["storage"] = cluster
    return backend


def no_pause(_seconds: float) -> None:
    """Repeat a call at once."""


@given(script=st.lists(STEP, max_size=16), is_ranked=st.booleans())
@settings(max_examples=100, deadline=None)
def test_no_line_is_lost_or_comes_twice(script: list[tuple[Any, ...]], is_ranked: bool) -> None:
    """Pods write, their logs are rotated, pods are replaced and deleted, the list of pods expires
    (410), connections are dropped.
    """
    backend = scripted_backend(script, is_ranked=is_ranked)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("smtrain.client.follow.follower.pause", no_pause)
        patches.setattr("smtrain.client.backends.sagemaker.retry.Backoff.pause", lambda _: 0.0)
        follower = Follower(backend, NAME, poll=0.0)
        shown = Counter(
            (event.host, event.text) for event in follower.events() if isinstance(event, Line)
        )
    written = Counter(
        (f"algo-{pod.rank + 1}", text)
        for pod in backend.cluster.__dict__["pods"]
        for _, text in pod.lines
    )
    assert shown == written
