"""LoRA in engine tests: adapters of the tiny models, trained by the engine on any mesh and by peft
in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from smtrain.core.model.lora import AdapterShape, Lora, targets_of
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.native.reader import NativeSource
from smtrain.worker.checkpoint.peft import peft_config
from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.initial_weights import RandomFactors
from smtrain.worker.engine.native import NativeEngine
from tests.worker.engine import cases
from tests.worker.engine.cases import OPTIMIZER

SEED = 3
RATE = 0.1  # of the steps of whole models, as LoRA's are


def steps(e: Any, first: int, last: int) -> list[tuple[float, float]]:
    out = []
    for step in range(first, last):
        result = e.step(*cases.own(e, cases.batch(e.config, step)), RATE * cases.lr(step))
        out.append((result.loss, result.grad_norm))
    return out


def lora(config: dict[str, Any], targets: Any = ("all-linear",), **more: Any) -> Lora:
    return Lora(
        **{"rank": 4, "alpha": 8.0, **more},
        targets=targets_of(ModelShape.from_config(config), targets),
    )


def engine(
    config: dict[str, Any], options: ParallelOptions, adapter: Lora, base: int = 0
) -> NativeEngine:
    source: Any = cases.Memory(config, cases.weights(config, base))
    return NativeEngine(config, options, OPTIMIZER, source, SEED, adapter)


def train(
    rank: int,
    config: dict[str, Any],
    options: ParallelOptions,
    adapter: Lora,
    folder: Path,
    count: int = 3,
) -> list[tuple[float, float]]:
    return begun(engine(config, options, adapter), folder, count)


def begun(e: Any, folder: Path, count: int) -> list[tuple[float, float]]:
    """Train an engine of any kind and leave a checkpoint after the last step."""
    out = steps(e, 0, count)
    e.save(folder, count, {"consumed": count})
    return out


def resume(
    rank: int,
    config: dict[str, Any],
    options: ParallelOptions,
    adapter: Lora,
    checkpoint: Path,
    at: int,
    last: int,
    folder: Path | None = None,
) -> list[tuple[float, float]]:
    return resumed(engine(config, options, adapter), checkpoint, at, last, folder)


def resumed(
    e: Any, checkpoint: Path, at: int, last: int, folder: Path | None
) -> list[tuple[float, float]]:
    """Resume an engine of any kind from step `at`, and leave a checkpoint in `folder` if it is
    given.
    """
    assert e.load(checkpoint).get("consumed", at) == at
    out = steps(e, at, last)
    if folder is not None:
        e.save(folder, last, {"consumed": last})
    return out


def try_build(rank: int, config: dict[str, Any], options: ParallelOptions, adapter: Lora) -> str:
    return cases.refusal(lambda: engine(config, options, adapter), "built")


def try_load(
    rank: int, config: dict[str, Any], options: ParallelOptions, adapter: Lora | None, path: Path
) -> str:
    e = cases.engine(config, options) if adapter is None else engine(config, options, adapter)
    return cases.refusal(lambda: e.load(path), "loaded")


def factors(checkpoint: Path) -> dict[str, torch.Tensor]:
    source = NativeSource(checkpoint)
    return {name: source.read(name).clone() for name in source.names()}


def peft_model(config: dict[str, Any], adapter: Lora) -> Any:
    """peft's model with the factors that the engine begins with."""
    from peft import LoraConfig, get_peft_model

    shape = AdapterShape.of(ModelShape.from_config(config), adapter)
    described = {k: v for k, v in peft_config(adapter, None, shape).items() if k in _SHARED}
    base = cases.transformers_model(config)
    if adapter.quantize:
        quantize_by_bitsandbytes(base)
    model = get_peft_model(base, LoraConfig(**described))
    start = as_peft(config, adapter, RandomFactors(shape, SEED).read)
    ones = as_peft(
        config, adapter, lambda name: torch.ones({s.name: s.shape for s in shape.specs}[name])
    )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            with torch.no_grad():
                parameter.copy_(start[plain_name(name)])
            # Linears of each expert stay apart, as with transformers 4: peft makes them one, and
            # would train all of it.
            mask = ones[plain_name(name)]
            parameter.register_hook(mask.mul)
    return model


def quantize_by_bitsandbytes(model: Any) -> None:
    """Quantise on the CPU as transformers does with load_in_4bit, nf4 and double quantisation."""
    import bitsandbytes

    nn: Any = bitsandbytes.nn
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and module is not head:
            made = nn.Linear4bit(
                module.in_features,
                module.out_features,
                module.bias is not None,
                compute_dtype=module.weight.dtype,
                compress_statistics=True,
                quant_type="nf4",
                device="meta",
            )
            made.weight = nn.Params4bit(
                module.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4"
            ).to("cpu")
            made.bias = module.bias
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, made)
    model.is_loaded_in_4bit = True


_SHARED = ("r", "lora_alpha", "target_modules", "target_parameters", "use_rslora", "task_type")


def as_peft(
    config: dict[str, Any], adapter: Lora, read: Callable[[str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Factors, which `read` gives by our names, by those of peft's model and in its shapes."""
    shape = AdapterShape.of(ModelShape.from_config(config), adapter)
    both, out, held = (
        len(adapter.of_experts) > 1,
        dict[str, torch.Tensor](),
        dict[str, list[torch.Tensor]](),
    )
    for spec in shape.specs:
        if not spec.is_stacked:
            out[spec.name] = read(spec.name)
            continue
        path, leaf, kind, _ = spec.name.rsplit(".", 3)
        down = leaf in ("down_proj", "w2")
        path = path.replace("block_sparse_moe", "mlp") + (
            ".base_layer" if both and not down else ""
        )
        held.setdefault(f"{path}.{kind}.weight", []).append(read(spec.name))
    for (
        name,
        parts,
    ) in held.items():  # gate and up with an A each: ranks one after another, and B block by block
        if "lora_A" in name:
            out[name] = torch.cat(parts, 1).flatten(0, 1)
        else:
            blocks = torch.stack([torch.block_diag(*each) for each in zip(*parts, strict=True)])
            out[name] = blocks.permute(1, 2, 0).flatten(1)
    return out


def plain_name(name: str) -> str:
    """peft's name of a factor without its own prefix and suffix."""
    return name.removeprefix("base_model.model.").replace(".default.", ".")


def peft(
    rank: int,
    config: dict[str, Any],
    adapter: Lora,
    count: int = 3,
    samples: int = cases.BATCH,
    aux: float = 0.0,
) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """The same steps by peft and torch's AdamW, and the factors after them.

    With `aux`, the auxiliary loss is that of each `samples` of a batch.
    """
    out, trained, _ = _peft(config, adapter, count, samples, aux)
    return out, {name: p.detach().numpy() for name, p in trained.items()}


def peft_moments(
    rank: int, config: dict[str, Any], adapter: Lora, count: int, samples: int, aux: float
) -> dict[str, Any]:
    """AdamW's first moments of the factors after steps of `peft`, made from the gradients."""
    out, trained, gradients = _peft(config, adapter, count, samples, aux)
    made = {name: torch.zeros_like(p) for name, p in trained.items()}
    for (_, norm), of_step in zip(out, gradients, strict=True):
        for name, gradient in of_step.items():
            clipped = gradient * min(1.0, OPTIMIZER.grad_clip / (norm + 1e-6))
            made[name] = made[name] * OPTIMIZER.betas[0] + clipped * (1 - OPTIMIZER.betas[0])
    return {name: moment.numpy() for name, moment in made.items()}


def _peft(
    config: dict[str, Any], adapter: Lora, count: int, samples: int, aux: float
) -> tuple[list[tuple[float, float]], dict[str, torch.nn.Parameter], list[dict[str, torch.Tensor]]]:
    model = peft_model(config, adapter)
    trained = {plain_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    gradients = []

    def backward(step: int) -> float:
        ids, labels = cases.batch(config, step)
        total, labelled = 0.0, (labels != -100).sum()
        for some, wanted in zip(ids.split(samples), labels.split(samples), strict=True):
            made = model(
                input_ids=some, use_cache=False, **({"output_router_logits": True} if aux else {})
            )
            loss = (
                F.cross_entropy(made.logits.flatten(0, 1), wanted.flatten(), reduction="sum")
                / labelled
            )
            balance = aux * made.aux_loss * len(some) / len(ids) if aux else 0.0
            (loss + balance).backward()
            total += float(loss.detach())
        gradients.append(
            {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        )
        return total

    return (
        cases.adamw_steps(list(trained.values()), backward, count, OPTIMIZER, RATE),
        trained,
        gradients,
    )


def made_by_peft(
    rank: int, config: dict[str, Any], folder: Path, parameters: list[str], modules: list[str]
) -> Any:
    """Logits of the first batch, by an adapter of random factors that peft leaves in a folder."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(SEED)
    options = LoraConfig(
        r=3,
        lora_alpha=5,
        target_parameters=parameters,
        target_modules=modules,
        task_type="CAUSAL_LM",
        rank_pattern={} if "w1" in modules else {"down_proj": 2},
        alpha_pattern={"q_proj": 4},
    )
    model = get_peft_model(cases.transformers_model(config), options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
        model.save_pretrained(folder)
        return model(input_ids=cases.batch(config, 0)[0], use_cache=False).logits.numpy()


def peft_logits(rank: int, config: dict[str, Any], base: Path, folder: Path) -> Any:
    """Logits of the first batch, by peft with an exported folder."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
    with torch.no_grad():
        return model(input_ids=cases.batch(config, 0)[0], use_cache=False).logits.numpy()


def plain_logits(rank: int, config: dict[str, Any], folder: Path) -> Any:
    """Logits of the first batch, by transformers with a merged folder."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder)
        return model(input_ids=cases.batch(config, 0)[0], use_cache=False).logits.numpy()


def logits(
    rank: int, config: dict[str, Any], options: ParallelOptions, adapter: Lora, checkpoint: Path
) -> tuple[Any, Any]:
    """Evaluation loss and logits of the first batch after a checkpoint is loaded."""
    e = engine(config, options, adapter)
    e.load(checkpoint)
    made = e.logits(cases.batch(config, 0)[0])
    return e.evaluate(*cases.own(e, cases.batch(config, 0))), None if made is None else made.numpy()


def frozen(
    rank: int, config: dict[str, Any], options: ParallelOptions, adapter: Lora
) -> dict[str, Any]:
    """The base after two steps: whether it changed, parameters with gradients, and size of the
    optimizer state.
    """
    e = engine(config, options, adapter)
    before = e.stage.dense.flat.clone()
    steps(e, 0, 2)
    state = (
        cases.zero1(e).gradients.flat,
        cases.zero1(e).master,
        cases.zero1(e).exp_avg,
        cases.zero1(e).exp_avg_sq,
    )
    return {
        "unchanged": torch.equal(before, e.stage.dense.flat),
        "gradients": [
            name
            for name, p in e.stage.named_own_parameters()
            if p.grad is not None or p.requires_grad
        ],
        "dtypes": (
            {str(p.dtype) for _, p in e.stage.named_own_parameters()}
            | {str(p.dtype) for p in e.stage.trained.parameters.values()}
        ),
        "numbers": max(len(t) for t in state),
        "flat": len(e.stage.trained.flat),
    }
