"""The library's configuration for a model on a mesh, and the meshes that it cannot train."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed import neuronx_distributed_config
from torch import nn

from smtrain.core.model.families import FAMILIES
from smtrain.core.model.layout import Layout
from smtrain.core.model.lora import Lora
from smtrain.core.model.shape import ModelShape
from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.nxd.attention import CoreAttention
from smtrain.worker.engine.nxd.model import layer_class


def refusals(
    shape: ModelShape, options: ParallelOptions, processes: int, lora: Lora | None = None
) -> list[str]:
    """Explain why `processes` processes cannot train a model so, each with the setting and a
    remedy.
    """
    faults = shape.mesh_faults(options.tp, options.pp)
    if not shape.by_nxd:
        faults.append(f"train.engine: nxd trains no {shape.family} models; set native")
    if options.tp * options.pp * options.dp != processes:
        faults.append(
            f"parallel.tp x pp x dp = {options.tp} x {options.pp} x {options.dp} must be the number"
            f" of processes, {processes}"
        )
    if options.precision == "bf16" and options.tp > 1 and not options.sequence_parallel:
        faults.append(
            "parallel.sequence_parallel: NxD's gradients are silently wrong with precision bf16 and"
            " tp > 1 without it; set it to true"
        )
    if options.precision == "bf16" and not options.zero1 and lora is None:  # adapters are fp32
        faults.append(
            "parallel.zero1: NxD keeps the fp32 master weights of precision bf16 in ZeRO-1 only;"
            " set it to true"
        )
    if lora is not None and lora.dropout:
        faults.append(
            "train.adapter.dropout: engine nxd trains adapters without dropout, whose masks take"
            " its hosts longer to draw than a step takes; set it to 0"
        )
    return faults


def library_config(
    shape: ModelShape, options: ParallelOptions, micro_batches: int
) -> dict[str, Any]:
    """Configure the library for a number of micro-batches a step; it makes its groups of ranks
    here.
    """
    checkpointed_modules: dict[str, type[nn.Module]] = {
        "full": layer_class(shape),
        "selective": CoreAttention,
    }
    config: dict[str, Any] = neuronx_distributed_config(
        tensor_parallel_size=options.tp,
        pipeline_parallel_size=options.pp,
        pipeline_config=_pipeline(shape, options, micro_batches) if options.pp > 1 else None,
        # `ClippedAdamW` clips: the library's norm counts repeated heads more than once.
        optimizer_config={"zero_one_enabled": options.zero1, "grad_clipping": False},
        sequence_parallel=options.sequence_parallel and options.tp > 1,
        activation_checkpoint_config=checkpointed_modules.get(options.activation_checkpointing),
        model_init_config={
            "meta_device_init": True,
            "param_init_fn": _leave_empty,
            "sequential_move_factor": 11,
        },
        mixed_precision_config={
            "use_master_weights": options.zero1,
            "use_fp32_grad_acc": options.zero1,
            "use_master_weights_in_ckpt": options.zero1,
        },
    )
    return config


def _pipeline(shape: ModelShape, options: ParallelOptions, micro_batches: int) -> dict[str, Any]:
    family = FAMILIES[shape.family]
    stages = options.pp * options.virtual_stages
    cut = Layout(shape, 1, stages, cuts=options.pipeline_cuts or None)
    return {
        "transformer_layer_cls": layer_class(shape),
        "num_microbatches": micro_batches,
        "virtual_pipeline_size": options.virtual_stages,
        # The library cuts after each of these layers.
        "pipeline_cuts": [f"{family.prefix}.layers.{cut.layers(s)[-1]}" for s in range(stages - 1)],
        "output_loss_value_spec": True,
        "input_names": ["input_ids", "labels", "weights", *(["places"] if options.apart else [])],
        "leaf_module_cls": ["RMSNorm", "LayerNorm", "WeighedLoss"],
        "use_zero1_optimizer": options.zero1,
        "use_optimizer_wrapper": True,
    }


def _leave_empty(_module: nn.Module, _device: torch.device) -> None:
    """Do not initialise: parameters get memory from the library and values from `fill`."""
