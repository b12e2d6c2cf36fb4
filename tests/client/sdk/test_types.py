"""Every type with accelerators that botocore lists: processes, precision, image, variables, request
and plan.
"""

from __future__ import annotations

from typing import Any

import pytest
from botocore.session import Session

import smtrain
from smtrain.core.facts import is_known, table
from smtrain.core.facts.engines import is_gpu, is_neuron, sagemaker_lack
from smtrain.core.facts.image_fit import image_fault

OWN = "123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:"
CUDA12, ARM, NEURON = (
    f"{OWN}2.9-cu126",
    f"{OWN}gb200",
    f"{OWN}2.14.0-neuronx-py314-sdk2.33.0-ubuntu26.04",
)

# Of a family: the GPU or core, EFA, precision, and the image if none is known. Of a size: its
# training processes.
FAMILIES: dict[str, tuple[str, bool, str, str | None, dict[str, int]]] = {
    "trn1": ("", False, "bf16", None, {"2xlarge": 2}),
    "trn1 ": ("", True, "bf16", None, {"32xlarge": 32}),
    "trn1n": ("", True, "bf16", None, {"32xlarge": 32}),
    "trn2": ("", True, "bf16", NEURON, {"48xlarge": 64}),
    "p2": ("K80", False, "fp32", CUDA12, {"xlarge": 1, "8xlarge": 8, "16xlarge": 16}),
    "p3": ("V100", False, "fp16", CUDA12, {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8}),
    "p3dn": ("V100", True, "fp16", CUDA12, {"24xlarge": 8}),
    "p4d": ("A100", True, "bf16", None, {"24xlarge": 8}),
    "p4de": ("A100", True, "bf16", None, {"24xlarge": 8}),
    "p5": ("H100", True, "bf16", None, {"4xlarge": 1, "48xlarge": 8}),
    "p5e": ("H200", True, "bf16", None, {"48xlarge": 8}),
    "p5en": ("H200", True, "bf16", None, {"48xlarge": 8}),
    "p6-b200": ("B200", True, "bf16", None, {"48xlarge": 8}),
    "p6-b300": ("B300", True, "bf16", None, {"48xlarge": 8}),
    "p6e-gb200": ("GB200", True, "bf16", ARM, {"36xlarge": 4}),
    "g4dn": (
        "T4",
        False,
        "fp16",
        None,
        {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 4, "16xlarge": 1},
    ),
    **{
        family: (
            gpu,
            False,
            "bf16",
            None,
            {
                "xlarge": 1,
                "2xlarge": 1,
                "4xlarge": 1,
                "8xlarge": 1,
                "16xlarge": 1,
                "12xlarge": 4,
                "24xlarge": 4,
                "48xlarge": 8,
            },
        )
        for family, gpu in (("g5", "A10G"), ("g6", "L4"), ("g6e", "L40S"))
    },
    **{
        family: (
            gpu,
            False,
            "bf16",
            None,
            {"2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 2, "24xlarge": 4, "48xlarge": 8},
        )
        for family, gpu in (("g7", "RTX PRO 4500"), ("g7e", "RTX PRO 6000"))
    },
}
TYPES = {
    f"ml.{family.strip()}.{size}": (gpu, efa, precision, image, count)
    for family, (gpu, efa, precision, image, sizes) in FAMILIES.items()
    for size, count in sizes.items()
}


def raw(kind: str, **compute: Any) -> dict[str, Any]:
    made = {
        "instance_type": kind,
        "region": "us-east-1",
        "role": "arn:aws:iam::123456789012:role/x",
        **compute,
    }
    return {
        "name": "r", "target": "aws", "model": {"path": "s3://models/llama-3.2-1b"},
        "data": {"prepared": "s3://texts/t/"}, "output": {"s3_uri": "s3://texts/out"},
        "train": {"steps": 100, "seq_len": 2048, "adapter": {}}, "compute": made,
    }  # fmt: skip


def trained(kind: str, precision: str, **compute: Any) -> dict[str, Any]:
    given = raw(kind, **compute)
    given["train"]["precision"] = precision
    return given


def test_the_table_has_every_type_that_botocore_lists_and_no_other() -> None:
    """When this fails, a release of botocore has new types: give them rows, here and in
    core/facts/instances.toml.
    """
    listed = set(
        Session().get_service_model("sagemaker").shape_for("TrainingInstanceType").metadata["enum"]
    )
    devices = {kind for kind in listed if is_gpu(kind) or is_neuron(kind)}
    assert devices == set(TYPES)
    rows = table("instances")["instances"]
    assert {kind for kind in rows if not sagemaker_lack(kind)} == devices
    sizes = {
        f"ml.{family}.{size}"
        for family, each in table("instances")["cpu_sizes"].items()
        for size in each
    }
    assert sizes == listed - devices
    assert set(table("instances")["chips"]) <= {row.get("chip") for row in rows.values()}


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_a_type_has_its_processes_precision_image_and_variables(kind: str) -> None:
    gpu, efa, precision, image, processes = TYPES[kind]
    compute = {"image": image} if image else {}
    given = trained(kind, precision, **compute)
    if gpu == "K80":
        with pytest.raises(
            smtrain.ConfigError, match=r"has K80 GPUs, for which no torch from 2\.9 on has kernels"
        ):
            smtrain.load_config(given)
        return
    config = smtrain.load_config(given)
    assert config.processes_per_instance == processes
    request = smtrain.request(config)
    assert request["ResourceConfig"]["InstanceType"] == kind
    assert request["HyperParameters"]["processes_per_instance"] == str(processes)
    variables = request["Environment"]
    assert (variables.get("FI_PROVIDER") == "efa") == efa
    assert ("NCCL_DEBUG" in variables) == bool(gpu)
    assert ("NEURON_LOGICAL_NC_CONFIG" in variables) == (kind == "ml.trn2.48xlarge")
    plan = smtrain.plan(config)
    assert plan.machines == f"1 x {kind}"
    assert plan.mesh.tp * plan.mesh.pp * plan.mesh.dp == processes
    wrong = "fp16" if not gpu else "bf16" if gpu in ("V100", "T4") else None
    if wrong:
        with pytest.raises(smtrain.ConfigError, match=r"^train\.precision: .*; set "):
            smtrain.load_config(trained(kind, wrong, **compute))
    if image and gpu:
        with pytest.raises(
            smtrain.ConfigError, match=r"compute\.image: no image is known for .*; give its URI"
        ):
            smtrain.request(trained(kind, precision))


BOX = {"devices": 8, "memory_gib": 270, "tflops": 2500, "host_memory_gib": 4096, "efa": True}


@pytest.mark.parametrize(
    ("kind", "device"), [("ml.p7.48xlarge", "gpu"), ("ml.trn9.48xlarge", "neuron")]
)
def test_a_type_newer_than_the_table_is_refused_until_its_devices_are_described(
    kind: str, device: str
) -> None:
    assert not is_known(kind)
    image = {"image": NEURON} if device == "neuron" else {}
    with pytest.raises(smtrain.ConfigError) as caught:
        smtrain.load_config(raw(kind, **image))
    (fault,) = caught.value.faults
    assert fault.startswith(
        f"compute.instance_type: {kind} is no instance type that smtrain knows (did you mean "
    )
    assert fault.endswith(f", or describe {kind} under machines")
    given = {**trained(kind, "bf16", **image), "machines": {kind: {**BOX, "kind": device}}}
    request = smtrain.request(given)
    assert request["ResourceConfig"]["InstanceType"] == kind
    assert request["HyperParameters"]["processes_per_instance"] == "8"
    variables = request["Environment"]
    assert variables["FI_PROVIDER"] == "efa"
    assert ("NCCL_DEBUG" in variables) == (device == "gpu")
    assert smtrain.plan(given).machines == f"1 x {kind}"
    given["machines"][kind]["efa"] = False
    assert "FI_PROVIDER" not in smtrain.request(given)["Environment"]


def test_a_type_without_an_accelerator_has_one_process_and_no_variables_of_devices() -> None:
    request = smtrain.request(trained("ml.c8i-flex.2xlarge", "bf16"))
    assert request["HyperParameters"]["processes_per_instance"] == "1"
    assert not {"FI_PROVIDER", "NCCL_DEBUG"} & request["Environment"].keys()


@pytest.mark.parametrize(
    ("kind", "tag", "fault"),
    [
        (
            "ml.p3.16xlarge",
            "2.9.0-cu130",
            "this image has CUDA 13.0, without kernels for V100 GPUs",
        ),
        (
            "ml.p6-b300.48xlarge",
            "2.9.0-cu128",
            "this image has CUDA 12.8, without kernels for B300",
        ),
        (
            "ml.g7e.2xlarge",
            "2.6.0-cu126",
            "this image has CUDA 12.6, without kernels for RTX PRO",
        ),
        ("ml.p3.16xlarge", "2.9.0-cu126", None),
        ("ml.g4dn.xlarge", "2.9.0-cu130", None),
        (
            "ml.p5.48xlarge",
            "2.9.0-arm64-cu130",
            "this image is for arm64, and ml.p5.48xlarge has x86_64 processors",
        ),
        ("ml.p6e-gb200.36xlarge", "2.9.0-arm64-cu130", None),
    ],
)
def test_an_image_whose_name_says_another_cuda_or_processor_is_refused(
    kind: str, tag: str, fault: str | None
) -> None:
    found = image_fault(f"{OWN}{tag}", "native", kind)
    assert found is None if fault is None else found is not None and found.startswith(fault), found
