"""The model card that the export stage writes: what the checkpoint and the base model's folder say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.model.card import README, card, hub_name, metadata, table, usage
from smtrain.core.model.hf_folder import SOURCE, is_legal
from smtrain.worker.checkpoint.manifest import Manifest
from smtrain.worker.checkpoint.storage import Place, read_text


def write_card(base: Place, path: str | None, manifest: Manifest | None, *, title: str, adapter: bool) -> bytes:
    """README.md for a model that was trained from the folder `base`, which its user named `path`."""
    files = base.files()
    readme = _text(base, README) if README in files else ""
    about = metadata(_base(base, path), readme, adapter=adapter, legal=filter(is_legal, files))
    paragraphs = [_lead(about, adapter)]
    if manifest is not None:
        paragraphs += ["## Training", table(["setting", "value"], _rows(manifest)), *_results(manifest.state)]
    paragraphs.append(usage("path/to/this/folder", adapter=adapter))
    return card(title, about, paragraphs).encode()


def _lead(about: Mapping[str, Any], adapter: bool) -> str:
    base = about.get("base_model")
    of = f"[{base}](https://huggingface.co/{base})" if base else "the model named in its config"
    what = "A LoRA adapter for" if adapter else "Trained from"
    terms = about.get("license_link") or about.get("license")
    legal = f" The base model's licence ({terms}) applies to it." if terms else ""
    return f"{what} {of}, by smtrain.{legal}"


def _rows(manifest: Manifest) -> list[tuple[str, str]]:
    state, told = manifest.state, manifest.state.get("settings") or {}
    samples, length = state.get("samples"), state.get("seq_len")
    rows = [("steps", f"{manifest.step:,}")]
    if samples and length:
        rows += [("sequences", f"{samples:,} of {length:,} tokens"), ("tokens", f"{samples * length:,}")]
    if state.get("objective"):
        rows.append(("objective", str(state["objective"])))
    names = ("global_batch_size", "lr", "schedule", "warmup_steps", "weight_decay", "grad_clip", "precision", "mesh")
    rows += [(name.replace("_", " "), str(told[name])) for name in names if name in told]
    if manifest.lora is not None:
        rows += [("LoRA rank", str(manifest.lora.rank)), ("LoRA alpha", f"{manifest.lora.alpha:g}")]
    return rows


def _results(state: Mapping[str, Any]) -> list[str]:
    losses, judged = state.get("losses") or [], state.get("validation") or {}
    rows = [("training loss, last step", f"{losses[-1]:.4f}")] if losses else []
    if judged.get("loss") is not None:
        rows.append((f"loss on held-out text, step {judged['step']}", f"{judged['loss']:.4f}"))
    return ["## Results", table(["measure", "value"], rows)] if rows else []


def _base(base: Place, path: str | None) -> str | None:
    """The base model's name on the hub, by the config or by what fetched it."""
    if named := hub_name(path if (path or "").startswith("hf://") else None):
        return named
    try:
        said = json.loads(_text(base, SOURCE)) if SOURCE in base.files() else {}
    except ValueError:
        return None
    elsewhere = not isinstance(said, dict) or said.get("hub") == "modelscope"  # names there are not the hub's
    return None if elsewhere else hub_name(said.get("model"))


def _text(base: Place, file: str) -> str:
    try:
        return read_text(base, file)
    except (CheckpointError, ValueError):  # a README that is no text says nothing
        return ""
