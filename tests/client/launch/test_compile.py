"""Stage compile: graphs compiled before the cluster is there, kept in S3 by what changes them,
failures never.

Neuron's program is not to be had here: tests/client/launch/neuron holds a stand-in that says and
writes what the program does.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.backends.sagemaker.s3 import list_objects
from smtrain.client.launch import compiled_graphs
from smtrain.client.launch.stages import Chain
from smtrain.client.planner.resolve import load_config
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.protocol.uris import split_uri
from smtrain.stages import stages_of

PATH = f"{Path(__file__).parent / 'neuron'}:{Path(sys.executable).parent}:/usr/bin:/bin"
LIBRARY = importlib.util.find_spec("neuronx_distributed") is not None
URI = compiled_graphs.VARIABLE


def config(inputs: dict[str, Path], name: str, **environment: str) -> dict[str, Any]:
    return {
        "name": name,
        "target": "local",
        "model": {"path": str(inputs["model"])},
        "data": {"path": str(inputs["text"])},
        "parallel": {"tp": 2, "sequence_parallel": True},
        "train": {
            "engine": "nxd",
            "steps": 4,
            "global_batch_size": 4,
            "seq_len": 32,
            "precision": "fp32",
        },
        "compute": {
            "instance_type": "ml.trn1.2xlarge",
            "instance_count": 2,
            "processes_per_instance": 2,
            "environment": {"PATH": PATH, **environment},
        },
    }


def changed(raw: dict[str, Any], *settings: str) -> dict[str, str]:
    found: dict[str, str] = smtrain.request(raw, stage="train", set_=settings)["Environment"]
    return found


def names(uri: str) -> set[str]:
    prefix = split_uri(uri)[1]
    return {
        item["Key"].removeprefix(f"{prefix}/")
        for item in list_objects(SageMakerBackend("local"), f"{uri}/")
    }


@pytest.fixture(scope="module")
def prepared(local_home: Path, trained_inputs: dict[str, Path]) -> str:
    """Inputs of the runs, prepared once."""
    return smtrain.launch(config(trained_inputs, "text"), stage="prepare", say=_silent).output


@pytest.mark.slow
@pytest.mark.full  # of engine nxd; the gate has test_native_graphs.py
def test_graphs_are_compiled_once_and_every_later_job_knows(
    prepared: str, trained_inputs: dict[str, Path]
) -> None:
    raw, said = {**config(trained_inputs, "ahead"), "data": {"prepared": prepared}}, list[str]()
    job = smtrain.launch(raw, stage="compile", say=said.append)
    told = job.describe()
    assert told["ResourceConfig"]["InstanceCount"] == 1, "one instance, whatever trains"
    result = json.loads(job.read("compilation.json"))
    assert (result["total"], result["successful"], result["failed"], result["cached"]) == (
        3,
        3,
        0,
        0,
    )
    assert result["compilers"] == ["neuronxcc-2.25.3371.0+f524c9e3"]
    finals = {metric["MetricName"]: metric["Value"] for metric in told["FinalMetricDataList"]}
    assert finals["compile:compiled"] == 3
    kept = names(result["cache"])
    assert sum(name.endswith("/model.neff") for name in kept) == 3
    assert not any(name.endswith((".lock", ".log")) for name in kept)
    chain = Chain(load_config(raw), SageMakerBackend("local"))
    chain_says: list[str] = []
    compiled_graphs.announce_compiling(
        chain.target, chain.config, chain.plan("train").request, chain_says.append
    )
    assert chain_says == [f"graphs: all 3 were compiled by {job.name} ({result['cache']})"]
    other = smtrain.launch({**raw, "name": "other"}, stage="compile", say=said.append)
    assert other.name == job.name, "another run of the same shapes finds them"
    smtrain.launch(raw, stage="compile", again=True, say=said.append)
    again = smtrain.launch(raw, stage="compile", say=said.append)
    assert again.name != job.name
    assert json.loads(again.read("compilation.json"))["cached"] == 3


@pytest.mark.slow
@pytest.mark.full
def test_graphs_that_fail_fail_the_job_by_name_and_are_not_cached(
    prepared: str, trained_inputs: dict[str, Path]
) -> None:
    raw = config(trained_inputs, "broken", STANDIN_FAIL="MODULE_222+aa")
    raw["data"], raw["train"]["global_batch_size"] = {"prepared": prepared}, 8
    with pytest.raises(JobError) as failed:
        smtrain.launch(raw, stage="compile", say=_silent)
    text = str(failed.value)
    assert "1 of 3 graphs did not compile" in text
    assert "MODULE_222+aa" in text
    assert "too many instructions" in text
    uri = changed(raw)[URI]
    assert {name.split("/")[1] for name in names(uri)} == {"MODULE_111+aa", "MODULE_333+aa"}
    assert compiled_graphs.read_marker(SageMakerBackend("local"), uri) is None
    said: list[str] = []
    compiled_graphs.announce_compiling(
        SageMakerBackend("local"),
        Chain(load_config(raw), SageMakerBackend("local")).config,
        smtrain.request(raw),
        said.append,
    )
    assert said[0].startswith("graphs: not compiled ahead")
    del raw["compute"]["environment"]["STANDIN_FAIL"]
    job = smtrain.launch(raw, stage="compile", say=_silent)
    result = json.loads(job.read("compilation.json"))
    assert (result["total"], result["cached"], result["graphs"]) == (
        1,
        2,
        3,
    ), "only the one that failed is compiled"


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(LIBRARY, reason="neuronx_distributed can be imported here")
def test_what_ends_the_traced_run_or_lacks_is_the_failure(
    prepared: str, trained_inputs: dict[str, Path]
) -> None:
    raw = config(trained_inputs, "cause", STANDIN_TRIAL="1")
    raw["data"], raw["train"]["global_batch_size"] = {"prepared": prepared}, 16
    with pytest.raises(JobError, match=r"train\.engine: nxd needs"):
        smtrain.launch(raw, stage="compile", say=_silent)
    raw["compute"]["environment"] = {}
    with pytest.raises(JobError, match=r"neuron_parallel_compile is not in this container"):
        smtrain.launch(raw, stage="compile", again=True, say=_silent)


def test_the_cache_is_found_by_all_that_changes_a_graph_and_nothing_else(
    trained_inputs: dict[str, Path], tmp_path: Path
) -> None:
    raw = config(trained_inputs, "key")
    known = changed(raw)[URI]
    assert known.startswith("s3://smtrain-local/smtrain/neuron-cache/")
    same = [
        ("name=another",),
        ("train.lr=1e-5",),
        ("train.steps=9",),
        ("train.seed=3",),
        ("compute.keep_alive=10m",),
        ("checkpoint.keep=7",),
        ("train.global_batch_size=4",),
        ("model.init=scratch",),
        ("compute.environment.HF_HUB_OFFLINE=yes_please",),
    ]
    for settings in same:
        assert changed(raw, *settings)[URI] == known, settings
    other = [
        ("train.seq_len=64",),
        ("train.precision=bf16",),
        ("train.global_batch_size=8",),
        ("parallel.micro_batch_size=2",),
        ("parallel.tp=1", "parallel.sequence_parallel=false"),
        ("parallel.tp=1", "parallel.pp=2", "parallel.sequence_parallel=false"),
        ("parallel.activation_checkpointing=full",),
        ("parallel.zero1=false",),
        ("compute.instance_count=4",),
        ("compute.instance_type=ml.trn1n.32xlarge",),
        ("compute.image=1.dkr.ecr.us-west-2.amazonaws.com/x:sdk2.29.0",),
        ("compute.environment.NEURON_CC_FLAGS=--model-type=transformer -O1",),
        ("compute.environment.XLA_IR_DEBUG=one",),
        ("train.adapter.rank=4",),
        ("train.adapter.targets=q_proj",),
        ("data.document_mask=true",),
    ]
    found = {known, *(changed(raw, *settings)[URI] for settings in other)}
    assert len(found) == len(other) + 1
    model = tmp_path / "wider"
    model.mkdir()
    for file in trained_inputs["model"].iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**described, "transformers_version": "0"}))
    assert changed({**raw, "model": {"path": str(model)}})[URI] == known, (
        "the shape counts, not who saved it"
    )
    (model / "config.json").write_text(json.dumps({**described, "intermediate_size": 256}))
    assert changed({**raw, "model": {"path": str(model)}})[URI] not in found


def test_compile_and_train_share_cache_and_flags_with_a_warm_pool_too(
    trained_inputs: dict[str, Path],
) -> None:
    raw = config(trained_inputs, "shared")
    raw["compute"]["keep_alive"] = "10m"
    raw["data"] = {"prepared": "s3://bucket/data"}
    compiled, train = (smtrain.request(raw, stage=stage) for stage in ("compile", "train"))
    assert "checkpoints" in train["Environment"].pop(
        "SMTRAIN_CHECKPOINTS"
    )  # stage compile has none
    assert compiled["Environment"] == train["Environment"]
    assert train["Environment"][URI].startswith("s3://"), (
        "the pool's folder would hide what was compiled"
    )
    assert "KeepAlivePeriodInSeconds" not in compiled["ResourceConfig"]
    assert "CheckpointConfig" not in compiled


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            ["train.engine=native"],
            r"train\.engine: native compiles as it runs, stage compile has nothing to do",
        ),
        (["network.isolation=true"], r"network\.isolation: keeps stage compile from the cache"),
        (
            [f"compute.environment.{URI}=s3://mine/cache"],
            r"compute\.environment: moves the compile cache",
        ),
        (
            ["compute.environment.NEURON_CC_FLAGS=--cache_dir=/tmp/x"],
            r"compute\.environment: moves the compile cache",
        ),
        (["compute.instance_type=ml.m5.xlarge"], r"ml\.m5\.xlarge is no Neuron instance"),
    ],
)
def test_where_there_is_nothing_to_compile_it_says_so(
    trained_inputs: dict[str, Path], settings: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        smtrain.request(config(trained_inputs, "nothing"), stage="compile", set_=settings)


def test_a_run_compiles_ahead_where_it_is_asked_to_and_on_aws_alone(
    trained_inputs: dict[str, Path],
) -> None:
    raw = config(trained_inputs, "asked")
    assert "compile" not in stages_of(load_config(raw), "aws")
    raw["compute"]["compile_ahead"] = True
    assert stages_of(load_config(raw), "aws") == [
        "prepare",
        "convert",
        "compile",
        "train",
        "export",
        "generate",
    ]
    assert "compile" not in stages_of(load_config(raw), "local")
    for settings in (["train.engine=native"], ["network.isolation=true"]):
        with pytest.raises(ConfigError, match=r"compute\.compile_ahead"):
            load_config(raw, set_=settings)


def _silent(_line: str) -> None:
    pass
