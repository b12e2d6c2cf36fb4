"""What the library cannot do with a model on a mesh, said before anything is built."""

from __future__ import annotations

from smtrain.core.model.families import ModelShape
from smtrain.core.model.lora import Lora
from smtrain.worker.engine.base import ParallelOptions


def refusals(shape: ModelShape, options: ParallelOptions, processes: int, lora: Lora | None = None) -> list[str]:
    """Why a model cannot be trained so by `processes` processes; each names the setting and a way out."""
    faults = shape.mesh_faults(options.tp, options.pp)
    if shape.positions is not None:
        faults.append(f"train.engine: nxd trains no {shape.family} models; set native")
    if options.tp * options.pp * options.dp != processes:
        faults.append(
            f"parallel.tp x pp x dp = {options.tp} x {options.pp} x {options.dp} must be the number of processes, "
            f"{processes}"
        )
    if options.precision == "bf16" and options.tp > 1 and not options.sequence_parallel:
        faults.append(
            "parallel.sequence_parallel: NxD's gradients are silently wrong with precision bf16 and tp > 1 "
            "without it; set it to true"
        )
    if options.precision == "bf16" and not options.zero1 and lora is None:  # adapters are fp32
        faults.append(
            "parallel.zero1: NxD keeps the fp32 master weights of precision bf16 in ZeRO-1 only; set it to true"
        )
    if lora is not None and lora.dropout:
        faults.append(
            "train.adapter.dropout: engine nxd trains adapters without dropout, whose masks take its hosts longer "
            "to draw than a step takes; set it to 0"
        )
    return faults
