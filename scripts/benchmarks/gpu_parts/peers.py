"""Models of other projects in the usual loop: transformers compiled, with Liger's kernels, with
peft; torchtitan.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from scripts.benchmarks.gpu_parts.bench import Bench
from scripts.benchmarks.gpu_parts.loops import PeerLoop, adapters
from scripts.benchmarks.gpu_parts.weights import draw_values, fill
from smtrain.core.model.lora import AdapterShape
from smtrain.core.model.shape import ModelShape
from smtrain.core.model.transformers_build import transformers_config
from smtrain.worker.engine.initial_weights import RandomFactors


def transformers_model(
    bench: Bench, config: dict[str, Any], dtype: torch.dtype, recompute: bool = False
) -> Any:
    """transformers' model with the benchmark's values, on the device."""
    from transformers import AutoModelForCausalLM

    with torch.device(bench.kind):
        model: Any = AutoModelForCausalLM.from_config(
            transformers_config(config), attn_implementation="sdpa", dtype=dtype
        )
    fill(model, config)
    model.config.use_cache = False
    model.train()  # there is no dropout; gradient checkpointing works in this mode only
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy in fp32."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def compiled_transformers(bench: Bench, config: dict[str, Any]) -> PeerLoop:
    """transformers with compiled blocks and loss."""
    model, loss = (
        transformers_model(bench, config, torch.float32),
        torch.compile(mean_loss, dynamic=False),
    )
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    return PeerLoop(
        bench,
        lambda i, y: loss(model(input_ids=i, use_cache=False).logits, y),
        [*model.parameters()],
    )


def fully_sharded(bench: Bench, config: dict[str, Any]) -> PeerLoop:
    """transformers with compiled blocks and loss, sharded by FSDP2, gradients summed in fp32."""
    model, loss = (
        transformers_model(bench, config, torch.float32),
        torch.compile(mean_loss, dynamic=False),
    )
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in model.model.layers:
        layer.compile(dynamic=False)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return PeerLoop(
        bench,
        lambda i, y: loss(model(input_ids=i, use_cache=False).logits, y),
        [*model.parameters()],
        autocast=False,
    )


def plain_experts(bench: Bench, config: dict[str, Any]) -> PeerLoop:
    """transformers' experts, all in bf16 (its grouped products take no autocast), with the
    auxiliary loss if the model has one.
    """
    model, factor = (
        transformers_model(bench, config, torch.bfloat16),
        config.get("router_aux_loss_coef"),
    )

    def loss(i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if factor is None:
            return mean_loss(model(input_ids=i, use_cache=False).logits, y)
        out = model(input_ids=i, use_cache=False, output_router_logits=True)
        balance: torch.Tensor = factor * out.aux_loss
        # The auxiliary loss trains, but is not part of the compared loss.
        return mean_loss(out.logits, y) + balance - balance.detach()

    return PeerLoop(bench, loss, [*model.parameters()], autocast=False)


def with_liger(
    bench: Bench, config: dict[str, Any], recompute: bool = False, lora: bool = False
) -> PeerLoop:
    """transformers with Liger's rope, norm, swiglu and fused linear cross entropy; with peft's
    adapters if `lora`.
    """
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    on = ("rope", "swiglu", "rms_norm", "fused_linear_cross_entropy")
    apply_liger_kernel_to_llama(**dict.fromkeys(on, True), cross_entropy=False)
    model = transformers_model(bench, config, torch.bfloat16 if lora else torch.float32, recompute)
    if lora:
        model = with_adapters(model, config)

    def loss(i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(input_ids=i, labels=y, shift_labels=y, use_cache=False).loss
        return out

    return PeerLoop(bench, loss, [*model.parameters()], autocast=not lora)


def quantized_transformers(bench: Bench, config: dict[str, Any]) -> PeerLoop:
    """transformers with linears of bitsandbytes in nf4, double quantized, and peft's adapters."""
    from bitsandbytes.nn.modules import Linear4bit, Params4bit

    model = transformers_model(bench, config, torch.bfloat16)
    for layer in model.model.layers:
        linears = [
            (name, module) for name, module in layer.named_modules() if type(module) is nn.Linear
        ]
        for name, linear in linears:
            replacement = Linear4bit(
                linear.in_features,
                linear.out_features,
                bias=False,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
                device="meta",
            )
            replacement.weight = Params4bit(
                linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
            )
            parent, _, leaf = name.rpartition(".")
            setattr(layer.get_submodule(parent), leaf, replacement.to(bench.kind))
    model = with_adapters(model, config)

    def loss(i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mean_loss(model(input_ids=i, use_cache=False).logits, y)

    return PeerLoop(bench, loss, [*model.parameters()], autocast=False)


def with_adapters(model: Any, config: dict[str, Any]) -> Any:
    """peft's LoRA on all linears with this engine's initial factors."""
    from peft import LoraConfig, get_peft_model

    lora = adapters(config)
    settings = LoraConfig(
        r=lora.rank, lora_alpha=int(lora.alpha), lora_dropout=0.0, target_modules=list(lora.targets)
    )
    peft_model: Any = get_peft_model(model, settings)
    factors = RandomFactors(AdapterShape.of(ModelShape.from_config(config), lora), 0)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(
                    factors.read(name.removeprefix("base_model.model.").replace(".default.", "."))
                )
    return peft_model


def torchtitan(bench: Bench, config: dict[str, Any]) -> PeerLoop:
    """torchtitan's Llama as it compiles it, block by block and the loss, with the same values and a
    tied head.
    """
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.model.args import RoPEScalingArgs
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    rope, hidden_size = config["rope_scaling"], config["hidden_size"]
    arguments = TransformerModelArgs(
        dim=hidden_size,
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        vocab_size=config["vocab_size"],
        multiple_of=64,
        ffn_dim_multiplier=config["intermediate_size"] / (8 * hidden_size / 3),
        norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_theta"],
        max_seq_len=8192,
        rope_scaling_args=RoPEScalingArgs(
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        ),
    )
    with torch.device("meta"):
        model = Transformer(arguments)
    model.to_empty(device=bench.kind)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(bench.kind))  # its table of rotations too
    shape, device = ModelShape.from_config(config), torch.device(bench.kind)
    values = {spec.name: draw_values(shape, spec.name, spec.shape, device) for spec in shape.specs}
    values = Llama3StateDictAdapter(arguments, None).from_hf(values)
    model.load_state_dict(values, strict=False)  # without the output matrix, which is tied
    model.output.weight = model.tok_embeddings.weight
    for layer in model.layers.values():
        layer.compile(fullgraph=not bench.toy)  # it refuses to be switched off
    loss = torch.compile(mean_loss)
    return PeerLoop(bench, lambda i, y: loss(model(i), y), list(model.parameters()))
