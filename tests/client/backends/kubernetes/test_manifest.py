"""The objects of a stage: a pure function, compared with golden files; the schema of the official
client and that of the CRD know every field.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from smtrain.client.backends.kubernetes.backend import KubernetesBackend
from smtrain.client.backends.kubernetes.kinds import KINDS
from smtrain.client.backends.kubernetes.manifest import is_owner, manifests
from smtrain.client.backends.kubernetes.pod import devices_of
from smtrain.core.config.kubernetes import Kubernetes
from smtrain.stages import stage_named
from testing.kubernetes_api import StandInCluster
from testing.kubernetes_pods import expand

HERE = Path(__file__).parent
FULL = Kubernetes(
    namespace="team-a",
    storage="s3://bucket/smtrain/",
    queue="gpus",
    service_account="trainer",
    data=[
        {"claim": "fsx", "path": "/mnt/fsx"},
        {"claim": "scratch", "path": "/mnt/scratch", "write": True},
    ],
    resources={"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32", "memory": "1800Gi"},
    cpu_resources={"cpu": "16", "memory": "64Gi"},
    node_selector={"pool": "h100"},
    cpu_node_selector={"pool": "cpu"},
    tolerations=[{"key": "nvidia.com/gpu", "effect": "NoSchedule"}, {"key": "team", "value": "a"}],
    priority_class="high",
    shared_memory="64Gi",
    image_pull_secret="registry",
    env_secret="keys",
    restarts=5,
)
PLAIN = Kubernetes(storage="s3://bucket")


def request(stage: str = "train", **changes: Any) -> dict[str, Any]:
    """A request in SageMaker's form."""

    def channel(name: str, uri: str) -> dict[str, Any]:
        return {"ChannelName": name, "DataSource": {"S3DataSource": {"S3Uri": uri}}}

    return {
        "TrainingJobName": f"llama-{stage}-1a2b3c4d",
        "RoleArn": "",
        "AlgorithmSpecification": {"TrainingImage": "registry/train:1"},
        "HyperParameters": {"stage": stage},
        "InputDataConfig": [
            channel("text", "file:///mnt/fsx/web"),
            channel("model", "s3://models/llama/"),
            channel("code", "s3://bucket/smtrain/code/0123456789abcdef/"),
        ],
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/smtrain/llama/jobs"},
        "ResourceConfig": {
            "InstanceType": "ml.p5.48xlarge",
            "InstanceCount": 2 if stage == "train" else 1,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
        "CheckpointConfig": {"S3Uri": "s3://bucket/smtrain/llama/checkpoints/"},
        "Environment": {"NCCL_DEBUG": "WARN"},
        "Tags": [{"Key": "smtrain:run", "Value": "llama"}],
        **changes,
    }


@pytest.mark.parametrize("stage", ["train", "prepare"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_objects_are_the_file(kind: str, stage: str) -> None:
    made = manifests(request(stage), FULL.model_copy(update={"kind": kind}))
    assert json.dumps(made, indent=2) + "\n" == (HERE / f"golden/{kind}-{stage}.json").read_text()


def schema_of(name: str) -> Any:
    """The schema of a CRD's spec, whose file names its source."""
    return json.loads((HERE / f"{name}.json").read_text())["schema"]


def unknown_fields(value: Any, kind: str, path: str = "") -> list[str]:
    """Fields that a class of the official client does not have; its classes are made of the
    published OpenAPI schema.
    """
    from kubernetes.client import models

    if kind.startswith("list["):
        return [
            found
            for number, item in enumerate(value)
            for found in unknown_fields(item, kind[5:-1], f"{path}[{number}]")
        ]
    model = getattr(models, kind, None)
    if model is None or not isinstance(value, dict):
        return []
    types = {model.attribute_map[name]: of for name, of in model.openapi_types.items()}
    return [f"{path}.{key}" for key in value if key not in types] + [
        found
        for key, item in value.items()
        for found in unknown_fields(item, types.get(key, ""), f"{path}.{key}")
    ]


@pytest.mark.parametrize("section", [FULL, PLAIN], ids=["full", "plain"])
@pytest.mark.parametrize("stage", ["train", "export"])
def test_the_published_schemas_know_every_field(section: Kubernetes, stage: str) -> None:
    job, service = manifests(request(stage), section)
    assert unknown_fields(job, "V1Job") == []
    assert unknown_fields(service, "V1Service") == []
    assert unknown_fields({"spec": {"template": {"specs": 1}}}, "V1Job") == [".spec.template.specs"]
    (job_set,) = manifests(request(stage), section.model_copy(update={"kind": "jobset"}))
    jsonschema.validate(job_set["spec"], schema_of("jobset"))
    (group,) = job_set["spec"]["replicatedJobs"]
    assert unknown_fields(group["template"]["spec"], "V1JobSpec") == []
    runtime, train_job = manifests(request(stage), section.model_copy(update={"kind": "trainjob"}))
    jsonschema.validate(runtime["spec"], schema_of("trainingruntime"))
    assert runtime["spec"]["template"]["spec"]["replicatedJobs"] == [group]
    jsonschema.validate(train_job["spec"], schema_of("trainjob"))
    (job,) = manifests(request(stage), section.model_copy(update={"kind": "hyperpod"}))
    jsonschema.validate(job["spec"], schema_of("hyperpodpytorchjob"))
    (replica,) = job["spec"]["replicaSpecs"]
    assert unknown_fields(replica["template"], "V1PodTemplateSpec") == []


@pytest.mark.full  # kubectl takes seconds to start
@pytest.mark.parametrize("kind", KINDS)
def test_kubectl_takes_the_objects(cluster: StandInCluster, kind: str) -> None:
    section = FULL.model_copy(update={"kind": kind, "namespace": "default"})
    preview = KubernetesBackend(section).preview([request("prepare"), request("train")])
    command = ["kubectl", "create", "--dry-run=client", "--validate=false", "-o", "name", "-f", "-"]
    done = subprocess.run(command, input=preview, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    items = [(item["kind"].lower(), item) for item in json.loads(preview)["items"]]
    assert [line.partition("/")[0].partition(".")[0] for line in done.stdout.split()] == [
        kind for kind, _ in items
    ]
    assert [line.partition("/")[2] for line in done.stdout.split()] == [
        item["metadata"]["name"] for _, item in items
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_one_object_of_a_stage_owns_the_other_ones(kind: str) -> None:
    made = manifests(request(), PLAIN.model_copy(update={"kind": kind}))
    assert [item["kind"] for item in made if is_owner(item)] == [KINDS[kind].kind]
    kinds = {KINDS[kind].kind, *(name for _, name, _ in KINDS[kind].dependents)}
    assert {item["kind"] for item in made} == kinds


ODD = "a b'c\"d$(NAME)$$e\\f\n#ü"


def test_odd_text_reaches_the_pod_as_it_is() -> None:
    made = manifests(request(Environment={"ODD": ODD, "NAME": "wrong"}), PLAIN)[0]
    (container,) = made["spec"]["template"]["spec"]["containers"]
    variables = {item["name"]: item.get("value", "") for item in container["env"]}
    seen = {name: expand(value, {"NAME": "wrong"}) for name, value in variables.items()}
    assert seen["ODD"] == ODD
    script = expand(container["command"][2], {"NAME": "wrong"})
    assert "code=$(mktemp -d)" in script
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_secrets_are_named_and_not_copied() -> None:
    text = json.dumps(manifests(request(), FULL))
    assert '"secretRef": {"name": "keys"}' in text
    assert '"imagePullSecrets": [{"name": "registry"}]' in text


def test_the_devices_of_a_type_of_aws_are_asked_for() -> None:
    assert devices_of("ml.p5.48xlarge") == {"nvidia.com/gpu": "8"}
    assert devices_of("ml.trn2.48xlarge") == {"aws.amazon.com/neuron": "16"}
    assert devices_of("box") == {}
    spec = manifests(request(), PLAIN)[0]["spec"]["template"]["spec"]
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term["matchExpressions"][0]["values"] == ["ml.p5.48xlarge", "p5.48xlarge"]
    assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert "affinity" not in manifests(request(), FULL)[0]["spec"]["template"]["spec"]


def test_a_stage_that_cannot_resume_is_not_restarted() -> None:
    stages = {name: stage_named(name).resumable for name in ("train", "generate")}
    made = {name: manifests(request(name), FULL)[0]["spec"]["backoffLimit"] for name in stages}
    assert made == {name: 5 if resumable else 0 for name, resumable in stages.items()}


def test_exit_statuses_are_those_of_the_pod() -> None:
    source = (
        Path("entrypoints/kubernetes_node.py").read_text() + Path("entrypoints/gang.py").read_text()
    )
    rules = manifests(request(), PLAIN)[0]["spec"]["podFailurePolicy"]["rules"]
    values = [rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule]
    names = [["STOP_STATUS", "REFUSED_STATUS"], ["RESTART_STATUS", "TAKEN_STATUS"]]
    for statuses, words in zip(values, names, strict=True):
        for status, word in zip(statuses, words, strict=True):
            assert f"\n{word} = {status}\n" in source
