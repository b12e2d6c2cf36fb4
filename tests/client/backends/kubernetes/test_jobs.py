"""Jobs through the stand-in for a cluster: submit, follow, wait, stop, list and check; faults of the
cluster.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain import ConfigError, JobError
from smtrain.client.backends.kubernetes.backend import KubernetesBackend
from smtrain.client.backends.kubernetes.cluster_api import ClusterLostError
from smtrain.client.backends.kubernetes.kinds import KINDS
from smtrain.client.backends.kubernetes.manifest import manifests
from smtrain.client.backends.kubernetes.state import state_of
from smtrain.core.config.kubernetes import Kubernetes
from testing.kubernetes_api import StandInCluster
from testing.kubernetes_pods import POD_INDEX
from tests.client.backends.kubernetes.conftest import BOX, IMAGE, wait_for

WAITS = "trap 'echo saved; exit 143' TERM; echo waits; while :; do sleep 0.05; done"


@pytest.fixture
def place(section: dict[str, Any]) -> KubernetesBackend:
    return KubernetesBackend(Kubernetes(**section))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The script of each pod instead of the stage, as the text in a list."""
    text = [WAITS]

    def shell(request: Any, section: Kubernetes) -> list[dict[str, Any]]:
        made = manifests(request, section)
        for container in containers(made):
            container["command"] = ["bash", "-c", text[0].replace("$", "$$")]
        return made

    monkeypatch.setattr("smtrain.client.backends.kubernetes.backend.manifests", shell)
    return text


def containers(value: Any) -> list[dict[str, Any]]:
    """Every container of objects of any kind."""
    if isinstance(value, list):
        return [container for item in value for container in containers(item)]
    if not isinstance(value, dict):
        return []
    found = value["containers"] if isinstance(value.get("containers"), list) else []
    return [*found, *(item for part in value.values() for item in containers(part))]


def request(name: str = "own-train-00000000", pods: int = 2) -> dict[str, Any]:
    code = {"ChannelName": "code", "DataSource": {"S3DataSource": {"S3Uri": "s3://bucket/code/"}}}
    return {
        "TrainingJobName": name,
        "AlgorithmSpecification": {"TrainingImage": IMAGE},
        "HyperParameters": {"stage": "train"},
        "InputDataConfig": [code],
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/smtrain/own/jobs"},
        "ResourceConfig": {"InstanceType": "box", "InstanceCount": pods},
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
        "CheckpointConfig": {"S3Uri": "s3://bucket/smtrain/own/checkpoints/"},
        "Environment": {},
    }


def status(place: KubernetesBackend, name: str = "own-train-00000000") -> tuple[str, str]:
    described = place.describe(name, None)
    reason = described["SecondaryStatusTransitions"][-1].get("StatusMessage", "")
    return described["TrainingJobStatus"], described.get("FailureReason", reason)


def lines(place: KubernetesBackend, name: str = "own-train-00000000") -> list[tuple[str, str]]:
    page = place.log_page(name, None, 0, None, None, None)
    hosts = [str(event["logStreamName"]).rpartition("/")[2][:6] for event in page["events"]]
    return [(host, event["message"]) for host, event in zip(hosts, page["events"], strict=True)]


@pytest.mark.slow
def test_a_job_is_created_once_listed_followed_and_waits_in_words(
    cluster: StandInCluster, place: KubernetesBackend, script: list[str]
) -> None:
    script[0] = 'echo "pod $JOB_COMPLETION_INDEX of $SMTRAIN_HOSTS"; sleep 1'
    id_ = place.submit(request())
    assert place.queued_id("own-train-00000000") == id_
    assert place.submit(request()) is None
    (service,) = cluster.store.select("services", "default")
    assert service["metadata"]["ownerReferences"][0]["uid"] == id_
    wait_for(lambda: status(place)[0] == "Completed")
    assert sorted(lines(place)) == [("algo-1", "pod 0 of 2"), ("algo-2", "pod 1 of 2")]
    assert place.queued_id("own-train-00000000") is None
    cluster.missing_images.add(IMAGE)
    script[0] = WAITS
    place.submit(request("own-train-11111111", 1))
    wait_for(lambda: "the image cannot be pulled" in status(place, "own-train-11111111")[1])
    cluster.missing_images.clear()
    large = KubernetesBackend(place.section.model_copy(update={"resources": {"cpu": "64"}}))
    with pytest.raises(JobError, match="own-train-11111111 is writing checkpoints of this run"):
        large.submit(request("own-train-22222222", 1))
    cluster.delete("jobs", "default", "own-train-11111111", 0)
    without = {k: v for k, v in request("own-train-22222222", 1).items() if k != "CheckpointConfig"}
    large.submit(without)
    wait_for(
        lambda: "no node can take the pod (0/2 nodes" in status(place, "own-train-22222222")[1]
    )
    names = [row["TrainingJobName"] for page in place.rows("own", 1) for row in page]
    assert sorted(names) == ["own-train-00000000", "own-train-22222222"]
    place.stop("own-train-22222222")
    wait_for(lambda: status(place, "own-train-22222222")[0] == "Stopped")


@pytest.mark.slow
def test_a_failure_of_a_pod_is_counted_and_a_lost_one_is_not(
    cluster: StandInCluster, place: KubernetesBackend, script: list[str]
) -> None:
    script[0] = "exit 75"
    once = KubernetesBackend(place.section.model_copy(update={"restarts": 1}))
    once.submit(request(pods=1))
    wait_for(lambda: len(cluster.controllers.uncounted) > 3)
    assert status(once)[0] == "InProgress"
    script[0] = "exit 1"
    cluster.delete("jobs", "default", "own-train-00000000", 0)
    wait_for(lambda: not cluster.store.select("pods", "default"))
    once.submit(request(pods=1))
    wait_for(lambda: status(once)[0] == "Failed")
    assert status(once)[1].startswith("its pods failed more often than kubernetes.restarts allows")
    assert len(cluster.store.select("pods", "default")) == 2


def test_the_api_may_be_away_and_a_second_launch_may_be_faster(
    cluster: StandInCluster, place: KubernetesBackend, script: list[str]
) -> None:
    place.submit(request(pods=1))
    wait_for(lambda: lines(place) == [("algo-1", "waits")])
    cluster.down()
    with pytest.raises(ClusterLostError, match=r"the cluster's API at https://.* does not answer"):
        place.describe("own-train-00000000", None)
    cluster.serve()
    assert status(place)[0] == "InProgress"
    cluster.forbidden.add(("create", "services"))
    with pytest.raises(JobError, match=r"was not submitted: services is forbidden.*administrator"):
        place.submit(
            {**request("own-prepare-00000000", 1), "HyperParameters": {"stage": "prepare"}}
        )
    assert [job["metadata"]["name"] for job in cluster.store.select("jobs", "default")] == [
        "own-train-00000000"
    ]
    with pytest.raises(JobError, match="none: no such job in namespace default"):
        place.describe("none", None)


def announce(cluster: StandInCluster, place: KubernetesBackend) -> None:
    """Leave the rank of each pod that the cluster gives none, as kubernetes_node.py does."""
    for pod in cluster.store.select("pods", "default", label_selector=POD_INDEX):
        labels, uid = pod["metadata"]["labels"], pod["metadata"]["uid"][:8]
        folder = f"s3://bucket/smtrain/own/jobs/{labels['smtrain.io/job']}/hosts"
        place.storage.write(f"{folder}/algo-{int(labels[POD_INDEX]) + 1}-{uid}", b"")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "trainjob",
        "hyperpod",
        pytest.param("jobset", marks=pytest.mark.full),
    ],  # trainjob runs one too
)
def test_each_kind_runs_restarts_stops_and_leaves_nothing(
    cluster: StandInCluster, place: KubernetesBackend, script: list[str], tmp_path: Path, kind: str
) -> None:
    """The pods fail once, then complete; a second job is stopped."""
    place = KubernetesBackend(place.section.model_copy(update={"kind": kind, "restarts": 1}))
    rank = "${JOB_COMPLETION_INDEX:-$STAND_IN_RANK}"
    script[0] = f'echo "pod {rank}"; mkdir {tmp_path}/begun-{rank} 2>/dev/null && exit 1; sleep 1'
    place.submit(request())
    wait_for(lambda: status(place)[0] == "Completed")
    assert place.submit(request()) is None
    announce(cluster, place)
    assert {("algo-1", "pod 0"), ("algo-2", "pod 1")} == set(lines(place))
    script[0] = WAITS
    place.submit(request("own-train-11111111", 1))
    wait_for(lambda: len(cluster.controllers.processes) >= 5)
    announce(cluster, place)
    wait_for(lambda: lines(place, "own-train-11111111") == [("algo-1", "waits")])
    place.stop("own-train-11111111")
    if KINDS[kind].stops_by_file:
        assert status(place, "own-train-11111111")[0] == "Stopping"
    else:
        wait_for(lambda: status(place, "own-train-11111111")[0] == "Stopped")
    for name in ("own-train-00000000", "own-train-11111111"):
        cluster.delete(KINDS[kind].plural, "default", name, 0)
    always = {"nodes", "namespaces", "secrets", "events"}
    wait_for(lambda: {plural for plural, _, _ in cluster.store.objects} <= always)


@pytest.mark.slow
def test_check_names_what_the_cluster_lacks(
    cluster: StandInCluster, section: dict[str, Any], model_folder: Path, text_folder: Path
) -> None:
    raw = {
        "name": "own",
        "target": "kubernetes",
        "machines": {"box": BOX},
        "model": {"path": str(model_folder)},
        "data": {"path": str(text_folder)},
        "train": {"seq_len": 32, "global_batch_size": 2},
        "compute": {"instance_type": "box", "instance_count": 2, "image": IMAGE},
        "kubernetes": section,
    }
    ours = {"kubernetes", "rights", "nodes", "storage", "inputs"}
    assert [str(fault) for fault in smtrain.check(raw).faults if fault.check in ours] == []
    cluster.forbidden |= {("patch", "jobs"), ("list", "pods")}
    section.update(
        queue="gpus",
        service_account="trainer",
        priority_class="high",
        image_pull_secret="registry",
        data=[{"claim": "fsx", "path": "/mnt/fsx"}],
        resources={"nvidia.com/gpu": "8"},
        storage="s3://other/smtrain",
    )
    texts = "\n".join(f"{one.text}; {one.remedy}" for one in smtrain.check(raw))
    for words in (
        "you may not patch jobs, list pods in namespace default; ask the administrator",
        "the cluster has no queue gpus in namespace default; create it, or correct kubernetes.queue",
        "no service account trainer",
        "no priority class high",
        "no Secret registry",
        "no volume claim fsx",
        "the nodes offer 0 nvidia.com/gpu, for 0 pods of 8",
        "s3://other/smtrain",
    ):
        assert words in texts, texts
    section.update(namespace="team-b")
    texts = "\n".join(f"{one.text}; {one.remedy}" for one in smtrain.check(raw))
    assert "the cluster has no namespace team-b; correct kubernetes.namespace" in texts


def test_without_a_kubeconfig_the_sentence_says_how_to_log_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    place = KubernetesBackend(Kubernetes(storage="s3://bucket"))
    with pytest.raises(JobError, match=r"kubeconfig gives no access .*; run `kubectl get pods`"):
        place.describe("a", None)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("OOMKilled", "used more memory than it may have; raise memory in kubernetes.resources"),
        ("Evicted", "evicted the pod; raise memory and ephemeral-storage"),
        ("DeadlineExceeded", "longer than compute.max_run; raise that, and launch again"),
        ("Other", "Other: words of the cluster"),
    ],
)
def test_each_failure_has_its_sentence(reason: str, words: str) -> None:
    condition = {
        "type": "Failed",
        "status": "True",
        "reason": reason,
        "message": "words of the cluster",
    }
    job = {"metadata": {"name": "a"}, "spec": {}, "status": {"conditions": [condition]}}
    state = {"terminated": {"reason": reason, "exitCode": 1}}
    pod = {
        "metadata": {"name": "a-0"},
        "status": {"phase": "Failed", "containerStatuses": [{"name": "stage", "state": state}]},
    }
    assert words in state_of(job, [pod]).message


def test_the_place_of_a_job_is_known_here_or_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMTRAIN_KUBERNETES", "arn:aws:eks:x:1:cluster/c/team=s3://bucket/smtrain")
    place = smtrain.Job("own-train-00000000", "kubernetes").target
    assert isinstance(place, KubernetesBackend)
    assert json.loads(place.section.model_dump_json(exclude_defaults=True)) == {
        "context": "arn:aws:eks:x:1:cluster/c",
        "namespace": "team",
        "storage": "s3://bucket/smtrain",
    }
    monkeypatch.setenv("SMTRAIN_KUBERNETES", "team")
    with pytest.raises(ConfigError, match="SMTRAIN_KUBERNETES is 'team'; it must look like"):
        smtrain.Job("own-train-00000000", "kubernetes")
