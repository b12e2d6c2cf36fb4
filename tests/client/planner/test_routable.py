"""Meshes on Trainium2: only those that its torus connects are proposed, and the remedy of any other
one runs.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import smtrain
from smtrain.client.config.sample import Machines, values
from smtrain.client.planner.custom_machines import machine_of
from smtrain.client.planner.machines import GIB, Machine, Work
from smtrain.client.planner.resolve import load_config
from smtrain.client.planner.routable import broken_group
from smtrain.client.planner.search import search
from smtrain.core.errors import ConfigError
from smtrain.core.facts import table
from smtrain.core.facts.name_suggestions import instance_meant
from smtrain.core.facts.trainium2 import first_group_off_torus, pairs_of
from smtrain.core.model.shape import ModelShape
from tests.conftest import LLAMA
from tests.core.test_trainium2 import expected
from tests.tiers import examples

TRN2 = "ml.trn2.48xlarge"
MODELS = sorted(table("models")["models"])
DEGREES = [1, 2, 4, 8, 16, 32, 64]


def of(
    model: str, parallel: Any, batch: int | None = None, count: int = 1, **more: Any
) -> dict[str, Any]:
    train = {"global_batch_size": batch} if batch else {}
    return {
        "model": {"path": model},
        "data": {"path": "s3://texts/t/"},
        "parallel": parallel,
        "train": {**train, **more.pop("train", {})},
        "compute": {"instance_type": TRN2, "instance_count": count, **more.pop("compute", {})},
        **more,
    }


def faults(raw: dict[str, Any], target: str = "aws") -> list[str]:
    try:
        load_config(raw, target=target)
    except ConfigError as error:
        return error.faults
    return []


def followed(raw: dict[str, Any], told: str) -> dict[str, Any]:
    """The config with every key set as the sentence says."""
    raw = yaml.safe_load(yaml.safe_dump(raw))
    remedy = told.rpartition("; set ")[2].partition(", which gives")[0]
    for section, key in re.findall(r" and leave out (\w+)\.(\w+)", remedy):
        del raw[section][key]
    remedy = re.sub(r" and leave out [\w.]+", "", remedy)
    for text in re.split(r", | and ", remedy):
        key, value = text.split(": ")
        *sections, last = key.split(".")
        here = raw
        for section in sections:
            here = here.setdefault(section, {})
        here[last] = yaml.safe_load(value)
    return raw


@settings(max_examples=examples(120), deadline=None)
@given(
    model=st.sampled_from(MODELS),
    batch=st.none() | st.integers(1, 512),
    count=st.integers(1, 4),
    lnc=st.sampled_from([None, "1", "2"]),
    target=st.sampled_from(["aws", "local"]),
)
@pytest.mark.full
def test_auto_gives_only_meshes_that_the_torus_connects(
    model: str, batch: int | None, count: int, lnc: str | None, target: str
) -> None:
    compute = {"environment": {"NEURON_LOGICAL_NC_CONFIG": lnc}} if lnc else {}
    raw = of(f"s3://models/{model}", "auto", batch, count, compute=compute)
    if told := faults(raw, target):
        assert told[0].startswith("parallel: auto finds no mesh")
        return
    config = load_config(raw, target=target)
    assert broken_group(config) is None
    assert config.world_size == count * (128 if lnc == "1" else 64)
    written = {**raw, "parallel": config.parallel.model_dump(mode="json")}
    written["train"] = {"global_batch_size": config.train.global_batch_size}
    assert not faults(written)


@settings(max_examples=examples(200), deadline=None)
@given(
    model=st.sampled_from([*(f"s3://models/{name}" for name in MODELS), "hf://someone/unknown"]),
    tp=st.sampled_from(DEGREES),
    pp=st.sampled_from(DEGREES),
    micro=st.sampled_from([1, 2]),
    slots=st.integers(1, 3),
    count=st.sampled_from([1, 2, 3]),
    dp=st.booleans(),
    adapter=st.booleans(),
    processes=st.sampled_from([None, 64, 32, 24, 8]),
)
def test_what_a_refused_mesh_is_told_to_take_runs(
    model: str,
    tp: int,
    pp: int,
    micro: int,
    slots: int,
    count: int,
    dp: bool,
    adapter: bool,
    processes: int | None,
) -> None:
    world = (processes or 64) * count
    assume(world % (tp * pp) == 0)
    copies = world // (tp * pp)
    parallel = {"tp": tp, "pp": pp, "micro_batch_size": micro, **({"dp": copies} if dp else {})}
    train = {"adapter": {"rank": 8}} if adapter else {}
    compute = {"processes_per_instance": processes} if processes else {}
    raw = of(model, parallel, copies * micro * slots, count, train=train, compute=compute)
    refused = faults(raw)
    assume(not any("for which smtrain has no adapters" in fault for fault in refused))
    told = [fault for fault in refused if fault.startswith("parallel: with")]
    assert len(told) == len(refused) <= 1
    if not told:
        return
    if "take GPUs" in told[0]:
        assert faults({**raw, "parallel": "auto"})[0].startswith("parallel: auto finds no mesh")
        return
    taken = followed(raw, told[0])
    assert not faults(taken), (told, taken)
    config = load_config(taken, target="aws")
    if "which gives" in told[0]:
        assert (
            f"{config.mesh_words} with micro-batches of {config.parallel.micro_batch_size}"
            in told[0]
        )
        assert smtrain.plan(taken, target="aws").fits


@settings(max_examples=examples(80), deadline=None)
@given(
    heads=st.sampled_from([6, 8, 12, 14, 16, 20, 28, 32, 40, 64]),
    shared=st.sampled_from([1, 2, 4]),
    layers=st.integers(1, 48),
    width=st.sampled_from([32, 64, 128]),
    tied=st.booleans(),
    batch=st.integers(1, 300),
    count=st.integers(1, 5),
    lnc=st.sampled_from([1, 2]),
)
def test_any_shape_gets_only_meshes_that_the_torus_connects(
    heads: int, shared: int, layers: int, width: int, tied: bool, batch: int, count: int, lnc: int
) -> None:
    hidden, kv_heads = heads * width, heads // shared if heads % shared == 0 else heads
    shape = ModelShape.from_config(
        {
            **LLAMA,
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "num_hidden_layers": layers,
            "tie_word_embeddings": tied,
        }
    )
    machine = Machine.of(TRN2, count, lnc=lnc)
    for way in search(Work(shape, 512, batch), [machine]):
        mesh = way.mesh
        assert mesh.tp * mesh.pp * mesh.dp == machine.world
        assert expected(mesh.tp, mesh.pp, mesh.dp, machine.cores, 8 // lnc, tied), mesh
        pairs = pairs_of(mesh.pp, tied=tied, neighbours=True)
        assert not first_group_off_torus(
            mesh.tp, mesh.pp, mesh.dp, machine.cores, 8 // lnc, pairs
        ), mesh


def test_the_sentence_names_the_chips_and_a_mesh() -> None:
    told = faults(of("s3://models/llama-3.1-8b", {"tp": 8}))
    assert told == [
        "parallel: with tp 8 x pp 1 x dp 8, a data-parallel group would be chips 0, 2, 4, 6, 8,"
        f" 10, ... of {TRN2}, whose 4 x 4 torus connects one chip, two neighbours, whole rows and"
        " columns, and rectangles of these (`smtrain help trainium-reference`); set parallel: auto, which gives tp"
        " 4 x pp 1 x dp 16 with micro-batches of 1"
    ]


def test_more_processes_than_cores_are_one_fault() -> None:
    raw = of("s3://models/llama-3.1-8b", {"tp": 8}, 128, compute={"processes_per_instance": 128})
    (told,) = faults(raw)
    assert told.startswith(
        "compute.processes_per_instance: 128, and ml.trn2.48xlarge has 64 Neuron cores"
    )


def test_the_remedies_of_a_batch_and_of_memory_name_no_other_mesh() -> None:
    small = of("s3://models/llama-3.2-1b", {"tp": 4}, train={"max_global_batch_size": 8})
    (told,) = faults(small)
    assert told.endswith("takes 16 sequences at least (dp x micro_batch_size); raise it")
    raised = {**small, "train": {"max_global_batch_size": 16}}
    assert not faults(raised)
    less = of("s3://models/llama-3.2-1b", {"tp": 8}, train={"max_global_batch_size": 8})
    taken = followed(
        less, next(fault for fault in faults(less) if fault.startswith("parallel: with"))
    )
    assert not faults(taken)
    plan = smtrain.plan(of("s3://models/llama-3.1-8b", {"tp": 1}, 64), target="aws")
    assert "take a larger tp x pp that the torus connects, recompute more" in plan.faults[0]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_init_guesses_a_mesh_that_runs(count: int) -> None:
    """A model of unknown shape gets a chip's processes as tp; else the planner chooses when the
    file is read.
    """
    for model in ("hf://someone/unknown", "hf://meta-llama/Llama-3.1-8B"):
        made = values(
            model, "s3://texts/t/", Machines(TRN2, count), mesh=model != "hf://someone/unknown"
        )
        assert not faults(made)


def test_tied_embeddings_need_their_two_stages_side_by_side() -> None:
    tied, apart = "s3://models/llama-3.2-1b", "s3://models/llama-2-7b"
    sixteen = {"tp": 1, "pp": 16, "activation_checkpointing": "full"}
    assert "a pair of first and last stage would be chips 0, 15" in faults(of(tied, sixteen, 32))[0]
    assert not faults(of(apart, sixteen, 32))
    plan = smtrain.plan(of(apart, sixteen, 32), target="aws")
    (told,) = (text for text in plan.warnings if "send and receive" in text)
    assert told.startswith(
        "a pair of neighbouring stages is on chips 3 and 4, which the torus does not connect"
    )
    assert not faults(of(tied, {"tp": 1, "pp": 4}, 32))


def test_other_machines_have_no_such_rule() -> None:
    raw = of("s3://models/llama-3.1-8b", {"tp": 8}, 64)
    slurm = {**raw, "cluster": {"shared": "/fsx/x"}}
    for kind in ("ml.trn1.32xlarge", "ml.p5.48xlarge", "trn3-gen1", "trn3-gen2"):
        on = {**slurm, "compute": {"instance_type": kind, "instance_count": 8}}
        on["parallel"] = {"tp": 8, "sequence_parallel": True}
        assert not faults(on, "slurm"), kind
    assert not faults(
        {**slurm, "parallel": {"tp": 2, "pp": 2}, "compute": {"instance_type": "ml.trn2.3xlarge"}},
        "slurm",
    )
    assert faults({**slurm, "compute": {"instance_type": "ml.trn2u.48xlarge"}}, "slurm")[
        0
    ].startswith("parallel: with")
    assert not faults(raw, "local"), "CPUs run any mesh"
    own = {
        "devices": 64,
        "memory_gib": 24,
        "tflops": 100,
        "host_memory_gib": 2048,
        "network_gbs": 100,
    }
    mine = {**slurm, "machines": {"mine": own}, "compute": {"instance_type": "mine"}}
    assert not faults(mine, "slurm")


@pytest.mark.parametrize("model", ["s3://models/llama-3.1-8b", "hf://someone/unknown"])
def test_meshes_of_other_sentences_run_too(model: str) -> None:
    """A wrong dp, and a tp x pp that does not divide: what "would do" is a mesh that the torus
    connects.
    """
    for parallel in (
        {"tp": 8, "dp": 4},
        {"tp": 24},
        {"tp": 8, "pp": 8, "dp": 2},
        {"tp": 64, "pp": 2},
    ):
        told = next(fault for fault in faults(of(model, parallel, 64)) if "would do" in fault)
        named = dict(re.findall(r"(tp|pp|dp) = (\d+)", told.rpartition("; ")[2]))
        assert not faults(of(model, {key: int(value) for key, value in named.items()}, 64)), told


def test_a_fallback_whose_torus_does_not_connect_the_mesh_is_refused() -> None:
    for model in ("s3://models/llama-3.1-8b", "hf://someone/unknown"):
        raw = of(model, {"tp": 8}, 64)
        raw["compute"] = {
            "instance_type": "ml.p5.48xlarge",
            "instance_count": 8,
            "capacity_wait": "1h",
            "fallback_instance_types": [TRN2],
            "processes_per_instance": 8,
        }
        assert not faults(raw), "eight processes are two chips"
        raw["compute"] |= {"instance_count": 1, "processes_per_instance": None}
        told = faults(raw)
        assert len(told) == 1
        assert (
            "ml.trn2.48xlarge cannot take this job: a data-parallel group would be chips 0, 2, 4"
            in told[0]
        )


def test_plans_of_machines_propose_only_such_meshes() -> None:
    raw = of("s3://models/llama-3.1-8b", {}, 256)
    plan = smtrain.plan(raw, machines=[(TRN2, 1), (TRN2, 2), ("ml.trn2u.48xlarge", 4)], best=True)
    assert len(plan.choices) == 5
    for choice in plan.choices:
        count, _, kind = choice.machines.partition(" x ")
        mesh = choice.mesh
        parallel = {
            "tp": mesh.tp,
            "pp": mesh.pp,
            "dp": mesh.dp,
            "micro_batch_size": mesh.micro_batch,
        }
        tried = {**of("s3://models/llama-3.1-8b", parallel, 256), "cluster": {"shared": "/fsx/x"}}
        assert not faults(
            {**tried, "compute": {"instance_type": kind, "instance_count": int(count)}}, "slurm"
        )


def test_what_sagemaker_lacks_is_one_sentence_with_what_it_has() -> None:
    for kind, parallel in (
        ("ml.trn2u.48xlarge", {"tp": 4}),
        ("ml.trn2.3xlarge", {"tp": 4}),
        ("trn3-gen1", {"tp": 8}),
        ("trn3-gen2", {"tp": 4}),
    ):
        raw = of("s3://models/llama-3.1-8b", parallel, 16)
        raw["compute"]["instance_type"] = kind
        told = faults(raw)
        assert len(told) == 1
        assert told[0].startswith(f"compute.instance_type: {kind} is for a ")
        assert (
            "SageMaker has no training job on it; set compute.instance_type: ml.trn2.48xlarge"
            in told[0]
        )
        assert not faults(followed(raw, told[0])), told


def test_a_type_of_trainium3_that_ec2_may_name_is_known_by_its_family() -> None:
    for name in ("ml.trn3.48xlarge", "trn3", "trainium3", "ml.trn3-gen1.48xlarge"):
        assert instance_meant(name) == "trn3-gen1"
    assert instance_meant("trn3-gen2u") == "trn3-gen2"
    raw = {**of("hf://someone/unknown", {}, 64), "compute": {"instance_type": "ml.trn3.48xlarge"}}
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    (told,) = caught.value.faults
    assert told.startswith(
        "compute.instance_type: trn3-gen1 is for a Slurm cluster on EC2 (target: slurm"
    )
    assert told.endswith("as SageMaker has no training job on it; take ml.trn2.48xlarge")
    with pytest.raises(ConfigError, match="did you mean trn3-gen1"):
        Machine.of("ml.trn3.48xlarge", 1)


def test_trainium_has_its_memory_and_peak_by_lnc() -> None:
    """Cores x memory of a host are the same at LNC 1 and 2: 16 chips of 96 GiB, 10.7 PF."""
    for kind, cores, gib, flops, host in (
        (TRN2, 64, 24, 10.672e15, 2048),
        ("ml.trn2u.48xlarge", 64, 24, 10.672e15, 2048),
        ("ml.trn2.3xlarge", 4, 24, 0.667e15, 128),
        ("trn3-gen1", 64, 36, 10.736e15, 2048),
        ("trn3-gen2", 16, 36, 2.684e15, 768),
    ):
        for lnc in (1, 2):
            raw = of("hf://someone/unknown", {}, 128)
            environment = {"NEURON_RT_VIRTUAL_CORE_SIZE": str(lnc)}
            raw["compute"] = {"instance_type": kind, "environment": environment}
            config = load_config({**raw, "cluster": {"shared": "/fsx/x"}}, target="slurm")
            machine = Machine.of_config(config)
            assert (machine.cores, machine.core_bytes / GIB) == (
                cores * 2 // lnc,
                gib * lnc / 2,
            ), kind
            assert machine.core_flops * machine.cores == pytest.approx(flops)
            assert machine.host_bytes == host * GIB
            assert machine_of(kind, 1, {}, environment) == machine
