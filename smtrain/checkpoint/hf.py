"""Hugging Face folders: config.json and weights, one file or shards with an index, read and written lazily.

Weights are read from safetensors, or else from torch's `pytorch_model.bin`; what is written is safetensors.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from smtrain.checkpoint import safetensors, torchzip
from smtrain.checkpoint.conversion_manifest import checksums, read_manifest
from smtrain.checkpoint.conversion_plan import ConversionPlan
from smtrain.checkpoint.dtypes import FLOATS, Bits, DType
from smtrain.checkpoint.execute import execute
from smtrain.checkpoint.slabs import Slab, Tally
from smtrain.checkpoint.sources import Read, WeightSource
from smtrain.checkpoint.storage import Bounds, Place, place, read_text
from smtrain.checkpoint.tensor_files import Job, Tensor, TensorFile, Write
from smtrain.errors import CheckpointError
from smtrain.model import hf_tokenizer
from smtrain.model.card import README
from smtrain.model.families import FAMILIES, ModelShape
from smtrain.model.hf_config import for_everyone, normalise
from smtrain.model.hf_folder import SOURCE, is_legal, weights_in
from smtrain.model.layout import Layout

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Buffers that older transformers saved and newer ones compute. A tied head is its embedding.
COMPUTED = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|\.attention\.(masked_)?bias$")
COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.json", "chat_template.jinja"),
    *("generation_config.json", SOURCE),
)


def is_hf_folder(where: Place) -> bool:
    return weights_in(where.files()) is not None


def read_config(where: Place | Path | str) -> dict[str, Any]:
    """The contents of `config.json`; raises CheckpointError where there is none."""
    where = place(where)
    if "config.json" not in where.files():
        raise CheckpointError(f"{where} has no config.json; copy the model's into it.")
    try:
        config = json.loads(read_text(where, "config.json"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}/config.json cannot be read ({error}); copy the model's again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}/config.json is not a JSON object; copy the model's again.")
    return config


class HFSource(WeightSource):
    """A Hugging Face folder as a `WeightSource`.

    Raises CheckpointError where a file is missing, cut short or not safetensors, where the index points out of the
    folder, where a parameter of the model is missing or has another shape than config.json says, and where a tensor is
    none of the model's.
    """

    def __init__(self, folder: Place | Path | str) -> None:
        self._place = place(folder)
        self._config = read_config(self._place)
        self._shape = ModelShape.from_config(self._config)
        self._manifest = read_manifest(self._place)
        self._read: Read | None = None
        held = self._held()
        self._slabs: dict[str, Slab] = {}
        for spec in self._shape.specs:
            stored = next((n for n in (spec.name, *self._shape.file_aliases(spec.name)) if n in held), None)
            if stored is None:
                raise CheckpointError(f"{self._place} lacks the parameter {spec.name}; fetch the model again.")
            slab = self._slabs[spec.name] = held.pop(stored)
            if slab.shape != spec.shape:
                raise CheckpointError(
                    f"{self._place}: {spec.name} has shape {list(slab.shape)} where config.json asks for "
                    f"{list(spec.shape)}; take weights and config.json from the same model."
                )
            if slab.dtype not in FLOATS:
                raise CheckpointError(
                    f"{self._place}: {spec.name} has the type {slab.dtype.code}; save the model in bf16 or fp32."
                )
        head = f"{FAMILIES[self._shape.family].head}.weight" if self._shape.tied else None
        for name in held:
            if name != head and not COMPUTED.search(name):
                raise CheckpointError(
                    f"{self._place} holds {name[:200]}, which is no parameter of a {self._shape.family} model as its "
                    "config.json describes it; take the config.json of this model."
                )

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    def names(self) -> list[str]:
        return sorted(self._slabs)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._slab(name).shape

    def dtype(self, name: str) -> DType:
        return self._slab(name).dtype

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        slab = self._slab(name)
        if self._read is not None:
            self._read(f"{slab.file} {name}", partial(slab.seen, name))
        return slab.bits(bounds, tally)

    def check(self, name: str, tally: Tally | None = None) -> None:
        self._slab(name).check(name, tally)

    @property
    def read_alike(self) -> bool:
        return True

    def watch(self, read: Read) -> None:
        self._read = read

    @property
    def where(self) -> Place:
        return self._place

    def _held(self) -> dict[str, Slab]:
        """Stored name -> where it lies, of everything in the folder."""
        first = weights_in(self._place.files())
        if first is None:
            raise CheckpointError(
                f"{self._place} has neither {SINGLE} nor pytorch_model.bin, nor an index of them; save the model as "
                "safetensors."
            )
        if not first.endswith(".index.json"):
            return self._file(first)
        path = f"{self._place}/{first}"
        try:
            weight_map = dict(json.loads(read_text(self._place, first))["weight_map"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is not an index ({error!r}); fetch the model again.") from error
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or "\0" in file or file in ("", "..", "."):
                raise CheckpointError(
                    f"{path} points {name} to {file!r}, which is not a file in its folder; fetch the model again."
                )
        out = {}
        for file in sorted(set(weight_map.values())):
            found = self._file(file)
            for name in (name for name, at in weight_map.items() if at == file):
                if name not in found:
                    raise CheckpointError(f"{self._place}/{file} lacks {name}, which {first} says it has.")
                out[name] = found[name]
        return out

    def _file(self, file: str) -> dict[str, Slab]:
        if not file.endswith(".safetensors"):
            held = torchzip.load(self._place, file)
            if not isinstance(held, dict) or not all(isinstance(slab, Slab) for slab in held.values()):
                raise CheckpointError(f"{self._place}/{file} holds something other than named tensors; fetch it again.")
            return {str(name): slab for name, slab in held.items()}
        crcs = checksums(self._manifest, file)
        return {name: slab.with_crc32(crcs.get(name)) for name, slab in safetensors.slabs(self._place, file).items()}

    def _slab(self, name: str) -> Slab:
        if name not in self._slabs:
            raise CheckpointError(f"{self._place} has no parameter {name}.")
        return self._slabs[name]


def write_hf(
    source: WeightSource,
    target: Path | str,
    companions: Path | str | None = None,
    max_shard_size: int = 5_000_000_000,
    overwrite: bool = True,
    readme: bytes | None = None,
) -> None:
    """Write an ordinary Hugging Face folder, a few blocks in memory at a time; it appears whole.

    Names and types are the source's. `companions` is a folder whose config.json, tokenizer, generation config and
    licence go along; `readme` is the model card. More than `max_shard_size` bytes make shards and an index. Raises
    CheckpointError where the target is a file, or the companions are of another model.
    """
    said = normalise(source.config)
    shape = said.shape
    beside = None if companions is None else place(companions)
    config = source.config if beside is None else read_config(beside)
    if normalise(config) != said:
        raise CheckpointError(
            f"{companions}/config.json describes another model than the weights; give the folder training started from."
        )
    names = list(dict.fromkeys(part for spec in shape.specs for part in source.stored_with(spec.name)))
    tensors = {name: Tensor(source.dtype(name), source.shape(name)) for name in names}
    shards = _shards(tensors, max_shard_size)
    containers, groups = [], []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        container = safetensors.container(file, {name: tensors[name] for name in shard})
        containers.append(container)
        groups.append(_jobs(source, container))
        weight_map |= dict.fromkeys(shard, file)
    extras = {} if beside is None else companions_of(beside)
    if readme is not None:
        extras[README] = readme
    if len(shards) > 1:
        total = sum(tensor.size for tensor in tensors.values())
        extras[INDEX] = _json({"metadata": {"total_size": total}, "weight_map": weight_map})
    extras["config.json"] = _json(_with_dtype(for_everyone(config), {tensor.dtype for tensor in tensors.values()}))
    replaces = (SINGLE, INDEX, "model-*-of-*.safetensors")
    execute(
        source, target, ConversionPlan(Layout(shape), groups, containers, extras, {"kind": "hf"}, replaces), overwrite
    )


def _jobs(source: WeightSource, container: TensorFile) -> list[Job]:
    """In the order of the file; what is one tensor in the source is one job, as far as the file holds it."""
    jobs: list[Job] = []
    for name in sorted(container.offsets, key=container.offsets.__getitem__):
        write = Write(name, (name,), (container,))
        if jobs and jobs[-1][-1].name in source.stored_with(name):
            jobs[-1] = (*jobs[-1], write)
        else:
            jobs.append((write,))
    return jobs


def companions_of(beside: Place) -> dict[str, bytes]:
    """Tokenizer, generation config and licence of a folder, which go along with its weights."""
    files = beside.files()
    found = [file for file in files if file in COMPANIONS or is_legal(file)]
    out = {file: bytes(beside.read(file, 0, files[file])) for file in found}
    if (name := "tokenizer_config.json") in out:
        out[name] = _for_everyone(out[name])
    return out


def _for_everyone(tokenizer_config: bytes) -> bytes:
    """The same file, unless transformers 4 would not read it."""
    try:
        said = json.loads(tokenizer_config)
    except ValueError:
        return tokenizer_config
    if not isinstance(said, dict):
        return tokenizer_config
    written = hf_tokenizer.for_everyone(said)
    return tokenizer_config if written == said else _json(written)


def _with_dtype(config: dict[str, Any], dtypes: set[DType]) -> dict[str, Any]:
    """Loaders go by the type that config.json names, so where it names one, it is the weights'."""
    name = str(dtypes.pop()) if len(dtypes) == 1 else None
    return {**config, **{key: name for key in ("torch_dtype", "dtype") if name and key in config}}


def _shards(tensors: dict[str, Tensor], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        if shards[-1] and held + tensor.size > limit:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += tensor.size
    return shards


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
