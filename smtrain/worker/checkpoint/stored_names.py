"""Parameter names as other programs save them, and the errors for parameters that are missing or
too many.

torch.compile, DDP, FSDP and checkpointing add words to names; trainers put the whole state dict
under a key. Both leave the numbers alone, so both are read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.shape import LAYER, ModelShape
from smtrain.core.text import with_article
from smtrain.worker.checkpoint.tensor_ranges import Slab

# Of torch.compile, FSDP, checkpoint_wrapper and Lightning Fabric, in this order; _flat_param is
# FSDP's too.
_WRAPPERS = {
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
    "_flat_param",
}
NESTS = ("state_dict", "model", "module", "model_state_dict")
"""Keys under which trainers put the whole state dict."""
# Names of GPTQ and AWQ (qweight...), compressed-tensors (weight_packed...), bitsandbytes (SCB,
# absmax, quant_map...) and mxfp4 (_blocks, _scales).
_QUANTIZED_NAMES = re.compile(
    r"weight_scale|\.(?:qweight|qzeros|scales|g_idx|weight_packed|weight_shape|weight_zero_point|input_scale|SCB|absmax"
    r"|input_global_scale|weight_global_scale|activation_scale)$|_blocks$|_scales$|quant_state|absmax|quant_map"
)
V = TypeVar("V")


def without_wrappers(name: str) -> str:
    """A parameter's name without the words that torch.compile, FSDP, checkpointing and DDP add to
    it.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    # Wrappers nest: each adds another `module.` in front.
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def plain_names(names: Iterable[str], shape: ModelShape, location: object) -> dict[str, str]:
    """Stored name -> the model's own name, without a word in front of all names (such as `model.`).

    A base model's names, which lack the family's prefix, get it. Raises CheckpointError if two are
    the same parameter.
    """
    clean_names = {name: without_wrappers(name) for name in names}
    family = FAMILIES[shape.family]
    family_prefix = f"{family.prefix}."
    spec_names = {spec.name for spec in shape.specs}
    head = f"{family.head}.weight"
    anchors = [
        name for name in spec_names if name.startswith(f"{family_prefix}{family.layers}.0.")
    ] or [shape.embed_name]
    file_prefix, bare = "", False
    # The head is outside the family's prefix, so its name is the same in both forms.
    if not (spec_names - {head}) & {*clean_names.values()}:
        match = next(
            (
                (name[: -len(anchor)], short)
                for short in (False, True)
                for anchor in (
                    a.removeprefix(family_prefix) if short else a for a in sorted(anchors)
                )
                for name in sorted(clean_names.values(), key=len)
                if name == anchor or name.endswith(f".{anchor}")
            ),
            None,
        )
        file_prefix, bare = match or ("", False)
    out: dict[str, str] = {}
    first: dict[str, str] = {}
    for stored_name, name in clean_names.items():
        plain_name = name.removeprefix(file_prefix)
        if (
            bare
            and name.startswith(file_prefix)
            and family_prefix + plain_name in spec_names
            and plain_name != head
        ):
            plain_name = family_prefix + plain_name
        # Wrapped and unwrapped copies may differ in values: choosing one silently could be the
        # wrong one.
        if (twin := first.setdefault(plain_name, stored_name)) != stored_name:
            raise CheckpointError(
                f"{location} holds {plain_name[:200]} twice, as {twin[:200]} and as"
                f" {stored_name[:200]}; save the model with one of the two."
            )
        out[stored_name] = plain_name
    return out


def tensors_in(content: Any) -> dict[str, Slab] | None:
    """The named tensors in an object of torch.save, at its top or under a key such as `state_dict`;
    else None.
    """
    if not isinstance(content, dict):
        return None
    if content and all(isinstance(value, Slab) for value in content.values()):
        return {str(name): slab for name, slab in content.items()}
    nests = [key for key, value in content.items() if _is_state(value)]
    usual = [key for key in NESTS if key in nests]
    # A single state dict is the model under any key; among several only a usual key tells which.
    nest_names = nests if len(nests) == 1 else usual
    return (
        {str(name): slab for name, slab in content[nest_names[0]].items()}
        if len(nest_names) == 1
        else None
    )


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(slab, Slab) for slab in value.values())
    )


def not_tensors(content: Any, label: str) -> CheckpointError:
    """The error for a file of torch.save with anything but named tensors."""
    if isinstance(content, dict):
        other_keys = [
            str(key)[:50] for key, value in content.items() if not isinstance(value, Slab)
        ]
        nests = [str(key)[:50] for key, value in content.items() if _is_state(value)]
        if len(nests) > 1:
            return CheckpointError(
                f"{label} holds several models ({', '.join(nests[:5])}); save the one to take by"
                f" itself: torch.save(torch.load({label!r})[{nests[0]!r}], {label!r})."
            )
        return CheckpointError(
            f"{label} holds {', '.join(other_keys[:5]) or 'nothing'} and not only named tensors;"
            " save the tensors by themselves: torch.save(model.state_dict(), FILE)."
        )
    kind = "single tensor" if isinstance(content, Slab) else type(content).__name__
    return CheckpointError(
        f"{label} holds {with_article(kind)} instead of named tensors; save the tensors by"
        " themselves: torch.save(model.state_dict(), FILE)."
    )


def quantized_in(names: Iterable[str]) -> str | None:
    """The first name that only quantized weights have: scales, zero points or packed numbers."""
    return next((name for name in names if _QUANTIZED_NAMES.search(name)), None)


def missing_parameter_error(
    name: str, names: Mapping[str, Slab], shape: ModelShape, location: object
) -> CheckpointError:
    """The error for a parameter that no file has: a layer too many in config.json, a head, or
    missing files.
    """
    family = FAMILIES[shape.family]
    if any("lora_" in stored_name for stored_name in names):
        return unmerged_adapter_error(location)
    if fault := _of_experts(name, names, shape, location):
        return fault
    if name == f"{family.head}.weight":
        return CheckpointError(
            f"{location} has no {name}, and its config.json does not tie the output layer to the"
            " embedding: if the model ties them, as small models do, set tie_word_embeddings: true"
            " in config.json, else copy the file that holds it.",
            code="checkpoint.other_model",
        )
    match = LAYER.search(f".{name}")
    layers = _layers(names)
    if match and layers and int(match[1]) not in layers:
        # Only whole leading layers suggest a wrong config.json; a gap means a missing file.
        if layers == set(range(len(layers))) and int(match[1]) == len(layers):
            return CheckpointError(
                f"{location} has {len(layers)} layers, and its config.json says num_hidden_layers"
                f" {shape.layers}: set {family.keys.get('num_hidden_layers', 'num_hidden_layers')}:"
                f" {len(layers)} in config.json if these are all layers, else copy the files of"
                " the other layers.",
                code="checkpoint.other_model",
            )
        return CheckpointError(
            f"{location} has no weights of layer {match[1]} ({name}); copy the file that holds"
            " them.",
            code="checkpoint.damaged",
        )
    if (
        shape.qkv_bias
        and name.endswith(".bias")
        and shape.rules.qkv_bias == "key"
        and "self_attn" in name
    ):
        return CheckpointError(
            f"{location} lacks the parameter {name}; set attention_bias: false in config.json if"
            " the model has none, else copy the file that holds it.",
            code="checkpoint.other_model",
        )
    if (
        shape.mlp_bias
        and name.endswith(".bias")
        and ".mlp." in name
        and shape.rules.mlp_bias == "key"
    ):
        return CheckpointError(
            f"{location} lacks the parameter {name}; set mlp_bias: false in config.json if the"
            " model has none, else copy the file that holds it.",
            code="checkpoint.other_model",
        )
    return CheckpointError(
        f"{location} lacks the parameter {name}: take the config.json that was saved with these"
        " weights, or copy the file that holds it.",
        code="checkpoint.other_model",
    )


def unknown_tensor_error(
    name: str, names: Mapping[str, Slab], shape: ModelShape, location: object
) -> CheckpointError:
    """The error for a tensor that the model in config.json does not have."""
    family, short_name = FAMILIES[shape.family], name[:200]
    if "lora_" in name:
        return unmerged_adapter_error(location)
    if ".experts." in name and (fault := _of_experts(name, names, shape, location)):
        return fault
    match = LAYER.search(f".{name}")
    if match and int(match[1]) >= shape.layers:
        layers = max(_layers(names) | {int(match[1])}) + 1
        key = family.keys.get("num_hidden_layers", "num_hidden_layers")
        return CheckpointError(
            f"{location} has {layers} layers, and its config.json says {shape.layers}: set {key}:"
            f" {layers} in config.json.",
            code="checkpoint.other_model",
        )
    if (
        name.endswith(".bias")
        and shape.rules.qkv_bias == "key"
        and ".self_attn." in name
        and not shape.qkv_bias
    ):
        if shape.family == "llama" and not any(
            other_name.endswith("o_proj.bias") for other_name in names
        ):
            return CheckpointError(
                f"{location} holds {short_name}, and llama models have biases in all of attention"
                " or none: these are a qwen2 model's; set model_type: qwen2 in config.json.",
                code="checkpoint.other_model",
            )
        return CheckpointError(
            f"{location} holds {short_name}, and its config.json says attention_bias: false; set"
            " attention_bias: true there.",
            code="checkpoint.other_model",
        )
    if name.endswith(".bias") and ".mlp." in name and shape.rules.mlp_bias == "key":
        return CheckpointError(
            f"{location} holds {short_name}, and its config.json says mlp_bias: false; set"
            " mlp_bias: true there.",
            code="checkpoint.other_model",
        )
    if re.search(r"(?:^|\.)(?:score|classifier|v_head|value_head|reward_head|qa_outputs)\.", name):
        return CheckpointError(
            f"{location} holds {short_name}, a head that classifies or scores texts, which language"
            " models do not have: save the model without it (AutoModelForCausalLM,"
            " save_pretrained)."
        )
    return CheckpointError(
        f"{location} holds {short_name}, which is no parameter of {with_article(shape.family)}"
        " model as its config.json describes it; take the config.json that was saved with these"
        " weights, or save the model without this tensor.",
        code="checkpoint.other_model",
    )


def left_out(names: Iterable[str], shape: ModelShape) -> str:
    """The sentence for tensors that are no part of the text model, which alone is trained and
    written.
    """
    counts = Counter(str(shape.left_out_part(name)) for name in names)
    prefixes = ", ".join(f"{start}* ({count})" for start, count in sorted(counts.items()))
    return f"ignoring tensors that are no part of {with_article(shape.family)} model: {prefixes}"


def wrong_shape(
    name: str, slab: Slab, expected_shape: tuple[int, ...], shape: ModelShape, location: object
) -> CheckpointError:
    """The error for a parameter of another shape than config.json asks for."""
    text = (
        f"{location}: {name} has shape {list(slab.shape)}, and config.json asks for"
        f" {list(expected_shape)}"
    )
    tables = (shape.embed_name, f"{FAMILIES[shape.family].head}.weight")
    if name in tables and len(slab.shape) == 2 and slab.shape[1] == expected_shape[1]:
        return CheckpointError(
            f"{text}: set vocab_size: {slab.shape[0]} in config.json if the model's vocabulary was"
            " changed, else take weights and config.json from the same model.",
            code="checkpoint.other_model",
        )
    if (
        ".mlp." in name
        and name.endswith(("gate_proj.weight", "up_proj.weight"))
        and slab.shape[1:] == expected_shape[1:]
    ):
        return CheckpointError(
            f"{text}: set intermediate_size: {slab.shape[0]} in config.json.",
            code="checkpoint.other_model",
        )
    return CheckpointError(
        f"{text}; take weights and config.json from the same model.", code="checkpoint.other_model"
    )


def untied_head_error(location: object, head: str, embed: str) -> CheckpointError:
    """The error for a model that config.json calls tied and that has its own output layer."""
    return CheckpointError(
        f"{location}: {head} differs from {embed}, to which config.json ties it: the model has an"
        " output layer; set tie_word_embeddings: false in config.json.",
        code="checkpoint.other_model",
    )


def quantized_weights_error(location: object, evidence: str) -> CheckpointError:
    """The error for weights that are quantized."""
    from smtrain.core.model.remedies import dequantize

    is_fp8 = "config.json names fp8," in evidence or (
        "config.json names" not in evidence and "float8" in evidence
    )
    remedy = dequantize("fp8" if is_fp8 else "")
    return CheckpointError(
        f"{location} holds quantized weights ({evidence[:200]}), which cannot be trained; {remedy}."
    )


def unmerged_adapter_error(location: object) -> CheckpointError:
    """The error for a model that was saved with the factors of an adapter in it."""
    return CheckpointError(
        f"{location} holds a model with an unmerged adapter (lora_A, lora_B); save it"
        " with peft's model.merge_and_unload().save_pretrained(FOLDER)."
    )


_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def _of_experts(
    name: str, names: Iterable[str], shape: ModelShape, location: object
) -> CheckpointError | None:
    """The error if files and config.json have different experts; `name` is in only one of them."""
    expert_numbers = {
        int(match[1]) for stored_name in names if (match := _EXPERT.search(stored_name))
    }
    if shape.experts is None:
        if not expert_numbers and ".experts." not in name:
            return None
        return CheckpointError(
            f"{location} holds a mixture of experts, and its config.json is of"
            f" {with_article(shape.family)} model without: take the config.json that was saved with"
            " these weights.",
            code="checkpoint.other_model",
        )
    if not (match := _EXPERT.search(name)) or expert_numbers in (
        set(),
        {*range(shape.experts.count)},
    ):
        return None
    whole_model_clause = (
        " if these are all, else copy the files of the missing ones"
        if max(expert_numbers) < int(match[1])
        else ""
    )
    return CheckpointError(
        f"{location} has {max(expert_numbers) + 1} experts in a layer, and its config.json says"
        f" {shape.experts.count}: set the number of experts there (num_experts or"
        f" num_local_experts) to {max(expert_numbers) + 1}{whole_model_clause}.",
        code="checkpoint.other_model",
    )


def _layers(names: Iterable[str]) -> set[int]:
    return {int(match[1]) for name in names if (match := LAYER.search(f".{name}"))}
