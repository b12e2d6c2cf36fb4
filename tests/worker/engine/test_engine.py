"""The engine's refusals, and joining a job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from smtrain.core.errors import ConfigError
from smtrain.worker.engine.native import comm
from tests import warm
from tests.worker.engine import cases
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World


def arrays(config: dict[str, object]) -> dict[str, object]:
    return {name: tensor.numpy() for name, tensor in cases.weights(config).items()}


def test_missing_and_misshaped_weights_are_named_on_every_rank(four: World) -> None:
    config = CONFIGS["llama"]
    lacking = arrays(config)
    del lacking["model.layers.3.mlp.up_proj.weight"]  # only the second stage reads it
    answers = four.run(cases.try_build, config, mesh("221"), lacking)
    assert all("lack model.layers.3.mlp.up_proj.weight" in a for a in answers)
    other = arrays({**config, "vocab_size": 500})
    answers = four.run(cases.try_build, config, mesh("221"), other)
    assert all(
        "model.embed_tokens.weight is [500, 64] in the weights and [512, 64]" in a for a in answers
    )


def test_weights_under_the_modules_own_name_are_found(solo: World) -> None:
    config = CONFIGS["gpt_neox"]
    renamed = arrays(config)
    renamed["lm_head.weight"] = renamed.pop("embed_out.weight")
    assert solo.run(cases.try_build, config, mesh("111"), renamed) == ["built"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("222", "parallel.tp x pp x dp = 2 x 2 x 2 must be the number of processes, 4"),
        ("811", "parallel.tp = 8 does not divide the model's 4 attention heads"),
        ("181", "parallel.pp = 8 is more than the model's 4 layers"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(text: str, words: str, four: World) -> None:
    answers = four.run(cases.try_build, CONFIGS["llama"], mesh(text), None)
    assert all(words in a for a in answers)


def test_a_sequence_that_tp_cannot_cut_is_refused(four: World) -> None:
    answers = four.run(cases.try_step, CONFIGS["llama"], mesh("212 sp"), 31)
    assert all("31 tokens (train.seq_len) into 2 parts" in a for a in answers)


SCRIPT = """
import sys
import torch.distributed as dist
from smtrain.worker.engine.native import init_distributed
device = init_distributed("cpu")
assert init_distributed("cpu") == device
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()} {device} {dist.get_backend()}\\n")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.full)])
def test_joining_a_job_with_and_without_torchrun(processes: int, tmp_path: Path) -> None:
    script = tmp_path / "join.py"
    script.write_text(SCRIPT)
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        if processes
        else []
    )
    root = str(Path(cases.__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    if processes:
        job = subprocess.run(
            [sys.executable, *torchrun, str(script)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
    else:
        job = warm.run([script], environment)
    assert job.returncode == 0, job.stderr
    world = max(1, processes)
    # Gloo of torch 2.9 writes of its connections to stdout as well.
    said = sorted(line for line in job.stdout.splitlines() if not line.startswith("[Gloo]"))
    assert said == [f"rank {r} of {world} cpu gloo" for r in range(world)]


def test_a_device_without_a_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="no backend for device 'abacus'"):
        comm.init_distributed("abacus")


def test_a_batch_without_labels_has_no_loss_and_spoils_nothing(four: World) -> None:
    for empty, after in four.run(cases.step_without_labels, CONFIGS["llama"], mesh("212")):
        assert (empty.loss, empty.grad_norm) == (0.0, 0.0)
        assert 5 < after.loss < 8
        assert after.grad_norm > 0


@pytest.mark.parametrize("rounded", [False, True])
def test_fp32_weights_begin_with_what_the_source_has_and_not_with_what_bf16_keeps_of_it(
    four: World, rounded: bool
) -> None:
    for master, held, exact in four.run(
        cases.masters, CONFIGS["llama-tied-509"], mesh("212"), rounded
    ):
        assert (master == exact).all()
        assert (master == held).all() == rounded, "a bf16 source has no more than bf16 keeps"


def test_the_first_use_of_a_pipelines_group_is_by_all_of_its_ranks(four: World) -> None:
    for used in four.run(cases.first_use_of_the_pipelines_group, CONFIGS["llama"], mesh("141 m2")):
        assert used[0] == "all_reduce", (
            "NCCL makes a communicator at the first use, which messages of some are not"
        )
        assert "messages" in used
