"""A step of a mixture of experts calls about as many operators as transformers, and never waits for
the device.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from smtrain.core.model.lora import Lora
from smtrain.core.model.transformers_build import transformers_config
from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.native import NativeEngine
from tests.worker.engine import adapters, cases
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World

MANY = {
    **CONFIGS["qwen3_moe"],
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "mlp_only_layers": [],
    "num_experts": 64,
    "num_local_experts": 64,
    "num_experts_per_tok": 8,
}
VIEWS = {
    "view",
    "t",
    "transpose",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "expand",
    "alias",
    "detach",
    "split",
    "unbind",
    "split_with_sizes",
    "permute",
    "_unsafe_view",
    "as_strided",
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "lift_fresh",
}
"""Operators that start no kernel."""
READS = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "bincount",
    "masked_select",
    "unique",
    "_unique2",
    "equal",
}
"""Operators for which the host waits."""


class Calls(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func).removeprefix("aten.").partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))

    def kernels(self) -> int:
        return sum(number for name, number in self.calls.items() if name not in VIEWS)


def counted(rank: int, config: dict[str, Any]) -> tuple[int, int]:
    """Operators that start kernels of a step in bf16: ours, and transformers' with fused AdamW."""
    e = cases.engine(config, mesh("111 m8 bf16"))
    pair = cases.batch(config, 0)
    e.step(*pair, 1e-3)
    with Calls() as ours:
        e.step(*pair, 1e-3)
    model: Any = AutoModelForCausalLM.from_config(
        transformers_config(config), attn_implementation="sdpa", dtype=torch.bfloat16
    )
    adamw = torch.optim.AdamW(model.parameters(), fused=True)
    for theirs in (Calls(), Calls()):
        with theirs:
            logits = model(input_ids=pair[0], use_cache=False).logits
            F.cross_entropy(logits.float().flatten(0, 1), pair[1].flatten()).backward()
            adamw.step()
            adamw.zero_grad()
    return ours.kernels(), theirs.kernels()


def reads(
    rank: int, config: dict[str, Any], options: ParallelOptions, adapter: Lora | None
) -> set[str]:
    """The reads of the device by the host in a step, until its numbers are read."""
    e = NativeEngine(config, options, cases.OPTIMIZER, None, 0, adapter)
    pair = cases.batch(config, 0)
    e.step(*pair, 1e-3)
    made: set[str] = set()

    def read(name: str) -> Any:
        whole = getattr(torch.Tensor, name)

        def call(self: torch.Tensor, *args: Any) -> Any:
            made.add(name)
            return whole(self, *args)

        return patch.object(torch.Tensor, name, call)

    with (
        Calls() as calls,
        read("tolist"),
        read("item"),
        read("cpu"),
        read("__bool__"),
        read("__int__"),
    ):
        e.begin_step(*pair, 1e-3)
    return made | calls.calls.keys() & READS


def test_a_mixture_has_about_the_operators_of_transformers(solo: World) -> None:
    ours, theirs = solo.run(counted, MANY)[0]
    assert ours < 1.25 * theirs


@pytest.mark.parametrize(
    ("name", "options", "targets"),
    [
        ("qwen3_moe", "111 bf16", []),
        ("mixtral", "111 bf16 c2 full", []),
        ("gpt_oss", "111 bf16", []),
        ("qwen3_moe", "111 bf16", ["experts.gate_up_proj", "experts.down_proj"]),
    ],
)
def test_a_step_does_not_wait_for_the_device(
    name: str, options: str, targets: list[str], solo: World
) -> None:
    config = CONFIGS[name]
    adapter = adapters.lora(config, targets) if targets else None
    assert solo.run(reads, config, mesh(options), adapter) == [set()]
