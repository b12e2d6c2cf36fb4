"""neuronx-nemo-megatron's checkpoints, by facts about its source, since it could not be run
here.
"""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.convert import ReadOptions, convert
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.summary import inspect, verify
from smtrain.worker.checkpoint.targets import HuggingFace, NemoMegatron, Nxd, make_target
from tests.worker.checkpoint.folders import (
    GPT2,
    LLAMA,
    NEOX,
    hf_folder,
    random_weights,
    same,
    weights_of,
)

FOUR = {**LLAMA, "num_hidden_layers": 4}
MHA = {**FOUR, "num_key_value_heads": 4}
TIED = {**FOUR, "tie_word_embeddings": True}


def load(path: Path) -> dict[str, Any]:
    held: dict[str, Any] = torch.load(path, weights_only=True)["state_dict"]
    return held


@pytest.mark.pairwise
@pytest.mark.parametrize("xser", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("release", ["2.15", "2.21"])
@pytest.mark.parametrize("config", [FOUR, MHA, TIED, {**NEOX, "num_hidden_layers": 4}, GPT2])
def test_what_is_written_is_read(
    tmp_path: Path, config: dict[str, Any], release: Any, tp: int, pp: int, xser: bool
) -> None:
    source = hf_folder(tmp_path / "hf", config, torch.bfloat16)
    form: Any = "xser" if xser else "pt"
    convert(source, tmp_path / "nnm", to=NemoMegatron(release=release, tp=tp, pp=pp, form=form))
    assert same(weights_of(open_weights(tmp_path / "nnm")), random_weights(config, torch.bfloat16))
    about = inspect(tmp_path / "nnm")
    assert (about.kind, about.topology) == ("nemo-megatron", {"tp": tp, "pp": pp})
    assert verify(tmp_path / "nnm") == len(random_weights(config))


def test_the_names_and_rows_of_2_15(tmp_path: Path) -> None:
    convert(
        hf_folder(tmp_path / "hf", FOUR),
        tmp_path / "nnm",
        to=NemoMegatron(release="2.15", tp=2, pp=2),
    )
    held = load(tmp_path / "nnm/tp_rank_01_pp_rank_001/model_optim_rng.ckpt")
    weights = random_weights(FOUR)
    q, k, v = (weights[f"model.layers.2.self_attn.{n}_proj.weight"] for n in "qkv")
    layer = "model.language_model.encoder.layers.0."
    assert torch.equal(held[layer + "self_attention.query.weight"], q[8:])
    assert torch.equal(held[layer + "self_attention.key_value.weight"], torch.cat([k[4:], v[4:]]))
    assert torch.equal(
        held[layer + "mlp.dense_h_to_4h.weight"],
        weights["model.layers.2.mlp.gate_proj.weight"][12:],
    )
    assert torch.equal(
        held[layer + "mlp.dense_h_to_4h_2.weight"],
        weights["model.layers.2.mlp.up_proj.weight"][12:],
    )
    head = held["model.language_model.output_layer.weight"]
    assert torch.equal(
        head, torch.cat([weights["lm_head.weight"][24:], torch.zeros(8, 16)])
    )  # padded to 8 x tp
    assert "model.language_model.embedding.word_embeddings.weight" not in held


def test_the_names_and_rows_of_2_21(tmp_path: Path) -> None:
    convert(hf_folder(tmp_path / "hf", TIED), tmp_path / "nnm", to=NemoMegatron(tp=2))
    held = load(tmp_path / "nnm/mp_rank_01/llmv2_converted_checkpoint--step=0.ckpt")
    weights = random_weights(TIED)
    q, k, v = (weights[f"model.layers.2.self_attn.{n}_proj.weight"] for n in "qkv")
    gate, up = (weights[f"model.layers.2.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    layer = "model.language_model.encoder.layers.2."
    assert torch.equal(
        held[layer + "self_attention.query_key_value.weight"], torch.cat([q[8:], k[4:], v[4:]])
    )
    assert torch.equal(held[layer + "mlp.dense_h_to_4h.weight"], torch.cat([gate[12:], up[12:]]))
    assert layer + "mlp.dense_h_to_4h_2.weight" not in held


def rank(folder: Path, name: str, state: dict[str, Any], **more: Any) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": state, "epoch": 0, "global_step": 7, **more}, folder / name)


def test_what_training_leaves_is_read_the_latest_step_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Virtual stages, buffers, settings of other libraries, the head under its other name."""
    convert(hf_folder(tmp_path / "hf", MHA), tmp_path / "nnm", to=NemoMegatron(pp=2))
    folder = tmp_path / "trained"
    omegaconf = types.ModuleType("omegaconf_like")

    class DictConfig:
        __module__ = "omegaconf_like"
        __qualname__ = "DictConfig"

    omegaconf.DictConfig = DictConfig  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "omegaconf_like", omegaconf)
    first = load(tmp_path / "nnm/tp_rank_00_pp_rank_000/llmv2_converted_checkpoint--step=0.ckpt")
    last = load(tmp_path / "nnm/tp_rank_00_pp_rank_001/llmv2_converted_checkpoint--step=0.ckpt")
    layer = "model.language_model.encoder.layers."

    def layers(held: dict[str, Any], n: int) -> dict[str, Any]:
        mine = {
            k.replace(f"{layer}{n}.", f"{layer}0."): v
            for k, v in held.items()
            if k.startswith(f"{layer}{n}.")
        }
        return {
            **mine,
            f"{layer}0.self_attention.core_attention.rotary_emb.inv_freq": torch.zeros(2),
        }

    embedding = {k: v for k, v in first.items() if "embedding" in k}
    rest = {k: v for k, v in last.items() if "final_layernorm" in k}
    head = {"model.word_embeddings.weight": last["model.language_model.output_layer.weight"]}
    stages = [
        {"model0": {**embedding, **layers(first, 0)}, "model1": layers(last, 0)},
        {"model0": layers(first, 1), "model1": {**layers(last, 1), **rest, **head}},
    ]
    for p, state in enumerate(stages):
        at = f"tp_rank_00_pp_rank_{p:03d}/megatron_llama--step=20-consumed_samples=640.0.ckpt"
        rank(
            folder,
            at,
            state,
            hyper_parameters={"cfg": DictConfig()},
            optimizer_states=[{"lr": 0.1}],
        )
        rank(folder, at.replace("=20-", "=3-"), {"nothing": torch.zeros(1)})
    monkeypatch.delitem(sys.modules, "omegaconf_like")
    assert same(weights_of(open_weights(folder, MHA)), random_weights(MHA))
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        open_weights(folder)


@pytest.mark.parametrize("change", ["rank", "tensors", "state"])
def test_what_is_not_whole_is_named(tmp_path: Path, change: str) -> None:
    convert(
        hf_folder(tmp_path / "hf", FOUR),
        tmp_path / "nnm",
        to=NemoMegatron(form="xser", tp=2, release="2.15"),
    )
    (tmp_path / "nnm/manifest.json").unlink()
    file = tmp_path / "nnm/mp_rank_01/model_optim_rng.ckpt"
    if change == "rank":
        (tmp_path / "nnm/mp_rank_00/model_optim_rng.ckpt").unlink()
    elif change == "tensors":
        (file.parent / "model_optim_rng.ckpt.tensors/tensor_3.pt").unlink()
    else:
        torch.save({"state": {}}, file)
    words = {
        "rank": "lacks the file of tp rank 0",
        "tensors": "tensor_3.pt is missing",
        "state": "no state_dict",
    }
    with pytest.raises(CheckpointError, match=words[change]):
        open_weights(tmp_path / "nnm")


def zero1(folder: Path, weights: dict[str, torch.Tensor], dp: int, keep: bool = True) -> None:
    """Add fp32 masters for every rank's file, as ZeRO-1 saves them, and a buffer among the
    weights.
    """
    for file in sorted(folder.rglob("*.ckpt")):
        content = torch.load(file, weights_only=True)
        state = content["state_dict"]
        masters = [weights[f"{file.parent.name} {name}"].clone() for name in state]
        named = {
            "model.counter": torch.zeros(3),
            **state,
            "untrained_buffer_names": ["model.counter"],
        }
        torch.save(
            {**content, "state_dict": named if keep else {"model.counter": torch.zeros(3)}}, file
        )
        for rank in range(dp):
            at = (
                file.parent
                / f"optim/dp_rank_{rank:03d}"
                / file.name.replace(".ckpt", "-optimizer_states.ckpt")
            )
            at.parent.mkdir(parents=True)
            cut = {}
            for number, whole in enumerate(masters):
                padding = torch.zeros(-whole.shape[0] % dp, *whole.shape[1:])
                cut[number] = torch.cat([whole, padding]).chunk(dp)[rank].clone()
            info = {number: whole.shape for number, whole in enumerate(masters)}
            torch.save(
                [
                    {
                        "state": {},
                        "base_state": {},
                        "shape_info": info,
                        "param_groups": [],
                        "untrained_buffers": {"model.counter": torch.zeros(3)},
                        "sharded_master_weights": cut,
                    }
                ],
                at,
            )


def with_masters(root: Path, config: dict[str, Any], dp: int, **how: Any) -> Path:
    """A bf16 checkpoint of two ranks by two stages, with the weights that it was rounded from."""
    fp32 = hf_folder(root / "fp32", config)
    convert(fp32, root / "wide", to=NemoMegatron(tp=2, pp=2, **how))
    convert(fp32, root / "nnm", to=NemoMegatron(tp=2, pp=2, dtype="bf16", **how))
    (root / "nnm/manifest.json").unlink()
    wide = {
        f"{p.parent.name} {k}": v
        for p in (root / "wide").rglob("*.ckpt")
        for k, v in load(p).items()
    }
    zero1(root / "nnm", wide, dp)
    return root / "nnm"


@pytest.mark.sample(4)  # each config and each number of ranks
@pytest.mark.parametrize("dp", [1, 3, 4])
@pytest.mark.parametrize(("config", "release"), [(FOUR, "2.15"), (TIED, "2.21"), (GPT2, "2.21")])
def test_master_weights_are_taken_when_asked(
    tmp_path: Path, config: dict[str, Any], release: Any, dp: int
) -> None:
    folder = with_masters(tmp_path, config, dp, release=release)
    rounded = {name: tensor.bfloat16() for name, tensor in random_weights(config).items()}
    assert same(weights_of(open_weights(folder)), rounded)
    convert(folder, tmp_path / "hf", to=HuggingFace(), read=ReadOptions(masters=True))
    assert same(weights_of(open_weights(tmp_path / "hf")), random_weights(config))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "no folder",
            "has no llmv2_converted_checkpoint--step=0-optimizer_states.ckpt in optim/dp_rank_000",
        ),
        ("a rank", "in optim/dp_rank_001"),
        ("none kept", "has no sharded_master_weights"),
        ("one less", "has no master weight"),
        ("a shape", "do not make up"),
        ("not asked of this", "is not a neuronx-nemo-megatron checkpoint"),
    ],
)
def test_master_weights_that_are_not_whole_are_named(
    tmp_path: Path, change: str, words: str
) -> None:
    folder = with_masters(tmp_path, FOUR, 2)
    optim = folder / "tp_rank_01_pp_rank_001/optim"
    last = next((optim / "dp_rank_001").iterdir())
    (state,) = torch.load(last, weights_only=True)
    if change == "no folder":
        shutil.rmtree(optim)
    elif change == "a rank":
        shutil.move(optim / "dp_rank_001", optim / "dp_rank_002")
    elif change == "none kept":
        torch.save([{"state": {}}], last)
    elif change == "not asked of this":
        folder = tmp_path / "fp32"
    else:
        held = state["sharded_master_weights"]
        held.update({3: torch.zeros(1, 1)} if change == "a shape" else {})
        if change == "one less":
            held.pop(max(held))
        torch.save([state], last)
    with pytest.raises(CheckpointError, match=words):
        convert(folder, tmp_path / "hf", to=HuggingFace(), read=ReadOptions(masters=True))
    assert not (tmp_path / "hf").exists()


def test_rows_that_a_converter_has_reordered_are_put_back_when_asked(tmp_path: Path) -> None:
    config = {**NEOX, "num_hidden_layers": 2}
    right = random_weights(config)
    wrong = {
        name: (
            tensor.view(3, 4, 4, -1).transpose(0, 1).reshape(tensor.shape)
            if "query_key_value" in name
            else tensor
        )
        for name, tensor in right.items()
    }
    source = hf_folder(tmp_path / "wrong", config)
    save_file(
        {name: tensor.contiguous() for name, tensor in wrong.items()}, source / "model.safetensors"
    )
    convert(source, tmp_path / "nnm", to=NemoMegatron(tp=2, pp=2))
    assert same(weights_of(open_weights(tmp_path / "nnm")), wrong)
    for to, tp in (("hf", 1), ("nxd", 4)):
        convert(
            tmp_path / "nnm",
            tmp_path / to,
            to=make_target(to, tp=tp),
            read=ReadOptions(reordered_qkv=True),
        )  # type: ignore[arg-type]
        assert same(weights_of(open_weights(tmp_path / to)), right)
    with pytest.raises(CheckpointError, match="is a llama model, and convert_HF_to_nemo_neox"):
        convert(
            hf_folder(tmp_path / "llama", FOUR),
            tmp_path / "no",
            to=Nxd(),
            read=ReadOptions(reordered_qkv=True),
        )
