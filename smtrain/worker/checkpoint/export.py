"""The export stage: weights of any kind to a standard Hugging Face folder with a model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smtrain.core import text
from smtrain.core.errors import CheckpointError
from smtrain.core.files import parse_json
from smtrain.core.model.card import README, card, hub_name, metadata, table, usage
from smtrain.core.model.hf_folder import SOURCE, is_legal
from smtrain.core.model.shape import ModelShape
from smtrain.core.protocol.requests import exporter_of, stage_of
from smtrain.core.text import Say
from smtrain.worker.checkpoint.adapter import native_adapter, open_adapter
from smtrain.worker.checkpoint.huggingface.companions import OF_A_WHOLE_MODEL, companions_of
from smtrain.worker.checkpoint.huggingface.folder import read_config
from smtrain.worker.checkpoint.huggingface.writer import tell_unchanged, write_hf
from smtrain.worker.checkpoint.manifest import Manifest
from smtrain.worker.checkpoint.merge import MergeBase, MergedSource, MergeEffect
from smtrain.worker.checkpoint.native.reader import NativeSource
from smtrain.worker.checkpoint.open import best_checkpoint, open_weights
from smtrain.worker.checkpoint.peft import write_peft
from smtrain.worker.checkpoint.storage import Place, place, read_text, refuse_overlap

_CARD = "the card of the model that was trained; a new one tells its licence and languages"


@dataclass(frozen=True)
class BaseModel:
    """The model that training started from."""

    folder: Path
    """Its config.json, its files that are not weights and, unless `weights` is given, its weights.
    """
    name: str | None = None
    """Its path as the user gave it, for the model card and peft. Default: the folder."""
    weights: Path | None = None


def export(
    checkpoint: Path,
    base: BaseModel,
    target: Path,
    *,
    merge: bool = False,
    merge_base: MergeBase | None = None,
    best: bool = False,
    title: str = "A model trained with smtrain",
    max_shard_size: int = 5_000_000_000,
    say: Say = text.say,
) -> MergeEffect | None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load; it appears whole or
    stays as it was.

    `checkpoint` is anything `open_weights` takes, or a checkpoint with an adapter; with `best`, a
    run's checkpoints, of which the best is taken. An adapter becomes peft's folder or, with
    `merge`, the base model with the adapter in it, of which `merge_base` says the weights; returns
    what that changed. A model card under `title` replaces the base's README. Raises CheckpointError
    if either cannot be read or they are not of one model.
    """
    for source in (checkpoint, base.folder):
        refuse_overlap(source, target)
    if best:
        best_folder = best_checkpoint(place(checkpoint)).path()
        assert best_folder is not None  # `checkpoint` is a folder
        checkpoint = best_folder
    folder = place(base.folder)
    # Before `open_weights`, which refuses a checkpoint with an adapter.
    adapter = native_adapter(place(checkpoint))
    if adapter is not None and not merge:
        companions = companions_of(folder, {README: _CARD, **OF_A_WHOLE_MODEL})
        readme = _card(folder, base.name, adapter.manifest, title=title, adapter=True)
        write_peft(
            adapter, target, base.name or str(base.folder), readme=readme, companions=companions
        )
        companions.tell(say)
        return None
    merged_source = None
    if adapter is None:
        trained_weights = open_weights(checkpoint)
        manifest = trained_weights.manifest if isinstance(trained_weights, NativeSource) else None
    else:
        manifest = adapter.manifest
        began = open_weights(
            base.weights or base.folder, read_config(base.folder) if base.weights else None
        )
        trained_weights = merged_source = MergedSource(
            began, open_adapter(checkpoint, ModelShape.from_config(began.config)), merge_base
        )
        if merged_source.note:
            say(merged_source.note)
    companions = companions_of(folder, {README: _CARD})
    readme = _card(folder, base.name, manifest, title=title, adapter=False)
    # With the base's folder: of a multimodal model it has the parts that were not trained.
    unchanged_names = write_hf(
        trained_weights,
        target,
        base.folder,
        max_shard_size,
        readme=readme,
        companion_files=companions,
    )
    tell_unchanged(unchanged_names, say)
    companions.tell(say)
    return None if merged_source is None else merged_source.change_summary()


def _card(
    base: Place, path: str | None, manifest: Manifest | None, *, title: str, adapter: bool
) -> bytes:
    """README.md of a model trained from the folder `base`, which its user named `path`."""
    files = base.files()
    readme = _text(base, README) if README in files else ""
    front_matter = metadata(
        _base(base, path), readme, adapter=adapter, legal=filter(is_legal, files)
    )
    paragraphs = [_lead(front_matter, adapter, exporter_of(path or ""))]
    if manifest is not None:
        paragraphs += [
            "## Training",
            table(["setting", "value"], _rows(manifest)),
            *_results(manifest.state),
        ]
    paragraphs.append(usage("path/to/this/folder", adapter=adapter))
    return card(title, front_matter, paragraphs).encode()


def _lead(front_matter: Mapping[str, Any], adapter: bool, parent: str | None) -> str:
    base = front_matter.get("base_model")
    of = f"[{base}](https://huggingface.co/{base})" if base else "the model named in its config"
    if parent is not None:
        run = (stage_of(parent) or (parent, ""))[0]
        of = f"the model that run {run} exported (job {parent})" + (
            f", which began as {of}" if base else ""
        )
    opening = "A LoRA adapter for" if adapter else "Trained from"
    terms = front_matter.get("license_link") or front_matter.get("license")
    legal = f" The base model's licence ({terms}) applies to it." if terms else ""
    return f"{opening} {of}, by smtrain.{legal}"


def _rows(manifest: Manifest) -> list[tuple[str, str]]:
    state, settings = manifest.state, manifest.state.get("settings") or {}
    samples, length = state.get("samples"), state.get("seq_len")
    rows = [("steps", f"{manifest.step:,}")]
    if samples and length:
        rows += [
            ("sequences", f"{samples:,} of {length:,} tokens"),
            ("tokens", f"{samples * length:,}"),
        ]
    if state.get("objective"):
        rows.append(("objective", str(state["objective"])))
    if (beta := settings.get("beta")) is not None:
        reference = "its own" if state.get("reference") is None else str(state["reference"])[:16]
        rows += [
            ("preference loss", str(settings.get("loss"))),
            ("beta", f"{beta:g}"),
            ("reference", reference),
        ]
    names = (
        "global_batch_size",
        "lr",
        "schedule",
        "warmup_steps",
        "weight_decay",
        "grad_clip",
        "precision",
        "mesh",
    )
    rows += [(name.replace("_", " "), str(settings[name])) for name in names if name in settings]
    if manifest.lora is not None:
        rows += [("LoRA rank", str(manifest.lora.rank)), ("LoRA alpha", f"{manifest.lora.alpha:g}")]
    return rows


def _results(state: Mapping[str, Any]) -> list[str]:
    losses, validation = state.get("losses") or [], state.get("validation") or {}
    rows = [("training loss, last step", f"{losses[-1]:.4f}")] if losses else []
    if validation.get("loss") is not None:
        rows.append(
            (f"loss on held-out text, step {validation['step']}", f"{validation['loss']:.4f}")
        )
    return ["## Results", table(["measure", "value"], rows)] if rows else []


def _base(base: Place, path: str | None) -> str | None:
    """The base model's name on the hub, from the config or from the record of its download."""
    if name := hub_name(path if (path or "").startswith("hf://") else None):
        return name
    try:
        record = parse_json(_text(base, SOURCE)) if SOURCE in base.files() else {}
    except ValueError:
        return None
    is_from_modelscope = (
        not isinstance(record, dict) or record.get("hub") == "modelscope"
    )  # its names are not the hub's
    return None if is_from_modelscope else hub_name(record.get("model"))


def _text(base: Place, file: str) -> str:
    try:
        return read_text(base, file)
    except (CheckpointError, ValueError):  # a README without text
        return ""
