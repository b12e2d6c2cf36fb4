"""Findings of `smtrain check` on a real cluster before anything is submitted."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.choose import backend_of
from smtrain.client.backends.slurm.backend import SlurmBackend
from smtrain.client.backends.slurm.checks import run_checks
from smtrain.client.backends.slurm.nodes import NodeAnswer, answers, node_findings
from smtrain.client.findings import Report
from smtrain.client.launch.stages import Chain
from smtrain.client.planner.resolve import load_config
from smtrain.core.config import JobConfig
from smtrain.core.demo.inputs import save_tokenizer
from tests.client.backends.slurm.conftest import Bench, wait_for

Checked = Callable[..., Report]


def config(
    raw: dict[str, Any], shared: str, kind: str = "ml.c5.xlarge", count: int = 2, **cluster: Any
) -> JobConfig:
    section = {"shared": shared, "venv": sys.prefix, "time": "30m", **cluster}
    compute = {"instance_type": kind, "instance_count": count, "processes_per_instance": 2}
    engine = "nxd" if "trn" in kind else "native"
    return load_config(
        {
            **raw,
            "target": "slurm",
            "cluster": section,
            "compute": compute,
            "train": {**raw["train"], "engine": engine},
        }
    )


@pytest.fixture
def checked(bench: Bench, raw: dict[str, Any]) -> Checked:
    save_tokenizer(["hello"], Path(raw["model"]["path"]), vocabulary=512, end="<end>")
    text = Path(raw["data"]["path"]) / "a.jsonl"
    text.write_text(text.read_text() * 20)
    return lambda stage=None, **cluster: smtrain.check(
        config(raw, **{"shared": str(bench.shared), **cluster}), stage=stage
    )


def faults(report: Report) -> str:
    return "\n".join(report.sentences("fault"))


def test_a_cluster_that_can_do_it_has_no_fault_and_its_nodes_were_asked(checked: Checked) -> None:
    report = checked()
    assert report.ok, faults(report)
    by_check = {finding.check: finding for finding in report.findings}
    assert by_check["nodes"].text.startswith("2 nodes have Python 3."), by_check["nodes"]
    assert by_check["nodes"].level == "ok"


@pytest.mark.parametrize(
    ("cluster", "fault"),
    [
        ({"partition": "closed"}, "closed is down"),
        ({"partition": "nowhere"}, "there is no partition 'nowhere'"),
        ({"partition": "short", "time": "2h"}, "short allows 1 h"),
        ({"constraint": "efa"}, "failed"),
    ],
)
def test_what_cannot_start_is_told(checked: Checked, cluster: dict[str, Any], fault: str) -> None:
    report = checked(stage="prepare", **cluster)
    assert not report.ok
    assert fault in faults(report)


@pytest.mark.parametrize(
    ("cluster", "remedy", "mended"),
    [
        ({"partition": "closed"}, "take another", {"partition": "main"}),
        (
            {"partition": "nowhere"},
            "set cluster.partition to one of closed, main, short",
            {"partition": "main"},
        ),
        (
            {"cpu_partition": "nowhere"},
            "set cluster.cpu_partition to one of closed",
            {"cpu_partition": "main"},
        ),
        ({"partition": "short", "time": "2h"}, "set cluster.time to at most 60m", {"time": "60m"}),
        (
            {"partition": "short", "time": "2h", "save_before": 3600},
            "take a partition with a longer limit",
            {"partition": "main"},
        ),
        ({"constraint": "efa"}, "correct the section cluster", {"constraint": None}),
    ],
)
def test_what_the_remedy_says_ends_the_fault(
    checked: Checked, cluster: dict[str, Any], remedy: str, mended: dict[str, Any]
) -> None:
    (fault,) = checked(stage="prepare", **cluster).faults
    assert remedy in fault.remedy
    assert checked(stage="prepare", **{**cluster, **mended}).ok


def test_more_nodes_than_there_are_is_told(checked: Checked) -> None:
    assert (
        "main has 3 nodes, and the run takes 4; set compute.instance_count to at most that"
        in faults(checked(stage="train", count=4))
    )


def test_a_shared_folder_below_a_file_is_told(checked: Checked, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert (
        f"shared: {tmp_path}/file is not a folder on this machine; correct cluster.shared"
        in faults(checked(stage="prepare", shared=f"{tmp_path}/file/shared"))
    )


def test_a_shared_folder_that_is_full_is_told(checked: Checked, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * (3 << 20))
    assert re.search(
        r"shared: \S+ has \d MB free; delete what is not needed", faults(checked(stage="prepare"))
    )


def test_an_input_that_is_not_there_is_told(
    bench: Bench, raw: dict[str, Any], tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    (gone / "text").mkdir(parents=True)
    (gone / "text/a.jsonl").write_text('{"text": "hello"}\n')
    settings = config({**raw, "data": {"path": str(gone / "text")}}, str(bench.shared))
    target = backend_of(settings)
    chain = Chain(settings, target, look=False)
    shutil.rmtree(gone)
    assert isinstance(target, SlurmBackend)
    findings = [
        finding
        for finding in run_checks(target, chain.config, ["prepare"])
        if finding.check == "inputs"
    ]
    assert [finding.text for finding in findings if finding.level == "fault"] == [
        f"{gone}/text is not on this machine"
    ]


def test_a_node_that_does_not_share_the_folder_is_told(checked: Checked, bench: Bench) -> None:
    slurm = bench.slurm
    slurm.end("node3")
    slurm.start_node("node3", hidden=bench.shared)
    try:
        wait_for(
            lambda: (
                subprocess.run(
                    ["srun", "-Q", "-w", "node3", "-I10", "true"], capture_output=True
                ).returncode
                == 0
            )
        )
        report = checked(srun=["--nodelist=node2,node3"])
        assert "nodes: node3 do not see cluster.shared or an input as the head node does" in faults(
            report
        )
        assert not list(bench.shared.iterdir())
    finally:
        slurm.end("node3")
        slurm.start_node("node3")


def test_an_environment_that_is_not_on_the_nodes_is_told(checked: Checked) -> None:
    assert "node1, node2 have no /nowhere/bin/activate; make it there" in faults(
        checked(venv="/nowhere")
    )


def test_what_slurm_refuses_is_told_once_and_no_node_is_asked(checked: Checked) -> None:
    report = checked(partition="nowhere")
    assert [finding.check for finding in report.findings if finding.level != "ok"] == ["partition"]


def test_text_that_cannot_be_read_is_told_before_it_is_copied(
    checked: Checked, text_folder: Path
) -> None:
    (text_folder / "a.jsonl").rename(text_folder / "a.bin")
    assert "holds no file of text that can be read" in faults(checked(stage="prepare"))


def test_a_python_without_the_packages_is_told_by_its_nodes(
    checked: Checked, tmp_path: Path
) -> None:
    (tmp_path / "bare/bin").mkdir(parents=True)
    (tmp_path / "bare/bin/activate").write_text(
        'export PYTHONPATH= PYTHONNOUSERSITE=1\npython3() { command python3 -S -I "$@"; }\n'
    )
    report = checked(venv=str(tmp_path / "bare"))
    assert "lack " in faults(report)
    assert "torch" in faults(report)
    assert "cluster.venv" in faults(report)


def test_a_head_node_without_slurm_is_told(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "so it is not a head node of Slurm" in faults(checked())


def node(
    name: str = "n1",
    clock: int = 100,
    lacks: str = "",
    neuron: int = 16,
    efa: int = 8,
    kind: str = "trn1.32xlarge",
) -> NodeAnswer:
    return NodeAnswer(name, clock, "3.11", lacks, True, neuron, 0, efa, kind)


@pytest.mark.parametrize(
    ("found", "level", "text"),
    [
        ([node(), node("n2")], "ok", "2 nodes have Python 3.11"),
        (
            [node(), replace(node("n2"), sees_shared=False)],
            "fault",
            "n2 do not see cluster.shared or an input as the head node",
        ),
        ([node(), node("n2", neuron=0)], "fault", "n2 have no Neuron device"),
        ([node(), node("n2", efa=0)], "warning", "n2 have no EFA device"),
        ([node(), node("n2", clock=200)], "warning", "the clocks of the nodes differ by 100 s"),
        ([node(lacks="python3"), node("n2")], "fault", "n1 have no python3"),
        ([node(lacks="torch,yaml"), node("n2", lacks="torch")], "fault", "n1, n2 lack torch, yaml"),
        ([node(kind="")], "ok", "1 nodes have Python 3.11"),
        (
            [node(), node("n2", kind="trn1n.32xlarge")],
            "warning",
            "n2: ml.trn1n.32xlarge; the plan is made for ml.trn1.32",
        ),
        (
            [node(kind="trn3x.48xlarge")],
            "warning",
            "n1: trn3-gen1; the plan is made for ml.trn1.32xlarge",
        ),
        (
            [node(kind="trn9.1xlarge")],
            "warning",
            "n1: ml.trn9.1xlarge; the plan is made for ml.trn1.32xlarge",
        ),
        ([], "warning", "nodes were asked and did not answer"),
    ],
)
def test_nodes_are_judged_by_what_they_say(
    raw: dict[str, Any], found: list[NodeAnswer], level: str, text: str
) -> None:
    (finding,) = node_findings(config(raw, "/fsx/smtrain", "ml.trn1.32xlarge"), found, 2)
    assert (finding.level, finding.text[: len(text)]) == (level, text)


def test_nodes_of_ones_own_are_counted_for_gpus(raw: dict[str, Any]) -> None:
    entry = {"devices": 4, "memory_gib": 24, "tflops": 80, "host_memory_gib": 256, "network_gbs": 3}
    settings = config(
        {**raw, "machines": {"box": entry}, "parallel": {"dp": 4}}, "/fsx/smtrain", "box"
    )
    two = replace(node(kind="", neuron=0), gpus=2)
    (finding,) = node_findings(settings, [two, replace(two, name="n2", gpus=1)], 2)
    assert (finding.level, finding.text) == (
        "fault",
        "n2 have fewer than 2 GPUs, one for each training process",
    )
    (fine,) = node_findings(settings, [two], 1)
    assert fine.level == "ok"
    (on_ec2,) = node_findings(settings, [replace(two, kind="g5.12xlarge")], 1)
    assert on_ec2.level == "ok", on_ec2


def test_what_a_profile_prints_is_no_answer() -> None:
    text = (
        "Welcome | to |"
        " n1\nn1|1700000000|3.11||yes|16|0|8|trn1.2xlarge\nn2|1700000001|3.9|torch,yaml|no|0|0|0|\n"
    )
    first, second = answers(text)
    assert (first.name, first.lacks, first.sees_shared, first.neuron, first.efa) == (
        "n1",
        "",
        True,
        16,
        8,
    )
    assert (first.kind, second.kind) == ("trn1.2xlarge", "")
    assert (second.lacks, second.sees_shared) == ("torch,yaml", False)


def test_nodes_of_another_type_than_the_config_are_told(raw: dict[str, Any]) -> None:
    settings = config(raw, "/fsx/smtrain", "ml.trn1.32xlarge")
    (finding,) = node_findings(settings, [node(kind="trn1n.32xlarge")], 1)
    assert finding.text.endswith("the plan is made for ml.trn1.32xlarge")
    assert finding.remedy == "set compute.instance_type to ml.trn1n.32xlarge"


def test_trainium3_is_known_by_its_devices(raw: dict[str, Any]) -> None:
    asked = load_config(
        {
            **raw,
            "train": {**raw["train"], "engine": "native"},
            "parallel": {},
            "target": "slurm",
            "compute": {"instance_type": "trn3-gen2", "processes_per_instance": 2},
            "cluster": {"shared": "/fsx/smtrain"},
        }
    )
    (finding,) = node_findings(asked, [node(kind="trn3e.24xlarge", neuron=4)], 1)
    assert finding.level == "ok"
    (finding,) = node_findings(asked, [node(kind="trn3.48xlarge", neuron=16)], 1)
    assert finding.remedy == "set compute.instance_type to trn3-gen1"
    finding = next(iter(node_findings(asked, [node(kind="trn3e.24xlarge", neuron=0)], 1)))
    assert "have no Neuron device" in finding.text
