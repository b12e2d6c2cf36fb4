"""Build transformers' config from a config.json, and check that its model agrees with the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.activations import ACT2FN

from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.hf_config import ACTIVATIONS, HFConfig, explicit
from smtrain.core.model.layer_kinds import FULL, SLIDING
from smtrain.core.model.rope import Rope
from smtrain.core.model.shape import ModelShape

_POINTS = (-3.0, -1.0, -0.3, 0.0, 0.3, 1.0, 3.0)  # inputs at which activations are compared
_TOLERANCE = 1e-5  # relative, between single and double precision


def transformers_config(config: Mapping[str, Any]) -> Any:
    """The installed transformers' config object for a config.json of any version. Raises
    `CheckpointError` if refused.
    """
    explicit_config = explicit(config)
    family = FAMILIES[str(explicit_config["model_type"])]
    model_type, (major, minor) = family.built_as or family.model_type, family.since
    installed_release = tuple(map(int, transformers.__version__.split(".")[:2]))
    if installed_release < family.since or model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"transformers {transformers.__version__} has no {family.model_type} models: install"
            f" transformers {major}.{minor} or newer"
        )
    try:
        hf_config = AutoConfig.for_model(**{**explicit_config, "model_type": model_type})
    except Exception as error:  # its validation errors have no common class
        reason = " ".join(str(error).split())
        raise CheckpointError(f"transformers does not take this config.json: {reason}") from None
    shape = ModelShape.from_config(explicit_config)
    # torch's grouped_mm, which transformers 5 prefers, fails if rows of 16-bit numbers are not
    # multiples of 16 bytes.
    uneven = shape.experts is not None and any(
        width % 8 for width in (shape.hidden, shape.experts.width)
    )
    if uneven and hasattr(hf_config, "_experts_implementation"):
        hf_config._experts_implementation = "eager"
    return hf_config


def check_model(model: Any, config: HFConfig) -> None:
    """Compare a causal LM that transformers built with its config.json, before training or
    generation.

    Raises `CheckpointError` with all differences in rotary embeddings, norms, activation, attention
    and parameters.
    """
    shape = config.shape
    model_shapes: dict[str, tuple[int, ...]] = {}
    for name, p in model.named_parameters():
        if p.numel():  # with n_shared_experts 0 transformers builds linears of no rows
            model_shapes |= shape.file_parts(name, tuple(p.shape))
    spec_shapes = {spec.name: spec.shape for spec in shape.specs}
    model_shapes |= {
        name: tuple(buffer.shape)
        for module_name, buffer in model.named_buffers()
        if (name := shape.file_name(module_name)) in spec_shapes
    }
    if model_shapes != spec_shapes:
        name = min(set(model_shapes.items()) ^ set(spec_shapes.items()))[0]
        raise CheckpointError(
            f"transformers builds {name} as {model_shapes.get(name)} and smtrain's table of"
            f" {shape.family} says {spec_shapes.get(name)}: this config.json is not one of a plain"
            f" {shape.family} model"
        )
    _refuse(_differences(model, config))


def base_of(model: Any, config: HFConfig) -> Any:
    """The decoder in a causal LM; transformers 4 does not find that of Gemma 3 by itself."""
    return getattr(model, FAMILIES[config.shape.family].prefix)


def build_rotary(base: Any) -> None:
    """Build the rotary embeddings again: a model made on `meta` lacks their numbers, which no
    checkpoint has.
    """
    for name, module in list(base.named_modules()):
        if name.startswith("rotary_emb") and hasattr(module, "config"):
            parent, _, leaf = name.rpartition(".")
            kind = {"rope_type": module.rope_type} if parent else {}  # OLMo 3 in transformers 4
            setattr(base.get_submodule(parent), leaf, type(module)(module.config, **kind))


def rotary_arguments(base: Any) -> tuple[str, ...]:
    """The arguments of a block that are rotary embeddings; a block takes that of its kind."""
    has_local = hasattr(base, "rotary_emb_local")  # Gemma 3 in transformers 4
    return (
        ("position_embeddings_global", "position_embeddings_local")
        if has_local
        else ("position_embeddings",)
    )


def scales_by_cache_position(block: Any, config: HFConfig) -> bool:
    """Whether a block of Ministral 3 scales its queries by `cache_position`, as in transformers 5.0,
    and not by `position_ids`.
    """
    family = FAMILIES[config.shape.family]
    if "llama_4_scaling_beta" not in family.rope_keys:
        return False
    return "cache_position" in signature(getattr(block, family.attention).forward).parameters


class Turning(NamedTuple):
    """A rotary embedding of transformers."""

    inv_freq: torch.Tensor
    attention_scaling: float
    turn: Callable[[torch.Tensor, torch.Tensor], Any]
    """Cosines and sines [B, S, D] of positions, in the type of the first tensor or fp32."""


def rotary_of(base: Any, config: HFConfig, sliding: bool) -> Turning:
    """The rotary embedding of layers with or without a window."""
    module: Any = getattr(base, "rotary_emb", None)
    if hasattr(module, "mrope_section"):
        # For texts its three kinds of positions are equal. transformers 5.17 wants all three, later
        # ones make them.
        module.recomposition_frequencies = lambda angles: torch.cat([angles[0], angles[0]], -1)
        return Turning(module.inv_freq, module.attention_scaling, partial(_turned_by_kinds, module))
    if config.rope is not None and config.rope.original is not None:
        module = base.rotary_emb
        return Turning(
            module.inv_freq, module.attention_scaling, partial(_turned_by_length, module)
        )
    kind = SLIDING if sliding else FULL
    if hasattr(base, "rotary_embs"):  # OLMo 3 in transformers 4
        module = base.rotary_embs[kind]
    else:
        module = (
            base.rotary_emb_local
            if sliding and hasattr(base, "rotary_emb_local")
            else base.rotary_emb
        )
    if hasattr(module, "inv_freq"):
        return Turning(
            module.inv_freq, module.attention_scaling, lambda x, at: module(x, position_ids=at)
        )
    return Turning(
        getattr(module, f"{kind}_inv_freq"),
        getattr(module, f"{kind}_attention_scaling"),
        lambda x, at: module(x, at, kind),
    )


def _turned_by_kinds(module: Any, x: torch.Tensor, at: torch.Tensor) -> Any:
    return module(x, position_ids=at.expand(3, *at.shape))


def _turned_by_length(module: Any, x: torch.Tensor, at: torch.Tensor) -> Any:
    """The cosines and sines of a module of type longrope, whose factors the length of the rows
    decides.

    transformers decides by the largest position, so that packed documents would turn otherwise than
    one of the length of the row. A position at the end of the row, which is taken off again,
    decides it for all stages and batches alike.
    """
    end = torch.full_like(at[:, :1], at.shape[1] - 1)
    cos, sin = module(x, position_ids=torch.cat([at, end], 1))
    return cos[:, :-1], sin[:, :-1]


def check_rotary(rotary: Any, rope: Rope) -> None:
    """`check_model` for a rotary embedding only."""
    _refuse(_rotary_differences(rotary, rope))


def _refuse(differences: Iterable[str]) -> None:
    if distinct := list(dict.fromkeys(differences)):
        raise CheckpointError(
            f"transformers {transformers.__version__} builds another model than config.json"
            f" describes: {'; '.join(distinct)}. Install another release of transformers (smtrain"
            " is tested with 4.56, 4.57 and 5)"
        )


def _differences(model: Any, config: HFConfig) -> Iterator[str]:
    base, shape = base_of(model, config), config.shape
    family = FAMILIES[shape.family]
    for sliding, rope in config.ropes.items():
        yield from _rotary_differences(rotary_of(base, config, sliding), rope)
    norms = [getattr(base, family.norm)]
    for block, window, kind in zip(
        getattr(base, family.layers), config.windows, shape.by_layer, strict=True
    ):
        norms += [getattr(block, name) for name in family.block_norms]
        if kind.delta is not None:
            net = getattr(block, family.linear or "")
            norms.append(net.norm)
            yield from _activation_differences(ACT2FN[net.activation], config.activation)
        else:
            attention = getattr(block, family.attention)
            of_heads = (getattr(attention, name, None) for name in ("q_norm", "k_norm", "v_norm"))
            norms += [norm for norm in of_heads if norm is not None]
            yield from _attention_differences(attention, model.config, config, window)
        mlp = getattr(block, "mlp", None) or block.block_sparse_moe  # Mixtral in transformers 4
        if kind.has_mlp:
            activations = (getattr(mlp, name, None) for name in ("act_fn", "activation_fn", "act"))
            yield from _activation_differences(next(filter(None, activations)), config.activation)
        if kind.experts is not None:
            yield from _expert_differences(
                block if hasattr(block, "experts") else mlp, model.config, config
            )
        if (expected_scale := config.scales.get("residual", 1.0)) != getattr(
            block, "residual_multiplier", 1.0
        ):
            yield (
                f"a block adds its parts times {block.residual_multiplier:g}, not"
                f" {expected_scale:g}"
            )
        if shape.family == "gpt_neox" and block.use_parallel_residual != config.parallel_residual:
            yield f"use_parallel_residual is {block.use_parallel_residual}"
    for norm in norms:
        eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        if not _close(eps, config.eps):
            yield f"a norm's eps is {eps:g}, not {config.eps:g}"
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if tied != shape.tied:
        yield f"the head is {'' if tied else 'not '}tied to the embedding"


def _rotary_differences(rotary: Any, rope: Rope) -> Iterator[str]:
    frequencies, expected_frequencies = (
        rotary.inv_freq.detach().cpu().double().tolist(),
        rope.frequencies(),
    )
    if len(frequencies) != len(expected_frequencies):
        yield f"{2 * len(frequencies)} numbers of a head turn, not {2 * len(expected_frequencies)}"
    elif wrong := [
        i
        for i, pair in enumerate(zip(frequencies, expected_frequencies, strict=True))
        if not _close(*pair)
    ]:
        i = wrong[0]
        yield (
            f"pair {i} of a head turns by {frequencies[i]:.6g} a position, not by"
            f" {expected_frequencies[i]:.6g}"
        )
    scaling = float(rotary.attention_scaling)
    if not _close(scaling, rope.attention_scaling()):
        yield f"rotary embeddings are scaled by {scaling:g}, not by {rope.attention_scaling():g}"


def _attention_differences(
    attention: Any, hf_config: Any, config: HFConfig, window: int | None
) -> Iterator[str]:
    expected_scale = config.attention_scale
    scaling = getattr(attention, "scaling", expected_scale)  # GPT-2's names none in transformers 4
    if not _close(scaling, expected_scale):
        yield f"attention is scaled by {scaling:g}, not by {expected_scale:g}"
    if config.shape.rules.windows != "never":
        actual_window = (
            hf_config.sliding_window
            if config.shape.rules.windows == "always"
            else attention.sliding_window
        )
        if actual_window != window:
            yield f"a layer's sliding window is {actual_window}, not {window}"


def _expert_differences(mlp: Any, hf_config: Any, config: HFConfig) -> Iterator[str]:
    """The differences of a mixture of experts: of transformers 5 in modules with all experts, of 4
    in one for each.
    """
    sizes, routing = config.shape.experts, config.routing
    assert sizes is not None
    assert routing is not None
    router = getattr(mlp, "router", None) or mlp.gate
    experts_per_token = getattr(router, "top_k", None) or getattr(
        mlp, "top_k", getattr(hf_config, "top_k_experts", None)
    )
    if experts_per_token != sizes.chosen:
        yield f"a token chooses {experts_per_token} experts, not {sizes.chosen}"
    is_normalised = getattr(router, "norm_topk_prob", getattr(mlp, "norm_topk_prob", True))
    if bool(is_normalised) != routing.normalised:
        yield f"a token's weights are {'' if is_normalised else 'not '}divided by their sum"
    aux = getattr(hf_config, "router_aux_loss_coef", 0.0)  # Gemma 4 and DeepSeek-V3 have none
    if not _close(aux, routing.aux):
        yield f"router_aux_loss_coef is {aux}, not {routing.aux}"
    # DeepSeek's groups and scale: in transformers 5.0 the module with all experts has them. Later
    # releases name n_group num_group.
    chooser = mlp if hasattr(mlp, "topk_group") else router
    groups = getattr(chooser, "num_group", getattr(chooser, "n_group", 1))
    chosen_groups = getattr(chooser, "topk_group", 1)
    if (groups, chosen_groups) != (routing.groups, routing.chosen_groups):
        yield (
            f"a token chooses among {chosen_groups} of {groups} groups, not among"
            f" {routing.chosen_groups} of {routing.groups}"
        )
    scale = getattr(chooser, "routed_scaling_factor", 1.0)
    if not _close(scale, routing.scale):
        yield f"a token's weights are multiplied by {scale:g}, not by {routing.scale:g}"
    experts = mlp.experts
    expert = experts[0] if hasattr(experts, "__getitem__") else experts
    if hasattr(expert, "act_fn"):
        yield from _activation_differences(expert.act_fn, config.activation)
    if hasattr(expert, "limit") and (expert.alpha, expert.limit) != (1.702, 7.0):
        yield f"experts have alpha {expert.alpha} and limit {expert.limit}, not 1.702 and 7"


def _activation_differences(activation: Any, name: str) -> Iterator[str]:
    actual_values = activation(torch.tensor(_POINTS, dtype=torch.float64, device="cpu")).tolist()
    if not all(
        _close(a, ACTIVATIONS[name](x)) for a, x in zip(actual_values, _POINTS, strict=True)
    ):
        yield f"the activation is not {name}"


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= _TOLERANCE * max(abs(a), abs(b))
