"""An adapter as peft writes it: adapter_config.json and adapter_model.safetensors, for peft and
vLLM to load.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.model.card import README
from smtrain.core.model.layout import Shard
from smtrain.core.model.lora import STACKED_EXPERTS, A, AdapterShape, B, Lora
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.adapter import BASE, CONFIG, PREFIX, WEIGHTS, quantized_header
from smtrain.worker.checkpoint.conversion_plan import ConversionPlan
from smtrain.worker.checkpoint.dtypes import Bits, DType
from smtrain.worker.checkpoint.execute import execute
from smtrain.worker.checkpoint.huggingface import safetensors
from smtrain.worker.checkpoint.huggingface.companions import NO_COMPANIONS, CompanionFiles
from smtrain.worker.checkpoint.native.reader import NativeSource
from smtrain.worker.checkpoint.sources import WeightSource, WrappedSource
from smtrain.worker.checkpoint.storage import Bounds
from smtrain.worker.checkpoint.tensor_files import Job, Tensor, Write
from smtrain.worker.checkpoint.tensor_ranges import Tally

_HUB = re.compile(r"(hf|modelscope)://([^@]+)(?:@(.+))?")


def write_peft(
    source: NativeSource,
    target: Path | str,
    base: str | None,
    overwrite: bool = True,
    readme: bytes | None = None,
    companions: CompanionFiles = NO_COMPANIONS,
) -> None:
    """Write the adapter of a checkpoint into a folder, which appears whole.

    `base` is the model that it was trained on, as the user names it, `companions` its companion
    files, `readme` the model card. Raises `CheckpointError` if the checkpoint holds no adapter or
    the target cannot be written.
    """
    manifest = source.manifest
    lora = manifest.lora
    if lora is None:
        raise CheckpointError(
            f"{source.location} holds a whole model, not an adapter; write it with --to hf."
        )
    if source.has_extended_rope:
        raise CheckpointError(
            f"{source.location} was trained with model.rope, and peft would load it on the model as"
            " it was before; merge it into that model (smtrain convert MODEL NEW --to hf"
            " --merge-adapter CHECKPOINT).",
            code="checkpoint.other_model",
        )
    assert isinstance(manifest.shape, AdapterShape)
    factors = PeftFactors(source, manifest.shape)
    tensors = {name: Tensor(factors.dtype(name), factors.shape(name)) for name in factors.names()}
    header = {BASE: manifest.base} if manifest.base else {}
    header |= quantized_header(manifest)
    container = safetensors.container(WEIGHTS, tensors, header or None)
    # By offset: an upload to an object store takes the bytes of a file front to back.
    names_by_offset = sorted(tensors, key=container.offsets.__getitem__)
    jobs: list[Job] = [(Write(name, (name,), (container,)),) for name in names_by_offset]
    extras = dict(companions.files)
    if readme is not None:
        extras[README] = readme
    extras[CONFIG] = (json.dumps(peft_config(lora, base, manifest.shape), indent=2) + "\n").encode()
    execute(
        factors,
        target,
        ConversionPlan(factors, [jobs], [container], extras, {"kind": "peft"}, (WEIGHTS, CONFIG)),
        overwrite,
    )


class PeftFactors(WrappedSource):
    """The factors of a checkpoint by the names and in the shapes that peft gives them.

    Of a matrix of all experts (target_parameters) A is [E * rank, in], and B [out, rank * E] with
    the expert last; if both matrices of a layer are adapted, gate_up_proj is the inner one,
    `base_layer`. Linears of each expert have separate factors.
    """

    def __init__(self, source: WeightSource, shape: AdapterShape) -> None:
        super().__init__(source)
        self._of: dict[str, tuple[str, int | None]] = {}
        """peft's name -> ours, and the expert if it is one's only."""
        lora, experts = shape.lora, shape.rules.experts
        has_both_stacks = {*STACKED_EXPERTS} <= {*lora.targets}
        for spec in shape.specs:
            if not spec.is_stacked or experts is None:
                self._of[f"{PREFIX}{spec.name}"] = spec.name, None
                continue
            kind = A if spec.name.endswith(A) else B
            path, _, leaf = spec.name.removesuffix(kind).rpartition(".")
            if lora.of_each_expert:
                self._of |= {
                    f"{PREFIX}{path}.{j}.{leaf}{kind}": (spec.name, j) for j in range(spec.shape[0])
                }
                continue
            # peft nests one ParamWrapper in another if both matrices of a module are targets.
            inner = ".base_layer" if has_both_stacks and leaf == "gate_up_proj" else ""
            self._of[f"{PREFIX}{path.removesuffix(experts.path)}{experts.module}{inner}{kind}"] = (
                spec.name,
                None,
            )

    def names(self) -> list[str]:
        return sorted(self._of)

    def shape(self, name: str) -> tuple[int, ...]:
        source_name, expert = self._of[name]
        shape = self._source.shape(source_name)
        if len(shape) == 2 or expert is not None:
            return shape[-2:]
        count, rows, columns = shape
        return (count * rows, columns) if source_name.endswith(A) else (rows, columns * count)

    def dtype(self, name: str) -> DType:
        return self._source.dtype(self._of[name][0])

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        source_name, expert = self._of[name]
        shape = self._source.shape(source_name)
        if len(shape) == 2:
            return self._source.bits(source_name, bounds, tally)
        if expert is not None:
            matrix: Bits = self._source.bits(source_name, [(expert, expert + 1), *bounds])[0]
            return matrix
        (start, stop), columns = bounds
        if source_name.endswith(A):
            first, rank = start // shape[1], shape[1]
            # Whole experts that cover the rows: a window may begin in the middle of one.
            window = self._source.bits(source_name, [(first, -(-stop // rank)), (0, rank), columns])
            return window.reshape(-1, window.shape[2])[start - first * rank : stop - first * rank]
        window = self._source.bits(source_name, [(0, shape[0]), (start, stop), (0, shape[2])])
        # [E, out, rank] becomes [out, rank, E]: peft reads the last dimension as the expert.
        return window.transpose(1, 2, 0).reshape(stop - start, -1)[:, slice(*columns)]

    def check(self, name: str, tally: Tally | None = None) -> None:
        self._source.check(self._of[name][0])

    def stored_with(self, name: str) -> tuple[str, ...]:
        return (name,)

    def seams(self, name: str) -> list[int]:
        return []

    def shard(self, name: str, tp_rank: int) -> Shard:
        """The whole tensor: peft's file is not cut."""
        return Shard()


def peft_config(lora: Lora, base: str | None, shape: ModelShape) -> dict[str, Any]:
    """adapter_config.json: the keys that every version of peft knows.

    `target_parameters` is added for matrices of all experts, and for linears whose names peft would
    take for those of experts. peft then has no dropout, also not for linears of experts with
    transformers 5, and an adapter with one could not be loaded.
    """
    plain = list(lora.of_linears)
    names, parameters = (
        shape.rules.experts,
        [
            f"{shape.rules.experts.module.removesuffix('experts')}{name}"
            for name in lora.of_experts
            if name in STACKED_EXPERTS and shape.rules.experts is not None
        ],
    )
    places = [] if names is None else ["mlp"] * bool(shape.sparse) + [names.shared or ""]
    if names is not None and any(places):
        # In target_modules these names would match the linears of experts too.
        parameters += [
            f"{path}.{name}.weight"
            for path in filter(None, places)
            for name in plain
            if name in names.parts
        ]
        plain = [name for name in plain if name not in names.parts]
    if lora.of_each_expert:
        plain += [name.rpartition(".")[2] for name in lora.of_experts]
    # With transformers 5, peft doubles rank and alpha of linears of experts, which keeps alpha /
    # rank only.
    rslora = lora.rslora and not lora.of_each_expert
    alpha = lora.alpha if rslora == lora.rslora else lora.scale * lora.rank
    hub = _HUB.fullmatch(base or "")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hub[2] if hub else base,
        "revision": hub[3] if hub and hub[1] == "hf" else None,  # peft asks the Hugging Face hub
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        # peft's ParamWrapper raises for any dropout (tuners/lora/layer.py).
        "lora_dropout": 0.0 if parameters or lora.of_experts else lora.dropout,
        "target_modules": sorted(plain),
        **({"target_parameters": sorted(parameters)} if parameters else {}),
        "use_rslora": rslora,
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
