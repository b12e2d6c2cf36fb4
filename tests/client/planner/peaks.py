"""The peak of tensor memory of a rank: bytes of every storage that an operator made, from its
making to its end.

Counted at torch's dispatcher, forward and backward, so it is what an accelerator's caching
allocator reports as peak allocated memory but for scratch inside kernels, and does not depend on
the machine. What gloo and Python hold outside tensors is not in it. (The allocator's own profile,
`torch.profiler(profile_memory=True)`, gives the same figures to 0.1 % for one process, but
miscounts if gloo's threads release what this thread allocated.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean
from typing import Any

import torch

from smtrain.core.config.training import DpoSection
from smtrain.core.model.lora import STACKED_EXPERTS, Lora, targets_of
from smtrain.worker.engine.base import OptimizerOptions, ParallelOptions
from smtrain.worker.engine.native import NativeEngine
from smtrain.worker.train.operators import HeldBytes


def peak(
    rank: int,
    config: dict[str, Any],
    options: ParallelOptions,
    batch: int,
    seq_len: int,
    lora: Lora | None = None,
    paired: bool = False,
    packed: bool = False,
    varlen: bool = False,
) -> tuple[int, int, int, float]:
    """(pipeline stage, bytes between steps, peak bytes in a step, its experts' rows over the mean)
    of this rank.

    `batch` samples for each dp rank. `paired`: two pairs of answers in each row, whose reference
    has its pass in the peak too. `packed`: four samples in each row. `varlen`: attention takes
    documents in place of masks, as on CUDA.
    """
    with HeldBytes() as held, counting_resizes(held):
        preference = DpoSection() if paired else None
        engine = NativeEngine(config, options, OptimizerOptions(), None, 0, lora, preference)
        engine.stage.context.varlen = varlen
        ids = torch.randint(
            config["vocab_size"], (batch, seq_len), generator=torch.Generator().manual_seed(rank)
        )
        pairs: tuple[torch.Tensor, ...] = ()
        if paired:
            pairs = (_quarters(batch, seq_len), torch.zeros(batch, 2, 2))
        if packed:
            pairs = (_quarters(batch, seq_len),)
        engine.step(ids, ids, 1e-4, *pairs)
        state, tops = held.now, list[int]()
        # gloo's threads may release the buffers of FSDP2 late, so its smallest peak counts.
        for _ in range(4 if options.shard == "full" else 1):
            held.top = held.now
            if paired:
                engine.log_probabilities(ids, ids, pairs[0], 2)
            result = engine.step(ids, ids, 1e-4, *pairs)
            tops.append(held.top)
    share = 1.0
    if result.routing is not None and engine.mesh.ep > 1:
        own = engine.layout.experts(engine.mesh.ep_rank)
        share = mean(mean(layer[j] for j in own) for layer in result.routing.loads)
    return engine.mesh.pp_rank, state, min(tops), share


@contextmanager
def counting_resizes(held: HeldBytes) -> Iterator[None]:
    """Count storages that FSDP2 empties and fills again, which no operator does."""
    resize = torch.UntypedStorage.resize_

    def counted(storage: torch.UntypedStorage, size: int) -> Any:
        is_known = storage._cdata in held._sizes
        out = resize(storage, size)
        if is_known:
            held.count(storage)
        return out

    torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def _quarters(batch: int, seq_len: int) -> torch.Tensor:
    """The samples of rows that have four each."""
    return torch.arange(seq_len).mul(4).div(seq_len).long().expand(batch, -1)


SEQ_LEN, BATCH = 64, 8
# A family, and a mesh as tests/worker/engine/cases.py writes it: tp, pp, dp, then options,
# micro-batches of m samples.
COMBINATIONS = [
    ("llama", "111 m4"),
    ("llama", "111 m2 full bf16"),
    ("qwen2", "111 m1"),
    ("qwen3", "111 m2 bf16"),
    ("mistral", "111 m2"),
    ("gpt_neox", "111 m2 bf16"),
    ("gpt_neox", "111 m4 full"),
    ("llama", "111 m4 selective"),
    ("qwen3", "211 m2 selective"),
    ("gpt_neox", "111 m2 selective bf16"),
    ("llama", "211 m2 bf16 sp"),
    ("llama", "121 m2"),
    ("gpt_neox", "112 m2 bf16"),
    ("qwen2", "211 m4 full sp"),
    ("mistral", "121 m1 full"),
    ("llama", "221 m1 bf16 sp"),
    ("qwen3", "212 m2"),
    ("gpt_neox", "141 m1"),
    ("llama", "122 m2 bf16 full"),
    ("gemma3_text", "111 m2 bf16"),
    ("gemma3_text", "221 m1 sp"),
    ("gemma4_text", "111 m2 bf16"),
    ("gemma4_text", "111 m4 selective"),
    ("gemma4_text", "221 m1 sp"),
    ("gemma4_moe", "111 m2 bf16"),
    ("gemma4_moe", "212 m2 ep2 sp"),
    ("olmo2", "111 m2"),
    ("olmo2", "211 m2 bf16 sp"),
    ("granite", "111 m2 bf16"),
    ("smollm3", "211 m2"),
    ("qwen3_5_text", "111 m2"),
    ("qwen3_5_text", "111 m2 full bf16"),
    ("qwen3_5_text", "221 m1 bf16 sp"),
    ("qwen3_5_text", "122 m2"),
    ("qwen3_5_text", "211 m1 selective"),
    ("qwen3_moe", "111 m2"),
    ("qwen3_moe", "111 m4 bf16"),
    ("qwen3_moe", "111 m2 full bf16"),
    ("qwen3_moe", "111 m2 selective"),
    ("qwen3_moe", "221 m1 bf16 sp"),
    ("qwen3_moe", "112 m2 ep2 bf16"),
    ("qwen3_next", "111 m2"),
    ("qwen3_next", "111 m2 full bf16"),
    ("qwen3_next", "221 m1 bf16 sp"),
    ("qwen3_5_moe_text", "112 m2 ep2 bf16"),
    ("qwen3_5_moe_text", "111 m2 selective"),
    ("mixtral", "111 m2 bf16"),
    ("mixtral", "212 m2 ep2"),
    ("gpt_oss", "111 m2"),
    ("gpt_oss", "112 m2 ep2 bf16"),
    ("deepseek_v3", "111 m2 bf16"),
    ("deepseek_v3", "221 m1 sp"),
    ("glm4_moe", "112 m2 ep2 bf16"),
    ("gpt2", "111 m2 bf16"),
    ("gpt2", "111 m2 full"),
    ("gpt2", "121 m2"),
]


def model(family: str) -> dict[str, Any]:
    """A config.json large enough that no single small tensor decides."""
    from tests.worker.engine.cases import config

    if family == "gemma4_moe":
        experts = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 160}
        return {**model("gemma4_text"), "enable_moe_block": True, **experts}
    if family == "gpt2":
        dropouts = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        return config(
            family, n_embd=192, n_head=8, n_inner=480, n_positions=128, vocab_size=1024, **dropouts
        )
    sizes: dict[str, Any] = {
        "hidden_size": 192,
        "num_attention_heads": 8,
        "intermediate_size": 480,
        "vocab_size": 1024,
    }
    if family == "deepseek_v3":
        sizes |= {"q_lora_rank": 96, "kv_lora_rank": 64, "num_key_value_heads": 8, "n_group": 4}
        sizes |= {"qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 24, "topk_group": 2}
    elif family != "gpt_neox":
        sizes |= {"num_key_value_heads": 4, "head_dim": 24}
    if family == "gemma4_text":
        sizes |= {"global_head_dim": 48, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
        sizes |= {
            "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        }
    if family in ("mistral", "gemma3_text", "gemma4_text"):
        sizes["sliding_window"] = 32
    if family in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"):
        sizes |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
        sizes |= {"linear_key_head_dim": 24, "linear_value_head_dim": 32}
    if family in ("qwen3_moe", "mixtral", "gpt_oss"):
        sizes |= {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 160}
        sizes |= (
            {"moe_intermediate_size": 160, "mlp_only_layers": []} if family == "qwen3_moe" else {}
        )
        sizes |= {"num_experts": 8} if family == "qwen3_moe" else {}
        sizes |= {"sliding_window": 32} if family == "gpt_oss" else {}
    if family in ("qwen3_5_moe_text", "qwen3_next"):
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 160}
        sizes |= {"shared_expert_intermediate_size": 224}
    if family in ("deepseek_v3", "glm4_moe"):
        sizes |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 160}
        sizes |= {"n_shared_experts": 2, "first_k_dense_replace": 1}
    if family == "smollm3":
        sizes["pad_token_id"] = 0
    if family in ("gemma3_text", "gemma4_text"):
        sizes |= {"tie_word_embeddings": True, "final_logit_softcapping": 30.0}
    return config(family, **sizes)


SHARDED_BASE = [("llama", "114 m1 bf16 shards")]
ADAPTED = [
    ("llama", "111 m4"),
    ("llama", "111 m2 bf16"),
    ("qwen3", "111 m2 bf16"),
    ("gpt_neox", "111 m2 bf16"),
    ("llama", "221 m1 bf16 sp"),
    ("qwen2", "211 m4 full sp"),
    ("llama", "122 m2 bf16 full"),
    ("llama", "111 m4 selective"),
    ("qwen3", "211 m2 selective bf16"),
    ("gpt_neox", "111 m2 selective bf16"),
    ("gemma4_text", "111 m2 bf16"),
    ("gemma4_text", "221 m1 sp"),
    ("qwen3_5_text", "111 m2"),
    ("qwen3_5_text", "211 m1 bf16 sp"),
    ("qwen3_next", "111 m2 bf16"),
    ("deepseek_v3", "111 m2 bf16"),
    ("qwen3_moe", "112 m2 ep2 bf16"),
    ("qwen3_moe", "211 m2 sp"),
    ("mixtral", "111 m2 full bf16"),
    ("gpt_oss", "112 m2 ep2 bf16"),
]
"""With LoRA on all linears and experts."""


PAIRED = [
    ("llama", "111 m2 bf16"),
    ("llama", "111 m4 selective"),
    ("qwen3", "211 m2"),
    ("gpt_neox", "112 m2 bf16"),
    ("llama", "221 m1 bf16 sp"),
    ("qwen2", "211 m4 full sp"),
]
"""Objective dpo."""


CUT = [
    ("llama", "111 cp2 m1"),
    ("llama", "111 cp4 m1 full bf16"),
    ("llama", "211 cp2 m1 sp"),
    ("mistral", "121 cp2 m1"),
    ("qwen3", "112 cp2 m1 bf16"),
    ("qwen2", "111 cp2 m2 selective"),
    ("gpt_neox", "111 cp2 m1 full"),
    ("gemma4_text", "111 cp2 m1"),
    ("olmo2", "211 cp2 m1 sp bf16"),
    ("qwen3_5_text", "111 cp2 m1"),
    ("qwen3_5_text", "111 cp2 m1 full bf16"),
]
"""Rows of `LONG` tokens cut over ranks; four of them."""
LONG = 1024


MIXED = [
    ("qwen3_moe", "112 m2 ep2", 64, False),
    ("qwen3_moe", "111 cp2 m1 ep2", 1024, False),
    ("mixtral", "111 cp2 m1 ep2 bf16", 1024, False),
    ("qwen3_moe", "111 m2 bf16", 256, True),
    ("mixtral", "112 m2 ep2", 256, True),
    ("gpt_oss", "112 m2 ep2", 256, True),
    ("gpt_oss", "111 m1", 2048, False),
    ("gpt_oss", "111 m1 bf16", 2048, False),
]
"""Experts with cut, packed (the last number) and long rows of so many tokens."""


def compare(
    family: str,
    text: str,
    worlds: dict[int, Any],
    adapted: bool = False,
    paired: bool = False,
    seq_len: int = SEQ_LEN,
    batch: int = BATCH,
    packed: bool = False,
    varlen: bool = False,
    quantized: bool = False,
) -> list[tuple[int, int, float]]:
    """(stage, measured, predicted) peak bytes of the rank of each pipeline stage that needed
    most.
    """
    lora = adapter(family, quantized) if adapted else None
    rows = measure(family, text, worlds, lora, paired, seq_len, batch, packed, varlen)
    predicted = estimate(
        family, text, lora, paired or packed, seq_len, batch, varlen, [share for *_, share in rows]
    )
    return [
        (stage, top, bytes_) for (stage, _, top, _), bytes_ in zip(rows, predicted, strict=True)
    ]


def adapter(family: str, quantized: bool = False) -> Lora:
    """LoRA on all linears and experts."""
    from smtrain.core.model.shape import ModelShape

    shape = ModelShape.from_config(model(family))
    targets = ("all-linear", *(STACKED_EXPERTS if shape.experts else ()))
    return Lora(8, 16.0, targets=targets_of(shape, targets), quantize="nf4" if quantized else None)


def measure(
    family: str,
    text: str,
    worlds: dict[int, Any],
    lora: Lora | None = None,
    paired: bool = False,
    seq_len: int = SEQ_LEN,
    batch: int = BATCH,
    packed: bool = False,
    varlen: bool = False,
) -> list[tuple[int, int, int, float]]:
    """The `peak` of the rank of each pipeline stage that needed most."""
    from tests.worker.engine.cases import mesh

    o = mesh(text)
    measured = worlds[o.tp * o.pp * o.dp * o.cp].run(
        peak, model(family), o, batch // o.dp, seq_len, lora, paired, packed, varlen
    )
    return [
        max((row for row in measured if row[0] == s), key=lambda row: row[2]) for s in range(o.pp)
    ]


def estimate(
    family: str,
    text: str,
    lora: Lora | None = None,
    separates_documents: bool = False,
    seq_len: int = SEQ_LEN,
    batch: int = BATCH,
    varlen: bool = False,
    shares: list[float] | None = None,
) -> list[float]:
    """The planner's peak bytes of each pipeline stage; `shares` are those of `peak`, 1 if None."""
    from smtrain.client.planner.machines import Machine, Mesh, Work
    from smtrain.client.planner.memory import core_memory
    from smtrain.core.model.shape import ModelShape
    from tests.worker.engine.cases import mesh

    o = mesh(text)
    work = Work(
        ModelShape.from_config(model(family)),
        seq_len,
        batch,
        o.precision,
        lora=lora,
        separates_documents=separates_documents,
        shards_fully=o.shard == "full",
    )
    size = o.tp * o.pp * o.dp * o.cp
    machine = Machine(
        "cpu", 1, size, 1e12, 1e12, 1e12, 1e9, has_accelerators=varlen, link=1e9 * varlen
    )
    cut = Mesh(
        o.tp,
        o.pp,
        o.dp,
        o.micro_batch_size,
        o.activation_checkpointing,
        o.sequence_parallel,
        o.cp,
        ep=o.ep,
    )
    memories = [
        core_memory(replace(work, skew=share), machine, cut, stage)
        for stage, share in enumerate(shares or [1.0] * o.pp)
    ]
    return [memory.total - memory.runtime for memory in memories]
