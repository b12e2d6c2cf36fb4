"""Which families have checkpoints of other libraries: neuronx-distributed, NeMo and Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.family import Family
from smtrain.core.model.rope import megatron_rope_lack

if TYPE_CHECKING:
    from smtrain.core.model.hf_config import HFConfig
    from smtrain.core.model.shape import ModelShape

MEGATRON_GROUP_SCORES = 2
"""The best experts of a group that transformers adds to choose groups (arXiv 2412.19437, 2.1.2)."""


def refuse_elsewhere(shape: ModelShape, form: str) -> None:
    """Raise `CheckpointError` if `form`, a checkpoint of another library, is not known for a
    family.
    """
    rules, megatron = shape.rules, form == "Megatron"
    if rules.nxd_and_megatron or (megatron and rules.megatron):
        return
    lacks = _beyond_megatron(rules) if megatron else ""
    known_families = [
        f.model_type for f in FAMILIES.values() if f.nxd_and_megatron or (megatron and f.megatron)
    ]
    raise CheckpointError(
        f"{shape.family} models are not converted from or to {form}{lacks}: take a Hugging Face"
        f" folder or a native checkpoint ({', '.join(known_families)} have other forms)",
        code="checkpoint.other_model",
    )


def megatron_lack(model: HFConfig) -> str | None:
    """The reason why a model has no checkpoint of Megatron-core 0.16.1; None if it has."""
    shape = model.shape
    if not (shape.rules.nxd_and_megatron or shape.rules.megatron):
        return f"{shape.family} models have no form of Megatron{_beyond_megatron(shape.rules)}"
    return megatron_rope_lack(model.rope) or _latent_lack(model) or _routing_lack(model)


def _latent_lack(model: HFConfig) -> str | None:
    """The part of latent attention that MLASelfAttention would compute in another way."""
    latent, rope = model.shape.latent, model.rope
    if latent is None or rope is None:
        return None
    settings = rope.settings
    signs = {
        "biases (attention_bias)": model.shape.qkv_bias,
        "halves that turn instead of pairs (rope_interleave false)": not latent.is_interleaved,
        f"rotary embeddings of type {rope.kind}": rope.kind not in ("default", "yarn"),
        "yarn whose borders are not rounded (truncate false)": not settings.get("truncate", True),
        "yarn with mscale_all_dim and without mscale": rope.kind == "yarn"
        and bool(settings.get("mscale_all_dim"))
        and not settings.get("mscale"),
    }
    lacks = [name for name, is_so in signs.items() if is_so]
    return f"Megatron-core's latent attention has no {' and no '.join(lacks)}" if lacks else None


def _routing_lack(model: HFConfig) -> str | None:
    """The rule of a router with sigmoid that Megatron-core does not have: it divides a token's
    weights by their sum if there are several, and adds topk // group_topk experts of a group.
    """
    names, sizes, routing = model.shape.rules.experts, model.shape.experts, model.routing
    if names is None or sizes is None or routing is None or names.scores != "sigmoid":
        return None
    if routing.normalised != (sizes.chosen > 1):
        return (
            f"Megatron-core's router has no norm_topk_prob {str(routing.normalised).lower()} with"
            f" {sizes.chosen} experts of a token"
        )
    is_limited = routing.chosen_groups < routing.groups
    if is_limited and sizes.chosen // routing.chosen_groups != MEGATRON_GROUP_SCORES:
        return (
            f"Megatron-core would choose among groups by {sizes.chosen // routing.chosen_groups}"
            f" experts of each, and this model does by {MEGATRON_GROUP_SCORES}"
        )
    return None


def _beyond_megatron(rules: Family) -> str:
    """The parts of a family that Megatron-core 0.16.1's GPTModel lacks, as the end of a clause."""
    signs = {
        "norms behind attention and the MLP": "post_feedforward_layernorm" in rules.block_norms,
        "norms over all heads": rules.qk_norm == "wide",
        "multipliers of embeddings, residuals and logits": bool(
            {"embedding", "residual", "logits"} & {*rules.scales}
        ),
        "scaled embedding": rules.root_embedding,
        "layers with gated delta nets of this form": rules.linear is not None,
        "queries that grow with the position": "llama_4_scaling_beta" in rules.rope_keys,
    }
    features = [name for name, is_so in signs.items() if is_so]
    return f", whose library has no {' and no '.join(features)}" if features else ""
