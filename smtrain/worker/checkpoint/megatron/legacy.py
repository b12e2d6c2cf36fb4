"""Read Megatron's legacy checkpoints: `iter_NNNNNNN/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`,
each rank's own part.

Names are Megatron-core's with either spec, with one or several virtual stages, and with sequential
or grouped experts, whose expert-parallel ranks have separate files. Anything else that a training
run left in the files is skipped, and nothing in them is run (unpickle.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import accumulate
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.model.layout import Shard
from smtrain.core.model.other_forms import refuse_elsewhere
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.conversion_manifest import checksums, mesh_of, read_manifest
from smtrain.worker.checkpoint.megatron import names
from smtrain.worker.checkpoint.megatron.block_source import PieceSource
from smtrain.worker.checkpoint.megatron.legacy_experts import by_stage, stored_degree
from smtrain.worker.checkpoint.storage import Place, read_text
from smtrain.worker.checkpoint.tensor_blocks import TensorBlock
from smtrain.worker.checkpoint.tensor_ranges import Slab
from smtrain.worker.checkpoint.torch_files import zip as torchzip
from smtrain.worker.checkpoint.torch_files.unpickle import Opaque

TRACKER = "latest_checkpointed_iteration.txt"
FOLDER = re.compile(r"iter_\d+|release")
# PPP is there only if pp > 1, EEE only if ep > 1 (Megatron-LM's checkpointing.py): two numbers
# are tp and pp or tp and ep, which by_stage tells apart. model_rng.pt: older runs with the
# distributed optimizer.
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3}))?(?:_(\d{3}))?/(?:model_optim_rng|model_rng)\.pt")
_QUANTIZED_CLASSES = re.compile(r"float8|fp8|nvfp4", re.IGNORECASE)
"""Matches the classes of Transformer Engine's quantized tensors."""
_CHUNK = re.compile(r"model(\d*)")

Shards = Mapping[tuple[int, int, int], Mapping[str, Slab]]
"""(tp rank, pipeline stage, virtual stage) -> local name -> tensor."""


def rank_files(files: Iterable[str]) -> dict[tuple[int, ...], str]:
    """The numbers in a folder's name -> its file, maybe empty: tp rank, and stage or
    expert-parallel rank or both.
    """
    matches = ((_RANK.fullmatch(file), file) for file in sorted(files))
    return {
        tuple(int(n) for n in match.groups() if n is not None): file
        for match, file in matches
        if match
    }


def iteration(location: Place) -> str | None:
    """The folder of the newest iteration, by the tracker file or by name; None without one."""
    files = location.files()
    folders = sorted(
        {
            file.split("/")[0]
            for file in files
            if "/" in file and FOLDER.fullmatch(file.split("/")[0])
        }
    )
    # Megatron writes the tracker after the files: a newer folder may be incomplete.
    if TRACKER in files:
        tracker_text = read_text(location, TRACKER, 1000).strip()
        folder_name = (
            tracker_text
            if tracker_text == "release"
            else f"iter_{int(tracker_text):07d}"
            if tracker_text.isdecimal()
            else None
        )
        if folder_name not in folders:
            raise CheckpointError(
                f"{location}/{TRACKER} says {tracker_text[:50]!r}, and there is no such folder;"
                " copy it again.",
                code="checkpoint.damaged",
            )
        return folder_name
    # Numbers have leading zeros, so names sort by iteration; `release` is last.
    return folders[-1] if folders else None


Part = Callable[[str, Slab, int, int], "tuple[str, list[tuple[int, int]]] | None"]
"""(key in the whole model, tensor, tp, tp rank) -> the tensor that it is a part of and its rows
there, or None.
"""


class RankSource(PieceSource):
    """A checkpoint of files for each (tp, pp) rank as a `WeightSource`; the topology is read from
    the files.

    `chunks` reads those of a rank as a dict for each virtual stage; `part` places tensors that
    Megatron-core stores differently, and `replace` gives other blocks for a block. Raises
    CheckpointError if a file is missing or not of this model.
    """

    def __init__(
        self,
        location: Place,
        at: Place,
        config: dict[str, Any],
        ranks: Collection[tuple[int, int]],
        chunks: Callable[[tuple[int, int]], list[dict[str, Slab]]],
        part: Part | None = None,
        replace: Callable[[TensorBlock], Iterable[TensorBlock]] | None = None,
    ) -> None:
        self.tp, self.pp = mesh_of(ranks, at)
        shape = ModelShape.from_config(config)
        # pp = 1: the stages are counted from the files, which may be cut unevenly.
        if faults := names.mesh_faults(shape, self.tp, 1):
            raise CheckpointError(
                f"{at}: {'; '.join(faults)}; check that config.json is this model's.",
                code="checkpoint.other_model",
            )
        shards = {(*rank, v): tensors for rank in ranks for v, tensors in enumerate(chunks(rank))}
        self.vpp = max(v for _, _, v in shards) + 1
        blocks = _global_blocks(at, shape, shards, self, part)
        if replace is not None:
            blocks = {
                key: [replacement for block in old for replacement in replace(block)]
                for key, old in blocks.items()
            }
        # table() of a tied model has no head, and PieceSource compares its copy.
        twins = blocks.pop(names.HEAD, None) if shape.tied else None
        super().__init__(location, config, names.table(shape), blocks, twins)


class MegatronSource(RankSource):
    """A legacy checkpoint; `folder` is that of one iteration below `location`, "" for `location`
    itself.
    """

    def __init__(self, location: Place, folder: str, config: dict[str, Any]) -> None:
        self.folder = folder
        at, prefix = (location.subfolder(folder), f"{folder}/") if folder else (location, "")
        manifest = read_manifest(location)
        shape = ModelShape.from_config(config)
        refuse_elsewhere(shape, "Megatron")

        def chunks(file: str) -> list[dict[str, Slab]]:
            return _chunks(at, file, checksums(manifest, prefix + file))

        files = rank_files(at.files())
        ranks = {rank: chunks(file) for rank, file in files.items()}
        stored_names = (n for chunks in ranks.values() for chunk in chunks for n in chunk)
        names.warn_of_mtp_layers(at, stored_names)
        chunks_by_stage, self.ep = by_stage(
            at,
            shape,
            {
                rank: [
                    {n: slab for n, slab in chunk.items() if not n.startswith(names.MTP)}
                    for chunk in chunks
                ]
                for rank, chunks in ranks.items()
            },
        )
        super().__init__(location, at, config, chunks_by_stage, chunks_by_stage.__getitem__)


def _chunks(location: Place, file: str, crcs: dict[str, int]) -> list[dict[str, Slab]]:
    """Read one rank's file: a dict for each virtual stage, with the local spec's names."""
    # lenient: args is an argparse.Namespace, and may hold enums of Megatron's classes.
    content = torchzip.load(location, file, lenient=True)
    models = (
        {
            int(match[1] or 0): value
            for key, value in content.items()
            if (match := _CHUNK.fullmatch(str(key)))
        }
        if isinstance(content, dict)
        else {}
    )
    if not models or sorted(models) != list(range(len(models))):
        raise CheckpointError(
            f"{location}/{file} has no model in it (model, or model0 and so on); it is not a"
            " checkpoint."
        )
    out = []
    for v in sorted(models):
        tensors: dict[str, Slab] = {}
        for key, value in _flat(location, file, models[v]):
            if names.is_ignored(key):
                continue
            if isinstance(value, Opaque) and _QUANTIZED_CLASSES.search(value.name):
                raise names.unreadable(f"{location}/{file}", key, "fp8 of Transformer Engine")
            if not isinstance(value, Slab):
                raise CheckpointError(
                    f"{location}/{file}: {key[:200]} is not a tensor; copy this file again.",
                    code="checkpoint.damaged",
                )
            name = names.canonical(key)
            if name in tensors:
                raise CheckpointError(
                    f"{location}/{file} has {name[:200]} under the names of both specs; save it"
                    " again."
                )
            tensors[name] = value
        out.append(tensors)
    # By value: the manifest has names of the whole model, the file local ones.
    stored_crcs = {slab.crc32 for tensors in out for slab in tensors.values()}
    if crcs and not stored_crcs <= {*crcs.values(), None}:
        raise CheckpointError(
            f"{location}/{file} is not what the manifest lists; convert the model again.",
            code="checkpoint.damaged",
        )
    return out


def _flat(location: Place, file: str, model: Any, depth: int = 0) -> list[tuple[str, Any]]:
    """Flatten nested dicts to dotted names."""
    if not isinstance(model, dict):
        raise CheckpointError(
            f"{location}/{file} holds something other than named tensors; it is not a checkpoint of"
            " weights."
        )
    out: list[tuple[str, Any]] = []
    for key, value in model.items():
        # The limit keeps a hostile nesting from exhausting the stack.
        if isinstance(value, dict) and depth < 6:
            out += [
                (f"{key}.{name}", item) for name, item in _flat(location, file, value, depth + 1)
            ]
        else:
            out.append((str(key), value))
    return out


def _global_blocks(
    location: Place, shape: ModelShape, shards: Shards, mesh: RankSource, part: Part | None
) -> dict[str, list[TensorBlock]]:
    """Key in the whole model -> its blocks, from the parts of all ranks.

    Raises CheckpointError for tensors that the model does not have, and for shapes that do not fit
    a rank.
    """
    tp, pp, vpp = mesh.tp, mesh.pp, mesh.vpp
    # Counted in the files, as each virtual stage numbers its layers from 0.
    counts = [[_layers(shards.get((0, p, v), {})) for v in range(vpp)] for p in range(pp)]
    # v outside, p inside: virtual stage 1 of stage 0 follows virtual stage 0 of the last stage.
    starts = list(accumulate((counts[p][v] for v in range(vpp) for p in range(pp)), initial=0))
    if starts[-1] != shape.layers:
        raise CheckpointError(
            f"{location} has {starts[-1]} layers, config.json {shape.layers}; take this model's.",
            code="checkpoint.other_model",
        )
    fused_tensors = {f.key: f for f in (*names.table(shape), names.head(shape))}
    out: dict[str, list[TensorBlock]] = {}
    for (t, p, v), tensors in sorted(shards.items()):
        for name, slab in tensors.items():
            key = _global(name, starts[v * pp + p])
            placement = part(key, slab, tp, t) if part is not None else None
            if placement is not None and placement[0] in fused_tensors:
                key, rows = placement
                shard = Shard(0, tuple(rows), sum(b - a for a, b in rows))
                out.setdefault(key, []).extend(
                    _blocks(location, fused_tensors[key], slab, shard, f"a part of {key}")
                )
                continue
            if key not in fused_tensors:
                raise CheckpointError(
                    f"{location} holds {name[:200]}, which is"
                    f" {names.describe_unknown(name, shape)}."
                )
            if key == names.EMBEDDING and p > 0:
                key = names.HEAD  # some versions keep a copy on the last stage of a tied model
            vocab = fused_tensors[key].shape[0]
            # The padding is taken from the file: divisors differ by run, and MindSpeed may not pad.
            if key in (names.EMBEDDING, names.HEAD) and slab.shape:
                vocab = max(slab.shape[0] * tp, vocab)
            # --expert-tensor-parallel-size may differ from tp, and only the local spec cuts linears
            # that give latents: the part's size tells the degree.
            cut_tp = stored_degree(fused_tensors[key], slab) or tp
            shard = names.cut(fused_tensors[key], cut_tp, t % cut_tp, vocab)
            out.setdefault(key, []).extend(
                _blocks(location, fused_tensors[key], slab, shard, f"{key} on tp rank {t}")
            )
    return out


def _layers(tensors: Mapping[str, Slab]) -> int:
    return len({match[1] for name in tensors if (match := names.LAYER.match(name))})


def _global(name: str, first: int) -> str:
    match = names.LAYER.match(name)
    return f"decoder.layers.{first + int(match[1])}.{match[2]}" if match else name


def _blocks(
    location: Place, fused_tensor: names.FusedTensor, slab: Slab, shard: Shard, label: str
) -> list[TensorBlock]:
    """The blocks of the model that a shard in `slab` holds; the padding of a vocabulary is left
    out.
    """
    expected_shape = tuple(
        shard.size if i == shard.dim else n for i, n in enumerate(fused_tensor.shape)
    )
    if slab.shape != expected_shape:
        raise CheckpointError(
            f"{location}: {label} is {list(slab.shape)} instead of {list(expected_shape)}; is"
            " config.json of this model, and the file of each rank there?",
            code="checkpoint.other_model",
        )
    full_spans = tuple((0, n) for n in fused_tensor.shape)
    if shard.dim is None:
        return [TensorBlock(full_spans, slab, (0,) * len(full_spans))]
    out, at = [], 0
    for a, b in shard.ranges:
        origin = tuple(at if i == shard.dim else 0 for i in range(len(full_spans)))
        # Empty for a rank that holds only padding of the vocabulary.
        if b > a:
            out.append(
                TensorBlock(
                    tuple((a, b) if i == shard.dim else n for i, n in enumerate(full_spans)),
                    slab,
                    origin,
                )
            )
        at += b - a
    return out
