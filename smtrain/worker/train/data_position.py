"""The training loop's part of a checkpoint: position in the data, settings, and the identity of the
model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smtrain.core.config import JobConfig
from smtrain.core.config.learning_rate import learning_rate
from smtrain.core.config.training import Train
from smtrain.core.digests import digest
from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.digest import weights_digest
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.data.manifest import DatasetManifest

Spans = list[list[float]]
"""[steps, samples of each], one for every stretch of a run with one batch size."""
SETTINGS = (
    "lr",
    "min_lr",
    "schedule",
    "warmup_steps",
    "steps",
    "global_batch_size",
    "betas",
    "eps",
    "weight_decay",
    "grad_clip",
    "precision",
    "stochastic_rounding",
)
DECAY = "steps before"
"""Written into checkpoints: `learning_rate` decays by the steps before a step.

Without it the last step had min_lr.
"""
ARITHMETIC = "logits in pieces"
"""Written into checkpoints: the order in which losses, norms and gradients are added up.

A change that gives other last digits on the same mesh changes this text (scripts/goes-on).
"""
_FIXED_KEYS = {
    "seq_len": "train.seq_len",
    "seed": "train.seed",
    "data": "the prepared data",
    "weights": "data.sources",
    "objective": "train.objective",
    "document_mask": "data.document_mask",
    "packing": "train.dpo.packing",
}
# Keys that change no step, or that each version of transformers writes in its own way.
_FREE = {
    "transformers_version",
    "torch_dtype",
    "dtype",
    "_name_or_path",
    "name_or_path",
    "architectures",
    "use_cache",
    "_attn_implementation",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "model_type",
    "bos_token_id",
    "eos_token_id",
    "id2label",
    "label2id",
    "problem_type",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "pretraining_tp",
    "initializer_range",
}


@dataclass(frozen=True)
class Position:
    """Makes the state that checkpoints of this attempt keep; `resumed_state` is that of the
    checkpoint it resumed from.
    """

    config: JobConfig
    data: DatasetManifest
    model: Mapping[str, Any]
    step: int = 0
    resumed_state: Mapping[str, Any] = field(default_factory=dict)
    abandoned_digests: Sequence[str] = ()
    reference: str | None = None
    """Objective dpo: a digest of the reference's weights."""

    def at(
        self, step: int, samples: int, losses: Sequence[float], proven: bool = True
    ) -> dict[str, Any]:
        """The state after `step` steps and `samples` samples; `proven` if a step has been done from
        these weights.
        """
        return {
            "samples": samples,
            **self.fixed_values(),
            **({"reference": self.reference} if self.reference else {}),
            "model": dict(self.model),
            "spans": self._spans(step),
            "settings": settings(self.config),
            "decay": DECAY,
            "arithmetic": ARITHMETIC,
            **(
                {}
                if self.config.train.deterministic is None
                else {"deterministic": self.config.train.deterministic}
            ),
            "losses": list(losses),
            "proven": proven,
            "chosen": self.config.checkpoint.step,
            "abandoned": sorted(
                {*self.resumed_state.get("abandoned", ()), *self.abandoned_digests}
            ),
        }

    def fixed_values(self) -> dict[str, Any]:
        """The values that the position in the data and the meaning of a loss depend on."""
        config, preference = self.config, self.config.train.preference
        return {
            **({"packing": preference.packing} if preference else {}),
            "seq_len": config.train.seq_len,
            "seed": config.train.seed,
            "data": digest(self.data.content),
            "weights": config.data.weights,
            "objective": config.train.objective,
            "document_mask": config.data.document_mask,
        }

    def refuse_another(self, name: str, state: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` if the checkpoint `name` is of other data, order, objective or
        model.
        """
        if state.get("imported"):  # another trainer wrote it: its data and settings are not known
            return
        for key, expected in self.fixed_values().items():
            if json.dumps(state.get(key)) != json.dumps(expected):
                detail = (
                    ""
                    if key == "data"
                    else f" ({json.dumps(state.get(key))} there, {json.dumps(expected)} here)"
                )
                raise CheckpointError(
                    f"{name}: was written with another value of {_FIXED_KEYS[key]}{detail}, so its"
                    " position in the data does not hold here; restore that value, or give the run"
                    " another name"
                )
        saved_rope, own_rope = (
            (side or {}).get("rope") for side in (state.get("model"), self.model)
        )
        if saved_rope != own_rope:
            raise CheckpointError(
                f"model.rope: {name} of this run was trained with {_rope_words(saved_rope)}, and"
                f" the config asks for {_rope_words(own_rope)}, for which its weights are not made;"
                " restore the former value, or give the run another name to start over",
                code="checkpoint.other_model",
            )
        if reason := difference(state.get("model") or {}, self.model):
            raise CheckpointError(
                f"model.path: {name} of this run was trained from another model ({reason}); name"
                " that model, or give the run another name to train this one",
                code="checkpoint.other_model",
            )
        if state.get("reference") != self.reference:
            raise CheckpointError(
                f"train.dpo.reference: {name} of this run was trained against another reference;"
                " name that one with the weights that it had, or give the run another name to"
                " train against this one",
                code="checkpoint.other_model",
            )

    def _spans(self, step: int) -> Spans:
        out: Spans = [list(span) for span in self.resumed_state.get("spans", [])]
        for step_count, batch_size in self.config.train.batches(
            step - self.step, self.resumed_state.get("samples", 0)
        ):
            if out and out[-1][1] == batch_size:
                out[-1][0] += step_count
            else:
                out.append([step_count, batch_size])
        return out


def arithmetic(step: int, state: Mapping[str, Any]) -> str | None:
    """Explain how a checkpoint's samples and steps disagree; None if they agree, or if it has no
    record of them.
    """
    spans = state.get("spans")
    if spans is None:
        return None
    steps, samples = sum(n for n, _ in spans), round(sum(n * batch_size for n, batch_size in spans))
    if (steps, samples) == (step, state.get("samples")):
        return None
    return (
        f"its record says {state.get('samples')} samples after {step} steps, and by its own record"
        f" they are {samples} after {steps}"
    )


def settings(config: JobConfig) -> dict[str, Any]:
    """The settings that a resume may change, each with a line in the log."""
    train = config.train.model_dump(mode="json")
    preference = config.train.preference
    pairs = preference.model_dump(exclude={"reference", "packing"}) if preference else {}
    return {
        **{key: train[key] for key in SETTINGS},
        **pairs,
        "mesh": config.mesh_words,
        **({"batch_ramp": train["batch_ramp"]} if train["batch_ramp"] else {}),
    }


def changes(state: Mapping[str, Any], step: int, config: JobConfig) -> list[str]:
    """Describe each setting that has changed since the checkpoint of `step` was written."""
    old_settings, new_settings = state.get("settings") or {}, settings(config)
    changed_settings = [
        f"{key} {_short(old_settings[key])} -> {_short(new_settings[key])}"
        for key in new_settings
        if key in old_settings and old_settings[key] != new_settings[key]
    ]
    ramps = [side.get("batch_ramp") for side in (old_settings, new_settings)]
    if old_settings and None in ramps and ramps[0] != ramps[1]:
        changed_settings.append(f"batch_ramp {' -> '.join(map(_short, ramps))}")
    lines = [f"continuing with changed {', '.join(changed_settings)}"] if changed_settings else []
    earlier = _has_another_decay(state, config)
    if earlier and step < config.train.steps:
        lines.append(
            "the checkpoint was written by a release in which the last step had train.min_lr; the"
            " learning rate now reaches it after the last step, so each remaining step has the rate"
            " of the step before it"
        )
    former = Train.model_validate(
        {**config.train.model_dump(), **{k: old_settings[k] for k in SETTINGS if k in old_settings}}
    )
    if old_settings and former.schedule != "constant" and former.steps <= step < config.train.steps:
        following = learning_rate(config.train, step + 1)
        last = learning_rate(former, step + 1 if earlier else step)
        lines.append(
            f"the learning rate had decayed to {_short(float(f'{last:.3g}'))} at step"
            f" {former.steps}, the end of the former train.steps; it continues at"
            f" {_short(float(f'{following:.3g}'))}"
        )
    return lines


def promise(state: Mapping[str, Any], config: JobConfig) -> str:
    """Say whether the losses after a resume are those of an unbroken run, bit for bit.

    Checkpoints written on CPUs, and those of releases that always had the same default, do not
    record it.
    """
    if state.get("imported"):
        return "another trainer wrote the checkpoint: the data begins with its first sample"
    if _has_another_decay(state, config):
        return (
            "the learning rate decays otherwise than before: losses differ slightly from those of"
            " an unbroken run"
        )
    if state.get("arithmetic") != ARITHMETIC:
        return (
            "the checkpoint was written by a release that may add numbers in another order: losses"
            " may differ from those of an unbroken run in the last digits"
        )
    is_deterministic, was_deterministic = (
        config.train.deterministic is not False,
        state.get("deterministic"),
    )
    if was_deterministic not in (None, is_deterministic):
        new_word, old_word = (str(value).lower() for value in (is_deterministic, was_deterministic))
        return (
            f"the checkpoint was written with train.deterministic: {old_word}, and this job has"
            f" {new_word}: losses differ from those of an unbroken run in the last digits"
        )
    if is_deterministic:
        return (
            "kernels are deterministic: on the same mesh, losses are those of an unbroken run, bit"
            " for bit"
        )
    return (
        "train.deterministic is false: losses differ from those of an unbroken run in the last"
        " digits"
    )


def _has_another_decay(state: Mapping[str, Any], config: JobConfig) -> bool:
    if not state or state.get("imported"):
        return False
    return state.get("decay") != DECAY and config.train.schedule != "constant"


def _short(value: Any) -> str:
    if isinstance(value, float) and value and not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.6e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_short, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _rope_words(rope: Mapping[str, Any] | None) -> str:
    return (
        "the rotary embeddings of config.json"
        if rope is None
        else ", ".join(f"{k} {v}" for k, v in rope.items())
    )


def identity(
    model_config: Mapping[str, Any],
    weights: WeightSource | None,
    init: str,
    rope: Mapping[str, Any] | None = None,
    quantized: str | None = None,
) -> dict[str, Any]:
    """The model as a checkpoint remembers it: the keys of config.json that matter, and a digest of
    the base weights.

    `rope` are the rotary embeddings if model.rope replaced those of the base model, `quantized` the
    digest of the base's 4-bit form.
    """
    digest = (
        "scratch" if init == "scratch" else None if weights is None else weights_digest(weights)
    )
    config_keys = {
        key: value for key, value in model_config.items() if key not in _FREE and value is not None
    }
    model_identity = {
        "config": {"model_type": model_config.get("model_type"), **config_keys},
        "weights": digest,
    }
    added = {"rope": None if rope is None else dict(rope), "quantized": quantized}
    return model_identity | {key: value for key, value in added.items() if value is not None}


def difference(saved_identity: Mapping[str, Any], own_identity: Mapping[str, Any]) -> str | None:
    """Explain how two identities differ; None if they are one model, or if one of them is not
    known.
    """
    saved_keys, own_keys = (
        _flat(side["config"]) if side.get("config") else {}
        for side in (saved_identity, own_identity)
    )
    keys = [
        key for key in sorted(saved_keys) if key in own_keys and saved_keys[key] != own_keys[key]
    ]  # defaults are written by some only
    if keys:
        detail = ", ".join(
            f"{key} {saved_keys[key]!r} there and {own_keys[key]!r} here" for key in keys[:3]
        )
        return f"config.json differs: {detail}"
    if (
        saved_identity.get("weights")
        and own_identity.get("weights")
        and saved_identity["weights"] != own_identity["weights"]
    ):
        if "scratch" in (saved_identity["weights"], own_identity["weights"]):
            return (
                "model.init was"
                f" {'scratch' if saved_identity['weights'] == 'scratch' else 'weights'} there"
            )
        return "the base weights differ"
    if reason := _other_quantization(
        saved_identity.get("quantized"), own_identity.get("quantized")
    ):
        return reason
    return None


def _other_quantization(saved: str | None, own: str | None) -> str | None:
    """Explain how the forms of a quantised base differ, as `quantized_digest` describes them; None
    if their numbers are equal, whatever made them, or if one is not known.
    """
    if saved is None or own is None:
        return None
    (saved_release, _, saved_digest), (own_release, _, own_digest) = (
        text.rpartition(" ") for text in (saved, own)
    )
    if saved_digest == own_digest:
        return None
    return f"the base in 4 bits differs, which {saved_release} made there and {own_release} here"


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Bring the rotary settings of both generations of transformers into one form."""
    out = dict(config)
    scaling = out.pop("rope_scaling", None) or {}
    rope = {**scaling, **(out.pop("rope_parameters", None) or {})}
    rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
    if "rope_theta" in out:
        rope.setdefault("rope_theta", out.pop("rope_theta"))
    out.pop("rope_theta", None)
    return {
        **out,
        **{f"{key} of rope" if key != "rope_theta" else key: value for key, value in rope.items()},
    }
