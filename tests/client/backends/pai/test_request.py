"""The CreateJob request: a pure function, compared with a golden file; the models of the SDK accept
all of it.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from alibabacloud_pai_dlc20201203.models import CreateJobRequest

import smtrain
from smtrain import ConfigError
from smtrain.client.backends.pai.backend import PaiBackend
from smtrain.client.backends.pai.cloud import CloudError
from smtrain.client.backends.pai.request import create_job
from smtrain.core.config.pai import Pai
from smtrain.stages import stages_of
from tests.docs.pages import ROOT

GOLDEN = Path(__file__).with_name("golden")
QUOTA = Pai(
    region="cn-beijing",
    workspace="1234",
    storage="oss://bucket/smtrain/",
    quota="quota1",
    priority=6,
    resources={"cpu": 96, "memory": "1000Gi", "gpu_type": "GU7E", "shared_memory": "64Gi"},
    cpu_resources={"cpu": 16, "memory": "64Gi"},
    data=[
        {"uri": "nas://1ab.cn-beijing.nas.aliyuncs.com/text", "path": "/mnt/nas"},
        {"dataset": "d-1", "path": "/mnt/set", "write": True, "cache": True, "options": "{}"},
    ],
    vpc={"id": "vpc-1", "switch": "vsw-1", "security_group": "sg-1", "cidrs": ["10.0.0.0/8"]},
    rdma=True,
    sanity_check=True,
    error_monitoring=True,
    error_monitoring_args="--a=b",
    driver="550.127.08",
)


def request(stage: str = "train", **changes: Any) -> dict[str, Any]:
    """A request in SageMaker's form."""

    def channel(name: str, uri: str) -> dict[str, Any]:
        return {
            "ChannelName": name,
            "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": uri}},
        }

    return {
        "TrainingJobName": f"llama-{stage}-1a2b3c4d",
        "RoleArn": "",
        "AlgorithmSpecification": {"TrainingImage": "registry/train:1"},
        "HyperParameters": (
            {"stage": stage} | ({"processes_per_instance": "8"} if stage == "train" else {})
        ),
        "InputDataConfig": [
            channel("text", "file:///mnt/nas/web"),
            channel("model", "oss://models/llama/"),
            channel("code", "oss://bucket/smtrain/code/0123456789abcdef/"),
        ],
        "OutputDataConfig": {"S3OutputPath": "oss://bucket/smtrain/llama/jobs"},
        "ResourceConfig": {"InstanceType": "gu7e-8", "InstanceCount": 2 if stage == "train" else 1},
        "StoppingCondition": {"MaxRuntimeInSeconds": 3601},
        "CheckpointConfig": {
            "S3Uri": "oss://bucket/smtrain/llama/checkpoints/",
            "LocalPath": "/opt/ml/checkpoints",
        },
        "Environment": {
            "NCCL_DEBUG": "WARN",
            "SMTRAIN_CHECKPOINTS": "oss://bucket/smtrain/llama/checkpoints/",
        },
        "Tags": [{"Key": "smtrain:run", "Value": "llama"}],
        **changes,
    }


@pytest.mark.parametrize("stage", ["train", "prepare"])
def test_the_request_is_the_file(stage: str) -> None:
    made = create_job(request(stage), QUOTA)
    assert json.dumps(made, indent=2) + "\n" == (GOLDEN / f"{stage}.json").read_text("utf-8")


PUBLIC = Pai(region="cn-beijing", storage="oss://bucket", ecs_spec="ecs.a", cpu_ecs_spec="ecs.b")
OWN = PUBLIC.model_copy(
    update={
        "command": "echo 'a b'\nexit 3",
        "code": (
            QUOTA.model_validate(
                {"code": {"source": "code-1", "branch": "main", "commit": "1a2b", "path": "/code"}}
            ).code
        ),
    }
)


def given(value: Any) -> Any:
    """A value without its empty lists: the models add one for each missing list."""
    if isinstance(value, dict):
        return {key: given(item) for key, item in value.items() if item != []}
    return [given(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("section", [QUOTA, PUBLIC, OWN], ids=["quota", "public", "own command"])
@pytest.mark.parametrize("stage", ["train", "export"])
def test_the_models_of_the_sdk_take_all_of_it(section: Pai, stage: str) -> None:
    made = create_job(request(stage), section)
    model = CreateJobRequest().from_map(made)
    model.validate()
    assert given(model.to_map()) == given(made)


def test_public_resources_have_a_type_for_each_kind_of_stage() -> None:
    assert [spec["EcsSpec"] for spec in create_job(request(), PUBLIC)["JobSpecs"]] == [
        "ecs.a",
        "ecs.a",
    ]
    assert [spec["EcsSpec"] for spec in create_job(request("export"), PUBLIC)["JobSpecs"]] == [
        "ecs.b"
    ]


def test_a_command_is_quoted_and_runs_in_stage_train_alone() -> None:
    made = create_job(request(), OWN)
    told = f"{made['UserCommand'].rpartition('train ')[2]}; echo $?"
    done = subprocess.run(["sh", "-c", told], capture_output=True, text=True)
    assert done.stdout == "a b\n3\n"
    assert made["CodeSource"]["CodeSourceId"] == "code-1"
    assert "bash -c" not in create_job(request("export"), OWN)["UserCommand"]


@pytest.mark.parametrize("stage", ["prepare", "train", "export"])
def test_sh_reads_every_command(stage: str) -> None:
    text = create_job(request(stage), OWN)["UserCommand"]
    done = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert shlex.split(text)


def test_a_request_that_is_too_long_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"pai\.command: the request of .* has .* bytes, and PAI-DLC takes 65,536"
    ):
        create_job(request(Environment={"A": "x" * 70_000}), PUBLIC)


def test_a_dry_run_prints_it_and_needs_no_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "alibabacloud_pai_dlc20201203", None)
    shown = PaiBackend(QUOTA).preview([request()])
    assert json.loads(shown) == create_job(request(), QUOTA)


def test_a_key_that_the_installed_sdk_does_not_know_is_named() -> None:
    with pytest.raises(CloudError, match=r"does not know Settings\.Newer of CreateJob; update it"):
        PaiBackend(QUOTA).cloud.create(
            {**create_job(request(), QUOTA), "Settings": {"Newer": True}}
        )


def test_the_request_of_smtrain_names_the_paths_of_the_pods(raw: dict[str, Any]) -> None:
    machine = {
        "devices": 2,
        "memory_gib": 80,
        "tflops": 300,
        "network_gbs": 50,
        "host_memory_gib": 500,
    }
    raw.update(
        target="pai-dlc", machines={"gpus": machine}, pai=PUBLIC.model_dump(exclude_defaults=True)
    )
    raw["compute"] = {"instance_type": "gpus", "instance_count": 2, "image": "registry/train:1"}
    sent = smtrain.request(raw, stage="prepare")
    uris = [channel["DataSource"]["S3DataSource"]["S3Uri"] for channel in sent["InputDataConfig"]]
    assert all(uri.startswith("oss://bucket/") for uri in uris)
    made = create_job(sent, PUBLIC)
    folders = json.loads(made["Envs"]["SMTRAIN_FOLDERS"])
    assert all(path.startswith("/mnt/smtrain/") for path in folders["inputs"].values())


EXAMPLE = ROOT / "examples/gpt-22b-pai-dlc.yaml"


def test_the_example_plans_and_its_requests_are_accepted() -> None:
    plan = smtrain.plan(EXAMPLE)
    assert (plan.fits, plan.machines, plan.dollars) == (True, "2 x a100-80g-8", None)
    assert (
        "no price is known for a100-80g-8 on PAI-DLC; give one as"
        " machines.a100-80g-8.dollars_per_hour" in (plan.warnings)
    )
    assert smtrain.plan(EXAMPLE, set_=["machines.a100-80g-8.dollars_per_hour=30"]).dollars
    config = smtrain.load_config(EXAMPLE)
    for stage in ("prepare", "train", "export"):
        made = create_job(smtrain.request(config, stage=stage), config.pai)
        assert given(CreateJobRequest().from_map(made).to_map()) == given(made)
        gpus = [spec["ResourceConfig"].get("GPU") for spec in made["JobSpecs"]]
        assert gpus == (["8", "8"] if stage == "train" else [None])


def test_the_command_of_the_docs_is_the_only_stage_and_reads_its_mounts() -> None:
    page = (ROOT / "docs/pai-dlc.md").read_text("utf-8")
    mounts, own = (
        yaml.safe_load(block) for block in re.findall(r"```yaml\n(pai:.*?)```", page, re.S)
    )
    assert "--num-layers 48" in own["pai"]["command"]
    whole = yaml.safe_load(EXAMPLE.read_text("utf-8"))
    raw = {**whole, **mounts, "pai": {**whole["pai"], **mounts["pai"]}}
    config = smtrain.load_config(raw)
    assert config.data.path == "file:///mnt/nas/web"
    folders = json.loads(
        create_job(smtrain.request(config, stage="prepare"), config.pai)["Envs"]["SMTRAIN_FOLDERS"]
    )
    assert folders["inputs"]["text"] == "/mnt/nas/web"
    raw["pai"].update(own["pai"])
    config = smtrain.load_config(raw)
    assert stages_of(config) == ["train"]
    made = create_job(smtrain.request(config, stage="train"), config.pai)
    assert "torchrun --nnodes $WORLD_SIZE --node_rank $RANK" in made["UserCommand"]
    assert [source["MountPath"] for source in made["DataSources"]][:3] == [
        "/mnt/smtrain",
        "/mnt/nas",
        "/mnt/set",
    ]
    assert smtrain.plan(config).fits


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("target", "dlc", "did you mean pai-dlc?"),
        ("pai.region", "Beijing", "give the name of a region of Alibaba Cloud, such as cn-beijing"),
        (
            "pai.storage",
            "s3://bucket/x",
            "give a bucket and a prefix, such as oss://my-bucket/smtrain",
        ),
        ("pai.ecs_spec", "gn7", "give a type of Alibaba Cloud, such as ecs.gn7e-c16g1.16xlarge"),
        ("pai.resource_id", "q", "unknown key; did you mean pai.quota?"),
        ("pai.priority", "11", "it must be at most 9"),
        ("pai.resources", "{cpu: 96, memory: '1000'}", "give a size with its unit, such as 512Gi"),
        ("pai.data", "[{uri: ftp://x, path: /x}]", "begins with oss://, nas:// or cpfs://"),
        (
            "pai.command",
            "HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyzabcdefgh x",
            "looks like a secret, and anyone who may",
        ),
        ("data.path", "OSS:/bucket/x", "OSS:/bucket/x is written oss://bucket/x here; give that"),
    ],
)
def test_a_slip_is_answered_with_what_is_meant(key: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        smtrain.load_config(EXAMPLE, set_=[f"{key}={value}"])
