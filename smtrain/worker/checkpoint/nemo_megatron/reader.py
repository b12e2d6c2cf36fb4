"""neuronx-nemo-megatron checkpoints as a source: a `.ckpt` of each rank, whole or with each tensor in a file (xser)."""

from __future__ import annotations

from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import ModelShape
from smtrain.worker.checkpoint.block_source import PieceSource
from smtrain.worker.checkpoint.conversion_manifest import checksums, read_manifest
from smtrain.worker.checkpoint.megatron.legacy import global_blocks
from smtrain.worker.checkpoint.megatron.names import HEAD, ignored, mesh_faults, table
from smtrain.worker.checkpoint.nemo_megatron.masters import Master, buffers_of
from smtrain.worker.checkpoint.nemo_megatron.masters import masters as masters_of
from smtrain.worker.checkpoint.nemo_megatron.names import canonical, part, rank_files
from smtrain.worker.checkpoint.nxd.reader import referred
from smtrain.worker.checkpoint.storage import Place
from smtrain.worker.checkpoint.tensor_ranges import Slab
from smtrain.worker.checkpoint.torch_files import zip as torchzip
from smtrain.worker.checkpoint.torch_files.unpickle import Reference


class NNMSource(PieceSource):
    """A folder of rank files as a `WeightSource`; mesh and form are read from the files.

    With `masters` the fp32 master weights of the optimizer's files count in place of the model's own. Raises
    CheckpointError where a file is missing, cut short or no checkpoint, or does not fit the config.
    """

    def __init__(self, where: Place, config: dict[str, Any], masters: bool = False) -> None:
        manifest = read_manifest(where)
        paths = rank_files(where.files())
        self.tp, self.pp = (max(rank[i] for rank in paths) + 1 for i in (0, 1))
        for t in range(min(self.tp, len(paths) + 1)):
            for p in range(min(self.pp, len(paths) + 1)):
                if (t, p) not in paths:
                    raise CheckpointError(
                        f"{where} lacks the file of tp rank {t}, pp rank {p}; copy that rank's file into it."
                    )
        shape = ModelShape.from_config(config)
        if faults := mesh_faults(shape, self.tp, 1):
            raise CheckpointError(f"{where}: {'; '.join(faults)}; check that config.json is this model's.")
        kept: dict[tuple[str, int], Master] | None = {} if masters else None
        shards = {
            (t, p, v): tensors
            for (t, p), file in paths.items()
            for v, tensors in enumerate(_chunks(where, file, manifest, kept))
        }
        vpp = max(v for _, _, v in shards) + 1

        def of(key: str, slab: Slab, t: int) -> tuple[str, list[tuple[int, int]]] | None:
            return part(shape, key, slab.shape[0] if slab.shape else 0, self.tp, t)

        blocks = global_blocks(where, shape, shards, self.tp, self.pp, vpp, of)
        if kept:
            blocks = {
                key: [part for block in held for part in kept[block.slab.file, block.slab.offset].of(block)]
                for key, held in blocks.items()
            }
        twins = blocks.pop(HEAD, None) if shape.tied else None
        super().__init__(where, config, table(shape), blocks, twins)


def _chunks(
    where: Place, file: str, manifest: dict[str, Any], kept: dict[tuple[str, int], Master] | None
) -> list[dict[str, Slab]]:
    """What one rank's file holds, a dict a virtual stage, under Megatron-core's names.

    Where `kept` is asked for, it gets the master weights, and what they stand in for is given.
    """
    content = torchzip.load(where, file, lenient=True)
    held = content.get("state_dict") if isinstance(content, dict) else None
    if not isinstance(held, dict) or not held:
        raise CheckpointError(f"{where}/{file} has no state_dict; it is not a checkpoint of neuronx-nemo-megatron.")
    virtual = isinstance(held.get("model0"), dict)
    models = [held.get(f"model{v}") for v in range(len(held))] if virtual else [held]
    if kept is not None and virtual:
        raise CheckpointError(
            f"{where}/{file} has virtual stages, and the order of their master weights is not known; take the weights "
            "themselves, without --masters (masters=True)."
        )
    better = masters_of(where, file, held) if kept is not None else {}
    crcs = {
        crc for name in manifest.get("files", {}) if name.startswith(file) for crc in checksums(manifest, name).values()
    }
    out = []
    for model in models:
        tensors: dict[str, Slab] = {}
        buffers = buffers_of(model) if isinstance(model, dict) else ()
        for key, found in model.items() if isinstance(model, dict) else ():
            if not isinstance(key, str) or ignored(key) or key in buffers:
                continue
            if kept is not None and key in better:
                slab = better[key].whole
                kept[slab.file, slab.offset] = better[key]
            else:
                slab = referred(where, file, key, found) if isinstance(found, Reference) else found
            if not isinstance(slab, Slab):
                raise CheckpointError(f"{where}/{file}: {key[:200]} is not a tensor; copy this file again.")
            if crcs and slab.crc32 is not None and slab.crc32 not in crcs:
                raise CheckpointError(f"{where}/{file}: {key} is not what the manifest lists; convert the model again.")
            name = canonical(key)
            if name in tensors and name != HEAD:  # the head may stand there under both of its names
                raise CheckpointError(f"{where}/{file} has {name[:200]} twice; copy this file again.")
            tensors.setdefault(name, slab)
        out.append(tensors)
    return out
