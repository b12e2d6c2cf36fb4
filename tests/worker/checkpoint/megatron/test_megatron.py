"""Megatron's checkpoints, written and read: both forms, every mesh, and variants from real runs."""

from __future__ import annotations

import argparse
import enum
import json
import pickle
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smtrain.core.errors import CheckpointError, ConfigError
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint import execute, tensor_files
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.dtypes import FP32
from smtrain.worker.checkpoint.megatron.args import arguments
from smtrain.worker.checkpoint.megatron.torch_dist_writer import write_torch_dist
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.summary import inspect, verify
from smtrain.worker.checkpoint.targets import (
    HuggingFace,
    Megatron,
    Native,
    NemoMegatron,
    Nxd,
    Target,
    make_target,
)
from tests.tiers import examples
from tests.worker.checkpoint.folders import (
    GPT2,
    LLAMA,
    NEOX,
    hf_folder,
    random_weights,
    same,
    weights_of,
)
from tests.worker.checkpoint.models import MORE, configs

FOUR = {**LLAMA, "num_hidden_layers": 4}
TIED = {**FOUR, "tie_word_embeddings": True}
QWEN3 = {**FOUR, "model_type": "qwen3", "head_dim": 8}
SERIAL_NEOX = {**NEOX, "num_hidden_layers": 4, "use_parallel_residual": False}


def legacy(folder: Path, tp: int = 0, pp: int | None = None) -> dict[str, Any]:
    rank = f"mp_rank_{tp:02d}" + ("" if pp is None else f"_{pp:03d}")
    held: dict[str, Any] = torch.load(
        folder / "iter_0000001" / rank / "model_optim_rng.pt", weights_only=False
    )
    return held


@settings(max_examples=examples(40) * MORE, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    config=configs(elsewhere=True).map(lambda config: {**config, "use_parallel_residual": False}),
)
def test_a_model_comes_back_from_any_form_and_mesh(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, config: dict[str, Any]
) -> None:
    root = tmp_path_factory.mktemp("any")
    source = hf_folder(
        root / "hf", config, data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    )
    layers = ModelShape.from_config(config).layers
    kv = config.get("num_key_value_heads", config["num_attention_heads"])
    pp, tps = data.draw(st.integers(1, layers)), [n for n in (1, 2, 4) if not kv % n]
    cuts = (
        sorted(data.draw(st.sets(st.integers(1, layers - 1), min_size=pp - 1, max_size=pp - 1)))
        if pp > 1
        else []
    )
    each = [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
    written: Any = data.draw(
        st.sampled_from([("torch", "te"), ("torch", "local"), ("torch_dist", "te")])
    )
    form, spec = written
    tp, divisor = data.draw(st.sampled_from(tps)), data.draw(st.sampled_from([1, 8, 128]))
    to = Megatron(form=form, spec=spec, tp=tp, pp=pp, layers_per_stage=each, vocab_divisor=divisor)
    convert(source, root / "mg", to=to)
    assert same(weights_of(open_weights(root / "mg")), weights_of(open_weights(source)))
    convert(root / "mg", root / "again", to=HuggingFace())
    assert same(weights_of(open_weights(root / "again")), weights_of(open_weights(source)))
    shutil.rmtree(root)


@pytest.mark.parametrize("config", [FOUR, TIED, QWEN3, SERIAL_NEOX, GPT2])
def test_virtual_stages_are_dealt_round_robin(tmp_path: Path, config: dict[str, Any]) -> None:
    convert(
        hf_folder(tmp_path / "hf", config),
        tmp_path / "mg",
        to=Megatron(form="torch", pp=2, vpp=2, spec="local"),
    )
    held = legacy(tmp_path / "mg", 0, 1)
    assert [key for key in held if key.startswith("model")] == ["model0", "model1"]
    weights = random_weights(config)
    norm = {
        "gpt_neox": "gpt_neox.layers.{}.input_layernorm.weight",
        "gpt2": "transformer.h.{}.ln_1.weight",
    }.get(config["model_type"], "model.layers.{}.input_layernorm.weight")
    for chunk, layer in (("model0", 1), ("model1", 3)):  # the second stage's
        mine = held[chunk]["decoder.layers.0.input_layernorm.weight"]
        assert torch.equal(mine, weights[norm.format(layer)])
    assert same(weights_of(open_weights(tmp_path / "mg")), weights)


def test_names_and_rows_are_megatrons(tmp_path: Path) -> None:
    convert(
        hf_folder(tmp_path / "hf", TIED), tmp_path / "mg", to=Megatron(form="torch", tp=2, pp=2)
    )
    first, last = legacy(tmp_path / "mg", 1, 0), legacy(tmp_path / "mg", 1, 1)
    weights = random_weights(TIED)
    q, k, v = (weights[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qkv")
    layer = "decoder.layers.0."
    assert torch.equal(
        first["model"][layer + "self_attention.linear_qkv.weight"], torch.cat([q[8:], k[4:], v[4:]])
    )
    gate, up = (weights[f"model.layers.0.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    assert torch.equal(
        first["model"][layer + "mlp.linear_fc1.weight"], torch.cat([gate[12:], up[12:]])
    )
    assert layer + "self_attention.linear_qkv.layer_norm_weight" in first["model"]
    embedding = weights["model.embed_tokens.weight"]
    assert first["model"]["embedding.word_embeddings.weight"].shape == (128, 16)
    assert not first["model"][
        "embedding.word_embeddings.weight"
    ].any()  # all 40 words are on the first rank
    held = legacy(tmp_path / "mg", 0, 1)["model"]["output_layer.weight"]
    assert torch.equal(held[:40], embedding)
    assert not held[40:].any()
    said = vars(last["args"])
    assert (said["padded_vocab_size"], said["num_query_groups"], said["params_dtype"]) == (
        256,
        2,
        torch.float32,
    )
    assert (last["checkpoint_version"], last["iteration"]) == (3.0, 1)
    assert (tmp_path / "mg/latest_checkpointed_iteration.txt").read_text() == "1"


def test_torch_reads_what_is_written_as_torch_dist(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    convert(hf_folder(tmp_path / "hf", FOUR, torch.bfloat16), tmp_path / "mg", to=Megatron())
    reader = dcp.FileSystemReader(tmp_path / "mg/iter_0000001")
    about: dict[str, Any] = reader.read_metadata().state_dict_metadata
    state = {
        k: torch.empty(a.size, dtype=a.properties.dtype)
        for k, a in about.items()
        if hasattr(a, "size")
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=reader)
    weights = random_weights(FOUR, torch.bfloat16)
    gate, up = (weights[f"model.layers.3.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    assert torch.equal(state["decoder.layers.mlp.linear_fc1.weight"][3], torch.cat([gate, up]))
    assert torch.equal(state["output_layer.weight"][:40], weights["lm_head.weight"])


class ModelType(enum.Enum):
    encoder_or_decoder = 1


def rewrite(folder: Path, change: Any, protocol: int = 2) -> None:
    for file in folder.rglob("model_optim_rng.pt"):
        held = torch.load(file, weights_only=False)
        change(held)
        torch.save(held, file, pickle_protocol=protocol)
    (folder / "manifest.json").unlink(missing_ok=True)


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_training_left_beside_the_weights_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    import numpy as np

    theirs = types.ModuleType("megatron_enums")
    theirs.ModelType = ModelType  # type: ignore[attr-defined]
    monkeypatch.setattr(ModelType, "__module__", "megatron_enums")
    monkeypatch.setitem(sys.modules, "megatron_enums", theirs)
    convert(hf_folder(tmp_path / "hf", FOUR), tmp_path / "mg", to=Megatron(form="torch", tp=2))

    def change(held: dict[str, Any]) -> None:
        held["args"] = argparse.Namespace(
            model_type=ModelType.encoder_or_decoder, dtype=torch.bfloat16, t={1, 2}
        )
        held["rng_state"] = [{"np": np.random.get_state(), "torch": torch.get_rng_state()}]
        held["optimizer"] = {
            "state": {0: {"exp_avg": torch.zeros(3)}},
            "param_groups": [{"lr": 0.1}],
        }
        held["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
        held["model"]["decoder.layers.1.mlp.linear_fc1._extra_state"] = torch.zeros(
            0, dtype=torch.uint8
        )
        held["model"]["rotary_pos_emb.inv_freq"] = torch.zeros(2)

    rewrite(tmp_path / "mg", change, protocol)
    monkeypatch.delitem(sys.modules, "megatron_enums")
    (tmp_path / "mg/iter_0000001").rename(tmp_path / "mg/release")
    (tmp_path / "mg/latest_checkpointed_iteration.txt").write_text("release\n")
    assert same(weights_of(open_weights(tmp_path / "mg")), random_weights(FOUR))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.9, of itself
def test_layers_may_stand_for_themselves_and_halves_apart(tmp_path: Path) -> None:
    """Layers stored one by one, as runs with non-homogeneous layers or singleton local shards save
    them.
    """
    import torch.distributed.checkpoint as dcp

    convert(hf_folder(tmp_path / "hf", TIED), tmp_path / "mg", to=Megatron())
    at = tmp_path / "mg/iter_0000001"
    about: dict[str, Any] = dcp.FileSystemReader(at).read_metadata().state_dict_metadata
    state = {
        k: torch.empty(a.size, dtype=a.properties.dtype)
        for k, a in about.items()
        if hasattr(a, "size")
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=dcp.FileSystemReader(at))
    apart = {}
    for key, tensor in state.items():
        for layer in range(4) if key.startswith("decoder.layers.") else ():
            one = key.replace("decoder.layers.", f"decoder.layers.{layer}.")
            if key.endswith("linear_fc1.weight"):
                apart[f"{one}_w"], apart[f"{one}_v"] = (
                    half.clone() for half in tensor[layer].chunk(2)
                )
            else:
                apart[one] = tensor[layer].clone()
        if not key.startswith("decoder.layers."):
            apart[key] = tensor
    apart["optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc2.weight"] = torch.zeros(2)
    shutil.rmtree(at)
    at.mkdir()
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(apart, checkpoint_id=at)
    (at / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    (tmp_path / "mg/manifest.json").unlink()
    assert same(weights_of(open_weights(tmp_path / "mg")), random_weights(TIED))
    assert same(
        weights_of(open_weights(at)), random_weights(TIED)
    )  # its config.json is one folder up


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda at: (at / "config.json").unlink(), "has no config.json, as Megatron writes none"),
        (
            lambda at: (at / "latest_checkpointed_iteration.txt").write_text("9"),
            "there is no such folder",
        ),
        (
            lambda at: shutil.rmtree(at / "iter_0000001/mp_rank_01_000"),
            "lacks the file of tp rank 1, pp rank 0",
        ),
        (
            lambda at: rewrite(
                at,
                lambda h: h["model"].update({"decoder.layers.0.mlp.router.weight": torch.zeros(2)}),
            ),
            "is of a mixture of experts, and config.json is of a llama model",
        ),
        (
            lambda at: rewrite(
                at, lambda h: h["model"].update({"decoder.layers.0.mlp.experts.x": torch.zeros(2)})
            ),
            "mixture of experts",
        ),
        (
            lambda at: rewrite(at, lambda h: h["model"].popitem()),
            "layers.1.mlp.linear_fc2.weight|lacks|are missing",
        ),
        (lambda at: rewrite(at, lambda h: h.pop("model")), "has no model in it"),
        (
            lambda at: (at / "config.json").write_text(json.dumps({**FOUR, "hidden_size": 32})),
            "instead of .*; is config.json",
        ),
        (
            lambda at: (at / "config.json").write_text(
                json.dumps({**FOUR, "num_hidden_layers": 5})
            ),
            "4 layers",
        ),
    ],
)
def test_what_is_not_whole_or_of_another_model_is_named(
    tmp_path: Path, change: Any, words: str
) -> None:
    convert(
        hf_folder(tmp_path / "hf", FOUR), tmp_path / "mg", to=Megatron(form="torch", tp=2, pp=2)
    )
    (tmp_path / "mg/manifest.json").unlink()  # Megatron writes none
    change(tmp_path / "mg")
    with pytest.raises(CheckpointError, match=words):
        weights_of(open_weights(tmp_path / "mg"))


@pytest.mark.parametrize("to", [Megatron(), Megatron(form="torch", tp=2), NemoMegatron(tp=2)])
def test_a_vocabulary_is_not_cut_by_a_damaged_config(tmp_path: Path, to: Target) -> None:
    convert(hf_folder(tmp_path / "hf", FOUR), tmp_path / "mg", to=to)
    file = tmp_path / "mg/config.json"
    for size in (
        "4 ",
        "41",
    ):  # a flipped bit; and more words than there are, of which the padding has room for some
        file.write_text(file.read_text().replace('"vocab_size": 40', f'"vocab_size": {size}'))
        with pytest.raises(
            CheckpointError, match=r"config.json differs from the one written .*--config"
        ):
            open_weights(tmp_path / "mg")
        file.write_text(file.read_text().replace(f'"vocab_size": {size}', '"vocab_size": 40'))
    file.write_text(json.dumps({**FOUR, "rope_theta": 500000.0}))
    again = open_weights(tmp_path / "mg", json.loads(file.read_text()))
    assert same(weights_of(again), random_weights(FOUR))


def test_forms_that_are_not_read_are_named(tmp_path: Path) -> None:
    convert(hf_folder(tmp_path / "hf", FOUR), tmp_path / "mg", to=Megatron(form="torch"))
    at = tmp_path / "mg/iter_0000001"
    (at / "mp_rank_00").rename(at / "mp_rank_00_000_000")
    (tmp_path / "mg/manifest.json").unlink()
    with pytest.raises(
        CheckpointError, match="expert-parallel ranks, which is of a mixture of experts"
    ):
        open_weights(tmp_path / "mg")
    shutil.rmtree(at / "mp_rank_00_000_000")
    (at / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    with pytest.raises(
        CheckpointError, match=r"in Megatron's old form 'zarr'; save it as torch_dist or torch"
    ):
        open_weights(tmp_path / "mg")
    (at / "metadata.json").unlink()
    (at / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"has no metadata\.json, which Megatron writes last"):
        open_weights(tmp_path / "mg")


def test_a_tied_head_that_differs_is_told(tmp_path: Path) -> None:
    convert(hf_folder(tmp_path / "hf", TIED), tmp_path / "mg", to=Megatron(form="torch", pp=2))

    def change(held: dict[str, Any]) -> None:
        if "output_layer.weight" in held["model"]:
            held["model"]["output_layer.weight"][3] += 1

    rewrite(tmp_path / "mg", change)
    with pytest.raises(CheckpointError, match="output layer differs"):
        convert(tmp_path / "mg", tmp_path / "out", to=HuggingFace())
    assert not (tmp_path / "out").exists()


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


def test_no_code_of_a_file_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    convert(hf_folder(tmp_path / "hf", FOUR), tmp_path / "mg", to=Megatron(form="torch"))
    rewrite(tmp_path / "mg", lambda held: held.update(args=Hostile()))
    assert same(
        weights_of(open_weights(tmp_path / "mg")), random_weights(FOUR)
    )  # as nothing of args is needed
    file = tmp_path / "mg/iter_0000001/mp_rank_00/model_optim_rng.pt"
    torch.save({"model": {"decoder.final_layernorm.weight": Hostile()}}, file)
    with pytest.raises(CheckpointError, match="is not a tensor"):
        open_weights(tmp_path / "mg")
    convert(tmp_path / "hf", tmp_path / "dist", to=Megatron())
    (tmp_path / "dist/manifest.json").unlink()
    (tmp_path / "dist/iter_0000001/.metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointError, match="lacks a Metadata"):
        open_weights(tmp_path / "dist")
    assert "ran" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tp": 4}, "does not divide the model's 2 key/value heads .*; tp = 1 or 2 would do"),
        ({"pp": 5}, "pp = 5 is more than the model's 4 layers; pp = 1 to 4 would do"),
        ({"pp": 3}, "cannot be dealt evenly to pp = 3"),
        ({"pp": 2, "layers_per_stage": [1, 2]}, "have the model.s 4 layers together"),
        ({"pp": 2, "vpp": 3, "form": "torch"}, "vpp = 3 does not divide"),
        ({"form": "xser"}, "form: got 'xser'"),
        ({"spec": "x"}, "spec: got 'x'"),
    ],
)
def test_what_megatron_could_not_do_is_refused(
    tmp_path: Path, flags: dict[str, Any], words: str
) -> None:
    source = hf_folder(tmp_path / "hf", FOUR)
    with pytest.raises(ConfigError, match=words):
        convert(source, tmp_path / "mg", to=Megatron(**flags))
    assert not (tmp_path / "mg").exists()


def test_a_folder_may_hold_its_own_checkpoint_but_not_change_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage export writes both forms into one folder."""
    model = hf_folder(tmp_path / "hf", FOUR)
    monkeypatch.chdir(tmp_path)
    for source in (model, model, Path("hf")):  # the second time the output is there
        write_torch_dist(open_weights(source), model / "megatron", Megatron())
        assert same(weights_of(open_weights(model / "megatron")), random_weights(FOUR))
    real = tensor_files.run

    def changing(*job: Any) -> Any:
        (model / "config.json").touch()
        return real(*job)

    monkeypatch.setattr(execute, "run", changing)
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        write_torch_dist(open_weights(model), model / "megatron", Megatron())


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_it_is_inspected_verified_and_converted_to_native(tmp_path: Path, form: Any) -> None:
    convert(hf_folder(tmp_path / "hf", FOUR), tmp_path / "mg", to=Megatron(form=form, tp=2, pp=2))
    about = inspect(tmp_path / "mg")
    assert (about.kind, about.step) == ("megatron", 1)
    assert about.topology == ({"tp": 2, "pp": 2} if form == "torch" else {})
    assert verify(tmp_path / "mg") == len(random_weights(FOUR))
    convert(tmp_path / "mg", tmp_path / "native", to=Native(tp=2))
    assert same(weights_of(open_weights(tmp_path / "native")), random_weights(FOUR))


GOLDEN = Path(__file__).parents[1] / "golden"
"""Checkpoints that megatron-core 0.16.1 wrote at tp 2, of twice the weights of `random_weights`."""


@pytest.mark.parametrize("name", ["megatron-torch-dist", "megatron-torch"])
def test_what_megatron_core_wrote_is_read_bit_for_bit(name: str) -> None:
    config = {**LLAMA, "num_hidden_layers": 2}
    doubled = {key: tensor * 2 for key, tensor in random_weights(config).items()}
    assert same(weights_of(open_weights(GOLDEN / name, config)), doubled)


def test_a_model_that_megatron_would_compute_otherwise_is_refused(tmp_path: Path) -> None:
    model = hf_folder(tmp_path / "hf", NEOX)
    for form in ("torch", "torch_dist"):
        with pytest.raises(
            CheckpointError, match="no parallel residual and would compute another model"
        ):
            convert(model, tmp_path / "out", to=Megatron(form=form))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("to", "options", "said"),
    [
        ("hf", {"tp": 2}, "tp: has no effect with to: hf"),
        ("native", {"form": None, "qkv": "grouped"}, "qkv: has no effect with to: native"),
        ("megatron", {"vpp": 2}, "vpp: has no effect with form: torch_dist"),
        ("megatron", {"release": "2.15"}, "release: has no effect with to: megatron"),
        (
            "nemo-megatron",
            {"vpp": 2, "layers_per_stage": [1, 1]},
            "vpp: has no effect with to: nemo-megatron",
        ),
    ],
)
def test_an_option_without_effect_is_refused(
    tmp_path: Path, to: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        convert(
            hf_folder(tmp_path / "hf", LLAMA), tmp_path / "out", to=make_target(to=to, **options)
        )
    assert not (tmp_path / "out").exists()


NEWER: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("multipliers of embeddings, residuals and logits", {}),
    "olmo2": ("norms behind attention and the MLP and no norms over all heads", {}),
    "olmo3": ("norms behind attention and the MLP and no norms over all heads", {}),
    "gemma3_text": ("norms behind attention and the MLP and no scaled embedding", {"head_dim": 4}),
    "ministral3": ("queries that grow with the position", {"head_dim": 4}),
}


@pytest.mark.parametrize("family", NEWER)
def test_a_family_that_megatron_core_lacks_is_refused_by_name_both_ways(
    tmp_path: Path, family: str
) -> None:
    why, changes = NEWER[family]
    config = {**LLAMA, "model_type": family, "rope_theta": 1e4, **changes}
    folder = hf_folder(tmp_path / "model", config)
    words = (
        f"{family} models are not converted from or to Megatron, whose library has no {why}: take a"
        " Hugging Face"
    )
    with pytest.raises(CheckpointError, match=words):
        convert(folder, tmp_path / "out", to=Megatron())
    with pytest.raises(CheckpointError, match=words):  # as stage export does
        write_torch_dist(open_weights(folder), tmp_path / "out", Megatron())
    for form in ("torch_dist", "torch"):
        convert(
            hf_folder(tmp_path / f"llama-{form}", LLAMA), tmp_path / form, to=Megatron(form=form)
        )
        with pytest.raises(CheckpointError, match=words):
            open_weights(tmp_path / form, config)
    with pytest.raises(
        CheckpointError, match=f"{family} models are not converted from or to Nxd: take"
    ):
        convert(folder, tmp_path / "nxd", to=Nxd())


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
@pytest.mark.parametrize(
    "config",
    [
        {
            **LLAMA,
            "model_type": "smollm3",
            "no_rope_layers": [1, 0, 1],
            "attention_bias": True,
            "mlp_bias": True,
        },
        {**LLAMA, "model_type": "phi3", "partial_rotary_factor": 0.5},
    ],
    ids=["smollm3", "phi3"],
)
def test_a_family_that_megatron_core_knows_comes_back(
    tmp_path: Path, config: dict[str, Any], form: Any
) -> None:
    folder = hf_folder(tmp_path / "model", config)
    convert(folder, tmp_path / "megatron", to=Megatron(form=form, tp=2))
    assert same(weights_of(open_weights(tmp_path / "megatron")), random_weights(config))


def test_biases_of_one_kind_are_refused(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "seed_oss", "attention_out_bias": True}
    with pytest.raises(CheckpointError, match="gives biases to only one of o_proj and the MLP"):
        convert(hf_folder(tmp_path / "model", config), tmp_path / "out", to=Megatron())


LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32}


@pytest.mark.parametrize(
    ("rope", "more"),
    [
        (LONG, {"model_type": "phi3", ORIGINAL: 32}),
        ({**YARN, "attention_factor": 1.5}, {}),
        (YARN, {"model_type": "gpt_neox", "rotary_pct": 0.5, "use_parallel_residual": False}),
        ({"rope_type": "linear", "factor": 1.5}, {}),
        ({**LLAMA3, ORIGINAL: 4096}, {}),
    ],
)  # fmt: skip
def test_positions_that_megatron_turns_otherwise_are_refused(
    rope: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    config = {**LLAMA, "rope_scaling": rope, **more}
    with pytest.raises(
        CheckpointError, match=rf"no rotary embeddings of type {rope['rope_type']}.*: convert to hf"
    ):
        convert(hf_folder(tmp_path / "model", config), tmp_path / "out", to=Megatron())


def test_scaled_positions_that_megatron_has_are_in_its_arguments() -> None:
    linear = arguments(
        {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, FP32, 64, Megatron()
    )
    assert (linear["rotary_seq_len_interpolation_factor"], linear["use_rope_scaling"]) == (2, False)
    llama3 = arguments({**LLAMA, "rope_scaling": {**LLAMA3, ORIGINAL: 8192}}, FP32, 64, Megatron())
    assert (llama3["rope_scaling_factor"], llama3["use_rope_scaling"]) == (8.0, True)
    assert "rotary_seq_len_interpolation_factor" not in llama3
    yarn = arguments({**LLAMA, "rope_scaling": YARN}, FP32, 64, Megatron())
    assert (yarn["position_embedding_type"], yarn["yarn_original_max_position_embeddings"]) == (
        "yarn",
        32,
    )
    assert (yarn["yarn_mscale"], yarn["yarn_mscale_all_dim"], yarn["yarn_beta_fast"]) == (
        1.0,
        0.0,
        32.0,
    )
