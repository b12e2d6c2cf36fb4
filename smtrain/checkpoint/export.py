"""The export stage: weights of any kind to an ordinary Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from smtrain.checkpoint.hf import write_hf
from smtrain.checkpoint.open import open_weights
from smtrain.checkpoint.staging import refuse_overlap


def export(checkpoint: Path, model_folder: Path, target: Path, *, max_shard_size: int = 5_000_000_000) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load; it appears whole or stays as it was.

    `checkpoint` is anything `open_weights` takes; `model_folder` is what training started from and gives config.json,
    tokenizer and licence. Raises CheckpointError where either cannot be read or they are not of one model.
    """
    for source in (checkpoint, model_folder):
        refuse_overlap(source, target)
    write_hf(open_weights(checkpoint), target, model_folder, max_shard_size)
