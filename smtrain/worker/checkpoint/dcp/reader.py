"""Read folders of torch.distributed.checkpoint: a model under Hugging Face's or torchtitan's
names, with AdamW's state or without.

torchtitan writes one folder with everything; accelerate's FSDP, and with it transformers' Trainer,
`pytorch_model_fsdp_0/` and `optimizer_0/`.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.conversion_manifest import matches_manifest, read_manifest
from smtrain.worker.checkpoint.dcp import names as titan
from smtrain.worker.checkpoint.dcp.slabs import ChunkedSlab, ReorderedSlab
from smtrain.worker.checkpoint.huggingface.expert_tensors import ExpertRows
from smtrain.worker.checkpoint.huggingface.folder import CONFIG, HFSource, read_config
from smtrain.worker.checkpoint.storage import Place, place
from smtrain.worker.checkpoint.tensor_ranges import Slab
from smtrain.worker.checkpoint.torch_files.distributed import METADATA, DistributedIndex

MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
"""accelerate's names for the first model and optimizer of a run."""
# torchtitan's step-N, and checkpoint-N of transformers' Trainer.
_STEP = re.compile(rf"((?:step|checkpoint)-(\d+))/(?:{MODEL_FOLDER}/)?{re.escape(METADATA)}")
_OPTIMIZER = ("optimizer.", "optim.")
# State of a run, not parameters: of torchtitan, and of Stateful objects in general.
_OF_THE_RUN = ("lr_scheduler.", "dataloader.", "train_state.", "scheduler.")
_MEGATRON = ("decoder.layers.", "embedding.word_embeddings.")
# Tables of rotary embeddings, which older releases of torchtitan saved.
_COMPUTED_NAMES = re.compile(r"(?:^|\.)(?:freqs_cis|rope\.cache)$")


def folder_in(location: Place) -> str | None:
    """The folder of a checkpoint, "" for the place itself or the newest step in it; None without
    one.
    """
    files = location.files()
    if METADATA in files or f"{MODEL_FOLDER}/{METADATA}" in files:
        return ""
    steps = [match for file in files if (match := _STEP.fullmatch(file))]
    # By their numbers: as text, step-9 comes after step-10.
    return max(steps, key=lambda match: int(match[2]))[1] if steps else None


class DcpSource(HFSource):
    """A folder of torch.distributed.checkpoint as a `WeightSource`.

    Raises CheckpointError as `HFSource` does, and for names of torchtitan that are not known.
    """

    def __init__(self, folder: Place | Path | str, config: dict[str, Any] | None = None) -> None:
        location = place(folder)
        self._accelerate = METADATA not in location.files()
        at = location.subfolder(MODEL_FOLDER) if self._accelerate else location
        self._refuse_damaged(location)
        self.index = DistributedIndex(at)
        self._index_place = at
        self.is_titan = titan.is_titan(self.index.sizes)
        super().__init__(location, _config(location, config))

    def optimizer_index(self) -> DistributedIndex | None:
        """The index with the optimizer's state; None without one."""
        if not self._accelerate:
            return self.index
        at = self._place.subfolder(OPTIMIZER_FOLDER)
        return DistributedIndex(at) if METADATA in at.files() else None

    def slab_of(self, index: DistributedIndex, key: str) -> Slab:
        """A tensor of an index."""
        return ChunkedSlab.of(self._place, key, index.sizes[key], index.chunks(key))

    def titan_slabs(self, name: str, slab: Slab, shape: ModelShape) -> dict[str, Slab]:
        """Hugging Face parameters in one tensor of torchtitan."""
        out: dict[str, Slab] = {}
        if experts := titan.experts_of(name, shape):
            if len(slab.shape) != 3 or slab.shape[0] != len(experts):
                raise titan.unknown_to_titan(name, self._place, shape)
            size = prod(slab.shape[1:])
            return {
                expert: ExpertRows.of(slab, number * size, slab.shape[1:])
                for number, expert in enumerate(experts)
            }
        parts = titan.parts_of(name)
        for hf_name, part in zip(self.titan_names(name, shape), parts, strict=True):
            order = titan.row_order(part, shape, fused=len(parts) > 1)
            out[hf_name] = slab if order is None else ReorderedSlab.of(slab, order)
        return out

    def titan_names(self, name: str, shape: ModelShape) -> list[str]:
        """The Hugging Face names of the parameters in one tensor of torchtitan."""
        if experts := titan.experts_of(name, shape):
            return experts
        names = [titan.hf_name(part, shape) for part in titan.parts_of(name)]
        known_names = [hf_name for hf_name in names if hf_name is not None]
        if len(known_names) < len(names):
            raise titan.unknown_to_titan(name, self._place, shape)
        return known_names

    def _stored_slabs(self) -> dict[str, Slab]:
        self._unusual = True  # transformers loads no such folder
        keys = [
            key
            for key in self.index.sizes
            if not key.startswith((*_OPTIMIZER, *_OF_THE_RUN)) and not _COMPUTED_NAMES.search(key)
        ]
        if not self.is_titan:
            if any(key.startswith(_MEGATRON) for key in keys):
                raise CheckpointError(
                    f"{self._place} has no metadata.json, which Megatron writes last; take a"
                    " finished iteration."
                )
            return {key: self.slab_of(self.index, key) for key in keys}
        shape = ModelShape.from_config(self.whole)
        titan.refuse_unknown_to_titan(shape)
        out: dict[str, Slab] = {}
        for key in keys:
            name = key.removeprefix("model.")
            if not titan.is_left_out(name, shape):
                out |= self.titan_slabs(name, self.slab_of(self.index, key), shape)
        return out

    @staticmethod
    def _refuse_damaged(location: Place) -> None:
        """Compare the indices with our manifest, if we wrote them."""
        entries = read_manifest(location).get("files", {})
        for file in (name for name in entries if name.rsplit("/", 1)[-1] == METADATA):
            if not matches_manifest(location, file, entries[file]):
                raise CheckpointError(
                    f"{location}/{file} is not what was written; convert the model again.",
                    code="checkpoint.damaged",
                )


def _config(location: Place, config: dict[str, Any] | None) -> dict[str, Any]:
    """config.json of the folder, or else the one that was named."""
    if config is not None and CONFIG not in location.files():
        return config
    return read_config(location)
