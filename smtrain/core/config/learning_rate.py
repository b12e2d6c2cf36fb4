"""The learning rate of each step."""

from __future__ import annotations

import math

from smtrain.core.config.training import Train


def learning_rate(train: Train, step: int) -> float:
    """Learning rate of optimizer step `step` (the first is 1).

    Linear warm-up reaches `lr` in step `warmup_steps`. The step after it still has `lr`; then a
    cosine or a line falls, and reaches `min_lr` after step `steps`. The decay is that of
    transformers' `get_cosine_schedule_with_warmup` and `get_linear_schedule_with_warmup` and of
    Megatron-core's `OptimizerParamScheduler`: all compute a step's rate from the steps before it,
    so that the last step still trains with `min_lr: 0`. Their warm-up is one step later than this
    one: its first step has rate 0 and trains nothing.
    """
    if step <= train.warmup:
        return train.lr * step / train.warmup
    if train.schedule == "constant":
        return train.lr
    progress = min(1.0, (step - 1 - train.warmup) / max(1, train.steps - train.warmup))
    share = (1 + math.cos(math.pi * progress)) / 2 if train.schedule == "cosine" else 1 - progress
    return train.min_lr + (train.lr - train.min_lr) * share
