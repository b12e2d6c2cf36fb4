"""Machines of one's own, in the config or in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.core.errors import ConfigError
from smtrain.core.facts.gpus import chip_named

BOX = {
    "devices": 4,
    "memory_gib": 24,
    "tflops": 80,
    "link_gbs": 12,
    "host_memory_gib": 256,
    "dollars_per_hour": 2.5,
}


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def raw(**machines: Any) -> dict[str, Any]:
    return {
        "model": {"path": "s3://models/llama-3.2-1b"}, "data": {"prepared": "s3://texts/t/"},
        "train": {"steps": 100, "seq_len": 2048}, "machines": machines,
    }  # fmt: skip


def test_a_machine_of_the_config_plans_by_its_name_at_its_price() -> None:
    plan = smtrain.plan(raw(box=BOX), machines=[("box", 1)])
    assert plan.machines == "1 x box"
    assert plan.memory_gib["available"] == 24
    assert plan.mesh.tp * plan.mesh.pp * plan.mesh.dp == 4
    assert plan.hours is not None
    assert plan.dollars_by_item["train"] == pytest.approx(plan.hours * 2.5)
    assert not plan.calibrated


def test_a_config_that_trains_on_it_is_planned_for_it() -> None:
    given = raw(box={**BOX, "network_gbs": 3}) | {
        "target": "slurm",
        "cluster": {"shared": "/fsx/smtrain"},
    }
    given["compute"] = {"instance_type": "box", "instance_count": 2}
    given["model"] = {"path": "hf://meta-llama/Llama-3.2-1B"}
    plan = smtrain.plan(given, parallel="auto")
    assert (plan.machines, plan.memory_gib["available"]) == ("2 x box", 24)
    assert plan.mesh.tp * plan.mesh.pp * plan.mesh.dp == 2 * 4
    assert plan.hours is not None
    assert plan.dollars_by_item["train"] == pytest.approx(plan.hours * 2 * 2.5)


def test_a_cluster_whose_nodes_are_not_named_is_planned_only_for_named_machines() -> None:
    given = raw(box=BOX) | {"target": "slurm", "cluster": {"shared": "/fsx/smtrain"}}
    given["model"] = {"path": "hf://meta-llama/Llama-3.2-1B"}
    with pytest.raises(ConfigError, match=r"^compute\.instance_type: is missing; set it to box"):
        smtrain.plan(given)
    assert smtrain.plan(given, machines=[("box", 1)]).machines == "1 x box"
    del given["machines"]
    assert smtrain.plan(given, machines=[("ml.p5.48xlarge", 1)]).machines == "1 x ml.p5.48xlarge"


def test_a_better_machine_is_faster_and_more_hosts_need_a_network() -> None:
    def rate(count: int = 1, **other: Any) -> float:
        found = smtrain.plan(raw(box={**BOX, **other}), machines=[("box", count)]).tokens_per_s
        assert found is not None
        return found

    assert rate(tflops=160) > rate()
    assert rate(link_gbs=100) > rate()
    assert rate(2, network_gbs=10) > rate(2, network_gbs=1)
    with pytest.raises(
        ConfigError, match=r"machines\.box\.network_gbs: is needed to plan with 2 hosts"
    ):
        rate(2)


def test_a_file_describes_machines_and_the_config_wins(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "machines:\n  box: {devices: 2, memory_gib: 48, tflops: 100, host_memory_gib: 64}\n"
        "  other: {devices: 1, memory_gib: 80, tflops: 300, host_memory_gib: 64}\n"
    )
    assert (
        smtrain.plan(raw(), machines=[("box", 1)], machine_file=file).memory_gib["available"] == 48
    )
    assert (
        smtrain.plan(raw(box=BOX), machines=[("box", 1)], machine_file=file).memory_gib["available"]
        == 24
    )
    both = smtrain.plan(
        raw(box=BOX), machines=[("box", 1), ("other", 1), ("ml.p5.4xlarge", 1)], machine_file=file
    )
    assert {choice.machines for choice in both.choices} == {
        "1 x box",
        "1 x other",
        "1 x ml.p5.4xlarge",
    }
    home.mkdir()
    (home / "machines.yaml").write_text(file.read_text())
    assert smtrain.plan(raw(), machines=[("other", 1)]).machines == "1 x other"


@pytest.mark.parametrize(
    ("machines", "told"),
    [
        ({"box": {**BOX, "devices": 0}}, "machines.box.devices: got 0"),
        ({"box": {**BOX, "memory_gib": -1}}, "machines.box.memory_gib: got -1"),
        ({"box": {**BOX, "tflops": "fast"}}, "machines.box.tflops: got 'fast'"),
        (
            {"box": {**BOX, "tflop": 1}},
            "machines.box.tflop: unknown key; did you mean machines.box.tflops?",
        ),
        (
            {"box": {k: v for k, v in BOX.items() if k != "tflops"}},
            "machines.box.tflops: is missing",
        ),
        (
            {"ml.box": BOX},
            "machines.ml.box: got 'ml.box'; a machine's name begins with a small letter",
        ),
        ({"box": 5}, "machines.box: got 5; it is a section"),
    ],
)
def test_nonsense_is_one_sentence(machines: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        smtrain.plan(raw(**machines), machines=[("ml.p5.4xlarge", 1)])
    assert len(caught.value.faults) == 1
    assert caught.value.faults[0].startswith(told)


def test_a_files_faults_are_told_at_once_and_as_those_of_a_config(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("machines:\n  box: {devices: -2, memory_gib: .nan, tflops: lots, tflop: 3}\n")
    with pytest.raises(ConfigError) as caught:
        smtrain.plan(raw(), machines=[("box", 1)], machine_file=file)
    told = [fault.removeprefix(f"{file}: ") for fault in caught.value.faults]
    assert [fault.partition(";")[0] for fault in told] == [
        "machines.box.devices: got -2",
        "machines.box.memory_gib: got nan",
        "machines.box.tflops: got 'lots'",
        "machines.box.host_memory_gib: is missing",
        "machines.box.tflop: unknown key",
    ]
    assert [fault.count(";") for fault in told] == [1] * 5, "one remedy each"
    assert told[3].endswith("is missing; `smtrain help gpus` shows the form")
    file.write_text("- box\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: machines: got \['box'\]; it is a section"):
        smtrain.plan(raw(), machines=[("box", 1)], machine_file=file)


def test_a_name_that_nobody_described_is_told_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"bax is an unknown instance type; name box, or name a type"
    ):
        smtrain.plan(raw(box=BOX), machines=[("bax", 1)])
    with pytest.raises(
        ConfigError, match="here is no machine of a plan; leave it out and set targ"
    ):
        smtrain.plan(raw(box=BOX), machines=["here:1"])


def test_a_run_on_it_corrects_its_plan() -> None:
    given = raw(box=BOX) | {"parallel": {"tp": 4}}
    plain = smtrain.plan(given, machines=[("box", 1)])
    half = smtrain.plan(given, machines=[("box", 1)], measured=1000.0)
    assert any("times as fast as the model says" in w for w in half.warnings)
    assert plain.tokens_per_s is not None
    assert half.tokens_per_s is not None
    assert half.tokens_per_s < plain.tokens_per_s
    with pytest.raises(ConfigError, match=r"tp x pp = 8 does not divide the number of processes"):
        smtrain.plan(raw(box=BOX) | {"parallel": {"tp": 8}}, machines=[("box", 1)], measured=1000.0)


def test_fp16_is_planned_as_bf16_is_and_not_on_cpus() -> None:
    def planned(precision: str, **box: Any) -> Any:
        asked = raw(box={**BOX, **box})
        asked["train"] |= {"precision": precision}
        asked |= {
            "target": "slurm",
            "cluster": {"shared": "/fsx"},
            "compute": {"instance_type": "box"},
        }
        return smtrain.plan(asked)

    bf16, fp16 = planned("bf16"), planned("fp16")
    assert fp16.memory_gib == bf16.memory_gib
    assert (fp16.mesh, fp16.step_s) == (bf16.mesh, bf16.step_s)
    with pytest.raises(ConfigError, match="fp16 is for GPUs, and box has none; set bf16 or fp32"):
        planned("fp16", kind="cpu")


@pytest.mark.parametrize("way", ["config", "option"])
def test_a_plan_for_ones_own_machine_has_no_word_of_aws(way: str) -> None:
    box = {key: value for key, value in BOX.items() if key != "dollars_per_hour"}
    given = {
        **raw(box=box),
        "data": {"path": "s3://texts/t/"},
        "model": {"path": "s3://models/qwen3-30b-a3b"},
    }
    given["machines"]["box"] |= {"devices": 8, "memory_gib": 79.1}
    if way == "config":
        plan = smtrain.plan({**given, "target": "local", "compute": {"instance_type": "box"}})
    else:
        plan = smtrain.plan({**given, "target": "local"}, machines=[("box", 1)])
    assert plan.machines == "1 x box"
    assert plan.hours is not None
    text = str(plan)
    assert [
        word
        for word in ("billed", "AWS", "ml.", "pull", "--prices", "nxd", "Trainium", "image")
        if word in text
    ] == []
    assert " of training" in text


def test_a_machine_that_names_its_gpu_is_planned_as_instances_with_it() -> None:
    """Its own `tflops`, which a product of two matrices measured, is no peak."""

    def planned(**entry: Any) -> smtrain.Plan:
        box = {**BOX, "devices": 8, "memory_gib": 139.8, "tflops": 704.0, "link_gbs": 450.0} | entry
        return smtrain.plan({**raw(box=box), "target": "local"}, machines=[("box", 1)])

    named, plain = planned(chip="H200"), planned()
    p5e = smtrain.plan({**raw(box=BOX), "target": "aws"}, machines=[("ml.p5e.48xlarge", 1)])
    assert named.step_s is not None
    assert p5e.step_s is not None
    assert named.step_s["compute"] == pytest.approx(p5e.step_s["compute"], rel=0.05)
    assert any("uncalibrated" in warning for warning in plain.warnings)
    assert not any("uncalibrated" in warning for warning in named.warnings)


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", None),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("NVIDIA GB200", "GB200"),
    ],
)
def test_a_device_is_known_by_its_name(name: str, chip: str | None) -> None:
    assert chip_named(name) == chip


def test_only_a_gpu_has_a_chip() -> None:
    with pytest.raises(ConfigError, match=r"machines\.box\.chip: .*only a machine of kind gpu"):
        smtrain.plan(raw(box={**BOX, "kind": "cpu", "chip": "H100"}), machines=[("box", 1)])
