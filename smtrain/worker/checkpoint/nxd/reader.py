"""Read neuronx-distributed shards: a file per (tp, pp) rank under NxD's own names.

Supported are the current layout `model/dp_rank_00_tp_rank_RR_pp_rank_PP.pt`, the older
`tp_rank_RR_pp_rank_PP/checkpoint.pt` of the public SageMaker samples, and the xser form of both.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.core.model.extension import with_rope_of
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.layout import KvOrder, Layout
from smtrain.core.model.other_forms import refuse_elsewhere
from smtrain.core.model.shape import ModelShape
from smtrain.core.model.text_part import text_part
from smtrain.core.protocol.checkpoints import RECORDS
from smtrain.core.text import with_article
from smtrain.worker.checkpoint.conversion_manifest import checksums, mesh_of, read_manifest
from smtrain.worker.checkpoint.dtypes import FLOATS, Bits, DType
from smtrain.worker.checkpoint.huggingface.folder import COMPUTED_BUFFERS, read_config
from smtrain.worker.checkpoint.nxd.names import StoredTensor, shard_files, stored_tensors
from smtrain.worker.checkpoint.sources import ReadCallback, WeightSource
from smtrain.worker.checkpoint.storage import Bounds, Place, place, read_json
from smtrain.worker.checkpoint.stored_names import NESTS, not_tensors, without_wrappers
from smtrain.worker.checkpoint.targets import Qkv
from smtrain.worker.checkpoint.tensor_ranges import Slab, Tally
from smtrain.worker.checkpoint.torch_files import zip as torchzip
from smtrain.worker.checkpoint.torch_files.unpickle import Reference

_RECORD = RECORDS["nxd"]
"""The record in a checkpoint of a run."""
Shards = Mapping[tuple[int, int], Mapping[str, Slab]]


class NxDSource(WeightSource):
    """A folder of NxD shards as a `WeightSource`; the topology is read from the files.

    `folder` holds `model/`, or is itself the folder of the shards. `config` replaces a missing
    config.json, and `kv_order` is the chip's order of repeated key/value heads, for shards without
    our manifest. Raises CheckpointError if a file is missing, cut short or no checkpoint, does not
    fit the config, or if two copies of a number differ.
    """

    def __init__(
        self,
        folder: Place | Path | str,
        config: dict[str, Any] | None = None,
        kv_order: KvOrder = "tiled",
    ) -> None:
        self._place = place(folder)
        manifest = read_manifest(self._place)
        self._extended = _is_extended(self._place)
        self._config = text_part(read_config(self._place) if config is None else config)
        if self._extended and config is not None:
            self._config = with_rope_of(self._config, read_config(self._place))
        self._shape = ModelShape.from_config(self._config)
        refuse_elsewhere(self._shape, "Nxd")
        paths = shard_files(self._place.files())
        if not paths:
            raise CheckpointError(
                f"{folder} holds no NxD shards (dp_rank_00_tp_rank_00_pp_rank_00.pt and so on).",
                code="checkpoint.damaged",
            )
        self.tp, self.pp = mesh_of(paths, folder, "shard")
        if manifest and manifest.get("topology") != {"tp": self.tp, "pp": self.pp}:
            raise CheckpointError(
                f"{folder} has shards of tp {self.tp} x pp {self.pp}, its manifest says otherwise;"
                " convert again.",
                code="checkpoint.damaged",
            )
        self._shards: Shards = {
            rank: _load(self._place, file, manifest) for rank, file in paths.items()
        }
        # tp rank 0 tells the names: _check_shapes then asks all ranks for each of them.
        stages = {name: p for p in range(self.pp) for name in self._shards[0, p]}
        self.form, multiplier = self._form(stages)
        # The manifest wins: it has the order that the shards were written with.
        order: KvOrder = manifest.get("kv_order", kv_order)
        # stages are looked up by name, so that any pipeline cut can be read
        self._layout = Layout(self._shape, self.tp, 1, order, kv_multiplier=multiplier)
        self.kv_multiplier = self._layout.kv_multiplier
        self._where = {
            part: (stages[tensor.name], tensor)
            for tensor in reversed(
                stored_tensors(self._layout, 0, self.form)
            )  # of a tied pair, the embedding counts
            for part in tensor.parts
            if tensor.name in stages
        }
        self._tied = (
            stages.get(f"{FAMILIES[self._shape.family].head}.weight") if self._shape.tied else None
        )
        self._check_shapes(stages)
        self._checked: set[tuple[int, str]] = set()
        self._found: dict[tuple[str, StoredTensor], list[tuple[int, int, int, int]]] = {}
        self._lock = threading.Lock()
        self._read: ReadCallback | None = None

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    @property
    def has_extended_rope(self) -> bool:
        return self._extended

    def names(self) -> list[str]:
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._layout.spec(name).shape

    def dtype(self, name: str) -> DType:
        pp, tensor = self._where[name]
        return self._shards[0, pp][tensor.name].dtype

    @property
    def location(self) -> Place:
        return self._place

    def stored_with(self, name: str) -> tuple[str, ...]:
        return self._where[name][1].parts

    def seams(self, name: str) -> list[int]:
        parts = self._parts(name, self._where[name][1])
        return sorted({a for _, a, _, _ in parts}) if not self._layout.shard(name, 0).dim else []

    def check(self, name: str, tally: Tally | None = None) -> None:
        pp, tensor = self._where[name]
        with self._lock:  # several parameters may be one fused tensor: check it once
            if (pp, tensor.name) in self._checked:
                return
            self._checked.add((pp, tensor.name))
        for t in range(self.tp):
            self._shards[t, pp][tensor.name].check(tensor.name, tally)

    def watch(self, read: ReadCallback) -> None:
        self._read = read

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        if name not in self._where:
            raise CheckpointError(f"{self._place} has no parameter {name}.")
        pp, tensor = self._where[name]
        bits = self._assemble(name, pp, tensor, bounds, tally)
        if self._tied is not None and name == self._shape.embed_name:
            head = StoredTensor(f"{FAMILIES[self._shape.family].head}.weight", (name,))
            if not np.array_equal(bits, self._assemble(name, self._tied, head, bounds)):
                raise CheckpointError(
                    f"{self._place}: {head.name} differs from {name}, to which config.json"
                    " ties it.",
                    code="checkpoint.other_model",
                )
        return bits

    def _assemble(
        self, name: str, pp: int, tensor: StoredTensor, bounds: Bounds, tally: Tally | None = None
    ) -> Bits:
        """Assemble a window of a parameter from the tp ranks' parts; a view if one rank has all of
        it.
        """
        dim = self._layout.shard(name, 0).dim or 0
        pieces: dict[tuple[int, int], Bits] = {}
        for t, a, b, at in self._parts(name, tensor):
            low, high = max(a, bounds[dim][0]), min(b, bounds[dim][1])
            if low >= high:
                continue
            # A fused tensor is joined along dimension 0, also if the cut is along columns.
            slab, first = (
                self._shards[t, pp][tensor.name],
                (0 if dim == 0 else self._first_row(name, tensor, t)),
            )
            local = [
                (start + first, stop + first) if i == 0 else (start, stop)
                for i, (start, stop) in enumerate(bounds)
            ]
            local[dim] = (at + low - a, at + high - a)
            if self._read is not None:
                self._read(f"{slab.file} {tensor.name}", partial(slab.check_or_hash, tensor.name))
            piece = slab.bits(local, tally)
            if (low, high) not in pieces:
                pieces[low, high] = piece
            # With the wrong kv_order, two different heads meet here as copies of one.
            elif not np.array_equal(pieces[low, high], piece):
                raise CheckpointError(
                    f"{slab.place}/{slab.file}: {tensor.name} differs from the copy that another tp"
                    " rank holds; the checkpoint is damaged, or was laid out for another chip"
                    " (kv_order).",
                    code="checkpoint.damaged",
                )
        if len(pieces) == 1:
            return next(iter(pieces.values()))
        out: Bits = np.empty([b - a for a, b in bounds], self.dtype(name).bits)
        for (low, high), piece in pieces.items():
            span = slice(low - bounds[dim][0], high - bounds[dim][0])
            out[span if dim == 0 else (slice(None), span)] = piece
        return out

    def _parts(self, name: str, tensor: StoredTensor) -> list[tuple[int, int, int, int]]:
        """A parameter's parts along the cut dimension: (tp rank, start, stop, offset in the rank's
        tensor).
        """
        if (name, tensor) not in self._found:
            out = []
            for t in range(self.tp):
                shard = self._layout.shard(name, t)
                at = 0 if shard.dim else self._first_row(name, tensor, t)
                for a, b in shard.ranges if shard.dim is not None else ((0, self.shape(name)[0]),):
                    out.append((t, a, b, at))
                    at += b - a
            self._found[name, tensor] = out
        return self._found[name, tensor]

    def _first_row(self, name: str, tensor: StoredTensor, tp_rank: int) -> int:
        """The first row of a rank's part of `name` in the tensor that holds it."""
        previous_parts = tensor.parts[: tensor.parts.index(name)]
        return sum(self._layout.local_shape(part, tp_rank)[0] for part in previous_parts)

    def _form(self, stages: dict[str, int]) -> tuple[Qkv, int]:
        """The form of the attention inputs, and the number of copies of each key/value head."""
        shape, first = self._shape, f"{FAMILIES[self._shape.family].prefix}.layers.0.self_attn"
        # Copies are counted from rows: shards without our manifest do not record them.
        rows = shape.kv_heads * shape.head_dim
        grouped_key, fused_key = f"{first}.qkv_proj.weight_k", f"{first}.qkv_proj.weight_qkv"
        if grouped_key in stages:
            return "grouped", max(1, self._rows(stages, grouped_key) * self.tp // rows)
        if fused_key in stages:
            keys = self._rows(stages, fused_key) * self.tp - shape.heads * shape.head_dim
            # The rows behind the queries are the copies of k, then those of v.
            return "fused", max(1, keys // (2 * rows))
        return ("fused_mha" if f"{first}.qkv_proj.weight" in stages else "separate"), 1

    def _rows(self, stages: dict[str, int], name: str) -> int:
        shape = self._shards[0, stages[name]][name].shape
        return shape[0] if shape else 0

    def _check_shapes(self, stages: dict[str, int]) -> None:
        for spec in self._shape.specs:
            if spec.name not in self._where:
                raise CheckpointError(
                    f"{self._place} lacks the parameter {spec.name}; check that config.json is this"
                    " model's.",
                    code="checkpoint.other_model",
                )
        table = stored_tensors(self._layout, 0, self.form)
        for name in stages.keys() - {tensor.name for tensor in table}:
            if not COMPUTED_BUFFERS.search(str(name)):
                raise CheckpointError(
                    f"{self._place} holds {name}, which is no parameter of"
                    f" {with_article(self._shape.family)} model in NxD's layout; check that"
                    " config.json is this model's.",
                    code="checkpoint.other_model",
                )
        for tensor in table:
            pp = stages.get(tensor.name)
            for t in range(self.tp):
                shapes = [self._layout.local_shape(part, t) for part in tensor.parts]
                expected_shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
                slab = None if pp is None else self._shards[t, pp].get(tensor.name)
                if slab is None or slab.shape != expected_shape:
                    raise CheckpointError(
                        f"{self._place}: {tensor.name} on tp rank {t} is"
                        f" {'missing' if slab is None else list(slab.shape)} instead of"
                        f" {list(expected_shape)}; is config.json of this model?",
                        code="checkpoint.other_model",
                    )
                assert pp is not None
                first = self._shards[0, pp][tensor.name].dtype
                if slab.dtype not in FLOATS or slab.dtype != first:
                    raise CheckpointError(
                        f"{self._place}: {tensor.name} on tp rank {t} is of type {slab.dtype}, on"
                        f" rank 0 of {first}; all shards must be of one floating-point type."
                    )


def _load(location: Place, file: str, manifest: dict[str, Any]) -> dict[str, Slab]:
    """Read one rank's file."""
    shard = torchzip.load(location, file)
    if isinstance(shard, dict):  # the public GPT-NeoX examples wrap it
        shard = next((shard[key] for key in NESTS if isinstance(shard.get(key), dict)), shard)
        shard = {
            without_wrappers(name) if isinstance(name, str) else name: value
            for name, value in shard.items()
        }
    if isinstance(shard, dict) and any(isinstance(t, Reference) for t in shard.values()):
        shard = {
            name: resolve_reference(location, file, name, value) for name, value in shard.items()
        }
    if not isinstance(shard, dict) or not all(
        isinstance(t, Slab) and isinstance(n, str) for n, t in shard.items()
    ):
        raise not_tensors(shard, f"{location}/{file}")
    crcs = checksums(manifest, file)
    for name, slab in shard.items():
        # The zip's checksum against ours: a file of another conversion is found unread.
        if name in crcs and slab.crc32 not in (None, crcs[name]):
            raise CheckpointError(
                f"{location}/{file}: {name} is not what the manifest lists; convert the model"
                " again.",
                code="checkpoint.damaged",
            )
    return shard


def resolve_reference(location: Place, file: str, name: str, value: Any) -> Any:
    """Resolve a reference of an xser shard to its tensor."""
    if not isinstance(value, Reference):
        return value
    tid = getattr(value, "tid", None)
    folder = f"{file}.tensors"
    # tid becomes part of a path, so nothing but a plain number may pass.
    if type(tid) is not int or tid < 0:
        raise CheckpointError(
            f"{location}/{file}: {str(name)[:200]} refers to tensor {str(tid)[:50]!r}; copy this"
            " file again.",
            code="checkpoint.damaged",
        )
    if not any(path.startswith(f"{folder}/") for path in location.files()):
        raise CheckpointError(
            f"{location}/{folder} is empty: the checkpoint has no weights but those in the"
            " optimizer's files (avoid_saving_lower_precision_weights), or they were left behind"
            " in a copy; save it without that option.",
            code="checkpoint.missing",
        )
    tensor = torchzip.load(location, f"{folder}/tensor_{tid}.pt")
    if not isinstance(tensor, Slab):
        raise CheckpointError(
            f"{location}/{folder}/tensor_{tid}.pt holds no tensor; copy this file again.",
            code="checkpoint.damaged",
        )
    return tensor


def _is_extended(location: Place) -> bool:
    """Whether a checkpoint is of a run with model.rope."""
    record = read_json(location, _RECORD) if _RECORD in location.files() else {}
    state = record.get("state")
    return isinstance(state, dict) and "rope" in (state.get("model") or {})
