"""The stand-in for a cluster speaks the protocol: the official client and kubectl list, watch, read
logs, patch and delete.

The client takes two CPU seconds to import, so the tests import it, not this module, which every
worker collects.
"""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from testing.kubernetes_api import StandInCluster
from testing.kubernetes_pods import expand
from testing.kubernetes_store import merge, selects
from tests.client.backends.kubernetes.conftest import wait_for

if TYPE_CHECKING:
    from kubernetes import client


def pod(name: str, script: str, **spec: Any) -> dict[str, Any]:
    container = {"name": "stage", "image": "i", "command": ["bash", "-c", script]}
    return {
        "metadata": {"name": name, "labels": {"a": name}},
        "spec": {"containers": [container], **spec},
    }


@pytest.fixture
def core(cluster: StandInCluster) -> client.CoreV1Api:
    """The official client."""
    from kubernetes import client, config

    return client.CoreV1Api(config.new_client_from_config(str(cluster.kubeconfig)))


def kubectl(*words: str, says: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(["kubectl", *words], input=says, capture_output=True, text=True)


def test_a_pod_is_created_watched_read_and_deleted(
    cluster: StandInCluster, core: client.CoreV1Api
) -> None:
    from kubernetes import watch

    core.create_namespaced_pod("default", pod("one", "echo first; echo second"))
    core.create_namespaced_pod(
        "default",
        pod("two", "trap 'echo saved; exit 5' TERM; echo waits; while :; do sleep 0.05; done"),
    )
    phases = []
    events = watch.Watch().stream(
        core.list_namespaced_pod, "default", label_selector="a=one", resource_version="1"
    )
    for event in events:
        phases.append((event["type"], event["object"].status.phase))
        if phases[-1][1] == "Succeeded":
            break
    assert phases[0] == ("ADDED", "Pending")
    assert "Running" in {phase for _, phase in phases}
    assert core.read_namespaced_pod_log("one", "default") == "first\nsecond\n"
    assert core.read_namespaced_pod_log("one", "default", tail_lines=1) == "second\n"
    stamped = core.read_namespaced_pod_log("one", "default", timestamps=True).splitlines()
    assert [line.split(" ")[1] for line in stamped] == ["first", "second"]
    wait_for(lambda: core.read_namespaced_pod_log("two", "default") == "waits\n")
    lines = watch.Watch().stream(core.read_namespaced_pod_log, "two", "default")
    assert next(lines) == "waits"
    core.delete_namespaced_pod("two", "default", grace_period_seconds=30)
    assert list(lines) == ["saved"]
    wait_for(
        lambda: (
            [item.metadata.name for item in core.list_namespaced_pod("default").items] == ["one"]
        )
    )


def test_lists_come_in_pages_and_old_versions_are_gone(
    cluster: StandInCluster, core: client.CoreV1Api
) -> None:
    from kubernetes import client, watch

    for number in range(5):
        core.create_namespaced_secret("default", {"metadata": {"name": f"s-{number}"}})
    first = core.list_namespaced_secret("default", limit=3)
    rest = core.list_namespaced_secret("default", limit=3, _continue=first.metadata._continue)
    names = [item.metadata.name for item in [*first.items, *rest.items]]
    assert names == [f"s-{number}" for number in range(5)]
    core.create_namespaced_secret("default", {"metadata": {"name": "t"}})
    cluster.store.compact()
    with pytest.raises(client.ApiException) as gone:
        core.list_namespaced_secret("default", limit=3, _continue=first.metadata._continue)
    assert gone.value.status == 410
    with pytest.raises(client.ApiException) as expired:
        next(watch.Watch().stream(core.list_namespaced_secret, "default", resource_version="1"))
    assert expired.value.status == 410
    assert core.patch_namespaced_secret("s-1", "default", {"metadata": {"labels": {"x": "y"}}})
    assert (
        core.list_namespaced_secret("default", label_selector="x=y").items[0].metadata.name == "s-1"
    )


def test_errors_have_the_words_of_the_api(cluster: StandInCluster, core: client.CoreV1Api) -> None:
    from kubernetes import client

    core.create_namespaced_secret("default", {"metadata": {"name": "s"}})
    calls = [
        (404, lambda: core.read_namespaced_secret("none", "default")),
        (409, lambda: core.create_namespaced_secret("default", {"metadata": {"name": "s"}})),
        (404, lambda: core.list_namespaced_pod("other-namespace")),
    ]
    cluster.forbidden.add(("delete", "secrets"))
    calls.append((403, lambda: core.delete_namespaced_secret("s", "default")))
    for status, call in calls:
        with pytest.raises(client.ApiException) as refused:
            call()
        assert refused.value.status == status


@pytest.mark.full  # kubectl takes seconds to start
def test_kubectl_creates_lists_reads_and_deletes(cluster: StandInCluster) -> None:
    made = {"apiVersion": "v1", "kind": "Pod", **pod("one", "echo first")}
    created = kubectl("create", "--validate=false", "-f", "-", says=json.dumps(made))
    assert (created.stdout, created.stderr) == ("pod/one created\n", "")
    wait_for(lambda: kubectl("logs", "one").stdout == "first\n")
    assert kubectl("get", "pods", "-o", "name").stdout == "pod/one\n"
    assert kubectl("delete", "pod", "one", "--wait=false").returncode == 0
    wait_for(lambda: kubectl("get", "pods", "-o", "name").stdout == "")


def test_references_patches_and_selectors_are_those_of_kubernetes() -> None:
    assert expand("$(A) $(B) $$(A) $A $", {"A": "1"}) == "1 $(B) $(A) $A $"
    item: dict[str, Any] = {"metadata": {"labels": {"a": "1", "b": "2"}}, "spec": {"x": 1}}
    merge(item, {"metadata": {"labels": {"a": None, "c": "3"}}, "spec": {"x": [2]}})
    assert item == {"metadata": {"labels": {"b": "2", "c": "3"}}, "spec": {"x": [2]}}
    assert selects(item, "b=2,c", "spec.x=[2]")
    assert not selects(item, "b=3")
    assert not selects(item, "", "spec.y=1")
