"""Every name of neuronx-distributed that the engine uses, with the arguments it passes.

If the library is installed, a test compares this list with its signatures; otherwise a test
compares the engine's code with this list. This finds a release that renames something before anyone
pays for a cluster.
"""

from __future__ import annotations

CHECKED_AGAINST = "0.18.0 (Neuron SDK 2.29), torch 2.9.0, torch_xla 2.9.0, transformers 4.56.2"

# "module:name" -> the arguments passed by name; "*" stands for those passed by position, with their
# number
USED: dict[str, tuple[str, ...]] = {
    "neuronx_distributed:neuronx_distributed_config": (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "pipeline_config",
        "optimizer_config",
        "sequence_parallel",
        "activation_checkpoint_config",
        "model_init_config",
        "mixed_precision_config",
    ),
    "neuronx_distributed:initialize_parallel_model": ("*2",),
    "neuronx_distributed:initialize_parallel_optimizer": ("*3", "lr", "betas", "eps", "clip"),
    "neuronx_distributed:save_checkpoint": (
        "*1",
        "tag",
        "model",
        "optimizer",
        "user_content",
        "use_xser",
        "num_kept_ckpts",
        "async_save",
    ),
    "neuronx_distributed:load_checkpoint": ("*1", "tag", "model", "optimizer"),
    "neuronx_distributed:finalize_checkpoint": (),
    "neuronx_distributed.kernels.flash_attn:nki_flash_attn_func": (
        "*3",
        "lnc",
        "softmax_scale",
        "causal",
        "transpose_nki_inputs",
    ),
    "neuronx_distributed.modules.qkv_linear:GQAQKVColumnParallelLinear": (
        "*2",
        "bias",
        "gather_output",
        "dtype",
        "sequence_parallel_enabled",
        "kv_size_multiplier",
        "fuse_qkv",
    ),
    "neuronx_distributed.parallel_layers.layers:ColumnParallelLinear": (
        "*2",
        "bias",
        "gather_output",
        "dtype",
        "stride",
        "sequence_parallel_enabled",
        "sequence_dimension",
    ),
    "neuronx_distributed.parallel_layers.layers:RowParallelLinear": (
        "*2",
        "bias",
        "input_is_parallel",
        "dtype",
        "sequence_parallel_enabled",
        "sequence_dimension",
    ),
    "neuronx_distributed.parallel_layers.layers:ParallelEmbedding": (
        "*2",
        "dtype",
        "padding_idx",
        "sequence_parallel_enabled",
    ),
    "neuronx_distributed.parallel_layers.loss_functions:parallel_cross_entropy": ("*2",),
    "neuronx_distributed.parallel_layers.mappings:copy_to_tensor_model_parallel_region": ("*1",),
    "neuronx_distributed.parallel_layers.mappings:gather_from_sequence_parallel_region": ("*1",),
    "neuronx_distributed.parallel_layers.mappings:reduce_from_tensor_model_parallel_region": (
        "*1",
    ),
    "neuronx_distributed.parallel_layers.mappings:reduce_scatter_to_sequence_parallel_region": (
        "*1",
    ),
    "neuronx_distributed.parallel_layers.parallel_state:get_kv_shared_group": (),
    "neuronx_distributed.parallel_layers.parallel_state:get_tensor_model_parallel_group": (),
    "neuronx_distributed.parallel_layers.parallel_state:get_tensor_model_parallel_rank": (),
    "neuronx_distributed.parallel_layers.parallel_state:get_pipeline_model_parallel_rank": (),
    "neuronx_distributed.parallel_layers.parallel_state:get_data_parallel_rank": (),
    "neuronx_distributed.parallel_layers.parallel_state:get_data_parallel_replica_groups": (),
    "neuronx_distributed.parallel_layers.parallel_state:destroy_model_parallel": (),
    "neuronx_distributed.utils:cpu_mode": (),
    "neuronx_distributed.utils:get_device": (),
    "neuronx_distributed.utils:mark_step": (),
}

# Methods and attributes of the objects that the functions above return.
METHODS: dict[str, tuple[str, ...]] = {
    "neuronx_distributed.trainer.model:NxDModel": (
        "run_train",
        "run_eval",
        "named_parameters",
        "named_modules",
        "original_module",
    ),
    "neuronx_distributed.trainer.optimizer:NxDOptimizer": ("step", "zero_grad", "param_groups"),
    "torch_xla.distributed.zero_redundancy_optimizer:ZeroRedundancyOptimizer": (
        "step",
        "state_dict",
    ),
}

# Keys of pipeline_config, which the library hands to its pipeline model as they are.
PIPELINE = (
    "transformer_layer_cls",
    "num_microbatches",
    "virtual_pipeline_size",
    "pipeline_cuts",
    "output_loss_value_spec",
    "input_names",
    "leaf_module_cls",
    "use_zero1_optimizer",
    "use_optimizer_wrapper",
)
