"""An adapter as peft writes it: adapter_config.json and adapter_model.safetensors, for peft and vLLM to load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.model.card import README
from smtrain.core.model.layout import Layout
from smtrain.core.model.lora import Lora
from smtrain.worker.checkpoint.adapter import BASE, CONFIG, PREFIX, WEIGHTS
from smtrain.worker.checkpoint.conversion_plan import ConversionPlan
from smtrain.worker.checkpoint.execute import execute
from smtrain.worker.checkpoint.huggingface import safetensors
from smtrain.worker.checkpoint.huggingface.companions import NOTHING, Carried
from smtrain.worker.checkpoint.native.reader import NativeSource
from smtrain.worker.checkpoint.tensor_files import Job, Tensor, Write

_HUB = re.compile(r"(hf|modelscope)://([^@]+)(?:@(.+))?")


def write_peft(
    source: NativeSource,
    target: Path | str,
    base: str | None,
    overwrite: bool = True,
    readme: bytes | None = None,
    carried: Carried = NOTHING,
) -> None:
    """Write the adapter of a checkpoint into a folder, which appears whole.

    `base` is the model that it was trained on, as the user names it, `carried` its companion files, `readme` the model
    card. Raises `CheckpointError` if the checkpoint holds no adapter or the target cannot be written.
    """
    manifest = source.manifest
    lora = manifest.lora
    if lora is None:
        raise CheckpointError(f"{source.location} holds a whole model, not an adapter; write it with --to hf.")
    if source.extended:
        raise CheckpointError(
            f"{source.location} was trained with model.rope, and peft would load it on the model as it was before; "
            "merge it into that model (smtrain convert MODEL NEW --to hf --merge-adapter CHECKPOINT).",
            code="checkpoint.other_model",
        )
    layout = Layout(manifest.shape)
    names = {f"{PREFIX}{spec.name}": spec.name for spec in layout.shape.specs}
    tensors = {key: Tensor(source.dtype(name), source.shape(name)) for key, name in names.items()}
    container = safetensors.container(WEIGHTS, tensors, {BASE: manifest.base} if manifest.base else None)
    ordered = sorted(names, key=container.offsets.__getitem__)
    jobs: list[Job] = [(Write(key, (names[key],), (container,)),) for key in ordered]
    extras = dict(carried.files)
    if readme is not None:
        extras[README] = readme
    extras[CONFIG] = (json.dumps(peft_config(lora, base), indent=2) + "\n").encode()
    execute(
        source,
        target,
        ConversionPlan(layout, [jobs], [container], extras, {"kind": "peft"}, (WEIGHTS, CONFIG)),
        overwrite,
    )


def peft_config(lora: Lora, base: str | None) -> dict[str, Any]:
    """adapter_config.json: the keys that every version of peft knows."""
    hub = _HUB.fullmatch(base or "")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hub[2] if hub else base,
        "revision": hub[3] if hub and hub[1] == "hf" else None,  # peft asks the Hugging Face hub
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(lora.targets),
        "use_rslora": lora.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "layers_pattern": None,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
