"""What a checkpoint keeps beside the weights: where in the data the run is, and what a resume may not change unsaid."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smtrain.core.config import JobConfig
from smtrain.core.config.schema import digest
from smtrain.core.config.training import Train
from smtrain.core.errors import CheckpointError
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.train.identity import difference
from smtrain.worker.train.schedule import learning_rate

Spans = list[list[float]]
"""[steps, samples of each], one for every stretch of a run with one batch size."""
SETTINGS = (
    "lr", "min_lr", "schedule", "warmup_steps", "steps", "global_batch_size", "betas", "eps", "weight_decay",
    "grad_clip", "precision", "stochastic_rounding",
)  # fmt: skip
_FIXED = {
    "seq_len": "train.seq_len",
    "seed": "train.seed",
    "data": "the prepared data",
    "weights": "data.sources",
    "objective": "train.objective",
    "document_mask": "data.document_mask",
}
_OLDEST = ("seq_len", "seed", "data", "weights")  # every version has written these


@dataclass(frozen=True)
class Position:
    """The part of a run's checkpoints that is the training loop's own; `before` is that of the one it began from."""

    config: JobConfig
    data: DatasetManifest
    model: Mapping[str, Any]
    step: int = 0
    before: Mapping[str, Any] = field(default_factory=dict)
    abandoned: Sequence[str] = ()

    def at(self, step: int, samples: int, losses: Sequence[float], proven: bool = True) -> dict[str, Any]:
        """After `step` steps and `samples` samples; `losses` are the last ones; `proven` if a step went on from it."""
        return {
            "samples": samples,
            **self.fixed(),
            "model": dict(self.model),
            "spans": self._spans(step),
            "settings": settings(self.config),
            "losses": list(losses),
            "proven": proven,
            "chosen": self.config.checkpoint.step,
            "abandoned": sorted({*self.before.get("abandoned", ()), *self.abandoned}),
        }

    def fixed(self) -> dict[str, Any]:
        """What the place in the data depends on, and what a loss means."""
        config = self.config
        return {
            "seq_len": config.train.seq_len,
            "seed": config.train.seed,
            "data": digest(self.data.content),
            "weights": config.data.weights,
            "objective": config.train.objective,
            "document_mask": config.data.document_mask,
        }

    def refuse_another(self, name: str, state: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` where data, order, cut or model are not those of the checkpoint `name`.

        What older versions did not write is not compared.
        """
        for key, expected in self.fixed().items():
            if (key in state or key in _OLDEST) and json.dumps(state.get(key)) != json.dumps(expected):
                shown = "" if key == "data" else f" ({json.dumps(state.get(key))} there, {json.dumps(expected)} here)"
                raise CheckpointError(
                    f"{name}: was written with another value of {_FIXED[key]}{shown}, so its position in the data does "
                    "not hold here; restore that value, or give the run another name"
                )
        if told := difference(state.get("model") or {}, self.model):
            raise CheckpointError(
                f"model.path: {name} of this run was trained from another model ({told}); name that model, or give the "
                "run another name to train this one"
            )

    def _spans(self, step: int) -> Spans:
        out: Spans = [list(span) for span in self.before.get("spans", [])]
        if self.before and not out and self.step:
            out = [[self.step, self.before["samples"] / self.step]]  # an older version's
        done, each = step - self.step, self.config.train.global_batch_size
        if done and out and out[-1][1] == each:
            out[-1][0] += done
        elif done:
            out.append([done, each])
        return out


def arithmetic(step: int, state: Mapping[str, Any]) -> str | None:
    """Why the samples of a checkpoint are not those of its own steps; None if they are, or it kept no record."""
    spans = state.get("spans")
    if spans is None:
        return None
    steps, samples = sum(n for n, _ in spans), round(sum(n * each for n, each in spans))
    if (steps, samples) == (step, state.get("samples")):
        return None
    return (
        f"its record says {state.get('samples')} samples after {step} steps, and by its own record they are "
        f"{samples} after {steps}"
    )


def settings(config: JobConfig) -> dict[str, Any]:
    """What may be changed on a resume, but not unsaid."""
    train = config.train.model_dump(mode="json")
    parallel = config.parallel
    return {**{key: train[key] for key in SETTINGS}, "mesh": f"tp {parallel.tp} x pp {parallel.pp} x dp {config.dp}"}


def changes(state: Mapping[str, Any], step: int, config: JobConfig) -> list[str]:
    """Lines that say what is not as it was when the checkpoint of `step` was written."""
    was, now = state.get("settings") or {}, settings(config)
    told = [f"{key} {_short(was[key])} -> {_short(now[key])}" for key in now if key in was and was[key] != now[key]]
    lines = [f"continuing with changed {', '.join(told)}"] if told else []
    former = Train.model_validate({**config.train.model_dump(), **{k: was[k] for k in SETTINGS if k in was}})
    if was and former.schedule != "constant" and former.steps <= step < config.train.steps:
        lines.append(
            f"the learning rate had decayed to {_short(learning_rate(former, step))} at step {former.steps}, the end "
            f"of the former train.steps; it goes on at {_short(float(f'{learning_rate(config.train, step + 1):.3g}'))}"
        )
    return lines


def _short(value: Any) -> str:
    if isinstance(value, float) and value and not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.6e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_short, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)
