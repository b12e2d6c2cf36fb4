"""Mixtures of experts: Megatron's checkpoints of all forms, mxfp4 of gpt-oss, and tensors of all
experts.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys
import time
from itertools import product
from math import lcm, prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from smtrain.core.errors import CheckpointError, ConfigError
from smtrain.core.model.hf_config import remarks
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.conversion_plan import MANIFEST
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.huggingface.folder import read_config
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.summary import diff, inspect, verify
from smtrain.worker.checkpoint.targets import HuggingFace, Megatron, Native, Nxd
from tests.client.planner.test_experts import OSS_20B, QWEN3_30B
from tests.tiers import examples
from tests.worker.checkpoint.folders import LLAMA, hf_folder, random_weights, same, weights_of
from tests.worker.checkpoint.models import MORE

GOLDEN = Path(__file__).resolve().parents[4] / "shared" / "golden" / "moe"
needs_golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason=f"{GOLDEN} is missing: it is next to the checkout"
)
RUNS = sorted(run.relative_to(GOLDEN) for run in GOLDEN.glob("*/tp*")) if GOLDEN.is_dir() else []
QWEN: dict[str, Any] = {
    **LLAMA, "model_type": "qwen3_moe", "head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8, "norm_topk_prob": True, "num_hidden_layers": 2,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
GPT_OSS = {
    **LLAMA,
    "model_type": "gpt_oss",
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "head_dim": 4,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "router_aux_loss_coef": 0.9,
}


@needs_golden
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_what_megatron_wrote_is_read_bit_for_bit(run: Path) -> None:
    model = GOLDEN / run.parts[0] / "hf"
    source = open_weights(GOLDEN / run, read_config(model))
    assert same(weights_of(source), weights_of(open_weights(model)))


@needs_golden
@pytest.mark.parametrize("name", ["qwen3moe", "mixtral"])
def test_keys_and_tensors_are_those_that_megatron_writes(tmp_path: Path, name: str) -> None:
    convert(GOLDEN / name / "hf", tmp_path / "mg", to=Megatron(vocab_divisor=8))
    ours, theirs = (
        stored(tmp_path / "mg/iter_0000001"),
        stored(GOLDEN / name / "tp1_ep1/iter_0000007"),
    )
    again = ours.pop(
        "decoder.layers.pre_mlp_layernorm.weight"
    )  # the name that the TE spec asks for
    assert torch.equal(again, ours["decoder.layers.mlp.linear_fc1.layer_norm_weight"])
    del ours["output_layer._extra_state/shard_0_1"]  # so is this
    assert ours.keys() == theirs.keys()
    assert all(
        ours[key] is theirs[key] is None or torch.equal(ours[key], theirs[key]) for key in ours
    )


def stored(folder: Path) -> dict[str, Any]:
    """The tensors of a folder as torch reads them, and None for each other entry."""
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(folder)
    about: dict[str, Any] = reader.read_metadata().state_dict_metadata
    state = {
        k: torch.empty(a.size, dtype=a.properties.dtype)
        for k, a in about.items()
        if hasattr(a, "size")
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=reader)
    return dict.fromkeys(about) | state


@st.composite
def moe_configs(
    draw: st.DrawFn, families: tuple[str, ...] = ("qwen3_moe", "mixtral", "gpt_oss")
) -> dict[str, Any]:
    """A small config.json of a mixture of experts, of odd sizes."""
    family, kv = draw(st.sampled_from(families)), draw(st.sampled_from([1, 2, 4]))
    experts, layers = draw(st.integers(2, 16)), draw(st.integers(1, 4))
    config = {
        **LLAMA,
        "model_type": family,
        "num_attention_heads": kv * draw(st.sampled_from([1, 3])),
        "hidden_size": 12,
        "num_key_value_heads": kv,
        "num_hidden_layers": layers,
        "head_dim": draw(st.sampled_from([2, 4])),
        "intermediate_size": draw(st.integers(1, 12)),
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "vocab_size": draw(st.integers(1, 40)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if family != "qwen3_moe":
        return config | {"num_local_experts": experts, "router_aux_loss_coef": 0.5}
    named = draw(
        st.sampled_from(
            [["num_experts"], ["num_local_experts"], ["num_experts", "num_local_experts"]]
        )
    )
    config |= {
        "mlp_only_layers": sorted(draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1)))
    }
    config |= {
        "moe_intermediate_size": draw(st.integers(1, 12)),
        "norm_topk_prob": draw(st.booleans()),
    }
    return config | dict.fromkeys(named, experts)


@settings(max_examples=examples(40) * MORE, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), config=moe_configs())
def test_a_mixture_comes_back_from_any_form_and_mesh(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, config: dict[str, Any]
) -> None:
    root = tmp_path_factory.mktemp("any")
    source = hf_folder(
        root / "hf", config, data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    )
    weights = load_file(source / "model.safetensors")
    shape = ModelShape.from_config(config)
    divided = [
        config["num_key_value_heads"],
        *(config[key] for key in config if key.endswith("intermediate_size")),
    ]
    tp = data.draw(st.sampled_from([n for n in (1, 2, 4) if not any(size % n for size in divided)]))
    pp = data.draw(st.sampled_from([n for n in (1, 2, 4) if not shape.layers % n]))
    written: Any = data.draw(
        st.sampled_from([("torch", "te"), ("torch", "local"), ("torch_dist", "te")])
    )
    convert(
        source,
        root / "mg",
        to=Megatron(form=written[0], spec=written[1], tp=tp, pp=pp, vocab_divisor=4),
    )
    assert same(weights_of(open_weights(root / "mg")), weights)
    convert(root / "mg", root / "native", to=Native(tp=tp, pp=pp))
    assert same(weights_of(open_weights(root / "native")), weights)
    convert(root / "native", root / "again", to=HuggingFace())
    assert same(weights_of(open_weights(root / "again")), weights)
    if shape.experts is not None:
        ep = data.draw(st.sampled_from([n for n in range(1, 9) if not shape.experts.count % n]))
        etp = data.draw(
            st.sampled_from(sorted({1, tp} if config["model_type"] != "gpt_oss" else {1}))
        )
        if written[0] == "torch_dist":
            dist_ranks(
                root / "ranks", stored(root / "mg/iter_0000001"), ep, etp, data.draw(st.booleans())
            )
        else:
            kinds = ["sequential", "te", "grouped"]  # the last knows no biases
            kind = data.draw(
                st.sampled_from(kinds[: 2 if config["model_type"] == "gpt_oss" else 3])
            )
            torch_ranks(root / "ranks", config, weights, (tp, pp, ep, etp), kind)
        assert same(weights_of(open_weights(root / "ranks", config)), weights)
    shutil.rmtree(root)


def dist_ranks(folder: Path, tensors: dict[str, Any], ep: int, etp: int, singleton: bool) -> None:
    """Write tensors of a torch_dist folder by torch's own writer, as the ranks of expert and
    expert-tensor parallelism share them; `singleton` as Megatron does with singleton_local_shards:
    a key for each layer, expert and half.
    """
    from torch.distributed.checkpoint import planner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    items: list[list[Any]] = [[] for _ in range(ep * etp)]
    data: dict[Any, torch.Tensor] = {}
    metadata: dict[str, Any] = {}

    def put(
        rank: int, key: str, part: torch.Tensor, offsets: tuple[int, ...], size: tuple[int, ...]
    ) -> None:
        chunk = ChunkStorageMetadata(torch.Size(offsets), part.shape)
        index, properties = (
            MetadataIndex(key, chunk.offsets),
            TensorProperties.create_from_tensor(part),
        )
        about = planner.TensorWriteData(chunk, properties, torch.Size(size))
        items[rank].append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=about))
        metadata.setdefault(
            key, TensorStorageMetadata(properties, torch.Size(size), [])
        ).chunks.append(chunk)
        data[key, chunk.offsets] = part.clone()

    for key, whole in tensors.items():
        if whole is None:
            continue
        own = ".experts.experts." in key
        depth = own + ("layers." in key and not re.search(r"layers\.\d", key))
        gated = re.search(r"\.linear_fc1\.(weight|bias)$", key) is not None
        for index in product(*map(range, whole.shape[:depth])):
            part, name, numbers = whole[index], key, list(index)
            if singleton and depth > own:
                name = name.replace("layers.", f"layers.{numbers.pop(0)}.")
            if singleton and own:
                name = name.replace("experts.experts.", f"experts.experts.{numbers.pop(0)}.")
            lead = () if singleton else tuple(whole.shape[:depth])
            first, cuts, dim = (
                (index[-1] * ep // whole.shape[depth - 1] * etp if own else 0),
                etp if own else 1,
                0,
            )
            dim = 1 if own and key.endswith("linear_fc2.weight") else 0
            cuts = cuts if gated or dim else 1
            for half, piece in enumerate(part.chunk(2) if gated else (part,)):
                size, ended = (
                    (piece.shape, name + "_" + "wv"[half])
                    if singleton and gated
                    else (part.shape, name)
                )
                for e, cut in enumerate(piece.chunk(cuts, dim)):
                    rows = e * cut.shape[dim] + (
                        half * len(piece) if size == part.shape and gated else 0
                    )
                    offsets = tuple(rows if i == dim else 0 for i in range(part.dim()))
                    ones = [1] * len(lead)
                    put(
                        first + e,
                        ended,
                        cut.reshape(*ones, *cut.shape),
                        (*numbers, *offsets),
                        (*lead, *size),
                    )

    class Planner:
        def resolve_data(self, item: Any) -> torch.Tensor:
            return data[item.index.fqn, item.index.offset]

    import torch.distributed.checkpoint as dcp

    (folder / "iter_0000007").mkdir(parents=True)
    writer = dcp.FileSystemWriter(folder / "iter_0000007")
    writer.set_up_storage_writer(True)
    plans = writer.prepare_global_plan([planner.SavePlan(rank) for rank in items])
    results = [writer.write_data(plan, Planner()).wait() for plan in plans]  # type: ignore[arg-type]
    writer.finish(Metadata(metadata), results)
    (folder / "iter_0000007/metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def torch_ranks(
    folder: Path,
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    mesh: tuple[int, int, int, int],
    kind: str,
) -> None:
    """Write files as Megatron-LM does with --ckpt-format torch on (tp, pp, ep, etp), for each way
    to compute experts.

    Tensors other than experts' come from our own writer, which other tests compare with Megatron.
    """
    tp, pp, ep, etp = mesh
    plain, shape = folder.with_name("plain"), ModelShape.from_config(config)
    save_file(weights, folder.with_name("hf") / "model.safetensors")
    convert(folder.with_name("hf"), plain, to=Megatron(form="torch", tp=tp, pp=pp, vocab_divisor=4))
    assert shape.experts is not None
    each, per = shape.experts.count // ep, shape.layers // pp
    pairs = {(rank % tp, rank // etp % ep) for rank in range(lcm(tp, ep * etp))}
    for (t, e), p in product(sorted(pairs), range(pp)):
        suffix = (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
        rank = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
        held = torch.load(plain / "iter_0000001" / rank / "model_optim_rng.pt", weights_only=False)
        model = {k: v for k, v in held["model"].items() if ".experts." not in k}
        for layer in range(per):
            if shape.by_layer[p * per + layer].experts is None:
                continue
            own = [
                of_expert(weights, shape, p * per + layer, j)
                for j in range(e * each, (e + 1) * each)
            ]
            part = t % etp
            for leaf in own[0]:
                linears = [expert[leaf] for expert in own]
                first = [
                    torch.cat([gate.chunk(etp)[part], up.chunk(etp)[part]])
                    for gate, up, _ in linears
                ]
                second = [
                    down.chunk(etp if leaf == "weight" else 1, -1)[part] for _, _, down in linears
                ]
                model |= named_experts(
                    f"decoder.layers.{layer}.mlp.experts.", first, second, kind, leaf
                )
        file = folder / "iter_0000007" / f"mp_rank_{t:02d}{suffix}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({**held, "model": model}, file)


def of_expert(
    weights: dict[str, torch.Tensor], shape: ModelShape, layer: int, j: int
) -> dict[str, tuple[torch.Tensor, ...]]:
    """Gate, up and down of an expert with the outputs first: `weight`, and `bias` if it has one."""
    names = shape.rules.experts
    assert names is not None
    at = f"model.layers.{layer}.{names.path}"
    if not names.stacked:
        return {"weight": tuple(weights[f"{at}.{j}.{part}.weight"] for part in names.parts)}
    both, down = (weights[f"{at}.{name}_proj"][j].T for name in ("gate_up", "down"))
    biases, last = (weights[f"{at}.{name}_proj_bias"][j] for name in ("gate_up", "down"))
    return {"weight": (both[::2], both[1::2], down), "bias": (biases[::2], biases[1::2], last)}


def named_experts(
    path: str, first: list[torch.Tensor], second: list[torch.Tensor], kind: str, leaf: str
) -> dict[str, Any]:
    """The experts of a rank and layer by Megatron's names: of SequentialMLP, GroupedMLP or
    TEGroupedMLP.
    """
    if kind == "grouped":
        hidden = len(second[0])
        stack = [torch.stack([one.T for one in both]).contiguous() for both in (first, second)]
        return {
            f"{path}weight1": stack[0].view(hidden, -1),
            f"{path}weight2": stack[1].view(-1, hidden),
        }
    name = "local_experts.{0}.linear_fc{1}.{2}" if kind == "sequential" else "linear_fc{1}.{2}{0}"
    return {
        path + name.format(j, n, leaf): one.clone()
        for n, both in ((1, first), (2, second))
        for j, one in enumerate(both)
    }


def packed(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """A gpt-oss of random mxfp4; returns the bf16 weights that transformers makes of it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(1)
    files, dense = {}, {}
    for name, tensor in random_weights({**GPT_OSS, **changes}, torch.bfloat16).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            files[name] = dense[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        sizes = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*sizes, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(0, 253, sizes, dtype=torch.uint8, generator=generator)
        files |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    folder.mkdir()
    save_file(files, folder / "model.safetensors", {"format": "pt"})
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(
        json.dumps({**GPT_OSS, "quantization_config": quantized, **changes})
    )
    return dense


def bits(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights as integers, as some of a random mxfp4 are -0."""
    return {
        name: one.view(torch.int32 if one.dtype == torch.float32 else torch.int16)
        for name, one in weights.items()
    }


def test_mxfp4_is_widened_as_transformers_does_it(tmp_path: Path) -> None:
    dense, said = packed(tmp_path / "hf"), list[str]()
    source = open_weights(tmp_path / "hf")
    assert same(bits(weights_of(source)), bits(dense))
    name = "model.layers.0.mlp.experts.down_proj"
    window = [(1, 3), (5, 31), (7, 60)]  # not at the ends of groups of 32
    assert torch.equal(source.window(name, window), dense[name][1:3, 5:31, 7:60])
    convert(tmp_path / "hf", tmp_path / "bf16", to=HuggingFace(), say=said.append)
    assert same(bits(load_file(tmp_path / "bf16/model.safetensors")), bits(dense))
    assert "quantization_config" not in json.loads((tmp_path / "bf16/config.json").read_text())
    assert said[0].startswith("2 tensors are mxfp4 in ")
    convert(tmp_path / "hf", tmp_path / "native", to=Native(tp=2, dtype="fp32"), say=said.append)
    wide = {name: one.float() for name, one in dense.items()}
    assert same(bits(weights_of(open_weights(tmp_path / "native"))), bits(wide))
    assert "mxfp4" in remarks(read_config(tmp_path / "hf"), 8)[0]


@pytest.mark.parametrize("form", ["torch_dist", pytest.param("torch", marks=pytest.mark.full)])
def test_gpt_oss_has_its_experts_one_by_one_in_megatron(tmp_path: Path, form: Any) -> None:
    """Gate above up, outputs first; the sinks and biases by their names in Megatron-core."""
    dense = packed(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "mg", to=Megatron(form=form, vocab_divisor=8))
    if form == "torch_dist":
        held, at = stored(tmp_path / "mg/iter_0000001"), "decoder.layers"
    else:
        held = torch.load(
            tmp_path / "mg/iter_0000001/mp_rank_00/model_optim_rng.pt", weights_only=False
        )["model"]
        held, at = {k: v[None] for k, v in held.items() if v is not None}, "decoder.layers.0"
    ours = {name.removeprefix("model.layers.0."): one for name, one in dense.items()}
    both, down = (ours[f"mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
    for j in range(3):
        expert = (
            (lambda name, j=j: held[f"{at}.mlp.experts.experts.{name}"][0, j])
            if form == "torch_dist"
            else (lambda name, j=j: held[f"{at}.mlp.experts.local_experts.{j}.{name}"][0])
        )
        assert torch.equal(
            expert("linear_fc1.weight"), torch.cat([both[j].T[::2], both[j].T[1::2]])
        )
        assert torch.equal(expert("linear_fc2.weight"), down[j].T)
        bias = ours["mlp.experts.gate_up_proj_bias"][j]
        assert torch.equal(expert("linear_fc1.bias"), torch.cat([bias[::2], bias[1::2]]))
        assert torch.equal(expert("linear_fc2.bias"), ours["mlp.experts.down_proj_bias"][j])
    for name, own in (
        ("self_attention.core_attention.softmax_offset", "self_attn.sinks"),
        ("mlp.router.bias", "mlp.router.bias"),
        ("mlp.router.weight", "mlp.router.weight"),
    ):
        assert torch.equal(held[f"{at}.{name}"][0], ours[own])
    convert(tmp_path / "mg", tmp_path / "back", to=HuggingFace())
    assert same(bits(load_file(tmp_path / "back/model.safetensors")), bits(dense))


def test_experts_with_biases_are_whole_on_each_tensor_parallel_rank(tmp_path: Path) -> None:
    """As Megatron-core has them, so tp need not divide their width."""
    hf = hf_folder(tmp_path / "hf", {**GPT_OSS, "intermediate_size": 3})
    convert(hf, tmp_path / "mg", to=Megatron(form="torch", tp=2, vocab_divisor=8))
    assert same(weights_of(open_weights(tmp_path / "mg")), load_file(hf / "model.safetensors"))
    with pytest.raises(
        ConfigError, match="tp = 2 does not divide the 3 units of the model's experts"
    ):
        convert(
            hf_folder(tmp_path / "qwen", {**QWEN, "moe_intermediate_size": 3}),
            tmp_path / "out",
            to=Megatron(tp=2),
        )


def test_damaged_mxfp4_is_refused_by_what_is_wrong(tmp_path: Path) -> None:
    packed(tmp_path / "hf")
    file, name = tmp_path / "hf/model.safetensors", "model.layers.0.mlp.experts.down_proj"
    good = load_file(file)
    save_file({k: v for k, v in good.items() if k != f"{name}_scales"}, file, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"has .*_blocks and no .*down_proj_scales; copy the file"
    ):
        open_weights(tmp_path / "hf")
    save_file(
        {**good, f"{name}_scales": good[f"{name}_scales"][:, :1].clone()}, file, {"format": "pt"}
    )
    with pytest.raises(CheckpointError, match="copy the files again"):
        open_weights(tmp_path / "hf")
    save_file(
        {**good, f"{name}_scales": torch.full_like(good[f"{name}_scales"], 255)},
        file,
        {"format": "pt"},
    )
    with pytest.raises(CheckpointError, match="a scale of mxfp4 is 255"):
        convert(tmp_path / "hf", tmp_path / "out", to=HuggingFace())


def test_fp8_is_refused_with_a_remedy_that_transformers_has(tmp_path: Path) -> None:
    hf_folder(tmp_path / "hf", QWEN)
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    weights = load_file(tmp_path / "hf/model.safetensors")
    weights |= {name: weights[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    save_file(weights, tmp_path / "hf/model.safetensors", {"format": "pt"})
    (tmp_path / "hf/config.json").write_text(
        json.dumps({**QWEN, "quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(
        CheckpointError, match=r"names fp8.*FineGrainedFP8Config\(dequantize=True\)"
    ):
        open_weights(tmp_path / "hf")


@pytest.mark.parametrize(
    ("config", "tp", "pp"),
    [
        pytest.param(
            {**GPT_OSS, "num_hidden_layers": 2, "num_local_experts": 4}, 2, 2, id="gpt_oss"
        ),
        pytest.param(QWEN, 2, 1, id="qwen3_moe", marks=pytest.mark.full),
        pytest.param(MIXTRAL, 1, 2, id="mixtral", marks=pytest.mark.full),
    ],
)
def test_a_folder_of_transformers_comes_back_with_its_logits(
    tmp_path: Path, config: dict[str, Any], tp: int, pp: int
) -> None:
    import transformers

    torch.manual_seed(0)
    loader: Any = transformers.AutoModelForCausalLM
    loader.from_config(transformers.AutoConfig.for_model(**config)).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "native", to=Native(tp=tp, pp=pp))
    convert(tmp_path / "native", tmp_path / "again", to=HuggingFace())
    assert same(
        load_file(tmp_path / "again/model.safetensors"),
        load_file(tmp_path / "hf/model.safetensors"),
    )
    ids = torch.arange(24).view(2, 12) % config["vocab_size"]
    with torch.no_grad():
        one, other = (
            loader.from_pretrained(tmp_path / name)(input_ids=ids).logits
            for name in ("hf", "again")
        )
    assert torch.equal(one, other)


@pytest.mark.parametrize("config", [QWEN, MIXTRAL], ids=["qwen3_moe", "mixtral"])
def test_a_state_dict_of_transformers_is_read_expert_by_expert(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "bin").mkdir()
    shutil.copy(tmp_path / "hf/config.json", tmp_path / "bin")
    torch.save(model.state_dict(), tmp_path / "bin/pytorch_model.bin")
    assert "model.layers.0.mlp.experts.gate_up_proj" in model.state_dict()
    assert same(
        weights_of(open_weights(tmp_path / "bin")), load_file(tmp_path / "hf/model.safetensors")
    )


def test_other_experts_in_files_than_in_config_json_are_told(tmp_path: Path) -> None:
    hf = hf_folder(tmp_path / "hf", QWEN)
    for count, remedy in ((6, r"to 4 if these are all, else copy"), (3, r"to 4\.")):
        (hf / "config.json").write_text(json.dumps({**QWEN, "num_experts": count}))
        save_file(weights_with_router(count), hf / "model.safetensors", {"format": "pt"})
        with pytest.raises(
            CheckpointError,
            match=f"has 4 experts in a layer, and its config.json says {count}.*{remedy}",
        ):
            open_weights(hf)
    dense = {**LLAMA, "model_type": "qwen3", "head_dim": 4, "num_hidden_layers": 2}
    (hf / "config.json").write_text(json.dumps(dense))
    with pytest.raises(
        CheckpointError,
        match=r"holds a mixture of experts, and its config\.json is of a qwen3 model",
    ):
        open_weights(hf)
    weights = random_weights(QWEN)
    del weights["model.layers.1.mlp.experts.2.up_proj.weight"]
    (hf / "config.json").write_text(json.dumps(QWEN))
    save_file(weights, hf / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks the parameter .*experts\.2\.up_proj.weight"):
        open_weights(hf)


def weights_with_router(count: int) -> dict[str, torch.Tensor]:
    """Weights of four experts with a router of `count`."""
    routers = {
        n: w
        for n, w in random_weights({**QWEN, "num_experts": count}).items()
        if n.endswith("mlp.gate.weight")
    }
    return random_weights(QWEN) | routers


def test_faults_of_experts_are_named(tmp_path: Path) -> None:
    hf = hf_folder(tmp_path / "hf", QWEN)
    weights = load_file(hf / "model.safetensors")
    torch_ranks(tmp_path / "ranks", QWEN, weights, (1, 1, 2, 1), "sequential")
    about = inspect(tmp_path / "ranks", QWEN)
    assert (about.topology, about.experts, about.experts_per_token) == (
        {"tp": 1, "pp": 1, "ep": 2},
        4,
        2,
    )
    assert (
        about.active_parameters
        == about.parameters - sum(weights[n].numel() for n in weights if "experts" in n) // 2
    )
    dense = {**LLAMA, "model_type": "qwen3", "head_dim": 4, "num_hidden_layers": 2}
    with pytest.raises(
        CheckpointError, match=r"a mixture of experts, and config.json is of a qwen3 model"
    ):
        open_weights(tmp_path / "ranks", dense)
    with pytest.raises(
        CheckpointError,
        match=r"2 experts a layer on each of 2 expert-parallel ranks, config.json 2",
    ):
        open_weights(tmp_path / "ranks", {**QWEN, "num_experts": 2})
    shutil.rmtree(tmp_path / "ranks/iter_0000007/mp_rank_00_001")
    with pytest.raises(CheckpointError, match="lacks the file of expert-parallel rank 1; copy"):
        open_weights(tmp_path / "ranks", QWEN)
    convert(hf, tmp_path / "mg", to=Megatron())
    with pytest.raises(
        CheckpointError, match=r"of a mixture of experts, and config.json is of a qwen3 model"
    ):
        open_weights(tmp_path / "mg", dense)
    with pytest.raises(
        CheckpointError,
        match=r"router.weight has shape \[4, 16\], and config.json asks for \[8, 16\]",
    ):
        open_weights(tmp_path / "mg", {**QWEN, "num_experts": 8})
    hf_folder(tmp_path / "unbiased", {**GPT_OSS, "attention_bias": False})
    with pytest.raises(
        CheckpointError, match="attention_bias false, and Megatron-core gives biases to attention"
    ):
        convert(tmp_path / "unbiased", tmp_path / "out", to=Megatron())
    with pytest.raises(CheckpointError, match="not converted from or to Nxd"):
        convert(hf, tmp_path / "nxd", to=Nxd(tp=2))
    assert verify(tmp_path / "mg") == len(weights)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    save_file({**weights, name: weights[name] + 1}, hf / "model.safetensors", {"format": "pt"})
    assert [one.name for one in diff(tmp_path / "mg", hf)] == [name]


class Float8Tensor:
    """Pickles as a tensor that Transformer Engine keeps in fp8."""

    def __reduce__(self) -> Any:
        return Float8Tensor, ()


def test_experts_left_behind_or_quantized_and_parts_of_other_families_are_named(
    tmp_path: Path,
) -> None:
    hf = hf_folder(tmp_path / "hf", QWEN)
    torch_ranks(
        tmp_path / "ranks", QWEN, load_file(hf / "model.safetensors"), (1, 1, 2, 1), "sequential"
    )
    file = tmp_path / "ranks/iter_0000007/mp_rank_00_001/model_optim_rng.pt"
    held, expert = (
        torch.load(file, weights_only=False),
        "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight",
    )
    for key, value, said in (
        (
            expert,
            None,
            (
                r"lacks expert 3 \(linear_fc1.weight\) of decoder.layers.0.mlp.experts, which has"
                r" more"
            ),
        ),
        (expert, Float8Tensor(), r"1.linear_fc1.weight is stored as fp8 of Transformer Engine"),
        (
            expert,
            held["model"][expert].to(torch.float8_e4m3fn),
            r"3.linear_fc1.weight is stored as float8_e4m3fn",
        ),
        (
            "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
            torch.ones(1),
            "of shared experts, which a qwen3_moe model",
        ),
        ("decoder.layers.0.mlp.router.expert_bias", torch.ones(4), "choice of experts moves"),
    ):
        model = {k: v for k, v in {**held["model"], key: value}.items() if v is not None}
        torch.save({**held, "model": model}, file)
        with pytest.raises(CheckpointError, match=said):
            open_weights(tmp_path / "ranks", QWEN)
    convert(hf, tmp_path / "mg", to=Megatron())
    (tmp_path / "mg" / MANIFEST).unlink()
    metadata = tmp_path / "mg/iter_0000001/.metadata"
    about = pickle.loads(metadata.read_bytes())
    experts = about.state_dict_metadata["decoder.layers.mlp.experts.experts.linear_fc2.weight"]
    experts.chunks = [chunk for chunk in experts.chunks if tuple(chunk.offsets[:2]) != (1, 2)]
    metadata.write_bytes(pickle.dumps(about))
    with pytest.raises(
        CheckpointError,
        match=r"lacks expert 2 \(linear_fc2.weight\) of decoder.layers.1.mlp.experts,",
    ):
        open_weights(tmp_path / "mg")


def sparse(folder: Path, config: dict[str, Any]) -> Path:
    """A folder whose weights are a hole in a file; experts of gpt-oss are mxfp4."""
    folder.mkdir()
    header, at = {}, 0
    for spec in ModelShape.from_config(config).specs:
        tensors = {spec.name: ("BF16", spec.shape, 2)}
        if spec.is_stacked and not spec.name.endswith("_bias"):
            experts, inputs, outputs = spec.shape
            sizes = (experts, outputs, inputs // 32)
            tensors = {
                f"{spec.name}_blocks": ("U8", (*sizes, 16), 1),
                f"{spec.name}_scales": ("U8", sizes, 1),
            }
        for name, (kind, shape, width) in tensors.items():
            end = at + width * prod(shape)
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
            at = end
    content = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + at)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    return folder


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "how"),
    [
        (QWEN3_30B, "Megatron()"),
        (QWEN3_30B, "Native()"),
        (QWEN3_30B, "HuggingFace()"),
        (OSS_20B, "HuggingFace()"),
        (OSS_20B, "Megatron()"),
    ],
)
def test_a_model_of_published_size_is_converted_within_256_mib(
    tmp_path: Path, config: dict[str, Any], how: str
) -> None:
    """Up to the first 1.5 GB of its output: all is planned before the first byte, and the rest is
    alike.
    """
    # On a file system that reserves no blocks: 58 GB are more than a machine of tests has to spare.
    code = (
        "import sys; from smtrain import *; from smtrain.worker.checkpoint import reserving;"
        " reserving._fallocate = lambda: None; convert(sys.argv[1], sys.argv[2], to={}, say=lambda"
        " line: None)"
    )
    source, out, peak = sparse(tmp_path / "hf", config), tmp_path / "out", 0
    command = [sys.executable, "-c", code.format(how), str(source), str(out / "model")]
    with subprocess.Popen(command) as process:
        written = 0
        while process.poll() is None and written < 1.5e9:
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak = max(
                [peak, *(int(line.split()[1]) for line in status if line.startswith("RssAnon"))]
            )
            written = sum(file.stat().st_blocks * 512 for file in out.rglob("*") if file.is_file())
            time.sleep(0.05)
        process.terminate()
    shutil.rmtree(out)
    print(f"{how}: {peak / 1024:.0f} MiB after {written / 1e9:.1f} GB")
    assert written >= 1.5e9
    assert peak < 256 * 1024
