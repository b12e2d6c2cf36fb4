"""What the library is told of a mesh: its own configuration, with stages that are cut where the layout cuts them."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed import neuronx_distributed_config
from torch import nn

from smtrain.core.model.families import FAMILIES, ModelShape
from smtrain.core.model.layout import Layout
from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.nxd.attention import CoreAttention
from smtrain.worker.engine.nxd.model import layer_class


def library_config(shape: ModelShape, options: ParallelOptions, micro_batches: int) -> dict[str, Any]:
    """Of a model on a mesh with so many micro-batches a step; the library makes its groups of ranks here."""
    recomputed: dict[str, type[nn.Module]] = {"full": layer_class(shape), "selective": CoreAttention}
    found: dict[str, Any] = neuronx_distributed_config(
        tensor_parallel_size=options.tp,
        pipeline_parallel_size=options.pp,
        pipeline_config=_pipeline(shape, options, micro_batches) if options.pp > 1 else None,
        optimizer_config={"zero_one_enabled": options.zero1, "grad_clipping": False},
        sequence_parallel=options.sequence_parallel and options.tp > 1,
        activation_checkpoint_config=recomputed.get(options.activation_checkpointing),
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
    return found


def _pipeline(shape: ModelShape, options: ParallelOptions, micro_batches: int) -> dict[str, Any]:
    family = FAMILIES[shape.family]
    stages = options.pp * options.virtual_stages
    cut = Layout(shape, 1, stages, cuts=options.pipeline_cuts or None)
    return {
        "transformer_layer_cls": layer_class(shape),
        "num_microbatches": micro_batches,
        "virtual_pipeline_size": options.virtual_stages,
        "pipeline_cuts": [f"{family.prefix}.layers.{cut.layers(s)[-1]}" for s in range(stages - 1)],
        "output_loss_value_spec": True,
        "input_names": ["input_ids", "labels", "weights"],
        "leaf_module_cls": ["RMSNorm", "LayerNorm", "WeighedLoss"],
        "use_zero1_optimizer": options.zero1,
        "use_optimizer_wrapper": True,
    }


def _leave_empty(_module: nn.Module, _device: torch.device) -> None:
    """Parameters made on `meta` get memory from the library and their values from `fill`."""
