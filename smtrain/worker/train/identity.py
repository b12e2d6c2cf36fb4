"""Which model a run trains: enough of config.json and the weights that another one under the same name is noticed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smtrain.worker.checkpoint.digest import weights_digest
from smtrain.worker.checkpoint.sources import WeightSource

# What changes no weight of a step, or is written otherwise by each version of transformers.
_FREE = {
    "transformers_version", "torch_dtype", "dtype", "_name_or_path", "name_or_path", "architectures", "use_cache",
    "_attn_implementation", "return_dict", "output_attentions", "output_hidden_states", "model_type",
    "bos_token_id", "eos_token_id", "id2label", "label2id", "problem_type", "chunk_size_feed_forward",
    "is_encoder_decoder", "pretraining_tp", "initializer_range",
}  # fmt: skip


def identity(described: Mapping[str, Any], weights: WeightSource | None, init: str) -> dict[str, Any]:
    """What a checkpoint remembers of the model: config.json's keys that matter, and a digest of the base weights.

    None where there are no weights.
    """
    digest = "scratch" if init == "scratch" else None if weights is None else weights_digest(weights)
    kept = {key: value for key, value in described.items() if key not in _FREE and value is not None}
    return {"config": {"model_type": described.get("model_type"), **kept}, "weights": digest}


def difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """What two identities do not share, in words; None where they are one model, or one of them is not known."""
    was, now = (_flat(side["config"]) if side.get("config") else {} for side in (there, here))
    keys = [key for key in sorted(was) if key in now and was[key] != now[key]]  # defaults are written by some only
    if keys:
        shown = ", ".join(f"{key} {was[key]!r} there and {now[key]!r} here" for key in keys[:3])
        return f"config.json differs: {shown}"
    if there.get("weights") and here.get("weights") and there["weights"] != here["weights"]:
        if "scratch" in (there["weights"], here["weights"]):
            return f"model.init was {'scratch' if there['weights'] == 'scratch' else 'weights'} there"
        return "the base weights are others"
    return None


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the rotary settings of both generations of transformers in one spelling."""
    out = dict(config)
    scaling = out.pop("rope_scaling", None) or {}
    given = {**scaling, **(out.pop("rope_parameters", None) or {})}
    given["rope_type"] = given.pop("type", given.get("rope_type", "default"))
    if "rope_theta" in out:
        given.setdefault("rope_theta", out.pop("rope_theta"))
    out.pop("rope_theta", None)
    return {**out, **{f"{key} of rope" if key != "rope_theta" else key: value for key, value in given.items()}}
