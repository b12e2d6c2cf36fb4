"""LoRA adapters in files: a run's checkpoint of ours, or the folder that peft writes.

Anything but plain LoRA is refused by its name: half of an adapter would give a model that was never
trained.
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
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.footprint import PRECISIONS, Precision
from smtrain.core.model.hf_folder import folder_of
from smtrain.core.model.lora import STACKED_EXPERTS, A, B
from smtrain.core.model.shape import ModelShape
from smtrain.core.model.text_part import text_name
from smtrain.worker.checkpoint import dtypes
from smtrain.worker.checkpoint.dtypes import FLOATS, Bits, DType
from smtrain.worker.checkpoint.huggingface import safetensors
from smtrain.worker.checkpoint.manifest import FORMAT as NATIVE
from smtrain.worker.checkpoint.manifest import NAME as NATIVE_MANIFEST
from smtrain.worker.checkpoint.manifest import Manifest
from smtrain.worker.checkpoint.native.reader import NativeSource
from smtrain.worker.checkpoint.open import format_of, newest_checkpoint
from smtrain.worker.checkpoint.storage import Place, is_uri, place, read_json
from smtrain.worker.checkpoint.stored_names import not_tensors, tensors_in, without_wrappers
from smtrain.worker.checkpoint.tensor_ranges import Slab
from smtrain.worker.checkpoint.torch_files import zip as torchzip

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OLDER = "adapter_model.bin"
BASE = "smtrain_base"
"""Key in the header of our adapter_model.safetensors: the digest of the weights that the adapter
was trained on.
"""
QUANTIZED_KEY = "smtrain_quantized"
"""Key in that header: the format of the base's linears in training, and its precision."""
PREFIX = "base_model.model."
_ON_ONE_THREAD = 1 << 18  # multiplications; OpenBLAS takes more threads above it
_COPY = ".base_layer.weight"  # peft saves the base's own output layer next to factors of it
# What peft calls starts that leave the base's weights as they are; any other start moves a part of
# them into the adapter.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
_NOT_PLAIN = {
    "use_dora": "DoRA, whose magnitudes are no part of plain LoRA",
    "use_qalora": "QALoRA, for quantized models",
    "lora_bias": "trained biases (lora_bias)",
    "modules_to_save": "layers trained whole (modules_to_save)",
    "trainable_token_indices": "trained token embeddings (trainable_token_indices)",
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
        """A window of scale * B A, in fp32; overwritten by this thread's next one."""
        a, b = self.a[:, slice(*columns)], self.b[slice(*rows)]
        out = dtypes.room("delta", (len(b), a.shape[1]), "<f4")
        # Each product is too small for numpy's BLAS to spread over threads, of which a conversion
        # has its own.
        step = max(1, _ON_ONE_THREAD // max(1, a.size))
        for start in range(0, len(b), step):
            np.matmul(b[start : start + step], a, out=out[start : start + step])
        out *= np.float32(self.scale)
        return out


@dataclass(frozen=True)
class Adapter:
    """A whole adapter.

    Factors in fp32 stay in their file; other factors are held in memory, little next to one layer.
    """

    location: Place
    factors: Mapping[str, Factor | tuple[Factor, ...]]
    """Name of the base parameter in Hugging Face files -> its factors; those of each expert if it
    has all of them.
    """
    base: str | None
    """Digest of the weights that it was trained on, if it is known."""
    stamp: Any
    """JSON that changes whenever its files do."""
    extension: Mapping[str, Any] | None = None
    """The config.json that it was trained with, if model.rope gave the base other rotary
    embeddings.
    """
    quantized_in: Precision | None = None
    """The precision in which the base was quantised to NF4 for the training (QLoRA); None: it was
    not, or another tool trained the adapter and does not say.
    """


def is_adapter(path: Path | str) -> bool:
    """Whether a place holds an adapter: peft's folder, or the checkpoints of a run that trains
    one.
    """
    location = place(folder_of(str(path)))
    return CONFIG in location.files() or native_adapter(location) is not None


def native_adapter(location: Place) -> NativeSource | None:
    """The checkpoint in a place (of a run: its newest) if it holds an adapter, else None."""
    checkpoint = location if format_of(location) == NATIVE else newest_checkpoint(location)
    if checkpoint is None or NATIVE_MANIFEST not in checkpoint.files():
        return None
    source = NativeSource(checkpoint)
    return source if source.manifest.adapter is not None else None


def open_adapter(path: Path | str, shape: ModelShape) -> Adapter:
    """Read the adapter in a folder or under an s3:// URI, for a model of `shape`.

    Raises `CheckpointError` if it is missing, is not plain LoRA or does not fit the model.
    """
    path = folder_of(str(path))
    if not is_uri(path) and not Path(path).is_dir():
        raise CheckpointError(
            f"{path} is not a folder; give the one that holds {CONFIG}, or a run's checkpoints.",
            code="checkpoint.missing",
        )
    location = place(path)
    if CONFIG in location.files():
        return _of_peft(location, shape)
    source = native_adapter(location)
    if source is None:
        raise CheckpointError(
            f"{path} holds no adapter; give a folder with {CONFIG}, or the checkpoints of a run"
            " with train.adapter.",
            code="checkpoint.missing",
        )
    lora = source.manifest.lora
    assert lora is not None
    numbers = {
        name: _numbers(
            source.bits(name, [(0, n) for n in source.shape(name)]),
            source.dtype(name),
            name,
            location,
        )
        for name in source.names()
    }
    pairs: dict[str, Factor | tuple[Factor, ...]] = {}
    for module in (name.removesuffix(A) for name in numbers if name.endswith(A)):
        a, b = numbers[module + A], numbers[module + B]
        if a.ndim == 3:
            pairs |= _of_experts(shape, module, a, b, lora.scale)
        else:
            pairs[f"{module}.weight"] = Factor(a, b, lora.scale)
    extension = source.config if source.has_extended_rope else None
    return _fitting(
        Adapter(
            source.location,
            pairs,
            source.manifest.base,
            source.stamp(),
            extension,
            source.manifest.quantized_in,
        ),
        shape,
    )


def _of_peft(location: Place, shape: ModelShape) -> Adapter:
    config = _config(location)
    slabs = _slabs(location)
    parts: dict[str, dict[str, Bits]] = {}
    for name, slab in slabs.items():
        if name.endswith(_COPY):
            continue
        module, kind = _split(location, name)
        if slab.dtype not in FLOATS or len(slab.shape) != 2:
            raise CheckpointError(
                f"{location}/{WEIGHTS}: {name[:200]} is {slab.dtype.code} {list(slab.shape)}; a"
                " factor is a matrix of floating-point numbers."
            )
        parts.setdefault(module, {})[kind] = _numbers(slab.read_all(), slab.dtype, name, location)
    factors: dict[str, Factor | tuple[Factor, ...]] = {}
    are_transposed = _are_transposed(parts, config, shape)
    for module, factor_pair in parts.items():
        if set(factor_pair) != {A, B}:
            raise CheckpointError(
                f"{location}/{WEIGHTS} has only one factor of {module[:200]}; save the adapter"
                " again."
            )
        experts_matrix = _find_experts_matrix(module, config, shape)
        module, count = experts_matrix or (module, 1)
        # rank_pattern and alpha_pattern override r and lora_alpha for single modules, so a scale
        # belongs to a module and not to the adapter.
        rank = _pattern(config["rank_pattern"], module, config["r"])
        if factor_pair[A].shape[0] != rank * count or factor_pair[B].shape[1] != rank * count:
            raise CheckpointError(
                f"{location}: the factors of {module[:200]} have rank"
                f" {factor_pair[A].shape[0] // count} and {factor_pair[B].shape[1] // count}, and"
                f" {CONFIG} says {rank}; copy both files from the same adapter"
                + (
                    ", or name the model that it was trained on, which may have other experts."
                    if experts_matrix
                    else "."
                ),
                code="checkpoint.other_model",
            )
        alpha = _pattern(config["alpha_pattern"], module, config["lora_alpha"])
        scale = alpha / (sqrt(rank) if config["use_rslora"] else rank)
        if experts_matrix:
            # The expert is first in A and last in B: peft's ParamWrapper.get_delta_factors reads
            # both so, and another order would mix the experts without an error.
            a = factor_pair[A].reshape(count, rank, -1)
            b = factor_pair[B].reshape(-1, rank, count).transpose(2, 0, 1)
            factors |= _of_experts(shape, module, a, b, scale, are_transposed)
            continue
        name = f"{module}.weight"
        name = (
            text_name(name, shape.rules.prefix) or name
        )  # of an adapter of the whole multimodal model
        factors[shape.file_name(name)] = Factor(factor_pair[A], factor_pair[B], scale)
    if not factors:
        raise CheckpointError(f"{location}/{WEIGHTS} holds no factors; save the adapter again.")
    header = safetensors.metadata(location, WEIGHTS) if WEIGHTS in location.files() else {}
    adapter = Adapter(
        location,
        factors,
        header.get(BASE),
        location.stamp(),
        quantized_in=quantized_precision(header, location),
    )
    return _fitting(adapter, shape)


def quantized_header(manifest: Manifest) -> dict[str, str]:
    """The entry of a header that `quantized_precision` reads; empty if the base was not
    quantised.
    """
    precision = manifest.quantized_in
    return {} if precision is None else {QUANTIZED_KEY: f"nf4 {precision}"}


def precision_of_base(adapter: Path) -> Precision | None:
    """`quantized_precision` of a PEFT folder."""
    location = place(adapter)
    if WEIGHTS not in location.files():
        return None
    return quantized_precision(safetensors.metadata(location, WEIGHTS), location)


def quantized_precision(header: Mapping[str, str], location: Place) -> Precision | None:
    """The precision in which the base was quantised to NF4 for the training, as the header of our
    adapter_model.safetensors says.

    Raises `CheckpointError` for a format that this version does not know.
    """
    if (text := header.get(QUANTIZED_KEY)) is None:
        return None
    for precision in PRECISIONS:
        if text == f"nf4 {precision}":
            return precision
    raise CheckpointError(
        f"{location}/{WEIGHTS} was trained on a base in {text[:40]}, which this version of smtrain"
        " does not know: update smtrain."
    )


def _find_experts_matrix(
    module: str, config: Mapping[str, Any], shape: ModelShape
) -> tuple[str, int] | None:
    """The matrix of all experts that a module's factors adapt, by transformers' name, and its
    number of experts.

    peft wraps one parameter in another: the inner one, which the module has first, is in
    `base_layer`. None for a linear.
    """
    path, _, inner = module.rpartition(".")
    path = path if inner == "base_layer" else module
    names = shape.rules.experts
    if shape.experts is None or names is None or not path.endswith(f".{names.module}"):
        return None
    matrices = [f"{path}.{name.rpartition('.')[2]}" for name in STACKED_EXPERTS]
    matches = [
        n
        for n in matrices
        if any(f".{n}".endswith(f".{target}") for target in config["target_parameters"])
    ]
    matches = matches or matrices[-1:]
    return matches[0] if inner == "base_layer" else matches[-1], shape.experts.count


def _are_transposed(
    parts: Mapping[str, Mapping[str, Bits]], config: Mapping[str, Any], shape: ModelShape
) -> bool:
    """Whether A multiplies outputs of experts that are stored with their inputs first.

    peft takes them for inputs with transformers 4, whose module does not say which of the two come
    first.
    """
    sizes = shape.experts
    for module, factor_pair in parts.items():
        experts_matrix = _find_experts_matrix(module, config, shape)
        if experts_matrix and sizes is not None and A in factor_pair:
            expected = sizes.width if experts_matrix[0].endswith(".down_proj") else shape.hidden
            if factor_pair[A].shape[1] != expected:
                return True
    return False


def _of_experts(
    shape: ModelShape, module: str, a: Bits, b: Bits, scale: float, are_transposed: bool = False
) -> dict[str, Factor | tuple[Factor, ...]]:
    """The factors of the parameters in files that a matrix of all experts consists of.

    `a` is [E, rank, in] and `b` [E, out, rank]; `module` its name in transformers, or the path of
    experts in files with the name of a linear that each has. `are_transposed` as `_are_transposed`.
    """
    names = shape.rules.experts
    assert names is not None
    path, _, leaf = module.rpartition(".")
    if names.stacked == "halves":
        return {module: tuple(Factor(*pair, scale) for pair in zip(a, b, strict=True))}
    if names.stacked == "pairs":  # stored with its inputs first
        pairs = zip(a, b, strict=True)
        return {
            module: tuple(
                Factor(
                    *((factor_a, factor_b) if are_transposed else (factor_b.T, factor_a.T)), scale
                )
                for factor_a, factor_b in pairs
            )
        }
    path = path.removesuffix("mlp.experts") + names.path if path.endswith("mlp.experts") else path
    gate, up, down = names.parts
    # Gate is the first half of the rows: transformers' experts split them with chunk(2).
    halves = [(gate, b[:, : b.shape[1] // 2]), (up, b[:, b.shape[1] // 2 :])]
    parts = halves if leaf == "gate_up_proj" else [(down if leaf == "down_proj" else leaf, b)]
    return {
        f"{path}.{j}.{part}.weight": Factor(a[j], rows[j], scale)
        for part, rows in parts
        for j in range(len(a))
    }


def _config(location: Place) -> dict[str, Any]:
    """Read adapter_config.json with peft's defaults; raises `CheckpointError` if it is not plain
    LoRA.
    """
    peft_config = read_json(location, CONFIG)
    if peft_config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{location}/{CONFIG} has peft_type {peft_config.get('peft_type')!r}, and smtrain reads"
            " LORA only; merge it with peft (model.merge_and_unload().save_pretrained(FOLDER)) and"
            " name the merged model."
        )
    for key, feature in _NOT_PLAIN.items():
        # Any true value counts: peft writes these keys as null or false if unused.
        if peft_config.get(key):
            raise CheckpointError(
                f"{location}/{CONFIG} has {feature}, which smtrain cannot merge; merge it with"
                " peft."
            )
    if peft_config.get("bias", "none") != "none":
        raise CheckpointError(
            f"{location}/{CONFIG} has trained biases (bias: {peft_config['bias']}), which smtrain"
            " cannot merge; merge it with peft."
        )
    start = peft_config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise CheckpointError(
            f"{location}/{CONFIG} has init_lora_weights {start!r}, a start that changed the base's"
            " own weights, so the adapter does not fit the original model; convert it with peft"
            " (save_pretrained with path_initial_model_for_weight_conversion)."
        )
    # The defaults of peft's LoraConfig (tuners/lora/config.py), for keys that a file leaves out.
    config = {"r": 8, "lora_alpha": 8, "use_rslora": False, **peft_config}
    config["target_parameters"] = _names(peft_config.get("target_parameters") or [], location)
    for key in ("rank_pattern", "alpha_pattern"):
        config[key] = peft_config.get(key) or {}
        valid = isinstance(config[key], dict) and all(_is_number(n) for n in config[key].values())
        try:
            valid = valid and all(re.compile(pattern) for pattern in config[key])
        except re.error:
            valid = False
        if not valid:
            raise CheckpointError(
                f"{location}/{CONFIG} has {key} {config[key]!r}; it must map patterns to numbers."
            )
    for key in ("r", "lora_alpha"):
        if not _is_number(config[key]):
            raise CheckpointError(
                f"{location}/{CONFIG} has {key} {config[key]!r}; it must be a number above 0."
            )
    return config


def _names(value: Any, location: Place) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(
            f"{location}/{CONFIG} has target_parameters {value!r}; it must be a list of names."
        )
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _slabs(location: Place) -> dict[str, Slab]:
    """The factors by name, from safetensors or from torch.save's form, which older versions of peft
    write.
    """
    if WEIGHTS in location.files():
        tensors = safetensors.slabs(location, WEIGHTS)
    elif _OLDER in location.files():
        content = torchzip.load(location, _OLDER)
        tensors = tensors_in(content) or {}
        if not tensors:
            raise not_tensors(content, f"{location}/{_OLDER}")
    else:
        raise CheckpointError(
            f"{location} has {CONFIG} and no {WEIGHTS}; copy that too.", code="checkpoint.damaged"
        )
    return {without_wrappers(name): slab for name, slab in tensors.items()}


def _split(location: Place, name: str) -> tuple[str, str]:
    """The module that a tensor adapts, and the factor that it is (A or B)."""
    kind = next((kind for kind in (A, B) if name.endswith(kind)), None)
    if kind is None or not name.startswith(PREFIX):
        description = (
            "an adapter of an embedding"
            if "lora_embedding" in name
            else "no factor of a linear layer"
        )
        raise CheckpointError(
            f"{location}/{WEIGHTS} holds {name[:200]}, {description}, which smtrain cannot merge;"
            " use peft."
        )
    return name.removeprefix(PREFIX).removesuffix(kind), kind


def _pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Look a module's value up as peft does: by the first pattern that its name ends with."""
    return next(
        (n for key, n in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default
    )


def _numbers(bits: Bits, dtype: DType, name: str, location: Place) -> Bits:
    numbers: Bits = dtypes.values(bits, dtype).astype(
        np.float32, copy=False
    )  # of fp32, pages of the file
    if not np.isfinite(numbers).all():
        raise CheckpointError(
            f"{location}: {name[:200]} has numbers that are not finite; take another adapter."
        )
    return numbers


def _fitting(adapter: Adapter, shape: ModelShape) -> Adapter:
    specs = {spec.name: spec for spec in shape.specs}
    for name, factor in adapter.factors.items():
        if shape.tied and name == shape.embed_name:
            head = FAMILIES[shape.family].head
            raise CheckpointError(
                f"{adapter.location} adapts {head}, which this model shares with its embedding, and"
                " merging would change both; keep the adapter next to the model."
            )
        first_factor = factor[0] if isinstance(factor, tuple) else factor
        count = (len(factor),) if isinstance(factor, tuple) else ()
        delta_shape = (*count, first_factor.b.shape[0], first_factor.a.shape[1])
        if name not in specs or specs[name].shape != delta_shape:
            has = f"is {list(specs[name].shape)} there" if name in specs else "is not there"
            raise CheckpointError(
                f"{adapter.location} is of another model: it adapts {name[:200]}"
                f" {list(delta_shape)}, which {has}; name the model that it was trained on.",
                code="checkpoint.other_model",
            )
    return adapter
