"""Images by region, partition and engine; environment by Neuron SDK generation, instance and
mesh.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any, get_args

import pytest
from botocore.session import Session

import smtrain
from smtrain.core.config.training import Train
from smtrain.core.facts import table
from smtrain.core.facts.engines import is_neuron, sagemaker_lack
from smtrain.core.facts.images import (
    gpu_row,
    gpu_rows,
    image_rows,
    image_uri,
    patch_fault,
    sdk_release,
    serves,
    training_image,
)

XLA = ("NEURON_CC_FLAGS", "NEURON_FUSE_SOFTMAX", "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS")
IMAGE = "123456789012.dkr.ecr.us-west-2.amazonaws.com/pytorch-training-neuronx:"


def environment(plain: dict[str, Any], *, stage: Any = "train", **compute: Any) -> dict[str, str]:
    more: dict[str, Any] = {
        name: compute.pop(name) for name in ("network", "parallel") if name in compute
    }
    raw: dict[str, Any] = {**plain, **more, "compute": {**plain["compute"], **compute}}
    made: dict[str, str] = smtrain.request(raw, stage=stage)["Environment"]
    return made


@pytest.mark.parametrize(
    ("region", "registry"),
    [
        ("us-east-1", "763104351884.dkr.ecr.us-east-1.amazonaws.com"),
        ("ap-southeast-4", "457447274322.dkr.ecr.ap-southeast-4.amazonaws.com"),
        ("cn-north-1", "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn"),
        ("us-gov-west-1", "442386744353.dkr.ecr.us-gov-west-1.amazonaws.com"),
        ("us-iso-east-1", "886529160074.dkr.ecr.us-iso-east-1.c2s.ic.gov"),
        ("us-isob-east-1", "094389454867.dkr.ecr.us-isob-east-1.sc2s.sgov.gov"),
    ],
)
def test_the_registry_is_the_regions_and_its_partitions(region: str, registry: str) -> None:
    assert image_uri(region).startswith(f"{registry}/pytorch-training-neuronx:")


def test_nxd_gets_the_newest_image_that_ships_it() -> None:
    assert image_uri("us-west-2", "nxd").endswith(":2.9.0-neuronx-py312-sdk2.30.0-ubuntu24.04")
    known = {row["sdk"]: row["engines"] for row in image_rows()}
    assert [sdk for sdk, engines in known.items() if "nxd" in engines] == [
        "2.30.0",
        "2.29.1",
        "2.29.0",
        "2.28.0",
    ]
    assert serves("x/y:2.12.0-neuronx-py312-sdk2.32.0-ubuntu24.04", "nxd") is False
    assert serves("x/y:latest", "nxd") is None
    assert not any("native" in engines for engines in known.values()), "no TorchNeuron tag is known"
    assert serves("x/y:2.14.3-neuronx-py312-sdk2.33.0-ubuntu26.04", "native") is True


def test_the_table_is_in_order_and_speaks_of_every_engine() -> None:
    releases = [sdk_release(row["tag"]) for row in table("images")["tags"]]
    assert releases == sorted(releases, reverse=True)  # type: ignore[type-var]
    assert [".".join(map(str, r)) for r in releases if r] == [
        row["sdk"] for row in table("images")["tags"]
    ]
    assert set(get_args(Train.model_fields["engine"].annotation)) <= set(table("images")["engines"])


def test_instance_types_are_those_that_sagemaker_trains_on() -> None:
    known = (
        Session().get_service_model("sagemaker").shape_for("TrainingInstanceType").metadata["enum"]
    )
    types = table("instances")
    lacking = {kind for kind in types["instances"] if sagemaker_lack(kind)}
    named = {*types["instances"], *types["cpu"]} - lacking
    assert named <= set(known)
    assert not lacking & set(known), "SageMaker has it by now: leave out its line `sagemaker`"
    assert lacking == {"ml.trn2u.48xlarge", "ml.trn2.3xlarge", "trn3-gen1", "trn3-gen2"}
    assert {row["type"] for row in table("prices")["rows"]} <= named


def test_trainium_has_names_that_aws_has() -> None:
    """The types of Slurm clusters by the names of EC2, and those that HyperPod has by its own."""
    on_ec2 = set(Session().get_service_model("ec2").shape_for("InstanceType").metadata["enum"])
    on_hyperpod = set(
        Session().get_service_model("sagemaker").shape_for("ClusterInstanceType").metadata["enum"]
    )
    for kind, row in table("instances")["instances"].items():
        if is_neuron(kind):
            named = kind.removeprefix("ml.") in on_ec2
            assert named == kind.startswith("ml."), "EC2 names Trainium3 by now: take its name"
            assert row.get("sagemaker") != "hyperpod" or kind in on_hyperpod
    assert not any(kind.startswith("trn3") for kind in on_ec2)


def test_the_page_of_gpus_names_every_chip_there_is() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/gpus.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ml.")]
    for kind, row in table("instances")["instances"].items():
        if "chip" in row:
            assert any(row["chip"] in line and kind.rpartition(".")[0] in line for line in rows), (
                kind
            )


def test_the_command_lists_them() -> None:
    command = [
        sys.executable,
        "-c",
        "from smtrain.cli import main; main()",
        "images",
        "--engine",
        "nxd",
        "--json",
    ]
    listed = json.loads(
        subprocess.run(command, capture_output=True, check=True, env={**os.environ}).stdout
    )
    assert listed["uri"] == image_uri("us-west-2", "nxd")
    command[-2] = "native"
    without = json.loads(
        subprocess.run(command, capture_output=True, check=True, env={**os.environ}).stdout
    )
    assert without["uri"] is None
    assert listed["images"] == image_rows()
    assert "TorchNeuron" in listed["needs"]["native"]


@pytest.mark.parametrize(
    ("kind", "efa"),
    [
        ("ml.trn1.2xlarge", False),
        ("ml.trn1.32xlarge", True),
        ("ml.trn1n.32xlarge", True),
        ("ml.trn2.48xlarge", True),
    ],
)
def test_efa_goes_by_the_instance(plain: dict[str, Any], kind: str, efa: bool) -> None:
    own = {"instance_type": kind, "image": f"{IMAGE}sdk{'2.33.0' if 'trn2' in kind else '2.30.0'}"}
    made = environment(plain, **own)
    trio = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
    assert {name: made[name] for name in trio if name in made} == (trio if efa else {})
    assert made.get("NEURON_LOGICAL_NC_CONFIG") == ("2" if kind == "ml.trn2.48xlarge" else None)
    assert "FI_PROVIDER" not in environment(plain, **own, stage="prepare")


def test_the_neuron_variables_go_by_the_images_sdk(plain: dict[str, Any]) -> None:
    today = environment(plain)
    assert today["NEURON_CC_FLAGS"] == "--model-type=transformer --retry_failed_compilation"
    newer = {
        "instance_type": "ml.trn2.48xlarge",
        "image": IMAGE + "2.14.0-neuronx-py313-sdk2.33.0-ubuntu26.04",
    }
    torchneuron = environment(plain, **newer)
    unknown = environment(plain, image="mine:latest")
    assert not set(XLA) & (set(torchneuron) | set(unknown))
    for made in (today, torchneuron, unknown):
        assert not {"XLA_USE_BF16", "XLA_DOWNCAST_BF16"} & set(made)
        assert "--cache_dir" not in made.get("NEURON_CC_FLAGS", "")


def test_a_pipeline_has_more_in_flight(plain: dict[str, Any]) -> None:
    flat = environment(plain, parallel={"tp": 2})
    deep = environment(plain, parallel={"tp": 2, "pp": 2})
    names = ("MALLOC_ARENA_MAX", "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS")
    assert [flat[name] for name in names] == ["64", "3"]
    assert [deep[name] for name in names] == ["128", "7"]


def test_the_compile_cache_is_in_s3_and_never_with_the_checkpoints(plain: dict[str, Any]) -> None:
    xla, native, pool = "NEURON_COMPILE_CACHE_URL", "SMTRAIN_GRAPHS", "SMTRAIN_GRAPHS_FOLDER"
    assert environment(plain)[xla].startswith("s3://bucket/out/neuron-cache/"), (
        "by what changes a graph"
    )
    assert environment(plain, environment={xla: "s3://mine/cache"})[xla] == "s3://mine/cache"
    warm = environment(plain, keep_alive="10m", network={"isolation": True})
    assert warm[xla] == "/opt/ml/sagemaker/warmpoolcache/neuron"
    assert not {native, pool} & warm.keys()
    plain["compute"] |= {"instance_type": "ml.trn2.48xlarge", "image": f"{IMAGE}sdk2.33.0"}
    made = environment(plain)
    assert made[native].startswith("s3://bucket/out/neuron-cache/")
    assert not {xla, pool, "MALLOC_ARENA_MAX", *XLA} & made.keys(), "TorchNeuron does not read them"
    warm = environment(plain, keep_alive="10m")
    assert (warm[native], warm[pool]) == (made[native], "/opt/ml/sagemaker/warmpoolcache/neuron")
    assert not {native, pool} & environment(plain, network={"isolation": True}).keys()
    for variable, value in (
        (xla, "/opt/ml/checkpoints/cache"),
        ("NEURON_CC_FLAGS", "--cache_dir=/opt/ml/checkpoints/cache"),
        ("TORCH_NEURONX_NEFF_CACHE_DIR", "/opt/ml/checkpoints/neff"),
        ("TORCHINDUCTOR_CACHE_DIR", "/opt/ml/checkpoints/inductor"),
        ("NKI_COMPILE_CACHE_URL", "/opt/ml/checkpoints/nki"),
    ):
        with pytest.raises(
            smtrain.ConfigError, match=r"the compile cache must not be in /opt/ml/checkpoints"
        ):
            environment(plain, environment={variable: value})


def test_a_folder_of_weights_is_a_prefix_of_its_own(plain: dict[str, Any]) -> None:
    """`s3://bucket/model` would include `s3://bucket/model-chat/`."""
    channels = {c["ChannelName"]: c for c in smtrain.request(plain)["InputDataConfig"]}
    assert channels["model"]["DataSource"]["S3DataSource"]["S3Uri"] == "s3://bucket/model/"


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (
            "ml.p4d.24xlarge",
            {"FI_PROVIDER": "efa", "FI_EFA_FORK_SAFE": "1", "FI_EFA_USE_DEVICE_RDMA": "1"},
        ),
        (
            "ml.p4de.24xlarge",
            {"FI_PROVIDER": "efa", "FI_EFA_FORK_SAFE": "1", "FI_EFA_USE_DEVICE_RDMA": "1"},
        ),
        ("ml.p5.48xlarge", {"FI_PROVIDER": "efa", "FI_EFA_FORK_SAFE": "1"}),
        ("ml.p6-b200.48xlarge", {"FI_PROVIDER": "efa", "FI_EFA_FORK_SAFE": "1"}),
        ("ml.g5.12xlarge", {}),
        ("ml.g6e.48xlarge", {}),
    ],
)
def test_nccl_gets_efa_by_the_instance(
    plain: dict[str, Any], kind: str, wanted: dict[str, str]
) -> None:
    gpus = {**plain, "train": {**plain.get("train", {}), "engine": "native"}}
    made = environment(gpus, instance_type=kind, parallel={})
    assert {key: value for key, value in made.items() if key.startswith("FI_")} == wanted
    assert made["NCCL_DEBUG"] == "WARN"
    assert not [key for key in made if "NEURON" in key or key.startswith("XLA")]
    assert not [
        key
        for key in environment(gpus, stage="export", instance_type=kind, parallel={})
        if "NCCL" in key
    ]


@pytest.mark.parametrize(
    ("region", "registry"), [("us-west-2", "763104351884"), ("af-south-1", "626614931356")]
)
def test_gpus_get_the_newest_image_that_has_what_the_stages_import(
    region: str, registry: str
) -> None:
    uri = training_image(region, "native", "ml.p5.48xlarge")
    row = gpu_row(uri)
    assert row is not None
    assert row["whole"]
    assert uri == f"{registry}.dkr.ecr.{region}.amazonaws.com/{row['repository']}:{row['tag']}"
    assert row["released"] == max(r["released"] for r in gpu_rows() if r["whole"])
    with pytest.raises(
        smtrain.ConfigError, match="no registry of training images is known for 'mars-1'"
    ):
        training_image("mars-1", "native", "ml.g5.xlarge")


def test_the_default_image_of_gpus_is_patched_today() -> None:
    """When this fails, look for a newer image with transformers (core/facts/images.toml has the
    source), and put it first.
    """
    assert patch_fault(training_image("us-west-2", "native", "ml.p5.48xlarge")) is None


def test_an_image_that_is_no_longer_patched_is_told_with_the_one_to_take() -> None:
    ended = next(row for row in gpu_rows() if row["patched_until"] == "2026-10-15")
    uri = f"763104351884.dkr.ecr.us-west-2.amazonaws.com/{ended['repository']}:{ended['tag']}"
    assert patch_fault(uri, date(2026, 10, 15)) is None, "the last day"
    sentence = patch_fault(uri, date(2026, 10, 16))
    assert sentence is not None
    assert sentence.startswith(
        f"AWS's patches of {ended['repository']}:{ended['tag']} ended on 2026-10-15; leave compute."
    )
    for other in (None, "own:1", training_image("us-west-2", "nxd", "ml.trn1.32xlarge")):
        assert patch_fault(other) is None


def test_no_price_changes_by_accident() -> None:
    """Each price was copied from its source by hand; a change must be made here too, after checking
    the source.
    """
    rows = sorted(
        (r["type"], r["region"], r["option"], r["dollars_per_hour"])
        for r in table("prices")["rows"]
    )
    assert len(rows) == 41
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == "ffabf8e377a7d3ae"
