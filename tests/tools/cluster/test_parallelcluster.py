"""The file for a new cluster: its content, its faults, and ParallelCluster's own schema."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from smtrain.client.planner.resolve import load_config
from smtrain.core.config import JobConfig
from smtrain.core.config.training import DpoSection
from smtrain.core.errors import ConfigError
from smtrain.tools.cluster.parallelcluster import OSES, Site, dollars_per_hour, template

SITE = Site(
    head_subnet="subnet-0123456789abcdef0",
    compute_subnet="subnet-0123456789abcdef1",
    key_name="mine",
)


def config(
    raw: dict[str, Any], kind: str = "ml.trn1.32xlarge", count: int = 4, **cluster: Any
) -> JobConfig:
    compute = {"instance_type": kind, "instance_count": count, "processes_per_instance": 2}
    section = {"shared": "/fsx/smtrain", **cluster}
    train = {**raw["train"], "global_batch_size": 8, "engine": "nxd"}
    return load_config(
        {**raw, "train": train, "compute": compute, "target": "slurm", "cluster": section}
    )


def queue(made: dict[str, Any]) -> dict[str, Any]:
    return made["Scheduling"]["SlurmQueues"][0]  # type: ignore[no-any-return]


def test_nodes_are_close_together_with_efa_and_a_job_has_them_alone(raw: dict[str, Any]) -> None:
    made = template(config(raw), SITE)
    train = queue(made)
    assert (train["CapacityType"], train["JobExclusiveAllocation"]) == ("ONDEMAND", True)
    assert train["Networking"] == {
        "SubnetIds": [SITE.compute_subnet],
        "PlacementGroup": {"Enabled": True},
    }
    assert train["ComputeResources"] == [
        {
            "Name": "trn1-32xlarge",
            "InstanceType": "trn1.32xlarge",
            "MinCount": 0,
            "MaxCount": 4,
            "Efa": {"Enabled": True},
        }
    ]
    assert made["SharedStorage"][0]["MountDir"] == "/fsx"
    assert [one["Name"] for one in made["Scheduling"]["SlurmQueues"]] == ["train", "cpu"]


def test_a_capacity_block_has_all_its_nodes_at_once_and_no_placement_group(
    raw: dict[str, Any],
) -> None:
    train = queue(template(config(raw), replace(SITE, capacity_block="cr-0123456789abcdef0")))
    resource = train["ComputeResources"][0]
    assert train["CapacityType"] == "CAPACITY_BLOCK"
    assert (resource["MinCount"], resource["MaxCount"]) == (4, 4)
    assert "PlacementGroup" not in train["Networking"]


def test_trainium2_has_its_names_of_ec2_and_trainium3_has_none(raw: dict[str, Any]) -> None:
    compute = {"instance_count": 2, "processes_per_instance": 2}
    base = {
        **raw,
        "train": {**raw["train"], "engine": "native"},
        "target": "slurm",
        "cluster": {"shared": "/fsx/x"},
    }
    for kind in ("trn2u.48xlarge", "trn2.3xlarge"):
        made = template(
            load_config({**base, "compute": {**compute, "instance_type": f"ml.{kind}"}}), SITE
        )
        (resource,) = queue(made)["ComputeResources"]
        assert (resource["InstanceType"], resource["Efa"]) == (kind, {"Enabled": True})
    with pytest.raises(
        ConfigError,
        match=r"EC2 had no name for trn3-gen1 .*; set compute.instance_type: ml.trn2.48xl",
    ):
        template(load_config({**base, "compute": {**compute, "instance_type": "trn3-gen1"}}), SITE)


def test_nodes_have_a_python_that_torchneuron_has_wheels_for(raw: dict[str, Any]) -> None:
    base = {
        **raw,
        "train": {**raw["train"], "engine": "native"},
        "target": "slurm",
        "cluster": {"shared": "/fsx/x"},
    }
    trn2, gpus = (
        load_config(
            {
                **base,
                "compute": {
                    "instance_count": 2,
                    "processes_per_instance": 2,
                    "instance_type": kind,
                },
            }
        )
        for kind in ("ml.trn2.48xlarge", "ml.p5.48xlarge")
    )
    trn1 = config(raw)

    def image(of: JobConfig, **site: Any) -> dict[str, str]:
        made: dict[str, str] = template(of, replace(SITE, **site))["Image"]
        return made

    assert [image(of)["Os"] for of in (trn1, trn2, gpus)] == [
        "ubuntu2204",
        "ubuntu2404",
        "ubuntu2204",
    ]
    for os in set(OSES) - {"ubuntu2404"}:
        assert image(gpus, os=os)["Os"] == os
        assert image(trn2, os=os, ami="ami-0123456789abcdef0")["Os"] == os
        with pytest.raises(
            ConfigError,
            match=rf"--os: {os} has Python 3\.\d+, and TorchNeuron's wheels are for 3.12 to",
        ):
            template(trn2, replace(SITE, os=os))
    held = trn2.model_copy(
        update={"cluster": trn2.cluster.model_copy(update={"container": "/fsx/neuron.sqsh"})}
    )
    assert image(held, os="ubuntu2204")["Os"] == "ubuntu2204"


def test_queues_are_the_partitions_of_the_config(raw: dict[str, Any]) -> None:
    def names(**cluster: Any) -> list[str]:
        return [
            one["Name"]
            for one in template(config(raw, **cluster), SITE)["Scheduling"]["SlurmQueues"]
        ]

    assert names(partition="trn1") == ["trn1"]
    assert names(partition="trn1", cpu_partition="small") == ["trn1", "small"]


def test_nodes_may_read_the_buckets_of_inputs(raw: dict[str, Any]) -> None:
    made = template(config({**raw, "data": {"path": "s3://corpus/text"}}), SITE)
    assert [one["Iam"] for one in made["Scheduling"]["SlurmQueues"]] == [
        {"S3Access": [{"BucketName": "corpus"}]}
    ] * 2
    assert all("Iam" not in one for one in template(config(raw), SITE)["Scheduling"]["SlurmQueues"])


def test_nodes_may_read_the_buckets_of_a_reference_and_of_tests_too(raw: dict[str, Any]) -> None:
    tested = {"path": "s3://corpus/text", "decontaminate": {"path": "s3://tests/t"}}
    plain = config({**raw, "data": tested})
    pairs = {"objective": "dpo", "dpo": DpoSection(reference="s3://references/m")}
    train, _ = template(
        plain.model_copy(update={"train": plain.train.model_copy(update=pairs)}), SITE
    )["Scheduling"]["SlurmQueues"]
    assert [one["BucketName"] for one in train["Iam"]["S3Access"]] == [
        "corpus",
        "references",
        "tests",
    ]


def test_the_train_nodes_alone_run_and_may_read_a_script_as_they_start(raw: dict[str, Any]) -> None:
    made = template(config(raw), replace(SITE, post_install="s3://scripts/neuron.sh"))
    train, cpus = made["Scheduling"]["SlurmQueues"]
    assert train["CustomActions"] == {"OnNodeConfigured": {"Script": "s3://scripts/neuron.sh"}}
    assert train["Iam"] == {"S3Access": [{"BucketName": "scripts"}]}
    assert "CustomActions" not in cpus
    assert "Iam" not in cpus


@pytest.mark.parametrize(
    ("site", "cluster", "fault"),
    [
        ({"os": "ubuntu2004"}, {}, "--os: ParallelCluster does not support ubuntu2004"),
        (
            {"capacity_block": "cr-0123456789abcdef0", "spot": True},
            {},
            "--spot: a capacity block is paid for already",
        ),
        ({"storage_gib": 3000}, {}, "--storage: 3000 GiB is not a size"),
        ({"storage_gib": 0}, {}, "--storage: 0 GiB is not a size"),
        ({"head_subnet": "subnet-1"}, {}, "--head-subnet: subnet-1 is not such an ID"),
        ({"ami": "neuron"}, {}, "--ami: neuron is not such an ID"),
        (
            {"region": "uswest2"},
            {},
            "--region: uswest2 is not a region of AWS; did you mean us-west-2?",
        ),
        (
            {"post_install": "neuron.sh"},
            {},
            "--post-install: neuron.sh is not a script that nodes can read",
        ),
        ({"capacity_block": "block"}, {}, "--capacity-block: block is not such an ID"),
        (
            {},
            {"partition": "Trn1_queue"},
            "cluster.partition: ParallelCluster allows no queue named 'Trn1_queue'",
        ),
        (
            {},
            {"cpu_partition": "default"},
            "cluster.cpu_partition: ParallelCluster allows no queue named 'default'",
        ),
    ],
)
def test_what_cannot_be_made_has_its_sentence(
    raw: dict[str, Any], site: dict[str, Any], cluster: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        template(config(raw, **cluster), replace(SITE, **site))
    assert [one[: len(fault)] for one in refused.value.faults] == [fault]


def test_it_says_what_an_hour_costs_idle_and_busy(raw: dict[str, Any]) -> None:
    idle, busy = dollars_per_hour(config(raw), SITE)
    assert idle is not None
    assert busy is not None
    assert 1 < idle < 5 < busy
    assert (
        dollars_per_hour(config(raw), replace(SITE, capacity_block="cr-0123456789abcdef0"))[1]
        is None
    )
    assert dollars_per_hour(config(raw), replace(SITE, storage_gib=2400))[0] < idle  # type: ignore[operator]


@pytest.mark.full  # the package pins old versions: scripts/test has it in .venv/pcluster
@pytest.mark.parametrize("os", OSES)
@pytest.mark.parametrize(
    "site",
    [
        {},
        {"spot": True, "region": "us-east-1"},
        {"capacity_block": "cr-0123456789abcdef0"},
        {"ami": "ami-0123456789abcdef0", "key_name": None},
        {"post_install": "s3://scripts/neuron.sh"},
    ],
)
@pytest.mark.parametrize("kind", ["ml.trn1.32xlarge", "ml.trn1.2xlarge"])
@pytest.mark.parametrize("text", [None, "s3://corpus/text"])
def test_parallelcluster_takes_every_template(
    raw: dict[str, Any],
    os: str,
    site: dict[str, Any],
    kind: str,
    text: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schema = pytest.importorskip(
        "pcluster.schemas.cluster_schema", reason="aws-parallelcluster is not installed"
    )
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    settings = {**raw, "data": {"path": text}} if text else raw
    made = template(config(settings, kind), replace(SITE, os=os, **site))
    assert schema.ClusterSchema(cluster_name="tiny").load(made).scheduling.queues[0].name == "train"
