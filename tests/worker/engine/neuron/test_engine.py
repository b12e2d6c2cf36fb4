"""The native engine on the imitated device: the CPU's numbers bit for bit, within the limits of
TorchNeuron.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from smtrain.worker.engine.native import comm, init_distributed
from tests.ports import free_port
from tests.worker.engine import adapters, cases, packed, preference
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.neuron import imitation, runs
from tests.worker.engine.neuron.imitation import Limits
from tests.worker.engine.world import CONTEXT, PATIENCE, World

ALL = [
    ("llama", "221 sp"),
    ("llama-tied-509", "411 sp"),
    ("gpt_neox", "122"),
    ("qwen3", "212 sp full"),
    ("gpt2-509", "221 sp"),
    ("mistral-window", "141 m1"),
    ("llama-kv1", "411"),
    ("llama-kv4", "114"),
    ("qwen2", "221 sp full"),
    ("qwen2-window", "122 m2"),
    ("gpt_neox-sequential", "212"),
    ("gpt2", "122 selective"),
    ("llama", "221 sp bf16"),
    ("llama-tied-509", "122 bf16 full"),
    ("gemma3", "221 sp"),
    ("olmo2", "411 sp"),
    ("granite", "122"),
    ("phi3", "212 sp"),
    ("smollm3-window", "141 m1"),
    ("olmo3", "122 m2"),
    ("ministral3", "221"),
    ("phi3-long", "221 sp"),
    ("qwen3_5", "221 sp"),
    ("gemma4", "221 sp"),
]


def files(folder: Path) -> dict[str, bytes]:
    """The tensor files below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.safetensors")}


@pytest.mark.full  # the gate has one family within all limits, below
@pytest.mark.parametrize(("name", "text"), ALL, ids=[f"{name}-{text}" for name, text in ALL])
def test_every_family_has_the_cpu_s_numbers_and_checkpoints(
    name: str, text: str, four: World, neuron: World, tmp_path: Path
) -> None:
    expected = four.run(runs.whole, CONFIGS[name], mesh(text), tmp_path / "cpu")
    assert neuron.run(runs.whole, CONFIGS[name], mesh(text), tmp_path / "neuron") == expected
    saved = files(tmp_path / "neuron")
    assert saved == files(tmp_path / "cpu")
    assert saved


def test_one_process_has_the_cpu_s_numbers(solo: World, neuron_solo: World, tmp_path: Path) -> None:
    config, options = CONFIGS["llama-tied-509"], mesh("111")
    expected = solo.run(runs.whole, config, options, tmp_path / "cpu")
    assert neuron_solo.run(runs.whole, config, options, tmp_path / "neuron") == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt2-509", "411"),
        ("llama", "221 sp"),
        ("mistral-window", "122"),
        ("qwen3_5", "221 sp"),
    ],
)
def test_packed_rows_have_the_cpu_s_numbers(
    name: str, text: str, four: World, neuron: World
) -> None:
    limits = Limits(missing=imitation.KERNELLESS)
    expected = four.run(packed.train, CONFIGS[name], mesh(text), 3)
    assert neuron.run(runs.limited, limits, packed.train, CONFIGS[name], mesh(text), 3) == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize(("text", "lora"), [("221 sp", False), ("122 m1", False), ("212 m1", True)])
def test_pairs_of_answers_have_the_cpu_s_numbers(
    text: str, lora: bool, four: World, neuron: World
) -> None:
    limits = Limits(
        missing=imitation.KERNELLESS,
        integer_sums=False,
        float64=False,
        generators=False,
        strided_writes=False,
    )
    expected = four.run(preference.steps, mesh(text), "sigmoid_sft", 2, lora)
    made = neuron.run(runs.limited, limits, preference.steps, mesh(text), "sigmoid_sft", 2, lora)
    for ours, theirs in zip(made, expected, strict=True):
        for mine, step in zip(ours, theirs, strict=True):
            assert mine == pytest.approx(step, rel=1e-6, abs=1e-6)


@pytest.mark.full  # dropout without a generator is a limit of the device, below
@pytest.mark.parametrize("text", ["221 sp full", "122"])
def test_lora_with_dropout_has_the_cpu_s_numbers_without_a_generator(
    text: str, four: World, neuron: World, tmp_path: Path
) -> None:
    config = CONFIGS["llama-tied-509"]
    adapter = adapters.lora(config, dropout=0.2)
    expected = four.run(adapters.train, config, mesh(text), adapter, tmp_path / "cpu")
    limits = Limits(generators=False, strided_writes=False)
    ours = neuron.run(
        runs.limited, limits, adapters.train, config, mesh(text), adapter, tmp_path / "neuron"
    )
    assert ours == expected
    assert files(tmp_path / "neuron") == files(tmp_path / "cpu")
    answers = neuron.run(runs.refused, limits, draw)
    assert all("torch.Generator is not available" in a for a in answers), answers


def draw(rank: int) -> None:
    torch.Generator("neuron")


def sum_integers(rank: int) -> None:
    dist.all_reduce(torch.ones(1, dtype=torch.int64, device="neuron"))


def widen(rank: int) -> None:
    torch.ones(1, device="neuron").double()


def write_a_slice(rank: int) -> None:
    torch.ones(2, 4, device="neuron")[:, 1:] = 0.0


def run_a_maximum(rank: int) -> None:
    torch.ones(3, device="neuron").cummax(0)


def update_one_by_one(rank: int) -> None:
    weight = torch.nn.Parameter(torch.ones(3, device="neuron"))
    weight.grad = torch.ones(3, device="neuron")
    torch.optim.AdamW([weight], foreach=True).step()


def send_first(rank: int) -> None:
    x = torch.ones(1, device="neuron")
    dist.isend(x, (rank + 1) % 4)


LIMITS = {
    "no sums of integers": (Limits(integer_sums=False), sum_integers, "NCC_EVRF061"),
    "no float64": (Limits(float64=False), widen, "no float64"),
    "no writes into slices": (Limits(strided_writes=False), write_a_slice, "into a strided slice"),
    "no running maximum": (
        Limits(missing=imitation.KERNELLESS),
        run_a_maximum,
        "no kernel for aten::_cummax",
    ),
    "no foreach": (
        Limits(missing=imitation.KERNELLESS),
        update_one_by_one,
        "no kernel for aten::lerp",
    ),
    "no messages": (Limits(messages="none"), send_first, "no send"),
}


LIMITED = "llama-tied-509", "221 sp"


@pytest.fixture(scope="module")
def expected(four: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, bytes]]:
    """The CPU's numbers of `LIMITED`, and its checkpoint."""
    (name, text), folder = LIMITED, tmp_path_factory.mktemp("cpu")
    return four.run(runs.whole, CONFIGS[name], mesh(text), folder), files(folder)


@pytest.mark.parametrize("name", LIMITS)
def test_each_limit_refuses(name: str, neuron: World) -> None:
    limits, breach, words = LIMITS[name]
    answers = neuron.run(runs.refused, limits, breach)
    assert all(words in answer for answer in answers), answers


EVERY = Limits(
    integer_sums=False,
    float64=False,
    strided_writes=False,
    generators=False,
    messages="none",
    missing=imitation.KERNELLESS,
)


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(EVERY, id="every limit"),
        *(
            pytest.param(limits, id=name, marks=pytest.mark.full)
            for name, (limits, _, _) in LIMITS.items()
        ),
    ],
)
def test_the_engine_keeps_within_the_limits(
    limits: Limits, expected: tuple[Any, dict[str, bytes]], neuron: World, tmp_path: Path
) -> None:
    (config, text), (numbers, saved) = LIMITED, expected
    assert (
        neuron.run(runs.limited, limits, runs.whole, CONFIGS[config], mesh(text), tmp_path)
        == numbers
    )
    assert files(tmp_path) == saved
    assert saved


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama-tied-509", "212 shards sp bf16"),
        pytest.param("llama-tied-509", "122 shards full m2", marks=pytest.mark.full),
        pytest.param("qwen3_moe", "114 ep2 shards m2 c1", marks=pytest.mark.full),
    ],
)
def test_full_sharding_keeps_within_the_limits(
    name: str, text: str, four: World, neuron: World, tmp_path: Path
) -> None:
    """FSDP2's streams are one, as in TorchNeuron by default; its collectives sum no integers."""
    config = CONFIGS[name]
    # Routers need `cumsum`, with and without full sharding.
    limits = EVERY if name != "qwen3_moe" else replace(EVERY, missing=Limits().missing)
    expected = four.run(runs.whole, config, mesh(text), tmp_path / "cpu")
    ours = neuron.run(runs.limited, limits, runs.whole, config, mesh(text), tmp_path / "neuron")
    assert ours == expected
    assert files(tmp_path / "neuron") == files(tmp_path / "cpu") != {}


@pytest.mark.parametrize("text", ["141 m1", "221"])
def test_stages_do_not_wait_for_each_other_if_messages_are_unbuffered(
    text: str, four: World, neuron: World
) -> None:
    expected = four.run(cases.train, CONFIGS["llama"], mesh(text), 2)
    limits = Limits(messages="unbuffered")
    assert (
        neuron.run(runs.limited, limits, cases.train, CONFIGS["llama"], mesh(text), 2) == expected
    )


def test_a_mesh_off_the_torus_is_what_the_device_refuses(four: World, neuron: World) -> None:
    limits = Limits(cores_a_chip=1)  # four ranks are a row of chips
    answers = neuron.run(runs.refused, limits, cases.train, CONFIGS["llama"], mesh("221"), 1)
    assert all("no_hier no_mesh" in answer for answer in answers), answers
    for text in ("411", "141", "114", "114 shards"):
        expected = four.run(cases.train, CONFIGS["llama"], mesh(text), 1)
        assert (
            neuron.run(runs.limited, limits, cases.train, CONFIGS["llama"], mesh(text), 1)
            == expected
        )


def test_attention_without_the_flash_kernel_is_close(solo: World, neuron_solo: World) -> None:
    config, options = CONFIGS["llama"], mesh("111")
    (expected,) = solo.run(cases.train, config, options, 4)
    (ours,) = neuron_solo.run(runs.limited, Limits(flash=False), cases.train, config, options, 4)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_the_log_says_once_why_attention_has_no_flash_kernel(neuron_solo: World) -> None:
    (said,) = neuron_solo.run(listened, cases.train, CONFIGS["llama"], mesh("111"), 2)
    assert said == [
        "attention runs without its flash kernel, and keeps every score: the kernel takes lengths"
        " of a multiple of 512, and train.seq_len is 32"
    ]
    (said,) = neuron_solo.run(listened, packed.train, CONFIGS["llama"], mesh("111"), 2)
    assert said == [
        "attention runs without its flash kernel, and keeps every score: the kernel takes no mask"
    ]


def listened(rank: int, function: Any, *args: Any) -> list[str]:
    with runs.heard() as said:
        function(rank, *args)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("works", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_layer_that_the_compiler_refuses_runs_as_it_is(
    works: bool, solo: World, neuron_solo: World
) -> None:
    config, options = CONFIGS["llama"], mesh("111")
    expected = solo.run(cases.train, config, options, 2)
    ours = neuron_solo.run(compiled, Limits(compiler=works), config, replace(options, compile=True))
    np.testing.assert_allclose([numbers for numbers, _, _ in ours], expected, rtol=1e-6)
    assert all(bool(graphs) == works for _, graphs, _ in ours), ours
    said = [line for _, _, lines in ours for line in lines if line.startswith("train.compile")]
    assert bool(said) != works
    assert all(
        "runs uncompiled: backend='neuron' raised: RuntimeError: neuronx-cc" in line
        for line in said
    ), said


def compiled(
    rank: int, limits: Limits, config: dict[str, Any], options: Any
) -> tuple[Any, int, list[str]]:
    imitation.start(limits)
    imitation.compiled.clear()
    torch._dynamo.reset()
    with runs.heard() as said:
        return cases.train(rank, config, options, 2), imitation.compiled["graphs"], said


def join(rank: int, port: int, answers: Any) -> None:
    """Join a job of two as under torchrun, and tell of the device."""
    job = {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({key: str(value) for key, value in job.items()})
    imitation.start(Limits(devices=2, visible=1, early_touch=False))
    device = init_distributed()
    assert comm.gather(dist.get_rank()) == [0, 1]
    assert imitation.patience == comm.COMPILATION, "a stage may compile while all other stages wait"
    answers.send(
        (str(device), torch.accelerator.current_device_index(), init_distributed() == device)
    )


def test_a_process_joins_before_it_touches_its_device() -> None:
    """Each process sees one core until it has joined, and the runtime must not run before."""
    port, pipes = free_port(), [CONTEXT.Pipe(duplex=False) for _ in range(2)]
    processes = [
        CONTEXT.Process(target=join, args=(n, port, theirs)) for n, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0, 0]
    assert [ours.recv() for ours, _ in pipes] == [("neuron:0", 0, True), ("neuron:1", 1, True)]
