"""Learning rate by step."""

from __future__ import annotations

import math

from smtrain.core.config.training import Train


def learning_rate(train: Train, step: int) -> float:
    """Learning rate of optimizer step `step` (the first is 1).

    Linear warm-up reaches `lr` after `warmup_steps`; then a cosine or a line falls to `min_lr` at step `steps`.
    """
    if step <= train.warmup:
        return train.lr * step / train.warmup
    if train.schedule == "constant":
        return train.lr
    done = min(1.0, (step - train.warmup) / max(1, train.steps - train.warmup))
    share = (1 + math.cos(math.pi * done)) / 2 if train.schedule == "cosine" else 1 - done
    return train.min_lr + (train.lr - train.min_lr) * share
