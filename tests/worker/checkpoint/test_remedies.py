"""Model folders with a fault: the sentence gives a remedy, and applying it leads to no second
fault.

A remedy is applied from the words of the sentence by `apply`, which knows one action for each way
of putting it.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from smtrain.core.errors import CheckpointError, DataError
from smtrain.core.model.remedies import folder_misfit, misfit
from smtrain.core.suggest import near_path
from smtrain.tools.chat.resolve_model import find
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.huggingface.folder import HFSource
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.summary import diff, inspect
from smtrain.worker.checkpoint.targets import HuggingFace, Native, Nxd, make_target
from smtrain.worker.data.tokenizer import tokenizer_json
from tests.worker.checkpoint.folders import (
    GPT2,
    LLAMA,
    NEOX,
    hf_folder,
    random_weights,
    same,
    weights_of,
)

WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
SHARDS = [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{7:064d}\nsize 4976698672\n"
PAGE = "<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"
Change = Callable[[Path], object]


def with_config(changes: dict[str, Any], drop: tuple[str, ...] = ()) -> Change:
    def change(folder: Path) -> None:
        content = {**json.loads((folder / CONFIG).read_text()), **changes}
        (folder / CONFIG).write_text(
            json.dumps({k: v for k, v in content.items() if k not in drop})
        )

    return change


def with_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def changed(folder: Path) -> None:
        held = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
        change(held)
        save_file(held, folder / WEIGHTS)

    return changed


def text(name: str, content: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(
        content.encode() if isinstance(content, str) else content
    )


def bytes_of(name: str, change: Callable[[bytes], bytes]) -> Change:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def instead(*names: str) -> Change:
    """Replace the weights with these files."""

    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"GGUF" if name.endswith(".gguf") else b"x")

    return change


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def as_bin(
    make: Callable[[dict[str, torch.Tensor]], Any], name: str = "pytorch_model.bin"
) -> Change:
    def change(folder: Path) -> None:
        held = make(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).unlink()
        torch.save(held, folder / name)

    return change


def quantized(suffix: str, dtype: torch.dtype, *more: str) -> Change:
    """Store the attention inputs in another type under another name, with their scales."""

    def change(held: dict[str, torch.Tensor]) -> None:
        for name in [name for name in held if name.endswith("q_proj.weight")]:
            whole = held.pop(name)
            stem = name.removesuffix(".weight")
            held[stem + suffix] = (
                whole.to(dtype) if dtype.is_floating_point else whole.to(torch.int32).to(dtype)
            )
            held.update({stem + other: torch.ones(2) for other in more})

    return with_tensors(change)


def renamed(rule: Callable[[str], str]) -> Change:
    return with_tensors(
        lambda held: held.update({rule(name): held.pop(name) for name in list(held)})
    )


def biases(*modules: str) -> Change:
    sizes = {
        "q_proj": 16,
        "k_proj": 8,
        "v_proj": 8,
        "o_proj": 16,
        "gate_proj": 24,
        "up_proj": 24,
        "down_proj": 16,
    }
    part = {"gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}
    return with_tensors(
        lambda held: held.update(
            {
                f"model.layers.{i}.{part.get(m, 'self_attn')}.{m}.bias": torch.zeros(sizes[m])
                for i in range(3)
                for m in modules
            }
        )
    )


def distributed(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    held = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is told that it is alone, and says so
        dcp.save({"model": held}, checkpoint_id=str(folder / "pytorch_model_fsdp_0"), no_dist=True)


def without_metadata(folder: Path) -> None:
    distributed(folder)
    (folder / "pytorch_model_fsdp_0/.metadata").rename(folder.parent / "metadata")


def in_a_subfolder(folder: Path) -> None:
    (folder / "checkpoint-500").mkdir()
    for name in (WEIGHTS, CONFIG):
        (folder / name).rename(folder / "checkpoint-500" / name)


def of_peft(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / CONFIG).unlink()
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2})
    )
    stem = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    save_file(
        {f"{stem}A.weight": torch.ones(2, 16), f"{stem}B.weight": torch.ones(16, 2)},
        folder / "adapter_model.safetensors",
    )


class Whole(torch.nn.Module):
    """Save a model of a class that only its own program knows."""


SHARDED = "sharded"
TIED = "tied"
FAULTS: dict[str, tuple[Change, str]] = {
    "lfs weights": (text(WEIGHTS, LFS), "is a Git LFS pointer of a file of 4,976,698,672 bytes"),
    "lfs config": (text(CONFIG, LFS), "config.json is a Git LFS pointer"),
    "lfs index, sharded": (text(INDEX, LFS), "index.json is a Git LFS pointer"),
    "lfs shard, sharded": (text(SHARDS[1], LFS), "00002-of-00003.safetensors is a Git LFS pointer"),
    "lfs bin": (
        both(as_bin(dict), text("pytorch_model.bin", LFS)),
        r"pytorch_model\.bin is a Git LFS pointer",
    ),
    "lfs manifest": (text("manifest.json", LFS), r"manifest\.json is a Git LFS pointer"),
    "page weights": (text(WEIGHTS, PAGE), r"is a web page \(HTML\)"),
    "page config": (text(CONFIG, PAGE), r"config\.json is a web page"),
    "page index, sharded": (text(INDEX, "\n  " + PAGE), r"index\.json is a web page"),
    "answer weights": (
        text(WEIGHTS, '{"error":"Access to model is restricted"}'),
        "is a server's answer",
    ),
    "answer config": (text(CONFIG, "Entry not found"), r"a server's answer \(Entry not found\)"),
    "answer xml": (
        text(WEIGHTS, "<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>"),
        "server's answer",
    ),
    "empty weights": (text(WEIGHTS, ""), r"model\.safetensors is empty"),
    "empty config": (text(CONFIG, ""), r"config\.json is empty"),
    "empty bin": (
        both(as_bin(dict), text("pytorch_model.bin", "")),
        r"pytorch_model\.bin is empty",
    ),
    "zeros": (text(WEIGHTS, bytes(5000)), "has only zero bytes"),
    "cut weights": (
        bytes_of(WEIGHTS, lambda data: data[:-100]),
        r"is not a complete safetensors file \(it has",
    ),
    "cut header": (bytes_of(WEIGHTS, lambda data: data[:60]), "is not a complete safetensors file"),
    "cut shard, sharded": (
        bytes_of(SHARDS[2], lambda data: data[:-7]),
        "00003-of-00003.safetensors is not a complete",
    ),
    "cut bin": (
        both(as_bin(dict), bytes_of("pytorch_model.bin", lambda data: data[:-50])),
        "not a complete torch",
    ),
    "more bytes": (
        bytes_of(WEIGHTS, lambda data: data + b"more"),
        "is not a complete safetensors file",
    ),
    "packed": (bytes_of(WEIGHTS, gzip.compress), "is packed with gzip"),
    "torch as safetensors": (as_bin(dict, WEIGHTS), "is a file of torch.save, not of safetensors"),
    "safetensors as bin": (
        lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"),
        "is a safetensors file, not",
    ),
    "gguf as safetensors": (text(WEIGHTS, b"GGUF\3\0\0\0" + bytes(100)), "is a GGUF file"),
    "a shard missing, sharded": (
        lambda f: (f / SHARDS[0]).unlink(),
        "lacks 1 of its 3 files of weights",
    ),
    "no index and a shard missing, sharded": (
        lambda f: [(f / INDEX).unlink(), (f / SHARDS[1]).unlink()],
        r"lacks 1 of its 3 files of weights \(model-00002-of-00003\.safetensors\)",
    ),
    "index cut, sharded": (bytes_of(INDEX, lambda data: data[:-9]), r"index\.json is not JSON"),
    "index without a map, sharded": (text(INDEX, "{}"), "is not an index of weights"),
    "index a list, sharded": (text(INDEX, "[1]"), "is not a JSON object"),
    "index to the wrong shard, sharded": (
        bytes_of(INDEX, lambda data: data.replace(b"model-00002", b"model-00001")),
        "which model.safetensors.index.json says it has",
    ),
    "no config": (
        lambda f: (f / CONFIG).unlink(),
        r"has no config\.json; copy the model's into it",
    ),
    "config cut": (bytes_of(CONFIG, lambda data: data[:-3]), r"config\.json is not JSON"),
    "config with a comma": (
        bytes_of(CONFIG, lambda data: data[:-1] + b",}"),
        r"config\.json is not JSON",
    ),
    "config with a mark": (
        bytes_of(CONFIG, lambda data: b"\xef\xbb\xbf" + data),
        "begins with a byte-order mark",
    ),
    "config in UTF-16": (
        bytes_of(CONFIG, lambda data: data.decode().encode("utf-16")),
        "is UTF-16",
    ),
    "config a list": (text(CONFIG, "[]"), "is not a JSON object"),
    "no hidden_size": (with_config({}, ("hidden_size",)), "has no hidden_size"),
    "no layers": (with_config({}, ("num_hidden_layers",)), "has no num_hidden_layers"),
    "no vocabulary": (with_config({"vocab_size": None}), "has no vocab_size"),
    "no type but a class": (
        with_config({"architectures": ["LlamaForCausalLM"]}, ("model_type",)),
        "has no model_type: add model_type: llama",
    ),
    "no type": (with_config({}, ("model_type",)), "has no model_type: add the one of the model"),
    "layers too many": (
        with_config({"num_hidden_layers": 5}),
        "has 3 layers, and its config.json says",
    ),
    "layers too few": (
        with_config({"num_hidden_layers": 2}),
        "has 3 layers, and its config.json says 2",
    ),
    "a layer missing": (
        with_tensors(lambda held: [held.pop(n) for n in list(held) if ".layers.1." in n]),
        "has no weights of layer 1",
    ),
    "another vocabulary": (with_config({"vocab_size": 38}), r"set vocab_size: 40 in config\.json"),
    "another width of the MLP": (
        with_config({"intermediate_size": 32}),
        r"set intermediate_size: 24 in config\.json",
    ),
    "another width": (
        with_config({"hidden_size": 32}),
        "take weights and config.json from the same model",
    ),
    "other heads": (
        with_config({"num_key_value_heads": 4}),
        "take weights and config.json from the same model",
    ),
    "tied and is not": (
        with_config({"tie_word_embeddings": True}),
        r"set tie_word_embeddings: false in config\.json",
    ),
    "not tied and is, tied": (
        with_config({"tie_word_embeddings": False}),
        r"set tie_word_embeddings: true",
    ),
    "biases of attention": (
        biases("q_proj", "k_proj", "v_proj", "o_proj"),
        "set attention_bias: true there",
    ),
    "biases of qwen2": (
        biases("q_proj", "k_proj", "v_proj"),
        r"set model_type: qwen2 in config\.json",
    ),
    "no biases of attention": (
        with_config({"attention_bias": True}),
        r"set attention_bias: false in config\.json",
    ),
    "biases of the MLP": (biases("gate_proj", "up_proj", "down_proj"), "set mlp_bias: true there"),
    "no biases of the MLP": (
        with_config({"mlp_bias": True}),
        r"set mlp_bias: false in config\.json",
    ),
    "a stale quantization": (
        with_config({"quantization_config": {"quant_method": "fp8"}}),
        "take quantization_config out of config.json",
    ),
    "awq": (
        both(
            quantized(".qweight", torch.int32, ".qzeros", ".scales"),
            with_config({"quantization_config": {"quant_method": "awq", "bits": 4}}),
        ),
        "holds quantized weights",
    ),
    "gptq": (quantized(".qweight", torch.int32, ".g_idx", ".scales"), "holds quantized weights"),
    "fp8": (quantized(".weight", torch.float8_e4m3fn, ".weight_scale_inv"), "quantized weights"),
    "fp8 by its config": (
        both(
            quantized(".weight", torch.float8_e5m2),
            with_config({"quantization_config": {"quant_method": "fbgemm_fp8"}}),
        ),
        "q_proj.weight is float8_e5m2",
    ),
    "fp8 bin": (
        both(quantized(".weight", torch.float8_e4m3fn), as_bin(dict)),
        "quantized weights",
    ),
    "compressed-tensors": (
        quantized(".weight_packed", torch.int32, ".weight_scale"),
        "quantized weights",
    ),
    "bitsandbytes": (
        both(
            quantized(".weight", torch.uint8, ".weight.absmax", ".weight.quant_map"),
            with_config({"quantization_config": {"load_in_4bit": True}}),
        ),
        "bitsandbytes",
    ),
    "mxfp4": (quantized("_blocks", torch.uint8, "_scales"), "quantized weights"),
    "8 bits": (quantized(".weight", torch.int8, ".SCB"), "quantized weights"),
    "an adapter not merged": (
        with_tensors(
            lambda held: held.update(
                {"model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones(2, 16)}
            )
        ),
        "an unmerged adapter",
    ),
    "an adapter": (of_peft, "holds an adapter, not a model; merge it into its base"),
    "weights a link to nothing": (
        lambda f: [(f / WEIGHTS).unlink(), (f / WEIGHTS).symlink_to("../../blobs/4f3a")],
        r"is a link to \.\./\.\./blobs/4f3a, which is not there; copy the file itself",
    ),
    "config a link to nothing": (
        lambda f: [(f / CONFIG).unlink(), (f / CONFIG).symlink_to("../../blobs/4f3a")],
        r"config\.json is a link to",
    ),
    "an adapter without its config": (
        instead("adapter_model.safetensors"),
        r"without its adapter_config\.json",
    ),
    "a single tensor": (as_bin(lambda held: next(iter(held.values()))), "holds a single tensor"),
    "gguf": (instead("model-q4.gguf"), "holds a GGUF file of llama.cpp"),
    "a download that has not ended": (
        instead("model.safetensors.incomplete"),
        "a download that has not ended",
    ),
    "diffusers": (
        instead("model_index.json", "unet/diffusion_pytorch_model.bin"),
        "a pipeline of diffusers",
    ),
    "a trainer's state": (
        instead("optimizer.pt", "scheduler.pt", "rng_state.pth"),
        "the state of a trainer without",
    ),
    "deepspeed": (
        instead(
            "latest", "zero_to_fp32.py", "global_step9/zero_pp_rank_0_mp_rank_00_optim_states.pt"
        ),
        "a sharded checkpoint of DeepSpeed ZeRO",
    ),
    "fsdp": (without_metadata, "without their .metadata"),
    "meta": (instead("consolidated.00.pth", "params.json"), "Meta's original form"),
    "mistral": (instead("consolidated.safetensors", "params.json"), "Mistral's own form"),
    "onnx": (instead("onnx/model.onnx"), "an ONNX export"),
    "tensorflow": (instead("tf_model.h5"), "weights of TensorFlow or Flax"),
    "one level too high": (in_a_subfolder, "is not the model's folder itself"),
    "another name": (
        lambda f: (f / WEIGHTS).rename(f / "weights.safetensors"),
        "safetensors files under other names",
    ),
    "another name of torch": (as_bin(dict, "final.pt"), "files of torch.save under other names"),
    "a whole object": (as_bin(lambda held: {**held, "extra": Whole()}), "holds more than tensors"),
    "two models": (
        as_bin(lambda held: {"model": held, "model_state_dict": held}),
        "holds several models",
    ),
    "numbers among tensors": (
        as_bin(lambda held: {**held, "epoch": 3}),
        "holds epoch and not only named tensors",
    ),
    "a head that scores": (
        with_tensors(lambda held: held.update({"score.weight": torch.ones(2, 16)})),
        "a head that classifies or scores",
    ),
    "a tensor too many": (
        with_tensors(lambda held: held.update({"extra": torch.ones(2)})),
        "holds extra, which is no parameter of a llama model",
    ),
    "a parameter twice": (
        with_tensors(
            lambda held: held.update({f"module.{name}": t.clone() for name, t in held.items()})
        ),
        "twice, as",
    ),
}


def good(folder: Path, kind: str) -> Path:
    """The publisher's folder, which a copy or `git lfs pull` brings."""
    hf_folder(folder, {**LLAMA, "tie_word_embeddings": kind == TIED})
    if kind == SHARDED:
        held = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        parts = {file: sorted(held)[n::3] for n, file in enumerate(SHARDS)}
        for file, names in parts.items():
            save_file({name: held[name] for name in names}, folder / file)
        weight_map = {name: file for file, names in parts.items() for name in names}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def value(word: str) -> Any:
    return json.loads(word) if word in ("true", "false") or word.isdecimal() else word


def apply(sentence: str, folder: Path, source: Path) -> Path:
    """Apply a sentence's remedy; returns the folder to use from then on.

    `source` is the publisher's folder.
    """
    whole = load_file(source / WEIGHTS) if (source / WEIGHTS).exists() else {}
    named: list[str] = re.findall(r"[\w.-]+\.(?:json|safetensors|bin)\b", sentence)
    if match := re.search(
        r"(?:set|add) (\w+): ([\w-]+?)(?= in config\.json| there|, by its)", sentence
    ):
        with_config({match[1]: value(match[2])})(folder)
    elif match := re.search(r"config\.json has no (\w+)", sentence):
        with_config({match[1]: json.loads((source / CONFIG).read_text())[match[1]]})(folder)
    elif match := re.search(r"take (\w+) out of config\.json", sentence):
        with_config({}, (match[1],))(folder)
    elif match := re.search(r"unpack it under the name (\S+?)\.?$", sentence):
        bytes_of(match[1], gzip.decompress)(folder)
    elif "save it as UTF-8" in sentence:
        encoding = "utf-16" if "UTF-16" in sentence else "utf-8-sig"
        bytes_of(CONFIG, lambda data: data.decode(encoding).encode())(folder)
    elif match := re.search(
        r"rename (?:it|the one that holds the weights) to ([\w.-]+?)\.?$", sentence
    ):
        old = next(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt"))
        old.rename(folder / match[1])
    elif match := re.search(r"itself; name (\S+?)\.?$", sentence):
        return Path(match[1])
    elif "--merge-adapter" in sentence:
        target = folder.parent / "merged"
        convert(source, target, to=HuggingFace(), merge_adapter=folder)
        return target
    elif "copy .metadata there too" in sentence:
        (folder.parent / "metadata").rename(folder / "pytorch_model_fsdp_0/.metadata")
    elif "zero_to_fp32.py" in sentence:
        torch.save(whole, folder / "pytorch_model.bin")  # what that script writes
    elif match := re.search(r"torch\.save\(torch\.load\('(\S+)'\)\['(\w+)'\], '\S+'\)", sentence):
        torch.save(torch.load(match[1])[match[2]], match[1])
    elif "torch.save(model.state_dict(), FILE)" in sentence:
        torch.save(whole, folder / "pytorch_model.bin")
    elif "delete it" in sentence or "delete the index" in sentence:
        (folder / named[0] if "delete it" in sentence else folder / INDEX).unlink()
    elif re.search(r"git lfs pull|copy (?:this|that|those|the|model|adapter_config)", sentence):
        if "adapter_config.json" in named:
            return source  # with it, "an adapter" above
        for name in [
            *named,
            *([WEIGHTS] if "the file" in sentence or "copy model" in sentence else []),
        ]:
            if (source / name).exists():
                (folder / name).unlink(missing_ok=True)
                shutil.copyfile(source / name, folder / name)
            elif name == "manifest.json":
                (folder / name).unlink()
            elif name == "pytorch_model.bin":
                torch.save(whole, folder / name)
    elif re.search(
        r"run the same download again|"
        r"(?:give|take) the (?:bf16|Hugging Face|folder of one|model that it was exported)|give the"
        r" folder of|"
        r"take weights and config\.json from the same model|save the model (?:without|with one|from"
        r" PyTorch)|"
        r"save it with peft|take the Hugging Face form",
        sentence,
    ):
        return source
    else:
        raise AssertionError(f"no remedy is known for: {sentence}")
    return folder


@pytest.mark.parametrize("name", FAULTS)
def test_doing_what_the_sentence_says_leads_to_no_second_fault(tmp_path: Path, name: str) -> None:
    change, words = FAULTS[name]
    kind = name.rpartition(", ")[2]
    source = good(tmp_path / "source", kind)
    folder = good(tmp_path / "model", kind)
    change(folder)
    with pytest.raises(CheckpointError, match=words) as error:
        convert(folder, tmp_path / "out", to=Nxd())
    sentence = str(error.value)
    assert "\n" not in sentence
    assert not re.search(r"fetch (?:the model|it) again", sentence)
    with pytest.raises(CheckpointError) as again:
        inspect(folder)
    assert str(again.value) == sentence, "all commands say the same"
    folder = apply(sentence, folder, source)
    convert(folder, tmp_path / "out", to=Nxd())
    assert inspect(tmp_path / "out").parameters == inspect(folder).parameters


def test_there_are_enough_of_them() -> None:
    assert len(FAULTS) >= 60


HARMLESS: dict[str, Change] = {
    "compiled": renamed(lambda name: f"_orig_mod.{name}"),
    "ddp": renamed(lambda name: f"module.{name}"),
    "compiled in ddp": renamed(lambda name: f"module._orig_mod.{name}"),
    "wrapped in model": renamed(lambda name: f"model.{name}"),
    "lightning": renamed(lambda name: f"model.model.{name}"),
    "peft merged": renamed(lambda name: f"base_model.model.{name}"),
    "compiled layers": renamed(lambda name: re.sub(r"(layers\.\d+)\.", r"\1._orig_mod.", name)),
    "checkpointed layers": renamed(
        lambda name: re.sub(r"(layers\.\d+)\.", r"\1._checkpoint_wrapped_module.", name)
    ),
    "fsdp": renamed(
        lambda name: f"_fsdp_wrapped_module.{name.replace('.self', '._fsdp_wrapped_module.self')}"
    ),
    "base model's names": renamed(lambda name: name.removeprefix("model.")),
    "state_dict": as_bin(lambda held: {"state_dict": held, "epoch": 3}),
    "model": as_bin(
        lambda held: {"model": held, "optimizer": {"state": {}, "param_groups": []}, "iteration": 7}
    ),
    "module": as_bin(lambda held: {"module": held}),
    "another key": as_bin(lambda held: {"net": held}),
    "state_dict with words": as_bin(
        lambda held: {"state_dict": {f"model.{n}": t for n, t in held.items()}}
    ),
    "nulls": with_config(
        dict.fromkeys(
            (
                "num_experts",
                "num_local_experts",
                "quantization_config",
                "rope_scaling",
                "sliding_window",
            )
        )
    ),
    "another program's manifest": text("manifest.json", '{"files": []}'),
    "no experts": with_config({"num_experts": 0, "num_local_experts": 1, "n_routed_experts": None}),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_number_is_read_by_every_command(tmp_path: Path, name: str) -> None:
    folder, whole = hf_folder(tmp_path / "model", LLAMA), hf_folder(tmp_path / "whole", LLAMA)
    HARMLESS[name](folder)
    assert same(weights_of(open_weights(folder)), random_weights(LLAMA))
    assert not list(diff(folder, whole))
    assert inspect(folder).kind == "hf"
    convert(folder, tmp_path / "nxd", to=Nxd(tp=2))
    convert(folder, tmp_path / "hf", to=HuggingFace())
    assert same(load_file(tmp_path / "hf" / WEIGHTS), random_weights(LLAMA))
    assert not list(diff(tmp_path / "nxd", whole))


@pytest.mark.parametrize("config", [NEOX, GPT2])
@pytest.mark.parametrize("before", ["module.", "_orig_mod.", "model."])
def test_words_in_front_are_left_out_for_every_family(
    tmp_path: Path, config: dict[str, Any], before: str
) -> None:
    folder = hf_folder(tmp_path / "model", config)
    renamed(lambda name: before + name)(folder)
    assert same(weights_of(HFSource(folder)), random_weights(config))


def test_shards_and_steps_that_are_pointers_are_named(tmp_path: Path) -> None:
    model = hf_folder(tmp_path / "model", LLAMA)
    for kind, file in (
        ("nxd", "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"),
        ("native", "step_00000000/manifest.json"),
        ("native", "step_00000000/model/tp000_pp000.safetensors"),
    ):
        path = tmp_path / kind / file
        shutil.rmtree(tmp_path / kind, ignore_errors=True)
        convert(model, tmp_path / kind, to=make_target(kind))  # type: ignore[arg-type]
        whole = path.read_bytes()
        path.write_text(LFS)
        with pytest.raises(CheckpointError, match=f"{path} is a Git LFS pointer"):
            inspect(tmp_path / kind)
        path.write_bytes(whole)
        inspect(tmp_path / kind)


@pytest.mark.parametrize("start", [b"\x80\2", b"\x80\5", b"\x1f\x8b", b"BZ", b"PK"])
def test_a_safetensors_file_is_known_by_its_header_and_not_by_its_length(start: bytes) -> None:
    """The first bytes are the length of the header, which may be those of a pickle or of gzip."""
    head = start + bytes(8 - len(start)) + b'{"__metadata__":{"format":"pt"}'
    assert misfit("model-00006-of-00007.safetensors", head, 5000) is None
    if start in (b"\x80\2", b"\x1f\x8b"):
        assert misfit("model.safetensors", start + head[2:8][::-1] + b"no header", 5000) is not None


def test_numbered_shards_do_without_an_index(tmp_path: Path) -> None:
    folder = good(tmp_path / "model", SHARDED)
    (folder / INDEX).unlink()
    assert same(weights_of(open_weights(folder)), random_weights(LLAMA))
    assert HFSource(folder).renamed, "transformers would not find them"


def test_tied_weights_may_be_saved_under_the_name_of_the_output_layer(tmp_path: Path) -> None:
    config = {**LLAMA, "tie_word_embeddings": True}
    folder = hf_folder(tmp_path / "model", config)
    with_tensors(
        lambda held: held.update({"lm_head.weight": held.pop("model.embed_tokens.weight")})
    )(folder)
    assert same(weights_of(open_weights(folder)), random_weights(config))
    assert HFSource(folder).renamed, "transformers would not find the embedding"


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
def test_a_file_of_the_folder_stands_for_the_folder(tmp_path: Path, file: str) -> None:
    model = hf_folder(tmp_path / "model", LLAMA)
    convert(model / file, tmp_path / "nxd", to=Nxd())
    (tmp_path / "nxd" / CONFIG).unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        inspect(tmp_path / "nxd")
    convert(tmp_path / "nxd", tmp_path / "hf", to=HuggingFace(), config=model / file)
    assert same(load_file(tmp_path / "hf" / WEIGHTS), random_weights(LLAMA))
    convert(model, tmp_path / "native", to=Native())
    step = tmp_path / "native" / "step_00000000"
    assert inspect(step / "manifest.json").step == 0


def test_a_dense_model_of_an_unknown_family_is_not_called_a_mixture(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", LLAMA)
    with_config({"model_type": "glm4", "num_experts": None, "num_experts_per_tok": 2})(folder)
    with pytest.raises(CheckpointError, match=r"model_type 'glm4', which smtrain cannot train"):
        inspect(folder)
    with_config({"model_type": "phimoe", "num_local_experts": 8})(folder)
    with pytest.raises(CheckpointError, match=r"'phimoe' \(a mixture of experts\)"):
        inspect(folder)


def test_an_archive_is_unpacked_and_never_the_same_path_proposed(tmp_path: Path) -> None:
    archive = tmp_path / "model.tar.gz"
    archive.write_bytes(gzip.compress(b"x" * 900))
    unpack = "archive; unpack it, as with `tar -xf`, and name the folder that then has config.json"
    assert near_path(archive) == ""
    assert near_path(tmp_path / "model.tar.g") == f"did you mean {archive}? "
    for open_ in (open_weights, find):
        with pytest.raises(CheckpointError, match=re.escape(unpack)):
            open_(str(archive))
        with pytest.raises(
            CheckpointError,
            match=r"holds an archive \(model.tar.gz\) and no config.json; unpack it",
        ):
            open_(str(tmp_path))
    with pytest.raises(DataError, match=re.escape(unpack)):
        tokenizer_json(archive)
    for names, said in (
        (["model.tar.gz"], "holds an archive"),
        ([], "is an archive"),
        (["a.txt"], None),
    ):
        fault = folder_misfit(names, "s3://bucket/out/model.tar.gz/")
        assert fault is said or (fault or "").startswith(f"s3://bucket/out/model.tar.gz/ {said}")
    packed = misfit("model.safetensors.gz", archive.read_bytes()[:512], 90)
    assert packed == "is packed with gzip; unpack it under the name model.safetensors"
