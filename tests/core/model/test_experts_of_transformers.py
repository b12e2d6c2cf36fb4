"""transformers computes experts of any width, although the kernel that it prefers needs rows of 16
bytes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from smtrain.core.model.transformers_build import transformers_config
from tests.core.model.test_generate import SIZES

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "intermediate_size": 24},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "head_dim": 8,
    },
}
ODD: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 23},
    "mixtral": {"intermediate_size": 13},
    "gpt_oss": {"hidden_size": 34},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_width_may_be_odd(name: str, dtype: torch.dtype) -> None:
    config = {
        "model_type": name,
        **SIZES,
        **FAMILIES[name],
        "head_dim": 8,
        "router_aux_loss_coef": 0.0,
        **ODD[name],
    }
    model: Any = AutoModelForCausalLM.from_config(transformers_config(config), dtype=dtype)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(12)[None]).logits
    assert logits.shape == (1, 12, SIZES["vocab_size"])


def test_other_widths_keep_the_kernel() -> None:
    config = {
        "model_type": "qwen3_moe",
        **SIZES,
        **FAMILIES["qwen3_moe"],
        "router_aux_loss_coef": 0.0,
    }
    model: Any = AutoModelForCausalLM.from_config(transformers_config(config))
    assert getattr(model.config, "_experts_implementation", "grouped_mm") == "grouped_mm"
