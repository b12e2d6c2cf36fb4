"""Which families have checkpoints of other libraries: neuronx-distributed, NeMo and Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.family import Family

if TYPE_CHECKING:
    from smtrain.core.model.shape import ModelShape


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


def megatron_lack(shape: ModelShape) -> str | None:
    """The reason why a model has no checkpoint of Megatron-core; None if it has."""
    if shape.rules.nxd_and_megatron or shape.rules.megatron:
        return None
    return f"{shape.family} models have no form of Megatron{_beyond_megatron(shape.rules)}"


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
