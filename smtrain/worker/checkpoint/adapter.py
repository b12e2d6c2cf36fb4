"""LoRA adapters as they lie in files: a run's checkpoint of ours, or the folder that peft writes.

What is not plain LoRA is refused by its name: applying half of an adapter would give a model that nobody has trained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import FAMILIES, ModelShape
from smtrain.core.model.hf_folder import folder_of
from smtrain.core.model.lora import A, B
from smtrain.worker.checkpoint import dtypes
from smtrain.worker.checkpoint.dtypes import FLOATS, Bits, DType
from smtrain.worker.checkpoint.huggingface import safetensors
from smtrain.worker.checkpoint.manifest import FORMAT as NATIVE
from smtrain.worker.checkpoint.manifest import NAME as NATIVE_MANIFEST
from smtrain.worker.checkpoint.native.reader import NativeSource
from smtrain.worker.checkpoint.open import format_of, newest_checkpoint
from smtrain.worker.checkpoint.storage import Place, is_uri, place, read_json
from smtrain.worker.checkpoint.stored_names import not_tensors, tensors_in, without_wrappers
from smtrain.worker.checkpoint.tensor_ranges import Slab
from smtrain.worker.checkpoint.torch_files import zip as torchzip

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OLDER = "adapter_model.bin"
BASE = "smtrain_base"
"""In the header of our adapter_model.safetensors: the digest of the weights that the adapter was trained on."""
PREFIX = "base_model.model."
_ON_ONE_THREAD = 1 << 18  # multiplications; OpenBLAS takes more threads above it
_COPY = ".base_layer.weight"  # peft saves the base's own output layer beside factors of it
# What peft calls starts that leave the base's weights as they are; the others move a part of them into the adapter.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
_NOT_PLAIN = {
    "use_dora": "DoRA, whose magnitudes are no part of plain LoRA",
    "use_qalora": "QALoRA, for quantized models",
    "lora_bias": "trained biases (lora_bias)",
    "modules_to_save": "layers trained whole (modules_to_save)",
    "trainable_token_indices": "trained token embeddings (trainable_token_indices)",
    "target_parameters": "factors of parameters that are no linear layers (target_parameters)",
    "layer_replication": "replicated layers (layer_replication)",
    "alora_invocation_tokens": "Activated LoRA, which cannot be merged",
    "velora_config": "VeLoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "Monteclora",
    "fan_in_fan_out": "transposed layers (fan_in_fan_out), which no model family of smtrain has",
}


@dataclass(frozen=True)
class Factor:
    """One of an adapter's matrices, whole, in fp32."""

    a: Bits
    """[rank, in]."""
    b: Bits
    """[out, rank]."""
    scale: float

    def delta(self, rows: tuple[int, int], columns: tuple[int, int]) -> Bits:
        """A window of scale * B A, in fp32; this thread's next one takes its place."""
        a, b = self.a[:, slice(*columns)], self.b[slice(*rows)]
        out = dtypes.room("delta", (len(b), a.shape[1]), "<f4")
        # Each product is too small for numpy's BLAS to spread over threads, of which a conversion has its own.
        step = max(1, _ON_ONE_THREAD // max(1, a.size))
        for start in range(0, len(b), step):
            np.matmul(b[start : start + step], a, out=out[start : start + step])
        out *= np.float32(self.scale)
        return out


@dataclass(frozen=True)
class Adapter:
    """A whole adapter. Factors in fp32 stay in their file; others are held in memory, small beside one layer."""

    where: Place
    factors: Mapping[str, Factor]
    """By the base parameter's name in Hugging Face files."""
    base: str | None
    """Digest of the weights that it was trained on, where it says so."""
    stamp: Any
    """JSON that changes whenever its files do."""


def is_adapter(path: Path | str) -> bool:
    """Whether a place holds an adapter: peft's folder, or the checkpoints of a run that trains one."""
    where = place(folder_of(str(path)))
    return CONFIG in where.files() or native_adapter(where) is not None


def native_adapter(where: Place) -> NativeSource | None:
    """The checkpoint in a place (of a run: its newest), if it is of an adapter."""
    found = where if format_of(where) == NATIVE else newest_checkpoint(where)
    if found is None or NATIVE_MANIFEST not in found.files():
        return None
    source = NativeSource(found)
    return source if source.manifest.adapter is not None else None


def open_adapter(path: Path | str, shape: ModelShape) -> Adapter:
    """The adapter in a folder or under an s3:// URI, for a model of `shape`.

    Raises `CheckpointError` where there is none, it is not plain LoRA, or it does not fit the model.
    """
    path = folder_of(str(path))
    if not is_uri(path) and not Path(path).is_dir():
        raise CheckpointError(f"{path} is not a folder; give the one that holds {CONFIG}, or a run's checkpoints.")
    where = place(path)
    if CONFIG in where.files():
        return _of_peft(where, shape)
    source = native_adapter(where)
    if source is None:
        raise CheckpointError(
            f"{path} holds no adapter; give a folder with {CONFIG}, or the checkpoints of a run with train.adapter."
        )
    lora = source.manifest.lora
    assert lora is not None
    numbers = {name: _numbers(source.bits(name, [(0, n) for n in source.shape(name)]), source.dtype(name), name, where)
               for name in source.names()}  # fmt: skip
    weights = [name.removesuffix(A) for name in numbers if name.endswith(A)]
    pairs = {f"{w}.weight": Factor(numbers[w + A], numbers[w + B], lora.scale) for w in weights}
    return _fitting(Adapter(source.where, pairs, source.manifest.base, source.stamp()), shape)


def _of_peft(where: Place, shape: ModelShape) -> Adapter:
    told = _config(where)
    slabs = _slabs(where)
    parts: dict[str, dict[str, Bits]] = {}
    for name, slab in slabs.items():
        if name.endswith(_COPY):
            continue
        module, kind = _split(where, name)
        if slab.dtype not in FLOATS or len(slab.shape) != 2:
            raise CheckpointError(
                f"{where}/{WEIGHTS}: {name[:200]} is {slab.dtype.code} {list(slab.shape)}; a factor is a matrix of "
                "floating-point numbers."
            )
        parts.setdefault(module, {})[kind] = _numbers(slab.whole(), slab.dtype, name, where)
    factors = {}
    for module, both in parts.items():
        if set(both) != {A, B}:
            raise CheckpointError(f"{where}/{WEIGHTS} has only one factor of {module[:200]}; save the adapter again.")
        rank = _pattern(told["rank_pattern"], module, told["r"])
        if both[A].shape[0] != rank or both[B].shape[1] != rank:
            raise CheckpointError(
                f"{where}: the factors of {module[:200]} have rank {both[A].shape[0]} and {both[B].shape[1]}, and "
                f"{CONFIG} says {rank}; copy both files from the same adapter."
            )
        alpha = _pattern(told["alpha_pattern"], module, told["lora_alpha"])
        factors[shape.file_name(f"{module}.weight")] = Factor(
            both[A], both[B], alpha / (sqrt(rank) if told["use_rslora"] else rank)
        )
    if not factors:
        raise CheckpointError(f"{where}/{WEIGHTS} holds no factors; save the adapter again.")
    base = safetensors.metadata(where, WEIGHTS).get(BASE) if WEIGHTS in where.files() else None
    return _fitting(Adapter(where, factors, base, where.stamp()), shape)


def _config(where: Place) -> dict[str, Any]:
    """adapter_config.json with peft's defaults, once it is known to be plain LoRA."""
    said = read_json(where, CONFIG)
    if said.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{where}/{CONFIG} has peft_type {said.get('peft_type')!r}, and smtrain reads LORA only; merge it with "
            "peft (model.merge_and_unload().save_pretrained(FOLDER)) and name the merged model."
        )
    for key, what in _NOT_PLAIN.items():
        if said.get(key):
            raise CheckpointError(f"{where}/{CONFIG} has {what}, which smtrain cannot merge; merge it with peft.")
    if said.get("bias", "none") != "none":
        raise CheckpointError(
            f"{where}/{CONFIG} has trained biases (bias: {said['bias']}), which smtrain cannot merge; merge it with "
            "peft."
        )
    start = said.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise CheckpointError(
            f"{where}/{CONFIG} has init_lora_weights {start!r}, a start that changed the base's own weights, so the "
            "adapter does not fit the original model; convert it with peft (save_pretrained with "
            "path_initial_model_for_weight_conversion)."
        )
    told = {"r": 8, "lora_alpha": 8, "use_rslora": False, **said}
    for key in ("rank_pattern", "alpha_pattern"):
        told[key] = said.get(key) or {}
        rightly = isinstance(told[key], dict) and all(_is_number(n) for n in told[key].values())
        try:
            rightly = rightly and all(re.compile(pattern) for pattern in told[key])
        except re.error:
            rightly = False
        if not rightly:
            raise CheckpointError(f"{where}/{CONFIG} has {key} {told[key]!r}; it must map patterns to numbers.")
    for key in ("r", "lora_alpha"):
        if not _is_number(told[key]):
            raise CheckpointError(f"{where}/{CONFIG} has {key} {told[key]!r}; it must be a number above 0.")
    return told


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _slabs(where: Place) -> dict[str, Slab]:
    """The factors by name, from safetensors or from torch.save's form, which older versions of peft wrote."""
    if WEIGHTS in where.files():
        held = safetensors.slabs(where, WEIGHTS)
    elif _OLDER in where.files():
        loaded = torchzip.load(where, _OLDER)
        tensors = tensors_in(loaded)
        if tensors is None:
            raise not_tensors(loaded, f"{where}/{_OLDER}")
        held = tensors
    else:
        raise CheckpointError(f"{where} has {CONFIG} and no {WEIGHTS}; copy that too.")
    return {without_wrappers(name): slab for name, slab in held.items()}


def _split(where: Place, name: str) -> tuple[str, str]:
    """The module that a tensor adapts, and which factor it is."""
    kind = next((kind for kind in (A, B) if name.endswith(kind)), None)
    if kind is None or not name.startswith(PREFIX):
        what = "an adapter of an embedding" if "lora_embedding" in name else "no factor of a linear layer"
        raise CheckpointError(f"{where}/{WEIGHTS} holds {name[:200]}, {what}, which smtrain cannot merge; use peft.")
    return name.removeprefix(PREFIX).removesuffix(kind), kind


def _pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value for a module, as peft looks it up: the first pattern that its name ends with."""
    return next((n for key, n in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _numbers(bits: Bits, dtype: DType, name: str, where: Place) -> Bits:
    numbers: Bits = dtypes.values(bits, dtype).astype(np.float32, copy=False)  # of fp32, pages of the file
    if not np.isfinite(numbers).all():
        raise CheckpointError(f"{where}: {name[:200]} has numbers that are not finite; take another adapter.")
    return numbers


def _fitting(adapter: Adapter, shape: ModelShape) -> Adapter:
    specs = {spec.name: spec for spec in shape.specs}
    for name, factor in adapter.factors.items():
        if shape.tied and name == shape.embed_name:
            head = FAMILIES[shape.family].head
            raise CheckpointError(
                f"{adapter.where} adapts {head}, which this model shares with its embedding, and merging would change "
                "both; leave the adapter beside the model."
            )
        given = (factor.b.shape[0], factor.a.shape[1])
        if name not in specs or specs[name].shape != given:
            has = f"is {list(specs[name].shape)} there" if name in specs else "is not there"
            raise CheckpointError(
                f"{adapter.where} is of another model: it adapts {name[:200]} {list(given)}, which {has}; name the "
                "model that it was trained on.",
                code="checkpoint.other_model",
            )
    return adapter
