"""Write neuronx-distributed shards: `model/dp_rank_00_tp_rank_RR_pp_rank_PP.pt`, plain or xser, and
config.json.
"""

from __future__ import annotations

from pathlib import Path

from smtrain.core.errors import CheckpointError
from smtrain.core.model.layout import Layout
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.conversion_plan import ConversionPlan
from smtrain.worker.checkpoint.execute import execute
from smtrain.worker.checkpoint.huggingface.companions import NO_COMPANIONS, CompanionFiles
from smtrain.worker.checkpoint.nxd.names import StoredTensor, shard_file, stored_tensors
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.checkpoint.targets import Nxd, Qkv
from smtrain.worker.checkpoint.tensor_files import Job, Tensor, TensorFile, Write
from smtrain.worker.checkpoint.torch_files import zip_writer as torchzip_writer


def write_nxd(
    source: WeightSource,
    target: Path | str,
    to: Nxd,
    overwrite: bool = True,
    companions: CompanionFiles = NO_COMPANIONS,
) -> None:
    """Write the shards of a (tp, pp) mesh, config.json and the manifest; a few blocks are in memory
    at a time.

    Raises ConfigError if the model cannot be cut so, CheckpointError if the source cannot be read.
    """
    shape = ModelShape.from_config(source.config)
    layout = Layout(shape, to.tp, to.pp, to.kv_order, to.cuts, to.kv_multiplier)
    # q_proj, k_proj, v_proj cannot repeat heads in NxD; its grouped form can.
    qkv_form: Qkv = to.qkv or ("separate" if layout.kv_multiplier == 1 else "grouped")
    if qkv_form in ("separate", "fused_mha") and layout.kv_multiplier > 1:
        raise CheckpointError(
            f"{shape.kv_heads} key/value heads, held {layout.kv_multiplier} times each for tp"
            f" {to.tp}, cannot be kept in NxD's {qkv_form} form; take the grouped form."
        )
    if qkv_form == "fused_mha" and shape.heads != shape.kv_heads:
        raise CheckpointError(
            "NxD's fused_mha form has as many key/value heads as queries; take the fused form."
        )
    build = _plain if to.form == "pt" else _xser
    containers: list[TensorFile] = []
    groups: list[list[Job]] = []
    for p in range(to.pp):
        table = stored_tensors(layout, p, qkv_form)
        ranks = []
        for t in range(to.tp):
            rank_containers, by_name = build(
                shard_file(t, p), {s.name: _tensor(source, layout, s, t) for s in table}
            )
            containers += rank_containers
            ranks.append(by_name)
        # One write fills the part of every tp rank, so the source is read once.
        groups.append(
            [(Write(s.name, s.parts, tuple(rank[s.name] for rank in ranks)),) for s in table]
        )
    metadata = {
        "kind": "nxd",
        "topology": {"tp": to.tp, "pp": to.pp},
        "form": to.form,
        "qkv": qkv_form,
        "kv_order": to.kv_order,
        "kv_multiplier": layout.kv_multiplier,
    }
    extras = companions.with_config(source.config)
    # Any mesh: shards left from another tp or pp would count as ranks of this one.
    replaces = ("model/dp_rank_00_tp_rank_*_pp_rank_*",)
    execute(
        source,
        target,
        ConversionPlan(layout, groups, containers, extras, metadata, replaces),
        overwrite,
    )


def _tensor(source: WeightSource, layout: Layout, tensor: StoredTensor, tp_rank: int) -> Tensor:
    shapes = [layout.local_shape(part, tp_rank) for part in tensor.parts]
    dtypes = {source.dtype(part) for part in tensor.parts}
    if len(dtypes) > 1:
        raise CheckpointError(
            f"{' and '.join(tensor.parts)} become one tensor and have different types; convert with"
            " --dtype."
        )
    return Tensor(dtypes.pop(), (sum(shape[0] for shape in shapes), *shapes[0][1:]))


def _plain(file: str, tensors: dict[str, Tensor]) -> tuple[list[TensorFile], dict[str, TensorFile]]:
    container = torchzip_writer.container(file, tensors)
    return [container], dict.fromkeys(tensors, container)


def _xser(file: str, tensors: dict[str, Tensor]) -> tuple[list[TensorFile], dict[str, TensorFile]]:
    """A file for every tensor, and two that describe them."""
    by_name = torchzip_writer.one_file_each(file, tensors)
    heads = [
        torchzip_writer.container(file, {}, torchzip_writer.pickle_references(list(tensors))),
        torchzip_writer.container(
            f"{file}.info.pt", {}, torchzip_writer.pickle_info(list(tensors.values()))
        ),
    ]
    return [*by_name.values(), *heads], by_name
