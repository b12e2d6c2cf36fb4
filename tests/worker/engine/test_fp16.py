"""fp16: the same losses on every mesh, steps that overflow, and a loss scale that survives a
resume.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.manifest import Manifest
from smtrain.worker.checkpoint.native.reader import NativeSource
from smtrain.worker.checkpoint.targets import HuggingFace, Native
from smtrain.worker.engine.native import loss_scaling
from smtrain.worker.engine.native.loss_scaling import FIRST, FLOOR, GOOD_STEPS, LossScale
from tests.tiers import examples
from tests.worker.engine import cases
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World


@pytest.mark.parametrize(
    ("name", "text"),
    [("llama-tied-509", "221 sp fp16"), ("gpt_neox", "122 fp16 m2"), ("gpt2", "114 fp16")],
)
def test_losses_and_norms_agree(name: str, text: str, four: World, solo: World) -> None:
    single = solo.run(cases.train, CONFIGS[name], mesh("111 fp16"), 4)[0]
    ranks = four.run(cases.train, CONFIGS[name], mesh(text), 4)
    assert all(r == ranks[0] for r in ranks)
    np.testing.assert_allclose(np.array(ranks[0]), np.array(single), rtol=5e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("text", ["221 fp16", "122 fp16 m2"])
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(text: str, four: World) -> None:
    for result in four.run(cases.overflow, CONFIGS["llama-tied-509"], mesh(text)):
        assert result["skipped"].scaling == (FIRST, FIRST / 2, True)
        assert result["skipped"].loss == pytest.approx(6.5, abs=0.5)
        assert result["kept"], "weights, master weights and moments are the same bits"
        assert result["updates"] == 1
        assert result["state"] == {"scale": FIRST / 2, "good_steps": 0, "skipped": 1}
        assert result["same"], "what comes after is as if the step had not been"
        assert result["enormous"].scaling == (2.0**60, 2.0**59, True)


def test_resuming_is_bit_identical(four: World, tmp_path: Path) -> None:
    config, options = CONFIGS["llama"], mesh("212 fp16")
    whole = four.run(cases.train_and_save_fp16, config, options, tmp_path)
    assert [r.scaling and r.scaling.following for r in whole[0]] == [
        FIRST / 2,
        FIRST,
        FIRST / 2,
        FIRST / 2,
    ]
    checkpoint = tmp_path / "step_00000002"
    assert four.run(cases.resume_fp16, config, options, checkpoint) == whole
    saved = Manifest.read(checkpoint)
    assert saved.loss_scale == {"scale": FIRST / 2, "good_steps": GOOD_STEPS - 2, "skipped": 1}
    assert (saved.step, saved.optimizer_steps) == (2, 1)
    assert {
        NativeSource(checkpoint).dtype(name).name for name in NativeSource(checkpoint).names()
    } == {"float16"}
    convert(checkpoint, tmp_path / "exported", to=HuggingFace())
    assert {t.dtype for t in load_file(tmp_path / "exported" / "model.safetensors").values()} == {
        torch.float16
    }
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["dtype"] == "float16"
    convert(checkpoint, tmp_path / "cut", to=Native(tp=1, pp=2))
    assert Manifest.read(tmp_path / "cut" / "step_00000002").loss_scale == saved.loss_scale


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(st.booleans(), min_size=1, max_size=24))
def test_the_scale_is_that_of_torchs_gradscaler(overflows: list[bool]) -> None:
    ours, kept = LossScale(torch.device("cpu")), loss_scaling.GOOD_STEPS
    theirs = torch.amp.GradScaler("cpu", init_scale=FIRST, growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([weight], lr=0.0)
    loss_scaling.GOOD_STEPS = 3
    try:
        for overflowed in overflows:
            theirs.scale(torch.ones(1))
            weight.grad = torch.full((1,), float("inf") if overflowed else 1.0)
            theirs.step(sgd)
            theirs.update()
            ours.update(torch.tensor(overflowed))
            assert float(ours.scale) == max(FLOOR, theirs.get_scale())
            if theirs.get_scale() < 2 * FLOOR:
                return  # theirs has no floor
    finally:
        loss_scaling.GOOD_STEPS = kept
