"""The values of AdamW and of the training loop that torch's loaders ask for, except tensors."""

from __future__ import annotations

from typing import Any, Protocol

from smtrain.core.errors import CheckpointError

Path = tuple[str | int, ...]
"""The keys that lead to a value in the nested dict that was saved; joined by dots, the stored key."""


class LoopPosition(Protocol):
    """The place of a training loop."""

    @property
    def step(self) -> int: ...

    @property
    def loop(self) -> dict[str, Any]:
        """The loop's own state, `Manifest.state`."""
        ...


def group(state: LoopPosition, location: object, decays: bool) -> dict[str, Any]:
    """An entry of torch's param_groups without its parameters, after `state.step` steps.

    Keys are those of torch.optim.AdamW (2.13) and `initial_lr`, which its schedulers add. Raises
    CheckpointError if the state does not record how it was trained.
    """
    # Here, because the schema takes a quarter of a second, and few conversions have a state.
    from smtrain.core.config.learning_rate import learning_rate
    from smtrain.core.config.training import Train

    settings = state.loop.get("settings")
    if not settings:
        raise CheckpointError(
            f"{location} has no record of the learning rate, which an optimizer state needs;"
            " convert it to hf first, which takes the weights only."
        )
    train = Train.model_validate(
        {
            key: settings[key]
            for key in (
                "lr",
                "min_lr",
                "schedule",
                "warmup_steps",
                "steps",
                "betas",
                "eps",
                "weight_decay",
            )
        }
    )
    return {
        # Schedulers set the next step's rate after each step.
        "lr": learning_rate(train, state.step + 1),
        "betas": tuple(train.betas),
        "eps": train.eps,
        # One-dimensional parameters have none, as in the native engine.
        "weight_decay": train.weight_decay if decays else 0.0,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
        "initial_lr": train.lr,
    }


def titan_values(
    state: LoopPosition, location: object, parameters: dict[str, int]
) -> dict[Path, Any]:
    """All values of torchtitan except the data loader's; `parameters` maps torchtitan's names to
    numbers of dimensions.
    """
    groups = {decays: group(state, location, decays) for decays in (True, False)}
    tokens = state.loop.get("samples", 0) * state.loop.get("seq_len", 0)
    return {
        **{
            ("optimizer", f"param_groups.{name}.{key}"): value
            for name, dimensions in parameters.items()
            for key, value in groups[dimensions > 1].items()
        },
        ("lr_scheduler", "last_epoch"): state.step,
        ("train_state", "step"): state.step,
        ("train_state", "ntokens_seen"): tokens,
    }


def accelerate_values(
    state: LoopPosition, location: object, parameters: dict[str, int]
) -> dict[Path, Any]:
    """The param_groups of accelerate: parameters with weight decay, and those without."""
    out: dict[Path, Any] = {}
    for decays in (True, False):
        names = [name for name, dimensions in parameters.items() if (dimensions > 1) == decays]
        values = {**group(state, location, decays), "params": names}
        out |= {
            ("optimizer", "param_groups", int(not decays), key): value
            for key, value in values.items()
        }
    return out
