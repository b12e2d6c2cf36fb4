"""A model survives any chain of formats and meshes, and every variant of neuronx-nemo-megatron is
read.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.targets import (
    Dcp,
    HuggingFace,
    Megatron,
    Native,
    NemoMegatron,
    Nxd,
    Target,
)
from tests.worker.checkpoint import nnm_files
from tests.worker.checkpoint.folders import hf_folder, random_weights, same, weights_of
from tests.worker.checkpoint.models import MORE, configs

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
few = settings(max_examples=8 * MORE, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def targets(draw: st.DrawFn, config: dict[str, Any]) -> Target:
    """A target that the model can be converted to."""
    shape = ModelShape.from_config(config)
    tp = draw(st.sampled_from([n for n in (1, 2, 4) if not shape.kv_heads % n]))
    even = draw(st.sampled_from([n for n in range(1, shape.layers + 1) if not shape.layers % n]))
    mesh: dict[str, Any] = {"tp": tp, "pp": draw(st.integers(1, shape.layers))}
    divisor = draw(st.sampled_from([1, 8, 128]))
    stages = {**mesh, "pp": even, "vocab_divisor": divisor}
    kinds: list[Target] = [
        HuggingFace(max_shard_size=draw(st.sampled_from([3000, 5_000_000_000]))),
        Nxd(form=draw(st.sampled_from(["pt", "xser"])), **mesh),
        Native(**mesh),
        Megatron(form="torch_dist", tp=tp, vocab_divisor=divisor),
        Megatron(form="torch", spec=draw(st.sampled_from(["te", "local"])), **stages),
        NemoMegatron(
            form=draw(st.sampled_from(["pt", "xser"])),
            **stages,
            release=draw(st.sampled_from(["2.15", "2.21"])),
        ),
    ]
    known = [
        kind
        for kind in kinds
        if shape.rules.nxd_and_megatron or isinstance(kind, (HuggingFace, Native))
    ]
    if shape.experts is None:
        known.append(Dcp(form="accelerate"))
        if shape.family == "llama" and not (shape.qkv_bias or shape.mlp_bias):
            known.append(Dcp(form="torchtitan"))
    return draw(st.sampled_from(known))


@few
@given(
    data=st.data(), config=configs().map(lambda config: {**config, "use_parallel_residual": False})
)
def test_a_model_comes_back_from_a_row_of_conversions(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, config: dict[str, Any]
) -> None:
    root = tmp_path_factory.mktemp("row")
    dtype = data.draw(DTYPES)
    at, whole = hf_folder(root / "hf", config, dtype), random_weights(config, dtype)
    for n in range(3):
        convert(at, root / str(n), to=data.draw(targets(config)))
        at = root / str(n)
        assert same(weights_of(open_weights(at)), whole)
    shutil.rmtree(root)


@few
@given(
    data=st.data(),
    config=configs(elsewhere=True).filter(
        lambda config: config["model_type"] in ("llama", "gpt_neox", "gpt2")
    ),
)
def test_whatever_neuronx_nemo_megatron_left_is_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, config: dict[str, Any]
) -> None:
    config = {**config, "attention_bias": config["model_type"] == "gpt_neox", "mlp_bias": False}
    shape = ModelShape.from_config(config)
    weights = random_weights(config, data.draw(DTYPES))
    stages = [(pp, vpp) for pp in (1, 2, 3) for vpp in (1, 2) if not shape.layers % (pp * vpp)]
    pp, vpp = data.draw(st.sampled_from(stages))
    two: Any = st.sampled_from(["one", "two"])
    how = nnm_files.How(
        tp=data.draw(st.sampled_from([n for n in (1, 2, 4) if not shape.kv_heads % n])),
        pp=pp,
        vpp=vpp,
        qkv=data.draw(two) if shape.kv_heads != shape.heads else "one",
        mlp=data.draw(two),
        xser=data.draw(st.sampled_from([None, nnm_files.OLD, nnm_files.NEW])),
        head=data.draw(st.sampled_from(["model.word_embeddings.weight", nnm_files.How.head])),
        divisor=data.draw(st.sampled_from([1, 8, 128])),
        name=data.draw(
            st.sampled_from([nnm_files.How.name, "model_optim_rng.ckpt", "gpt--step=3-last.ckpt"])
        ),
        buffers=data.draw(st.booleans()),
    )
    root = tmp_path_factory.mktemp("nnm")
    folder = nnm_files.write(root / "nnm", config, weights, how)
    assert same(weights_of(open_weights(folder, config)), weights)
    shutil.rmtree(root)
