"""The convert stage: weights of any kind to NxD shards for a (tp, pp) mesh."""

from __future__ import annotations

from pathlib import Path

from smtrain.checkpoint.nxd import write_nxd
from smtrain.checkpoint.open import open_weights
from smtrain.checkpoint.staging import refuse_overlap


def convert(source: Path, target: Path, *, tp: int, pp: int) -> None:
    """Write the weights of `source` as NxD shards into `target`, which appears whole or stays as it was.

    Raises CheckpointError where the source cannot be read or the two overlap, ConfigError where the model cannot be cut
    for (tp, pp).
    """
    refuse_overlap(source, target)
    write_nxd(open_weights(source), target, tp=tp, pp=pp)
