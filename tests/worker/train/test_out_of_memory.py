"""Out of memory is one sentence: requested, free, and the settings that need less."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from smtrain.core.config import JobConfig
from smtrain.worker.train.out_of_memory import memory_sentence
from tests import warm

OF_A_GPU = (  # torch 2.9's words
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has a total capacity of 79.10 GiB of"
    " which 1.12 GiB is free. Including non-PyTorch memory, this process has 77.97 GiB memory in"
    " use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 5.00 GiB is reserved by"
    " PyTorch but unallocated."
)


def config(**parallel: Any) -> JobConfig:
    return JobConfig.model_validate({"model": {"path": "s3://m/x"}, "parallel": parallel})


@pytest.mark.parametrize(
    ("parallel", "advice"),
    [
        (
            {"micro_batch_size": 4},
            (
                "set parallel.activation_checkpointing: full, or lower parallel.micro_batch_size"
                " (now 4), or raise"
            ),
        ),
        (
            {"micro_batch_size": 2, "activation_checkpointing": "full"},
            "lower parallel.micro_batch_size (now 2), or",
        ),
        (
            {"activation_checkpointing": "full"},
            "raise parallel.tp or parallel.pp; `smtrain plan CONFIG --best`",
        ),
    ],
)
def test_a_gpu_says_what_was_asked_and_free_and_what_helps(
    parallel: dict[str, Any], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    sentence = memory_sentence(torch.OutOfMemoryError(OF_A_GPU), config(**parallel))
    assert sentence is not None
    assert sentence.startswith(
        "out of memory: 2.50 GiB were asked for, and 1.12 of 79.10 GiB were free on GPU 3;"
        f" {advice}"
    )


def test_neuron_cores_say_it_in_their_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    words = "NRT EXECUTION FAILED: Neuron OOM: requested_size = 536870912 (aten::mul)"
    sentence = memory_sentence(RuntimeError(words), config(micro_batch_size=2))
    assert sentence is not None
    assert sentence.startswith(
        "out of memory: 0.50 GiB were asked for, and nothing says how much was free; set parallel"
    )
    sentence = memory_sentence(RuntimeError("nrt_tensor_allocate: NRT_RESOURCE"), config())
    assert sentence is not None
    assert "more was asked for than there is" in sentence


def test_other_errors_are_not_of_memory() -> None:
    assert memory_sentence(RuntimeError("shapes differ"), config()) is None
    assert memory_sentence(KeyError("out of memory"), config()) is None


STAGE = """
import torch
from smtrain.worker.entry import main
main(lambda config, container: torch.empty(2**50, dtype=torch.uint8))
"""


def test_a_process_that_asks_for_too_much_ends_in_one_sentence(tmp_path: Path) -> None:
    channel = tmp_path / "input/data/config"
    channel.mkdir(parents=True)
    (channel / "config.json").write_text('{"model": {"path": "s3://m/x"}}')
    script = tmp_path / "stage.py"
    script.write_text(STAGE)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    root = str(Path(__file__).parents[3])
    done = warm.run([script], {**environment, "SMTRAIN_ML_ROOT": str(tmp_path), "PYTHONPATH": root})
    assert done.returncode == 1
    sentence = (tmp_path / "output/failure").read_text()
    assert sentence.startswith("algo-1: out of memory: 1,048,576.00 GiB were asked for, and ")
    assert sentence.endswith(
        " GiB were free on the host; take a machine with more memory (compute.cpu_instance_type)"
    )
    assert done.stderr == f"{sentence}\n"
