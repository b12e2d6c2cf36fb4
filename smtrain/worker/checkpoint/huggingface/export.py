"""The export stage: weights of any kind to an ordinary Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from smtrain.core import text
from smtrain.core.model.card import README
from smtrain.core.model.families import ModelShape
from smtrain.core.text import Say
from smtrain.worker.checkpoint.adapter import native_adapter, open_adapter
from smtrain.worker.checkpoint.huggingface.companions import OF_A_WHOLE_MODEL, companions_of
from smtrain.worker.checkpoint.huggingface.folder import read_config, write_hf
from smtrain.worker.checkpoint.huggingface.model_card import write_card
from smtrain.worker.checkpoint.huggingface.peft import write_peft
from smtrain.worker.checkpoint.merge import Changed, Merged
from smtrain.worker.checkpoint.native.reader import NativeSource
from smtrain.worker.checkpoint.open import best_checkpoint, open_weights
from smtrain.worker.checkpoint.storage import place, refuse_overlap

_CARD = "the card of the model that was trained; a new one tells its licence and languages"


def export(
    checkpoint: Path, model_folder: Path, target: Path, *, max_shard_size: int = 5_000_000_000, merge: bool = False,
    base: str | None = None, title: str = "A model trained with smtrain", best: bool = False,
    weights: Path | None = None, say: Say = text.say,
) -> Changed | None:  # fmt: skip
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load; it appears whole or stays as it was.

    A checkpoint that holds an adapter becomes peft's folder, which names the model `base`; or, with `merge`, the model
    with the adapter in it, and what that changed is given back. `checkpoint` is anything `open_weights` takes, or one
    with an adapter; with `best`, a run's checkpoints of which the best is taken. `model_folder` is what training
    started from. It gives config.json and all files that are not weights (`companions_of`), of which `say` names those
    that are left out, and its weights unless those lay in `weights`. A model card (README.md) under `title` replaces
    the model's. Raises CheckpointError where either cannot be read or they are not of one model.
    """
    for source in (checkpoint, model_folder):
        refuse_overlap(source, target)
    if best:
        found = best_checkpoint(place(checkpoint)).path()
        assert found is not None  # `checkpoint` is a folder
        checkpoint = found
    adapter = native_adapter(place(checkpoint))

    def readme(source: object) -> bytes:
        manifest = source.manifest if isinstance(source, NativeSource) else None
        whole = adapter is None or merge
        return write_card(place(model_folder), base, manifest, title=title, adapter=not whole)

    if adapter is not None and not merge:
        carried = companions_of(place(model_folder), {README: _CARD, **OF_A_WHOLE_MODEL})
        write_peft(adapter, target, base or str(model_folder), readme=readme(adapter), carried=carried)
        carried.tell(say)
        return None
    carried = companions_of(place(model_folder), {README: _CARD})
    if adapter is None:
        trained = open_weights(checkpoint)
        write_hf(trained, target, model_folder, max_shard_size, readme=readme(trained), carried=carried)
        carried.tell(say)
        return None
    began = open_weights(model_folder) if weights is None else open_weights(weights, read_config(model_folder))
    merged = Merged(began, open_adapter(checkpoint, ModelShape.from_config(began.config)))
    write_hf(merged, target, model_folder, max_shard_size, readme=readme(adapter), carried=carried)
    carried.tell(say)
    return merged.changed()
