"""Model shapes for layout and checkpoint tests, as hypothesis draws them.

$SMTRAIN_EXAMPLES multiplies how many are tried of each.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from smtrain.core.model.families import FAMILIES
from smtrain.worker.checkpoint import manifest

MORE = int(os.environ.get("SMTRAIN_EXAMPLES", "1"))

SMALL = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 4,
    "v_head_dim": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "global_head_dim": 8,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
}
"""Sizes in place of a family's defaults, which are those of a published model. 256 experts took a
test as long as a hundred models without any.
"""


def newest_complete(folder: Path) -> Path | None:
    """The newest complete checkpoint of one job's folder."""
    return next(
        (
            path
            for _, path in reversed(manifest.checkpoints(folder))
            if manifest.fault(path) is None
        ),
        None,
    )


@st.composite
def configs(draw: st.DrawFn, elsewhere: bool = False) -> dict[str, Any]:
    """A small config.json of any family, or of any that has forms of other libraries."""
    kv, group = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    head_dim = draw(st.sampled_from([2, 4]))
    family = draw(
        st.sampled_from(
            sorted(name for name, row in FAMILIES.items() if row.nxd_and_megatron >= elsewhere)
        )
    )
    config = {
        "model_type": family,
        "num_attention_heads": kv * group,
        "hidden_size": kv * group * head_dim,
        "num_hidden_layers": draw(st.integers(1, 6)),
        "intermediate_size": 16 * draw(st.integers(1, 2)),
        "vocab_size": draw(st.integers(1, 40)),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
    }
    if family == "gpt2":
        config |= {
            "n_inner": config.pop("intermediate_size"),
            "n_positions": draw(st.integers(1, 9)),
        }
    elif family != "gpt_neox":
        config |= {"num_key_value_heads": kv, "head_dim": draw(st.sampled_from([2, 4]))}
    config |= dict.fromkeys(FAMILIES[family].refused, 0)
    defaults, experts = FAMILIES[family].defaults, FAMILIES[family].experts
    config |= {key: size for key, size in SMALL.items() if key in defaults}
    if experts is not None:
        config |= {key: draw(st.sampled_from([4, 8])) for key in experts.counts if key in defaults}
        if experts.aux_default is None:
            config["router_aux_loss_coef"] = 0.5
    if FAMILIES[family].theta is None:
        config["rope_theta"] = 10000.0
    return config
