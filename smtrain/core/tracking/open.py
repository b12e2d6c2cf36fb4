"""Open the trackers in the section `track`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from smtrain.core.config.section import Secret
from smtrain.core.config.track import Track
from smtrain.core.text import Say
from smtrain.core.tracking.buffer import Buffered
from smtrain.core.tracking.mlflow import MlflowTracker
from smtrain.core.tracking.settings import Tracked
from smtrain.core.tracking.wandb import WandbTracker

EXPERIMENT = "smtrain"


def open_trackers(
    track: Track, tracked: Tracked, folder: Path, say: Say, secret: Callable[[Secret], str]
) -> list[Buffered]:
    """A buffered tracker for each one in the section; nothing blocks here. `secret` reads a secret by its name."""
    trackers: list[Buffered] = []
    if track.mlflow:
        trackers.append(Buffered(MlflowTracker(track.mlflow, track.experiment or EXPERIMENT, tracked), say))
    if track.wandb:
        named = track.wandb.key
        key = (lambda: secret(named)) if named is not None else None
        trackers.append(Buffered(WandbTracker(track.wandb, tracked, folder / "wandb", key), say))
    return trackers
