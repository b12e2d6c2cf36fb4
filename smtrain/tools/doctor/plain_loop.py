"""The training that `smtrain doctor --train` compares with: transformers' model in a loop as most
people write it.
"""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from smtrain.core.model.transformers_build import transformers_config
from smtrain.tools.doctor.task import SizedModel
from smtrain.worker.checkpoint.dtypes import BY_PRECISION
from smtrain.worker.engine.base import OptimizerOptions
from smtrain.worker.engine.initial_weights import RandomWeights

SEED = 20
LR = 1e-3
ADAMW = OptimizerOptions()


class DrawnWeights(RandomWeights):
    """Random matrices that a GPU draws: a core of the host takes ten seconds for a billion
    numbers.
    """

    def __init__(self, model: SizedModel, device: torch.device) -> None:
        super().__init__(model.config, model.shape, SEED)
        self._device = device

    def _make_tensor(self, name: str) -> torch.Tensor:
        shape = self.shape(name)
        if self._device.type != "cuda" or len(shape) == 1:
            return super()._make_tensor(name)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return torch.empty(shape, device=self._device).normal_(0.0, 0.02, generator=generator).cpu()


class PlainLoop:
    """transformers' model, cross entropy, clipping, torch's AdamW.

    In bf16 on a GPU the weights are fp32 and the products bf16 by autocast. These are 16 bytes a
    parameter with AdamW's state; the engine has 18. Other devices may have no autocast, so their
    weights are bf16.
    """

    def __init__(
        self, model: SizedModel, precision: str, device: torch.device, weights: RandomWeights | None
    ) -> None:
        """Begin from `weights`; None: from weights that the device draws."""
        from transformers import AutoModelForCausalLM

        self._device, self._mixed = device, precision == "bf16" and device.type == "cuda"
        torch.use_deterministic_algorithms(
            False
        )  # as such loops are; the engine switches it on again
        dtype: torch.dtype = (
            torch.float32 if self._mixed else getattr(torch, BY_PRECISION[precision].name)  # type: ignore[index]
        )
        with device if device.type == "cuda" and weights is None else nullcontext():
            model_on_cpu: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                transformers_config(model.config), attn_implementation="sdpa", dtype=dtype
            )
        if weights is not None:
            with torch.no_grad():
                for name, parameter in model_on_cpu.named_parameters():
                    parameter.copy_(weights.read(model.shape.file_name(name)))
        self._model = model_on_cpu.to(device).eval()  # without dropout
        parameters = list(self._model.parameters())
        groups = [
            {"params": [p for p in parameters if (p.dim() > 1) == matrices], "weight_decay": decay}
            for matrices, decay in ((True, ADAMW.weight_decay), (False, 0.0))
        ]
        can_fuse = device.type in ("cpu", "cuda")
        self._adamw = torch.optim.AdamW(
            groups, lr=LR, betas=ADAMW.betas, eps=ADAMW.eps, fused=can_fuse
        )

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """A step on int64 [batch, sequence]; labels are shifted already."""
        ids, labels = ids.to(self._device), labels.to(self._device)
        with torch.autocast("cuda", torch.bfloat16) if self._mixed else nullcontext():
            logits = self._model(ids).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), ADAMW.grad_clip)
        self._adamw.step()
        self._adamw.zero_grad()
        return {"loss": float(loss), "grad_norm": float(norm)}
