"""The real megatron-core on CPUs: models of a config.json, with weights from checkpoints, give
logits and save.

    python -m tests.worker.checkpoint.mcore CASES.json TP PP [EP ETP]

One process a rank (gloo); rank and world come from the environment. ETP is the tensor parallelism
inside experts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")


def main(
    cases: list[dict[str, Any]], tp: int, pp: int, ep: int = 1, etp: int | None = None
) -> None:
    if any(case["spec"] == "te" for case in cases):
        from tests.worker.checkpoint.te_stand_in import install

        install()
    import megatron.core.tensor_parallel.random as mrandom
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    vpp = cases[0].get("vpp", 1)
    parallel_state.initialize_model_parallel(
        tp,
        pp,
        vpp if vpp > 1 else None,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp or tp,
    )
    # What only a GPU has.
    torch.cuda.synchronize = lambda *a, **k: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[method-assign]
    for name in ("ones", "zeros", "tensor"):
        setattr(torch, name, _of_cpu(getattr(torch, name)))
    mrandom.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    _without_a_gpu(torch)
    t, p = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    for case in cases:
        one({**case, "ep": ep, "etp": etp or tp}, tp, pp, t, p)
        dist.barrier()
    dist.destroy_process_group()


def _of_cpu(make: Any) -> Any:
    def made(*sizes: Any, device: Any = None, **options: Any) -> Any:
        return make(*sizes, device=None if device == "cuda" else device, **options)

    return made


def _without_a_gpu(torch: Any) -> None:
    """Replace what experts need of a GPU, of Transformer Engine, or of gradients."""
    import copy

    import megatron.core.transformer.moe.grouped_gemm_util as gemm
    import megatron.core.transformer.moe.moe_utils as utils
    import megatron.core.transformer.moe.router as router
    import megatron.core.transformer.moe.token_dispatcher as dispatcher
    import megatron.core.transformer.multi_latent_attention as latent
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

        def record_event(self) -> Any:
            return type("Event", (), {"synchronize": lambda self: None})()

    gemm.assert_grouped_gemm_is_available = lambda: None  # GroupedMLP saves without it
    attend = DotProductAttention.__init__

    def attention(
        self: Any, *a: Any, k_channels: int = 0, v_channels: int = 0, **k: Any
    ) -> None:  # that of 0.16.1 does not know the sizes that latent attention passes
        attend(self, *a, **k)

    DotProductAttention.__init__ = attention
    if not isinstance(latent.TELinear, type):
        latent.HAVE_TE = False  # 0.16.1 takes an import without Transformer Engine for one with it
    only = Stream()
    torch.cuda.Stream = lambda *a, **k: only
    torch.cuda.default_stream = torch.cuda.current_stream = lambda *a, **k: only
    torch.cuda.stream = lambda s: contextlib.nullcontext()

    def gate(
        inputs: Any, weight: Any, bias: Any, dtype: Any
    ) -> Any:  # 0.16.1 calls a gemm of Transformer Engine
        return torch.nn.functional.linear(
            inputs.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        )

    utils.router_gating_linear = router.router_gating_linear = gate

    def to_host(x: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return x.numpy() if as_numpy and torch.is_tensor(x) else x

    utils.maybe_move_tensor_to_cpu = dispatcher.maybe_move_tensor_to_cpu = to_host
    type_of = torch.Tensor.type

    def of_gpu(self: Any, *a: Any) -> Any:
        return type_of(self, *a) if a else type_of(self).replace("torch.", "torch.cuda.")

    torch.Tensor.type = of_gpu  # type: ignore[method-assign,assignment]
    make = WrappedTorchNorm.__new__

    def norm(
        cls: Any, config: Any, *a: Any, **k: Any
    ) -> Any:  # it refuses sequence parallelism, for gradients
        config = copy.copy(config)
        config.sequence_parallel = False
        return make(cls, config, *a, **k)

    WrappedTorchNorm.__new__ = norm


def _of_experts(said: dict[str, Any], ep: int, etp: int) -> dict[str, Any]:
    """Megatron-core's settings of experts, from the arguments that are written with the weights."""
    if "num_experts" not in said:
        return {}
    names = (
        "moe_ffn_hidden_size",
        "moe_router_topk",
        "moe_router_pre_softmax",
        "moe_router_score_function",
    )
    further = (
        "moe_router_enable_expert_bias",
        "moe_router_topk_scaling_factor",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
    )
    all_names = (*names, "moe_layer_freq", "moe_router_dtype", *(n for n in further if n in said))
    return {name: said[name] for name in all_names} | {
        "num_moe_experts": said["num_experts"],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall" if ep > 1 and etp == 1 else "allgather",
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
    }


_LATENT = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_base",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
_AS_THEY_ARE = (
    "no_rope_freq",
    "window_size",
    "window_attn_skip_freq",
    "activation_func_clamp_value",
    "glu_linear_offset",
    "softmax_type",
)


def _models(task: dict[str, Any], tp: int, pp: int, p: int) -> list[Any]:
    """The model of a case, or a rank's virtual stages of it."""
    import torch
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    from smtrain.core.model.hf_config import normalise
    from smtrain.worker.checkpoint.dtypes import FP32
    from smtrain.worker.checkpoint.megatron.args import arguments
    from smtrain.worker.checkpoint.targets import Megatron

    c, normal = task["config"], normalise(task["config"])
    shape, said = normal.shape, arguments(task["config"], FP32, task["padded"], Megatron())
    plain, qwen3, gpt2 = shape.plain, shape.qk_norm == "head", shape.family == "gpt2"
    activation: Any = torch.nn.functional.gelu if plain else torch.nn.functional.silu
    if said.get("quick_geglu"):
        activation = quick_gelu
    if gpt2:
        activation = functools.partial(activation, approximate="tanh")  # --openai-gelu
    sized: dict[str, Any] = dict(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        kv_channels=said["kv_channels"],
        num_query_groups=shape.kv_heads,
        use_cpu_initialization=True,
        normalization="LayerNorm" if plain else "RMSNorm",
        gated_linear_unit=not plain,
        activation_func=activation,
        add_bias_linear=said["add_bias_linear"],
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=said["qk_layernorm"],
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        layernorm_epsilon=c.get("rms_norm_eps", 1e-5),
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        **{key: said[key] for key in _AS_THEY_ARE if key in said},
    )
    experts = _of_experts(said, task["ep"], task["etp"])
    if experts:
        sized |= {
            **experts,
            "sequence_parallel": tp > 1,
            "bias_dropout_fusion": False,
            "apply_rope_fusion": False,
        }
        sized |= {"persist_layer_norm": False, "moe_grouped_gemm": task.get("grouped", False)}
    if task.get("dtype") == "bfloat16":
        sized |= {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    last = task.get("vpp", 1) - 1
    kind: Any = TransformerConfig
    if said.get("multi_latent_attention"):
        kind = MLATransformerConfig
        sized |= {key: said[key] for key in _LATENT if key in said}
    config = kind(**sized, virtual_pipeline_model_parallel_size=last + 1 if last else None)
    for key in (key for key in said if key.startswith("yarn_")):
        setattr(config, key, said[key])
    models = []
    for v in range(last + 1):
        if experts or shape.latent is not None:
            stage = v if last else None
            spec = get_gpt_decoder_block_spec(
                config, task["spec"] == "te", config.normalization, vp_stage=stage
            )
        elif task["spec"] == "te":
            spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qwen3)
        else:
            spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=qwen3)
        models.append(
            GPTModel(
                config,
                spec,
                vocab_size=task["padded"],
                max_sequence_length=64,
                position_embedding_type=said["position_embedding_type"],
                rotary_base=10000 if normal.rope is None else normal.rope.theta,
                rotary_percent=1.0 if normal.rope is None else normal.rope.share,
                share_embeddings_and_output_weights=shape.tied,
                vp_stage=v if last else None,
                pre_process=p == 0 and v == 0,
                post_process=p == pp - 1 and v == last,
                parallel_output=False,
            )
        )
    return [model.to(config.params_dtype) for model in models]


def one(task: dict[str, Any], tp: int, pp: int, t: int, p: int) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state

    models = _models(task, tp, pp, p)
    keys = ["model"] if len(models) == 1 else [f"model{v}" for v in range(len(models))]
    folder = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
    if task["ep"] > 1:
        folder += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    if task["form"] == "torch":
        held = torch.load(Path(task["load"], folder, "model_optim_rng.pt"), weights_only=False)
        said = models[0].load_state_dict(held["model"], strict=False)
        assert not said.unexpected_keys, said
        assert all(key.endswith("_extra_state") for key in said.missing_keys), said
    else:
        wanted = {key: model.sharded_state_dict() for key, model in zip(keys, models, strict=True)}
        held = dist_checkpointing.load(wanted, task["load"])
        for key, model in zip(keys, models, strict=True):
            model.load_state_dict(held[key])
    assert held["args"].num_layers == models[0].config.num_layers
    if task.get("save"):
        _save_doubled(task, models, keys, folder)
        return
    (model,) = models
    ids = torch.tensor(task["ids"])
    n = ids.shape[1]
    mask = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)[None, None]
    before = torch.empty(n, len(ids), model.config.hidden_size)
    with torch.no_grad():
        if p > 0:
            dist.recv(before, parallel_state.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(before)
        logits = model.eval()(ids, torch.arange(n)[None], mask)
    if p < pp - 1:
        dist.send(logits, parallel_state.get_pipeline_model_parallel_next_rank())
    elif t == 0:
        torch.save(logits, task["logits"])


def _save_doubled(task: dict[str, Any], models: list[Any], keys: list[str], folder: str) -> None:
    """Save twice the weights in both forms, as Megatron-LM does, with an optimizer's state if
    `optimizer` asks for it.

    `metadata` is what Megatron-LM passes on, `router` the type of routers, `fully_parallel` spreads
    a rank's tensors.
    """
    from argparse import Namespace

    import numpy
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )
    from megatron.core.enums import ModelType

    metadata, saved = task.get("metadata"), Path(task["save"])
    optimizer = _stepped(models, task["optimizer"]) if task.get("optimizer") else None
    for model in models:
        for name, parameter in model.named_parameters():
            if name.endswith("router.weight") and task.get("router"):
                parameter.data = parameter.data.to(getattr(torch, task["router"]))
            parameter.data.mul_(2)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.mul_(2)
    state: dict[str, Any] = {"iteration": 7, "checkpoint_version": 3.0}
    if task.get("args", True):
        state["args"] = Namespace(num_layers=2, model_type=ModelType.encoder_or_decoder)
    sharded = {
        key: model.sharded_state_dict(metadata=metadata)
        for key, model in zip(keys, models, strict=True)
    }
    legacy = {
        key: model.state_dict_for_save_checkpoint() for key, model in zip(keys, models, strict=True)
    }
    if optimizer is not None:
        one = sharded["model"] if len(keys) == 1 else sharded
        sharded["optimizer"] = optimizer.sharded_state_dict(one, metadata=metadata or {})
        legacy["optimizer"] = optimizer.state_dict()
    strategy = None
    if task.get("fully_parallel"):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy("torch_dist"), group, True
        )
    saved.mkdir(exist_ok=True)
    dist_checkpointing.save({**sharded, **state}, str(saved), strategy, content_metadata=metadata)
    state |= {
        "rng_state": [
            {"np_rng_state": numpy.random.get_state(), "torch_rng_state": torch.get_rng_state()}
        ]
    }
    file = Path(f"{saved}-torch", "iter_0000007", folder, "model_optim_rng.pt")
    file.parent.mkdir(parents=True, exist_ok=True)
    # The first alone is Megatron-LM's own rule, by which it loses tp ranks if experts are cut less
    # than the rest.
    if 0 in (
        parallel_state.get_expert_data_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    ):
        torch.save({**state, **legacy}, file)


def _stepped(models: list[Any], kind: str) -> Any:
    """An optimizer after one step: `plain`, or `distributed`."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    distributed = kind == "distributed"
    about = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    wrapped = [DistributedDataParallel(model.config, about, model) for model in models]
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=models[0].config.bf16,
        params_dtype=models[0].config.params_dtype,
        use_distributed_optimizer=distributed,
        clip_grad=0.0,
    )
    optimizer = get_megatron_optimizer(config, wrapped)
    before = [parameter.data.clone() for model in models for parameter in model.parameters()]
    for parameter in (p for model in models for p in model.parameters()):
        parameter.main_grad.normal_()
    optimizer.step()
    for parameter, held in zip(
        (p for model in models for p in model.parameters()), before, strict=True
    ):
        parameter.data.copy_(held)
    return optimizer


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), *map(int, sys.argv[2:]))
