"""The files that a source names: a file, a folder, a glob, an s3:// URI or a data set of the Hugging Face hub."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from smtrain.errors import DataError, first_line

Format = Literal["auto", "jsonl", "parquet", "arrow", "text", "megatron"]

HUB = "hf://"
_SUFFIXES: dict[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.zstd"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "megatron": (".idx",),
    "text": (".txt", ".txt.gz", ".txt.zst", ".txt.zstd"),
}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


@dataclass(frozen=True)
class SourceFile:
    """A file to read: `name` is its path relative to the input folder, which is how reports call it.

    `path` is of this machine or an s3:// URI; `stamp` changes when the file does.
    """

    path: str
    name: str
    kind: str
    bytes: int
    stamp: str = ""

    @property
    def compression(self) -> str | None:
        """Of the whole file, by its ending: gzip, zstd or None."""
        return next((c for end, c in _COMPRESSIONS.items() if self.name.endswith(end)), None)

    def open(self) -> Any:
        """A seekable `pyarrow.NativeFile`; raises OSError."""
        import pyarrow as pa

        if "://" not in self.path:
            return pa.OSFile(self.path)
        filesystem, path = _remote(self.path)
        return filesystem.open_input_file(path)


def find_files(source: Path | str, format: Format = "auto", exclude: Path | None = None) -> list[SourceFile]:
    """The files of a source that `format` reads, sorted by name; hidden ones and those under `exclude` are left out.

    `auto` goes by the ending. A named format reads its own endings in a folder or prefix, `text` every file; a file
    that is named itself is read as the format says whatever its ending. Raises DataError where nothing is found.
    """
    if format != "auto" and format not in _SUFFIXES:
        raise DataError(f"data.format is {format!r}; it is one of auto, {', '.join(_SUFFIXES)}.")
    text = str(source)
    if text.startswith(HUB):
        return _hub_files(text)
    if text.startswith("s3://"):
        return _chosen(_listed(text), format, source)
    inputs = Path(source)
    if inputs.is_file():
        return [_local(inputs, inputs.name, _kind_of_one(inputs.name, format))]
    if not inputs.is_dir():
        if not glob.has_magic(text):
            raise DataError(f"{inputs} does not exist; give a file, a folder, a glob or an s3:// URI of text.")
        paths = sorted(Path(p) for p in glob.glob(text, recursive=True) if Path(p).is_file())
        base = Path(os.path.commonpath([p.parent for p in paths])) if paths else inputs
        return _chosen([_local(p, p.relative_to(base).as_posix(), "") for p in paths], format, source)
    # an output folder inside the input must not become input of the next run
    inside = exclude is not None and exclude.resolve().is_relative_to(inputs.resolve())
    skip = exclude.resolve().relative_to(inputs.resolve()) if exclude and inside else None
    found = []
    for path in sorted(p for p in inputs.rglob("*") if p.is_file()):
        relative = path.relative_to(inputs)
        if not any(part.startswith(".") for part in relative.parts) and skip not in relative.parents:
            found.append(_local(path, relative.as_posix(), ""))
    return _chosen(found, format, source)


def _chosen(files: list[SourceFile], format: Format, source: Path | str) -> list[SourceFile]:
    found = []
    for file in files:
        kind = "text" if format == "text" else _kind(file.name)
        if kind is not None and format in ("auto", kind):
            found.append(SourceFile(file.path, file.name, kind, file.bytes, file.stamp))
    if not found:
        endings = [s for k, v in _SUFFIXES.items() if format in ("auto", k) for s in v]
        raise DataError(
            f"{source} holds no file that ends in {', '.join(endings)}; "
            "point to one that does, or set data.format to text to read every file as one document."
        )
    return found


def _kind(name: str) -> str | None:
    return next((kind for kind, ends in _SUFFIXES.items() if name.endswith(ends)), None)


def _kind_of_one(name: str, format: Format) -> str:
    kind = format if format != "auto" else _kind(name)
    if kind is None:
        raise DataError(
            f"{name} has an ending that says nothing about its format; set data.format to "
            f"{', '.join(list(_SUFFIXES)[:-1])} or text."
        )
    return kind


def _local(path: Path, name: str, kind: str) -> SourceFile:
    about = path.stat()
    return SourceFile(str(path), name, kind, about.st_size, str(about.st_mtime_ns))


def _remote(uri: str) -> tuple[Any, str]:
    """pyarrow's client of an object store, and the path in it; AWS_ENDPOINT_URL and the usual credentials hold."""
    import pyarrow as pa
    from pyarrow import fs

    try:
        found: tuple[Any, str] = fs.FileSystem.from_uri(uri)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{uri} cannot be opened ({first_line(error)}); see to the URI and the access.") from None
    return found


def _listed(uri: str) -> list[SourceFile]:
    """The objects of a prefix, or those that a pattern of *, ** and ? means."""
    from pyarrow import fs

    wild = re.search(r"[^/]*[*?]", uri)  # from the first level that is no name
    filesystem, path = _remote(uri[: wild.start()].rstrip("/") if wild else uri)
    scheme = uri.partition("://")[0]
    wanted = _pattern(uri[wild.start() :]) if wild else None
    try:
        about = filesystem.get_file_info(path)
        if about.type == fs.FileType.File:
            found, base = [about], path.rpartition("/")[0]
        else:
            found, base = filesystem.get_file_info(fs.FileSelector(path, recursive=True)), path.rstrip("/")
    except OSError as error:
        raise DataError(f"{uri} cannot be listed ({first_line(error)}); see to the URI and the access.") from None
    files = [
        SourceFile(f"{scheme}://{f.path}", f.path[len(base) + 1 :], "", f.size, str(f.mtime_ns))
        for f in sorted(found, key=lambda f: f.path)
        if f.type == fs.FileType.File
    ]
    seen = [f for f in files if not any(part.startswith(".") for part in f.name.split("/"))]
    return [f for f in seen if wanted is None or wanted.fullmatch(f.name)]


def _pattern(text: str) -> re.Pattern[str]:
    """`glob`'s *, ** and ? for names that are no paths of this machine."""
    kinds = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(kinds.get(t) or re.escape(t) for t in re.split(r"(\*\*/|\*\*|\*|\?)", text)))


def _hub_files(uri: str) -> list[SourceFile]:
    """hf://NAME[:CONFIG][/SPLIT is written @SPLIT]: what `datasets` downloads, as the Arrow files of its cache."""
    name, _, split = uri.removeprefix(HUB).partition("@")
    name, _, config = name.partition(":")
    try:
        import datasets
    except ImportError:
        raise DataError(f"{uri} needs the package datasets; pip install datasets, or give files.") from None
    try:
        found: Any = datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # its own, huggingface_hub's and the network's have no common class
        raise DataError(
            f"{uri} cannot be loaded ({first_line(error)}); see that the hub can be reached, or give files."
        ) from None
    paths = [Path(file["filename"]) for file in found.cache_files]
    return [_local(path, f"{name}/{path.name}", "arrow") for path in paths]
