"""Defaults that follow from machines, model and target, and refusals of what cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain import JobConfig
from smtrain.client.config.sample import Machines, values
from smtrain.client.iam.policies import policies
from smtrain.core.config.annotations import section_in
from smtrain.core.config.section import Section
from smtrain.core.config.training import Model
from smtrain.core.errors import ConfigError

ARN = "arn:aws:iam::123456789012:role/train"
TRN1, TRN2 = "ml.trn1.32xlarge", "ml.trn2.48xlarge"


def bare(model: str = "s3://models/llama-3.1-8b", **compute: Any) -> dict[str, Any]:
    """Model and data, and the machines."""
    compute_keys = {"role": ARN, "region": "us-east-1", **compute}
    return {
        "model": {"path": model},
        "data": {"path": "s3://text/t/"},
        "compute": compute_keys,
        "output": {"s3_uri": "s3://out"},
    }


def fault(raw: dict[str, Any], **also: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        smtrain.load_config(raw, **also)
    (only,) = caught.value.faults
    return only


@pytest.mark.parametrize(
    ("kind", "target", "engine"),
    [
        ("ml.trn1.2xlarge", "aws", "nxd"),
        (TRN1, "aws", "nxd"),
        ("ml.trn1n.32xlarge", "aws", "nxd"),
        (TRN2, "aws", "native"),
        ("ml.m5.4xlarge", "aws", "native"),
        ("ml.p5.48xlarge", "aws", "native"),
        (TRN1, "local", "native"),
        (TRN2, "local", "native"),
    ],
)
def test_the_engine_follows_the_machines(kind: str, target: str, engine: str) -> None:
    settings = bare(instance_type=kind, processes_per_instance=1)
    settings["model"]["path"] = "demo://tiny-llama"
    assert smtrain.load_config(settings, target=target).train.engine == engine


def test_a_config_that_was_loaded_for_here_is_loaded_anew_for_there() -> None:
    here = smtrain.load_config(bare(), set_=["compute.processes_per_instance=1"])
    assert (here.train.engine, here.parallel.tp) == ("native", 1)
    there = smtrain.load_config(here, target="aws", set_=["compute.processes_per_instance=32"])
    assert there.train.engine == "nxd"
    assert there.parallel.tp > 1
    assert there == smtrain.load_config(bare(processes_per_instance=32), target="aws")


def test_what_cannot_run_is_refused_everywhere_with_the_same_sentence() -> None:
    native = {**bare(instance_type=TRN1), "train": {"engine": "native"}, "target": "aws"}
    sentence = fault(native)
    assert sentence.startswith(
        f"train.engine: native does not run on {TRN1}, as TorchNeuron knows trn2 and trn3 only;"
    )
    for way in (smtrain.plan, smtrain.request, smtrain.launch, smtrain.run, policies):
        with pytest.raises(ConfigError) as caught:
            way(native)
        assert caught.value.faults == [sentence]
    assert [f.text for f in smtrain.check(native).faults] == [sentence]
    assert smtrain.load_config(native, target="local").train.engine == "native", (
        "here they are CPUs"
    )
    assert fault(
        {**bare(instance_type="ml.m5.4xlarge"), "train": {"engine": "nxd"}}, target="aws"
    ).startswith("train.engine: nxd is the engine of Trainium1, and ml.m5.4xlarge is not")


def test_rows_of_several_samples_train_on_trainium1_with_memory_for_their_masks() -> None:
    mesh = {"tp": 8, "pp": 4, "sequence_parallel": True, "activation_checkpointing": "selective"}
    memory = []
    for more in (
        {},
        {"train": {"objective": "sft"}},
        {"data": {"path": "s3://text/t/", "document_mask": True}},
    ):
        config = smtrain.load_config({**bare(), **more}, target="aws")
        assert config.train.engine == "nxd"
        assert smtrain.request(config)["AlgorithmSpecification"]["TrainingImage"]
        made = smtrain.plan({**bare(), **more, "parallel": mesh}, target="aws")
        memory.append(made.memory_gib["total"] if made.memory_gib else 0)
    plain, sft, documents = memory
    assert (
        sft == documents > plain + 0.5
    )  # the scores of a layer: 4,096 x 4,096 x 4 heads, and their gradients


def test_a_plan_over_several_machines_takes_the_engine_of_each() -> None:
    def native(kind: str, *machines: tuple[str, int], **train: str) -> bool:
        made = smtrain.plan({**bare(instance_type=kind), "train": train}, machines=machines)
        assert made.fits
        return any("none is of the native engine" in warning for warning in made.warnings)

    assert native(TRN1, (TRN2, 1))
    assert not native(TRN2, (TRN1, 4))
    assert not native(TRN1, (TRN2, 1), (TRN1, 4), engine="nxd"), "trn2 is left out"


def test_no_request_names_an_image_that_its_engine_cannot_run_on() -> None:
    kind = TRN2
    settings = bare("s3://models/pythia-1.4b", instance_type=kind)
    with pytest.raises(ConfigError) as caught:
        smtrain.request(settings, target="aws")
    (fault,) = caught.value.faults
    assert fault.startswith(
        f"compute.image: no image is known for train.engine native on {kind}; look at gallery.ecr."
    )
    own = "123456789012.dkr.ecr.us-east-1.amazonaws.com/own:1"
    request = smtrain.request(settings, set_=[f"compute.image={own}"], target="aws")
    assert request["AlgorithmSpecification"]["TrainingImage"] == own


def test_a_config_of_model_and_data_alone_is_valid() -> None:
    config = smtrain.load_config(
        {"model": {"path": "s3://models/llama-3.2-1b"}, "data": {"path": "s3://text/t/"}},
        target="aws",
    )
    made = smtrain.plan(config)
    assert made.fits, made.faults
    assert config.train.global_batch_size % (config.dp * config.parallel.micro_batch_size) == 0
    assert made.mesh.tp * made.mesh.pp * made.mesh.dp == 32


def test_a_batch_that_is_not_given_is_one_that_the_mesh_can_cut() -> None:
    settings = {**bare(), "parallel": {"tp": 4, "pp": 1, "sequence_parallel": True}}
    config = smtrain.load_config(settings, set_=["compute.instance_count=3"], target="aws")
    assert (config.dp, config.train.global_batch_size) == (24, 24)
    usual = smtrain.load_config(bare("demo://tiny-llama", processes_per_instance=4))
    assert usual.train.global_batch_size == 8, "unchanged if it can be divided"
    assert usual.train.seq_len == 1024, "the model's positions"


def test_where_nothing_fits_one_sentence_says_so_and_a_plan_says_by_how_much() -> None:
    settings = bare("s3://models/llama-3.1-405b")
    sentence = fault(settings, target="aws")
    assert (
        sentence
        == f"compute.instance_count: no mesh of 1 x {TRN1} fits the model at train.seq_len 4096;"
        " set "
        "compute.instance_count: 32, or take larger instances"
    )
    made = smtrain.plan(settings)
    assert not made.fits
    assert made.faults[0].startswith("memory: a core of pipeline stage 0 needs")


def test_a_model_that_nobody_knows_is_trained_data_parallel(model_folder: Path) -> None:
    config = smtrain.load_config(bare("s3://models/mine"), target="aws")
    assert (config.parallel.tp, config.dp, config.train.global_batch_size) == (1, 32, 32)


def test_a_published_models_positions_are_known_before_its_files_are() -> None:
    hub = bare("hf://EleutherAI/pythia-1.4b@main")
    assert "4096 is beyond the 2048 positions of EleutherAI/pythia-1.4b@main" in fault(
        hub, train={"seq_len": 4096}
    )
    assert smtrain.load_config(hub, target="aws").train.seq_len == 2048
    written = values("hf://EleutherAI/pythia-1.4b", "s3://text/t/", Machines(TRN1), mesh=False)
    assert written["train"]["seq_len"] == 2048
    somebodys = smtrain.load_config(
        bare("hf://me/pythia-1.4b"), target="aws", train={"seq_len": 4096}
    )
    assert somebodys.train.seq_len == 4096


NEEDED: dict[str, dict[str, Any]] = {
    "Wandb": {"project": "llm"},
    "LanguageOptions": {"keep": ("en",)},
    "DecontaminateOptions": {"path": "tests.jsonl"},
    "BatchRamp": {"start": 8, "increment": 8, "samples": 800},
    "PaiResources": {"cpu": 8, "memory": "64Gi"},
    "PaiVpc": {"id": "vpc-1", "security_group": "sg-1"},
    "PaiCode": {"source": "code-1"},
}


def sections_of(section: type[Section]) -> Iterator[type[Section]]:
    yield section
    for field in section.model_fields.values():
        if inner := section_in(field.annotation):
            yield from sections_of(inner)


@pytest.mark.parametrize(
    "section", [s for s in dict.fromkeys(sections_of(JobConfig)) if s not in (JobConfig, Model)]
)
def test_a_section_s_defaults_obey_its_own_rules(section: type[Section]) -> None:
    """They are taken unvalidated."""
    needed = NEEDED.get(section.__name__, {})
    made = section(**needed)
    written = {name: getattr(made, name) for name in section.model_fields}
    assert section.model_validate(written) == made == section.model_validate(needed)
