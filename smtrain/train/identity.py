"""Which model a run trains: enough of config.json and the weights that another one under the same name is noticed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from smtrain.checkpoint.sources import WeightSource

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_COLUMNS = 4096  # of a row that is looked at
# What changes no number of a step, or is written otherwise by each version of transformers.
_FREE = {
    "transformers_version", "torch_dtype", "dtype", "_name_or_path", "name_or_path", "architectures", "use_cache",
    "_attn_implementation", "return_dict", "output_attentions", "output_hidden_states", "model_type",
    "bos_token_id", "eos_token_id", "id2label", "label2id", "problem_type", "chunk_size_feed_forward",
    "is_encoder_decoder", "pretraining_tp", "initializer_range",
}  # fmt: skip


def identity(described: Mapping[str, Any], weights: WeightSource | None, init: str) -> dict[str, Any]:
    """What a checkpoint remembers of the model: config.json's keys that matter, and a digest of the base weights.

    The digest takes two rows of the first and of the last parameter of each kind, under their Hugging Face names, so
    that it is the same for every cut of the same weights and costs a few dozen reads. None where there are none.
    """
    digest = "scratch" if init == "scratch" else None if weights is None else weights_digest(weights)
    kept = {key: value for key, value in described.items() if key not in _FREE and value is not None}
    return {"config": {"model_type": described.get("model_type"), **kept}, "weights": digest}


def weights_digest(source: WeightSource) -> str:
    """sha256 over names, shapes, types and sampled numbers. Raises `CheckpointError` as the source does."""

    def sample(name: str) -> bytes:
        shape = source.shape(name)
        rest = [(0, min(n, _COLUMNS)) for n in shape[1:]]
        parts = [b"".join(source.bits(name, [(at, at + 1), *rest]).tobytes() for at in sorted({0, shape[0] // 2}))]
        return b"\0".join([name.encode(), str(shape).encode(), str(source.dtype(name)).encode(), *parts])

    digest = hashlib.sha256()
    with ThreadPoolExecutor(8) as pool:  # a channel that streams from S3 answers late, not slowly
        for part in pool.map(sample, _sampled(source.names())):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


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


def _sampled(names: list[str]) -> Iterator[str]:
    """The first and the last layer's parameter of each kind, and those of no layer."""
    kinds: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        found = _LAYER.search(name)
        kinds.setdefault(_LAYER.sub(".layers.N.", name), []).append((int(found[1]) if found else 0, name))
    for kind in sorted(kinds):
        yield from sorted({min(kinds[kind])[1], max(kinds[kind])[1]})


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
