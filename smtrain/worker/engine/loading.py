"""Going on from a checkpoint in our own form: what engine native and the adapters of engine nxd do alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import ModelShape
from smtrain.core.model.lora import Lora, another_adapter
from smtrain.worker.checkpoint.manifest import Manifest
from smtrain.worker.checkpoint.native.reader import StateReader
from smtrain.worker.engine.saving import Ranks


def fill_from(
    checkpoint: Path, ranks: Ranks, shape: ModelShape, lora: Lora | None, fill: Callable[[StateReader], None]
) -> Manifest:
    """Let `fill` read this rank's part of a checkpoint; gives its manifest. Collective.

    Raises CheckpointError, on every rank, where it holds another model than `shape`, another adapter than `lora`, where
    `fill` raises it on any rank, or where the ranks were given different steps.
    """
    fault, reader = None, None
    try:
        reader = StateReader(checkpoint)
        if ModelShape.from_config(reader.manifest.config) != shape:
            raise CheckpointError(
                f"{checkpoint} holds another model than config.json describes: name the one it was trained from, or "
                "start over in an empty folder"
            )
        if told := another_adapter(reader.manifest.lora, lora):
            raise CheckpointError(f"{checkpoint} {told}")
        fill(reader)
    except CheckpointError as error:
        fault = str(error)
    ranks.agree(fault, "the checkpoint cannot be loaded")
    assert reader is not None
    steps = sorted(set(ranks.gather(reader.manifest.step)))
    if len(steps) > 1:
        raise CheckpointError(f"ranks were given checkpoints of different steps {steps}: name one for all")
    return reader.manifest
