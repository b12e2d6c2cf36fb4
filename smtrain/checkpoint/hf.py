"""Hugging Face folders: config.json and safetensors, one file or shards with an index, read and written lazily."""

from __future__ import annotations

import json
import re
import shutil
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from smtrain.checkpoint.sources import WeightSource
from smtrain.checkpoint.staging import whole_folder
from smtrain.errors import CheckpointError
from smtrain.model.families import FAMILIES, ModelShape

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_BLOCK = 64 << 20  # bytes written at a time
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}

# Buffers that older transformers saved and newer ones compute. A tied head is its embedding.
COMPUTED = re.compile(r"rotary_emb\.inv_freq$|\.attention\.(masked_)?bias$")
_COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.json", "chat_template.jinja"),
    *("generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*"),
)


def is_hf_folder(folder: Path) -> bool:
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of `config.json`; raises CheckpointError where there is none."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json; copy the model's into it.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); copy the model's again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object; copy the model's again.")
    return config


class HFSource:
    """A Hugging Face folder as a `WeightSource`.

    Raises CheckpointError where a file is missing, cut short or not safetensors, where the index points out of the
    folder, where a parameter of the model is missing or has another shape than config.json says, and where a tensor is
    none of the model's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder)
        self._config = read_config(self._folder)
        self._shape = ModelShape.from_config(self._config)
        self._files: dict[str, Any] = {}
        held = self._index()
        self._where: dict[str, tuple[str, str]] = {}
        for spec in self._shape.specs:
            stored = next((n for n in (spec.name, *self._shape.file_aliases(spec.name)) if n in held), None)
            if stored is None:
                raise CheckpointError(f"{self._folder} lacks the parameter {spec.name}; fetch the model again.")
            self._where[spec.name] = (held.pop(stored), stored)
            shape = tuple(self._slice(spec.name).get_shape())
            if shape != spec.shape:
                raise CheckpointError(
                    f"{self._folder}: {spec.name} has shape {list(shape)} where config.json asks for "
                    f"{list(spec.shape)}; the two are not of one model."
                )
        head = f"{FAMILIES[self._shape.family].head}.weight" if self._shape.tied else None
        for name in held:
            if name != head and not COMPUTED.search(name):
                raise CheckpointError(
                    f"{self._folder} holds {name}, which is no parameter of a {self._shape.family} model as its "
                    "config.json describes it; take the config.json of this model."
                )

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    def names(self) -> list[str]:
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        code = self._slice(name).get_dtype()
        if code not in _DTYPES:
            raise CheckpointError(f"{self._folder}: {name} has the type {code}; save the model in bf16 or fp32.")
        return _DTYPES[code]

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        stored = self._slice(name)
        window = tuple(slice(start, stop) if i == dim else slice(None) for i in range(len(stored.get_shape())))
        try:
            tensor: torch.Tensor = stored[window]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._folder}: {name} cannot be read ({error}); fetch the model again.") from None
        return tensor

    def _index(self) -> dict[str, str]:
        """Stored name -> file name, of everything in the folder."""
        if not (self._folder / INDEX).is_file():
            if not (self._folder / SINGLE).is_file():
                raise CheckpointError(
                    f"{self._folder} has neither {SINGLE} nor {INDEX}; save the model as safetensors."
                )
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        path = self._folder / INDEX
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            held = dict(weight_map)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is not an index ({error!r}); fetch the model again.") from error
        for name, file in held.items():
            if not isinstance(file, str) or Path(file).name != file or "\0" in file:
                raise CheckpointError(f"{path} points {name} to {file!r}, which is not a file of its own folder.")
        for file in sorted(set(held.values())):
            keys = set(self._open(file).keys())
            if missing := sorted(name for name, at in held.items() if at == file and name not in keys):
                raise CheckpointError(f"{self._folder / file} lacks {missing[0]}, which {INDEX} says it has.")
        return held

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self._folder / file
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; fetch the model again.")
            try:
                self._files[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is no whole safetensors file ({error}); fetch it again.") from None
        return self._files[file]

    def _slice(self, name: str) -> Any:
        if name not in self._where:
            raise CheckpointError(f"{self._folder} has no parameter {name}.")
        file, stored = self._where[name]
        return self._open(file).get_slice(stored)


def write_hf(
    source: WeightSource, target: Path, companions: Path | None = None, max_shard_size: int = 5_000_000_000
) -> None:
    """Write an ordinary Hugging Face folder, one tensor in memory at a time; it appears whole.

    Names and types are the source's. `companions` is a folder whose config.json, tokenizer, generation config and
    licence go along. More than `max_shard_size` bytes make shards and an index. Raises CheckpointError where the target
    is a file, or the companions are of another model.
    """
    shape = ModelShape.from_config(source.config)
    config = source.config if companions is None else read_config(companions)
    if ModelShape.from_config(config) != shape:
        raise CheckpointError(
            f"{companions}/config.json describes another model than the weights; give the folder training started from."
        )
    names = [spec.name for spec in shape.specs]
    shards = _shards(source, names, max_shard_size)
    with whole_folder(target, "config.json", replaces=(SINGLE, INDEX, "model-*-of-*.safetensors")) as folder:
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            _write_safetensors(folder / file, source, shard)
            weight_map |= dict.fromkeys(shard, file)
        if len(shards) > 1:
            total = sum(_bytes(source, name) for name in names)
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        if companions is not None:
            for path in (path for pattern in _COMPANIONS for path in companions.glob(pattern)):
                shutil.copyfile(path, folder / path.name)
        _write_json(folder / "config.json", _with_dtype(config, {source.dtype(name) for name in names}))


def _with_dtype(config: dict[str, Any], dtypes: set[torch.dtype]) -> dict[str, Any]:
    """Loaders go by the type that config.json names, so where it names one, it is the weights'."""
    name = str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None
    return {**config, **{key: name for key in ("torch_dtype", "dtype") if name and key in config}}


def _shards(source: WeightSource, names: list[str], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name in names:
        size = _bytes(source, name)
        if shards[-1] and held + size > limit:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def _bytes(source: WeightSource, name: str) -> int:
    return prod(source.shape(name)) * source.dtype(name).itemsize


def _write_safetensors(path: Path, source: WeightSource, names: list[str]) -> None:
    """The header first, then each tensor as it is read; safetensors' own writer wants all of them at once."""
    names = sorted(names, key=lambda name: (-source.dtype(name).itemsize, name))  # keeps every tensor aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        stop = at + _bytes(source, name)
        dtype, shape = _CODES[source.dtype(name)], list(source.shape(name))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            data = source.read(name).contiguous().view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), _BLOCK):
                file.write(data[start : start + _BLOCK])


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
