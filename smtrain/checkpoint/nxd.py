"""neuronx-distributed shards: a `.pt` file per (tp, pp) rank under NxD's own names, read and written.

Written is the current layout, `model/dp_rank_00_tp_rank_RR_pp_rank_PP.pt`, with config.json and a manifest beside it;
read is that and the older `tp_rank_RR_pp_rank_PP/checkpoint.pt` of the public SageMaker samples.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from smtrain.checkpoint.hf import COMPUTED, read_config
from smtrain.checkpoint.layout import KvOrder, Layout
from smtrain.checkpoint.nxd_names import Qkv, Stored, shard_file, shard_files, stored
from smtrain.checkpoint.sources import WeightSource
from smtrain.checkpoint.staging import whole_folder
from smtrain.errors import CheckpointError
from smtrain.model.families import FAMILIES, ModelShape

FORMAT = "smtrain-nxd"
VERSION = 1
MANIFEST = "manifest.json"


def write_nxd(
    source: WeightSource,
    target: Path,
    *,
    tp: int,
    pp: int,
    qkv: Qkv | None = None,
    kv_order: KvOrder = "tiled",
    kv_multiplier: int | None = None,
) -> None:
    """Write the shards of a (tp, pp) mesh, config.json and the manifest; one rank's shard is in memory at a time.

    `qkv` defaults to separate projections where tp divides the key/value heads, else to NxD's grouped form, whose
    heads are repeated `kv_multiplier` times (default: as often as tp needs) in the order of trn1 (`tiled`) or of trn2
    (`grouped`). Raises ConfigError where the model cannot be cut so, CheckpointError where the source cannot be read.
    """
    shape = ModelShape.from_config(source.config)
    layout = Layout(shape, tp, pp, kv_order, kv_multiplier=kv_multiplier)
    form: Qkv = qkv or ("separate" if layout.kv_multiplier == 1 else "grouped")
    if form in ("separate", "fused_mha") and layout.kv_multiplier > 1:
        raise CheckpointError(
            f"{shape.kv_heads} key/value heads, held {layout.kv_multiplier} times each for tp {tp}, cannot be kept in "
            f"NxD's {form} form; take the grouped form."
        )
    if form == "fused_mha" and shape.heads != shape.kv_heads:
        raise CheckpointError("NxD's fused_mha form has as many key/value heads as queries; take the fused form.")
    with whole_folder(target, MANIFEST, replaces=("model/dp_rank_00_tp_rank_*_pp_rank_*.pt",)) as folder:
        (folder / "model").mkdir()
        files = {}
        for p in range(pp):
            for t in range(tp):
                file = shard_file(t, p)
                torch.save({s.name: _join(source, layout, s, t) for s in stored(layout, p, form)}, folder / file)
                files[file] = {"size": (folder / file).stat().st_size, "sha256": _sha256(folder / file)}
        (folder / "config.json").write_text(json.dumps(source.config, indent=2) + "\n", encoding="utf-8")
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "topology": {"tp": tp, "pp": pp},
            "qkv": form,
            "kv_order": kv_order,
            "kv_multiplier": layout.kv_multiplier,
            "files": files,
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _join(source: WeightSource, layout: Layout, tensor: Stored, tp_rank: int) -> torch.Tensor:
    parts = []
    for name in tensor.parts:
        shard = layout.shard(name, tp_rank)
        if shard.dim is None:
            parts.append(source.read(name))
            continue
        pieces = [source.read(name, shard.dim, start, stop) for start, stop in shard.ranges if start < stop]
        missing = shard.size - sum(stop - start for start, stop in shard.ranges)
        if missing:  # a vocabulary that tp does not divide
            whole = source.shape(name)
            pieces.append(torch.zeros((missing, *whole[1:]), dtype=source.dtype(name)))
        parts.append(torch.cat(pieces, shard.dim))
    joined = torch.cat(parts) if len(parts) > 1 else parts[0]
    # torch.save writes the whole storage behind a view
    return joined.clone() if joined.untyped_storage().nbytes() != joined.nbytes else joined.contiguous()


class NxDSource:
    """A folder of NxD shards as a `WeightSource`; the topology is read from the files.

    `folder` holds `model/`, or is itself the folder of the shards. Without a manifest of ours, `config` may be given
    where there is no config.json beside, and `kv_order` says for which chip repeated key/value heads were laid out.
    Raises CheckpointError where a file is missing, cut short or no checkpoint, or does not fit the config, and where
    two copies of the same numbers differ.
    """

    def __init__(self, folder: Path, config: dict[str, Any] | None = None, kv_order: KvOrder = "tiled") -> None:
        self._folder = Path(folder)
        manifest = read_manifest(self._folder)
        self._config = config if config is not None else read_config(self._folder)
        self._shape = ModelShape.from_config(self._config)
        paths = shard_files(self._folder)
        if not paths:
            raise CheckpointError(f"{folder} holds no NxD shards (dp_rank_00_tp_rank_00_pp_rank_00.pt and so on).")
        self.tp, self.pp = (max(rank[i] for rank in paths) + 1 for i in (0, 1))
        for t in range(self.tp):
            for p in range(self.pp):
                if (t, p) not in paths:
                    raise CheckpointError(f"{folder} lacks the shard of tp rank {t}, pp rank {p}; fetch it again.")
        _check_sizes(self._folder, manifest, self.tp, self.pp)
        self._shards = {rank: _load(path) for rank, path in paths.items()}
        self._paths = paths
        held = {name: p for p in range(self.pp) for name in self._shards[0, p]}
        form, multiplier = self._form(held)
        order: KvOrder = manifest.get("kv_order", kv_order)
        # stages are found by name, so that any pipeline cut can be read
        self._layout = Layout(self._shape, self.tp, 1, order, kv_multiplier=multiplier)
        self._where = {
            part: (held[tensor.name], tensor)
            for tensor in reversed(stored(self._layout, 0, form))  # of a tied pair, the embedding counts
            for part in tensor.parts
            if tensor.name in held
        }
        self._tied = held.get(f"{FAMILIES[self._shape.family].head}.weight") if self._shape.tied else None
        self._check(held, form)

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    def names(self) -> list[str]:
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._layout.spec(name).shape

    def dtype(self, name: str) -> torch.dtype:
        pp, tensor = self._where[name]
        return self._shards[0, pp][tensor.name].dtype

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        if name not in self._where:
            raise CheckpointError(f"{self._folder} has no parameter {name}.")
        pp, tensor = self._where[name]
        found = self._read(name, pp, tensor, dim, start, stop)
        if self._tied is not None and name == self._shape.embed_name:
            head = Stored(f"{FAMILIES[self._shape.family].head}.weight", (name,))
            if not _same_bits(found, self._read(name, self._tied, head, dim, start, stop)):
                raise CheckpointError(f"{self._folder}: {head.name} differs from {name}, to which config.json ties it.")
        return found

    def _read(self, name: str, pp: int, tensor: Stored, dim: int | None, start: int, stop: int | None) -> torch.Tensor:
        whole = self.shape(name)
        window = [(start, whole[i] if stop is None else stop) if i == dim else (0, n) for i, n in enumerate(whole)]
        out = torch.empty([b - a for a, b in window], dtype=self.dtype(name))
        written: set[tuple[int, int]] = set()
        for t in range(self.tp):
            local = self._local(name, pp, tensor, t)
            shard = self._layout.shard(name, t)
            cut = 0 if shard.dim is None else shard.dim
            at = 0
            for a, b in shard.ranges if shard.dim is not None else ((0, whole[0]),):
                low, high = max(a, window[cut][0]), min(b, window[cut][1])
                if low < high:
                    part = local.narrow(cut, at + low - a, high - low)
                    if dim is not None and dim != cut:
                        part = part.narrow(dim, window[dim][0], window[dim][1] - window[dim][0])
                    into = out.narrow(cut, low - window[cut][0], high - low)
                    if (a, b) not in written:
                        into.copy_(part)
                    elif not _same_bits(into, part):
                        raise CheckpointError(
                            f"{self._paths[t, pp]}: {tensor.name} differs from the copy that another tp rank holds; "
                            "the checkpoint is damaged, or was laid out for another chip (kv_order)."
                        )
                    written.add((a, b))
                at += b - a
        return out

    def _local(self, name: str, pp: int, tensor: Stored, tp_rank: int) -> torch.Tensor:
        """A rank's part of `name`, out of the tensor that holds it."""
        at = 0
        for part in tensor.parts:
            size = self._layout.local_shape(part, tp_rank)[0]
            if part == name:
                return self._shards[tp_rank, pp][tensor.name].narrow(0, at, size)
            at += size
        raise AssertionError(f"{name} is no part of {tensor.name}")

    def _form(self, held: dict[str, int]) -> tuple[Qkv, int]:
        """How attention inputs are stored, and how often each key/value head is."""
        shape, first = self._shape, f"{FAMILIES[self._shape.family].prefix}.layers.0.self_attn"
        rows = shape.kv_heads * shape.head_dim
        grouped, fused = f"{first}.qkv_proj.weight_k", f"{first}.qkv_proj.weight_qkv"
        if grouped in held:
            return "grouped", max(1, self._shards[0, held[grouped]][grouped].shape[0] * self.tp // rows)
        if fused in held:
            keys = self._shards[0, held[fused]][fused].shape[0] * self.tp - shape.heads * shape.head_dim
            return "fused", max(1, keys // (2 * rows))
        return ("fused_mha" if f"{first}.qkv_proj.weight" in held else "separate"), 1

    def _check(self, held: dict[str, int], form: Qkv) -> None:
        for spec in self._shape.specs:
            if spec.name not in self._where:
                raise CheckpointError(f"{self._folder} lacks the parameter {spec.name}; is config.json of this model?")
        table = stored(self._layout, 0, form)
        for name in held.keys() - {tensor.name for tensor in table}:
            if not COMPUTED.search(name):
                raise CheckpointError(
                    f"{self._folder} holds {name}, which is no parameter of a {self._shape.family} model in NxD's "
                    "layout; is config.json of this model?"
                )
        for tensor in table:
            for t in range(self.tp):
                shapes = [self._layout.local_shape(part, t) for part in tensor.parts]
                wanted = (sum(shape[0] for shape in shapes), *shapes[0][1:])
                pp = held.get(tensor.name)
                found = None if pp is None else self._shards[t, pp].get(tensor.name)
                if found is None or tuple(found.shape) != wanted:
                    raise CheckpointError(
                        f"{self._folder}: {tensor.name} on tp rank {t} is "
                        f"{'missing' if found is None else list(found.shape)} where {list(wanted)} belongs; "
                        "is config.json of this model?"
                    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Our manifest of converted shards; empty where another tool wrote them."""
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); convert the model again.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of converted shards; convert the model again.")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {manifest.get('version')}, this smtrain reads {VERSION}; convert again."
        )
    return manifest


def _check_sizes(folder: Path, manifest: dict[str, Any], tp: int, pp: int) -> None:
    if manifest and manifest.get("topology") != {"tp": tp, "pp": pp}:
        raise CheckpointError(f"{folder} has shards of tp {tp} x pp {pp}, its manifest says otherwise; convert again.")
    for file, about in manifest.get("files", {}).items():
        path = folder / file
        size = path.stat().st_size if path.is_file() else None
        if size != about["size"]:
            raise CheckpointError(f"{path} has {size} bytes instead of {about['size']}; convert the model again.")


def _load(path: Path) -> dict[str, torch.Tensor]:
    if path.with_name(f"{path.name}.tensors").is_dir():
        raise CheckpointError(f"{path} is in NxD's xser form, which is not read; save it without use_xser.")
    try:
        shard = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises half a dozen kinds for a file that is none of its own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is no whole checkpoint of tensors ({reason}); fetch it again.") from None
    if isinstance(shard, dict) and isinstance(shard.get("model"), dict):
        shard = shard["model"]  # as the public GPT-NeoX examples wrap it
    if not isinstance(shard, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in shard.values()):
        raise CheckpointError(f"{path} holds something else than named tensors; it is not a model shard.")
    return shard


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
