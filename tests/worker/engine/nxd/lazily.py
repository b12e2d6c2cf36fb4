"""Runs on a real XLA device in a separate process: `python -m tests.worker.engine.nxd.lazily WHAT
[FOLDER]`.

Nothing of torch_xla or neuronx-distributed is replaced: only modules that are not there have
stand-ins. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_xla.debug.metrics as metrics

STEPS = 400


def rate(step: int, steps: int = STEPS) -> float:
    """Fall to 0 as with `min_lr: 0`, stay for some steps, and rise again; steps count from 1."""
    return 3e-3 * max(0.0, 1.0 - step / (steps - 50)) if step < steps - 20 else 1e-3


def compilations() -> int:
    return sum(
        (metrics.metric_data(name) or (0,))[0] for name in ("CompileTime", "UncachedCompile")
    )


def readings() -> int:
    """Count fetches from the device, each of which waits for it."""
    return int((metrics.metric_data("TransferFromDeviceTime") or (0,))[0])


class Counted:
    """Steps after which the number of compilations was higher than before."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._last = compilations()

    def after(self, step: int) -> None:
        now = compilations()
        if now != self._last:
            self.steps.append(step)
        self._last = now


def optimizer() -> dict[str, Any]:
    """Ours and torch's, on the device and on the host, over the same gradients."""
    import torch_xla
    import torch_xla.distributed.xla_backend  # registers the backend

    from smtrain.worker.engine.nxd.optimizer import SHARE, ClippedAdamW

    dist.init_process_group("xla", store=dist.HashStore(), rank=0, world_size=1)
    common: dict[str, Any] = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8}

    def run(
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], device: str, clip: bool
    ) -> Any:
        generator = torch.Generator().manual_seed(1)
        values = [torch.randn(4, 3, generator=generator), torch.randn(3, generator=generator)]
        parameters = [torch.nn.Parameter(value.to(device)) for value in values]
        decays = zip(parameters, (0.1, 0.0), strict=True)
        adamw = make([{"params": [p], "weight_decay": decay, SHARE: 1.0} for p, decay in decays])
        counted = Counted()
        for step in range(1, STEPS + 1):
            for group in adamw.param_groups:
                group["lr"] = rate(step)
            for p in parameters:
                p.grad = (torch.randn(p.shape, generator=generator) * 3).to(device)
            if clip:
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            adamw.step()
            torch_xla.sync()
            counted.after(step)
        return counted.steps, [p.detach().cpu() for p in parameters]

    def ours(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return ClippedAdamW(groups, clip=1.0, **common)

    def torchs(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, **common)

    compiled, result = run(ours, "xla", clip=False)
    anew, _ = run(torchs, "xla", clip=False)
    _, known = run(torchs, "cpu", clip=True)
    apart = max(float((a - b).abs().max()) for a, b in zip(result, known, strict=True))
    return {"ours": compiled, "torchs": anew, "apart": apart}


def engine(how: str, folder: Path) -> dict[str, Any]:
    """Train a tiny model, save at step 5 and a later one, and resume with another engine.

    `how` is `zero1`, `plain`, `adapter` (LoRA with ZeRO-1, fewer steps), or `apart`: rows of
    several samples, the same.
    """
    os.environ |= {"NXD_LOG_LEVEL": "warning", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    from smtrain.core.model.lora import Lora
    from tests.worker.engine import cases, packed
    from tests.worker.engine.nxd import shim

    shim.install_absent()
    from dataclasses import replace

    from smtrain.worker.engine.nxd import library

    library.init_distributed()
    from smtrain.worker.engine.nxd.engine import NxdEngine

    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 64}
    config = cases.config(
        "llama", **sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8
    )
    options = replace(cases.mesh("111"), zero1=how != "plain", apart=how == "apart")
    lora = (
        Lora(4, 8.0, targets=("q_proj", "v_proj", "o_proj", "up_proj"))
        if how == "adapter"
        else None
    )
    steps, middle = (60, 30) if how in ("adapter", "apart") else (STEPS, 330)
    source: Any = cases.Memory(config, cases.weights(config))

    def begin(engine: NxdEngine, step: int) -> Callable[[], Any]:
        batch = packed.batch if how == "apart" else cases.batch
        ids, labels, *segments = batch(config, step % 4)
        return engine.begin_step(ids, labels, rate(step, steps), *segments)

    e = NxdEngine(config, options, cases.OPTIMIZER, source, 0, 2, lora=lora)
    counted, losses = Counted(), []
    behind: Callable[[], Any] | None = None
    waits = 0
    for step in range(1, steps + 1):
        read = readings()
        begun = begin(e, step)
        waits += readings() - read
        if behind is not None:  # as the loop does, a step late
            losses.append(behind().loss)
        behind = begun
        if step in (5, middle):
            e.save(folder, step, {})
        counted.after(step)
    assert behind is not None
    losses.append(behind().loss)
    other = NxdEngine(config, options, cases.OPTIMIZER, source if lora else None, 7, 2, lora=lora)
    other.load(folder / f"step_{middle:08d}")
    on = range(middle + 1, middle + 4)
    again = [begin(other, step)().loss for step in on]
    return {
        "compiled": counted.steps,
        "waits": waits,
        "losses": losses,
        "again": again,
        "on": list(on),
    }


if __name__ == "__main__":
    what = sys.argv[1]
    result = optimizer() if what == "optimizer" else engine(what, Path(sys.argv[2]))
    print(json.dumps(result), flush=True)
    os._exit(0)  # the library's own farewell waits for devices that are not here
