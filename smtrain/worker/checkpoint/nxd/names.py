"""neuronx-distributed's names for files and the tensors in them.

One table, `stored_tensors`: a name, and the Hugging Face parameters whose local parts it holds one
after another. `Layout` determines the local part of a parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from smtrain.core.model.families import FAMILIES
from smtrain.core.model.layout import Layout
from smtrain.worker.checkpoint.targets import Qkv

_ADAPTER_INFIX = (  # between a block and its linear's name, in the names of engine nxd's parameters
    ".adapters."
)
# Today's names, and tp_rank_RR_pp_rank_PP/checkpoint.pt of the public SageMaker samples.
_FILE = re.compile(
    r"(?:model/)?(?:dp_rank_00_)?tp_rank_(\d{2,})_pp_rank_(\d{2,})(?:\.pt|/checkpoint\.pt|)"
)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a rank's file: the local parts of `parts`, one after another along dimension
    0.
    """

    name: str
    parts: tuple[str, ...]


def stored_tensors(layout: Layout, pp_rank: int, qkv: Qkv) -> list[StoredTensor]:
    """The tensors in the file of a rank on stage `pp_rank`, in order.

    Gate and up projections are always one tensor. A tied head is stored next to its embedding, as
    NxD loads both.
    """
    shape = layout.shape
    out = []
    for name in layout.names(pp_rank):
        if name == shape.embed_name and pp_rank != 0:
            continue  # the last stage of a tied model holds it as the head
        out += _stored_as(name, qkv)
    if shape.tied and pp_rank == layout.pp - 1:
        out.append(StoredTensor(f"{FAMILIES[shape.family].head}.weight", (shape.embed_name,)))
    return out


def _stored_as(name: str, qkv: Qkv) -> list[StoredTensor]:
    stem, kind = name.rsplit(".", 1)
    block, _, leaf = stem.rpartition(".")
    if leaf in ("gate_proj", "up_proj"):
        gate_up_parts = (f"{block}.gate_proj.{kind}", f"{block}.up_proj.{kind}")
        return (
            [StoredTensor(f"{block}.gate_up_proj.{kind}", gate_up_parts)]
            if leaf == "gate_proj"
            else []
        )
    # NxD's GQAQKVColumnParallelLinear calls them weight_q, weight_k, weight_v, and fused
    # weight_qkv; biases alike.
    if leaf in ("q_proj", "k_proj", "v_proj") and qkv == "grouped":
        return [StoredTensor(f"{block}.qkv_proj.{kind}_{leaf[0]}", (name,))]
    if leaf in ("q_proj", "k_proj", "v_proj") and qkv in ("fused", "fused_mha"):
        parts = tuple(f"{block}.{part}_proj.{kind}" for part in "qkv")
        qkv_suffix = kind if qkv == "fused_mha" else f"{kind}_qkv"
        return [StoredTensor(f"{block}.qkv_proj.{qkv_suffix}", parts)] if leaf == "q_proj" else []
    return [StoredTensor(name, (name,))]


def shard_file(tp_rank: int, pp_rank: int) -> str:
    return f"model/dp_rank_00_tp_rank_{tp_rank:02d}_pp_rank_{pp_rank:02d}.pt"


def shard_files(files: Iterable[str]) -> dict[tuple[int, int], str]:
    """(tp rank, pp rank) -> file in `model/` or in the folder itself, maybe empty."""
    files_in: dict[bool, dict[tuple[int, int], str]] = {True: {}, False: {}}
    for file in sorted(files):
        if match := _FILE.fullmatch(file):
            files_in[file.startswith("model/")][int(match[1]), int(match[2])] = file
    return files_in[True] or files_in[False]


def factor_of(parameter: str) -> str | None:
    """LoRA's name `<module>.lora_A.weight` of a factor of engine nxd; None for a parameter of the
    base.
    """
    return (
        f"{parameter.replace(_ADAPTER_INFIX, '.')}.weight" if _ADAPTER_INFIX in parameter else None
    )
