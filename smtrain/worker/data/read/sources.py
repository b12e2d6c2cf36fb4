"""The files that a source names: a file, a folder, a glob, an s3:// URI or a data set of the Hugging Face hub."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from smtrain.core.config import textfiles
from smtrain.core.config.textfiles import ENDINGS, LeftOut
from smtrain.core.errors import DataError, first_line
from smtrain.core.facts import table
from smtrain.core.near import hint, near_path
from smtrain.core.protocol.uris import respelled
from smtrain.worker.data.read import remote
from smtrain.worker.data.read.hub import HUB, HubFile, HubName, commit_of, hub_files, opened
from smtrain.worker.data.read.hub_rows import hub_rows

Format = Literal[
    "auto", "jsonl", "parquet", "arrow", "text", "megatron", "json", "csv", "mediawiki", "wikiextractor", "warc", "tar"
]


@dataclass(frozen=True)
class SourceFile:
    """A file to read: `name` is its path relative to the input folder, which is how reports call it.

    `path` is of this machine or an s3:// URI; `stamp` changes when the file does. `encoding` is what its text is
    in where it is not UTF-8.
    """

    path: str
    name: str
    kind: str
    bytes: int
    stamp: str = ""
    encoding: str = ""

    def identity(self, *, elsewhere: bool) -> dict[str, Any]:
        """What tells whether it is the same file; `elsewhere` on another machine, which mounts it at another time."""
        known = ("name", "kind", "bytes") if elsewhere else ("path", "name", "kind", "bytes", "stamp")
        about = {key: getattr(self, key) for key in known}
        return {**about, "encoding": self.encoding} if self.encoding else about

    @property
    def compression(self) -> str | None:
        """Of the whole file, by its ending: gzip, bz2, xz, zstd, lz4 or None."""
        return textfiles.compression(self.name) if self.kind in textfiles.STREAMS else None

    def open(self) -> Any:
        """A seekable `pyarrow.NativeFile`; raises OSError."""
        import pyarrow as pa

        if "://" not in self.path:
            return pa.OSFile(self.path)
        if self.path.startswith(HUB):
            return opened(self.path)
        filesystem, path = remote.filesystem(self.path)
        return filesystem.open_input_file(path)


def find_files(
    source: Path | str, format: Format = "auto", exclude: Path | None = None, say: Callable[[str], None] | None = None,
    encoding: str | None = None, commits: Mapping[str, str] | None = None,
) -> list[SourceFile]:  # fmt: skip
    """The files of a source that `format` reads, sorted by name; none of those under `exclude`.

    `auto` goes by the ending. A named format reads its own endings in a folder or prefix, `text` every file; a file
    that is named itself is read as the format says whatever its ending. `encoding` is that of text that is not in
    UTF-8. `commits` are those at which data sets of the hub are read, by their hf:// paths. `say` hears what else is
    there and why it is not read. Raises DataError where nothing is found.
    """
    files = _find(source, format, exclude, say, commits or {})
    if not encoding:
        return files
    return [replace(file, encoding=encoding) if file.kind in textfiles.STREAMS else file for file in files]


def _find(
    source: Path | str, format: Format, exclude: Path | None, say: Callable[[str], None] | None,
    commits: Mapping[str, str],
) -> list[SourceFile]:  # fmt: skip
    if format != "auto" and format not in ENDINGS:
        formats = table("word_names")["values"]
        raise DataError(f"data.format is {format!r}; {hint(format, ('auto', *ENDINGS), formats)}.")
    say = say or (lambda sentence: None)
    text = str(source)
    if text.startswith(HUB):
        asked = HubName.of(text, commits.get(text))
        asked = replace(asked, commit=commit_of(asked))
        files = [_of_hub(file) for file in hub_files(asked, say) or ()]
        if files and all(file.kind for file in files):
            return files
        return [_local(path, name, "arrow") for path, name in hub_rows(asked, say)]
    if text.startswith("s3://"):
        objects = [SourceFile(path, name, "", size, stamp) for path, name, size, stamp in remote.listed(text)]
        dotted = {one.name for one in objects if any(part.startswith(".") for part in one.name.split("/"))}
        seen = [one for one in objects if one.name not in dotted]
        hidden = [LeftOut(name, "it is hidden") for name in sorted(dotted)]
        return _chosen(seen, hidden, format, source, say)
    inputs = Path(source)
    if inputs.is_file():
        return [_local(inputs, inputs.name, _kind_of_one(inputs, format))]
    if not inputs.is_dir():
        if not glob.has_magic(text):
            if told := respelled(text, ("s3://", HUB), data=True):
                raise DataError(f"{told}.")
            raise DataError(
                f"{inputs} does not exist; {near_path(inputs)}give a file, a folder, a glob or an s3:// URI of text."
            )
        paths = sorted(Path(p) for p in glob.glob(text, recursive=True) if Path(p).is_file())
        base = Path(os.path.commonpath([p.parent for p in paths])) if paths else inputs
        return _chosen([_local(p, p.relative_to(base).as_posix(), "") for p in paths], [], format, source, say)
    # an output folder inside the input must not become input of the next run
    inside = exclude is not None and exclude.resolve().is_relative_to(inputs.resolve())
    skip = inputs / exclude.resolve().relative_to(inputs.resolve()) if exclude and inside else None
    paths, others = textfiles.folder_files(inputs, skip)
    found = [_local(path, path.relative_to(inputs).as_posix(), "") for path in paths]
    return _chosen(found, others, format, source, say)


def _chosen(
    files: list[SourceFile], others: list[LeftOut], format: Format, source: Path | str, say: Callable[[str], None]
) -> list[SourceFile]:
    by_name = {file.name: file for file in files}
    choice = textfiles.choose(((f.name, f.bytes) for f in files), format, lambda name: by_name[name].open(), others)
    for sentence in choice.sentences():
        say(f"{source}: {sentence}")
    if not choice.read:
        endings = [s for k, v in ENDINGS.items() if format in ("auto", k) for s in v]
        of = f"that ends in {', '.join(endings)}" if endings else f"that is of the format {format}"
        also = "".join(f"; {sentence}" for sentence in choice.sentences()[:3])
        raise DataError(
            f"{source} holds no file {of} and can be read{also}; "
            "point to one that does, or set data.format to text to read every file as one document."
        )
    return [replace(by_name[name], kind=kind) for name, kind in choice.read]


def _kind_of_one(path: Path, format: Format) -> str:
    name = path.name
    kind = format if format != "auto" else textfiles.kind_of(name, lambda _: path.open("rb"))
    if kind is None:
        raise DataError(
            f"{name} has an ending that says nothing about its format; set data.format to "
            f"{', '.join(list(ENDINGS)[:-1])} or text."
        )
    return kind


def _of_hub(file: HubFile) -> SourceFile:
    kind = textfiles.kind_of(file.name, lambda _: opened(file.path))
    return SourceFile(file.path, file.name, kind or "", file.bytes, file.path)


def _local(path: Path, name: str, kind: str) -> SourceFile:
    about = path.stat()
    return SourceFile(str(path), name, kind, about.st_size, str(about.st_mtime_ns))


def unreadable(file: SourceFile, error: BaseException, kind: str = "") -> DataError:
    """What to raise where reading a file fails; `kind` is what it was read as, with "as" before and a space after."""
    if "://" in file.path and remote.of_s3(error):
        return DataError(f"{file.path} cannot be read: {remote.said(error)}.")
    if file.compression:
        return DataError(f"{file.path} is not a whole {file.compression} file ({first_line(error)}); write it again.")
    return DataError(f"{file.path} cannot be read {kind}({first_line(error)}); write it again.")
