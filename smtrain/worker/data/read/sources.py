"""The files that a source names: a file, a folder, a glob, an s3:// URI or a data set of the
Hugging Face hub.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from smtrain.core.config import textfiles
from smtrain.core.config.compressed import HEAD, compressed_fault
from smtrain.core.config.textfiles import ENDINGS, LeftOut
from smtrain.core.errors import DataError, SmtrainError, first_line, read_remedy
from smtrain.core.facts import table
from smtrain.core.protocol.s3_probe import s3_outage
from smtrain.core.protocol.uris import spelling_fault
from smtrain.core.suggest import hint, missing_fault
from smtrain.worker.data.read.hub import HUB, HubName, commit_of, hub_files, hub_rows, open_hub_file
from smtrain.worker.object_store import (
    StorageError,
    explain,
    is_final,
    is_of_machine,
    is_of_store,
    is_remote,
    may_pass,
    open_file,
    retry,
    unreadable_error,
)

Format = Literal[
    "auto",
    "jsonl",
    "parquet",
    "arrow",
    "text",
    "megatron",
    "json",
    "csv",
    "mediawiki",
    "wikiextractor",
    "warc",
    "tar",
]


@dataclass(frozen=True)
class SourceFile:
    """A file to read: `name` is its path relative to the input folder, as reports show it.

    `path` is on this machine, or an s3:// or hf:// URI; `stamp` changes when the file does.
    `encoding` is "" for UTF-8. `number` counts the files of a preparation.
    """

    path: str
    name: str
    kind: str
    bytes: int
    stamp: str = ""
    encoding: str = ""
    number: int = 0

    def identity(self, *, portable: bool) -> dict[str, Any]:
        """The fields that identify the file; `portable` for another machine, which has other paths
        and times.
        """
        is_remote = "://" in self.path  # the same on every machine
        identity_fields = (
            ("name", "kind", "bytes")
            if portable and not is_remote
            else ("path", "name", "kind", "bytes", "stamp")
        )
        identity = {key: getattr(self, key) for key in identity_fields}
        return {**identity, "encoding": self.encoding} if self.encoding else identity

    @property
    def compression(self) -> str | None:
        """Compression of the whole file by its ending: gzip, bz2, xz, zstd, lz4 or None."""
        return textfiles.compression(self.name) if self.kind in textfiles.STREAMS else None

    def open(self) -> Any:
        """A seekable file that pyarrow's readers take. Raises OSError or StorageError."""
        import pyarrow as pa
        from pyarrow import fs

        if "://" not in self.path:
            is_here = not is_remote(Path(self.path))
            return (
                pa.OSFile(self.path)
                if is_here
                else open_file(fs.LocalFileSystem(), self.path, self.path)
            )
        if self.path.startswith(HUB):
            return open_hub_file(self.path)
        return open_file(*_filesystem(self.path), self.path)


def find_files(
    source: Path | str,
    format: Format = "auto",
    exclude: Path | None = None,
    say: Callable[[str], None] | None = None,
    encoding: str | None = None,
    commits: Mapping[str, str] | None = None,
    file_list: list[SourceFile] | None = None,
) -> list[SourceFile]:
    """The files of a source that `format` reads, sorted by name, without those under `exclude`.

    `auto` decides by the ending. In a folder or prefix a format reads its own endings, `text` every
    file; a file named directly is read in the given format, whatever its ending. `commits` maps
    hf:// paths to the commits to read. `say` receives which files are not read, and why.
    `file_list` are the objects of an s3:// source, if the caller has listed them. Raises DataError
    if there is nothing to read.
    """
    files = _find(source, format, exclude, say, commits or {}, file_list)
    if not encoding:
        return files
    return [
        replace(file, encoding=encoding) if file.kind in textfiles.STREAMS else file
        for file in files
    ]


def _find(
    source: Path | str,
    format: Format,
    exclude: Path | None,
    say: Callable[[str], None] | None,
    commits: Mapping[str, str],
    file_list: list[SourceFile] | None,
) -> list[SourceFile]:
    if format != "auto" and format not in ENDINGS:
        formats = table("word_names")["values"]
        raise DataError(f"data.format is {format!r}; {hint(format, ('auto', *ENDINGS), formats)}.")
    say = say or (lambda sentence: None)
    text = str(source)
    if text.startswith(HUB):
        dataset = HubName.of(text, commits.get(text))
        dataset = replace(dataset, commit=commit_of(dataset))
        files = [_of_hub(*file) for file in hub_files(dataset, say) or ()]
        if files and all(file.kind for file in files):
            return files
        return [_local(path, name, "arrow") for path, name in hub_rows(dataset, say)]
    if text.startswith("s3://"):
        objects = _s3_objects(text) if file_list is None else file_list
        hidden_names = {
            s3_object.name
            for s3_object in objects
            if any(part.startswith(".") for part in s3_object.name.split("/"))
        }
        visible_objects = [s3_object for s3_object in objects if s3_object.name not in hidden_names]
        left_out_objects = [LeftOut(name, "it is hidden") for name in sorted(hidden_names)]
        return _choose_files(visible_objects, left_out_objects, format, source, say)
    inputs = Path(source)
    if inputs.is_file():
        return [_local(inputs, inputs.name, _kind_of_one(inputs, format))]
    if not inputs.is_dir():
        if not glob.has_magic(text):
            if correction := spelling_fault(text, ("s3://", HUB), data=True):
                raise DataError(f"{correction}.")
            raise DataError(
                f"{inputs} {missing_fault(inputs)}give a file, a folder, a glob or an"
                " s3:// URI of text.",
                code="data.not_found",
            )
        paths = [path for path in textfiles.matches(text) if path.is_file()]
        base = Path(os.path.commonpath([p.parent for p in paths])) if paths else inputs
        return _choose_files(
            [_local(p, p.relative_to(base).as_posix(), "") for p in paths], [], format, source, say
        )
    if fault := textfiles.folder_fault(inputs):
        raise DataError(f"{fault}.", code="data.not_found")
    # an output folder inside the input must not become input of the next run
    is_inside = exclude is not None and exclude.resolve().is_relative_to(inputs.resolve())
    skip = (
        inputs / exclude.resolve().relative_to(inputs.resolve()) if exclude and is_inside else None
    )
    paths, left_out_files = textfiles.folder_files(inputs, skip)
    files = [_local(path, path.relative_to(inputs).as_posix(), "") for path in paths]
    return _choose_files(files, left_out_files, format, source, say)


def _choose_files(
    files: list[SourceFile],
    left_out_files: list[LeftOut],
    format: Format,
    source: Path | str,
    say: Callable[[str], None],
) -> list[SourceFile]:
    by_name = {file.name: file for file in files}
    choice = textfiles.choose(
        ((f.name, f.bytes) for f in files),
        format,
        lambda name: by_name[name].open(),
        left_out_files,
    )
    for sentence in choice.sentences():
        say(f"{source}: {sentence}")
    if not choice.read:
        endings = [s for k, v in ENDINGS.items() if format in ("auto", k) for s in v]
        of = f"that ends in {', '.join(endings)}" if endings else f"of the format {format}"
        reasons = "".join(f"; {sentence}" for sentence in choice.sentences()[:3])
        raise DataError(
            f"{source} holds no file {of} and can be read{reasons}; "
            "point to one that does, or set data.format to text to read every file as one"
            " document.",
            code="data.not_found",
        )
    return [replace(by_name[name], kind=kind) for name, kind in choice.read]


def _kind_of_one(path: Path, format: Format) -> str:
    name = path.name
    kind = format if format != "auto" else textfiles.kind_of(name, lambda _: path.open("rb"))
    if kind is None:
        with path.open("rb") as file:
            head = file.read(1 << 12)
        if b"\0" in head and not textfiles.encoding_like(head):
            raise DataError(f"{name} is not text; {textfiles.encoding_remedy(head, name)}.")
        raise DataError(
            f"{name} has an ending that says nothing about its format; set data.format to "
            f"{', '.join(kind for kind in ENDINGS if kind != 'text')} or text."
        )
    return kind


def _of_hub(path: str, name: str, size: int) -> SourceFile:
    return SourceFile(
        path, name, textfiles.kind_of(name, lambda _: open_hub_file(path)) or "", size, path
    )


def _local(path: Path, name: str, kind: str) -> SourceFile:
    file_stat = path.stat()
    return SourceFile(str(path), name, kind, file_stat.st_size, str(file_stat.st_mtime_ns))


def unreadable(file: SourceFile, error: BaseException, kind: str = "") -> SmtrainError:
    """The error for a file that cannot be read; `kind` is empty or the format, such as "as Parquet
    ".
    """
    if isinstance(error, OSError) and (is_of_store(error) or is_of_machine(error)):
        return unreadable_error(file.path, error, "")
    return DataError(f"{file.path} {_unreadable_fault(file, error, kind)}.")


def _unreadable_fault(file: SourceFile, error: BaseException, kind: str) -> str:
    """The fault of a file that its disk or store could give, with the remedy of its cause."""
    remedy = "copy the original again, or write it again"
    if not file.compression or isinstance(error, (PermissionError, FileNotFoundError)):
        return f"cannot be read {kind}({first_line(error)}); {read_remedy(error, remedy)}"
    head = b""
    with suppress(OSError, StorageError), file.open() as raw:
        head = raw.read(HEAD)
    damage = f"is not a whole {file.compression} file ({first_line(error)}); {remedy}"
    return compressed_fault(file.name, head) or damage


# S3, through pyarrow


def _filesystem(uri: str) -> tuple[Any, str]:
    """pyarrow's client of an object store, and the path in it; it uses AWS_ENDPOINT_URL and the
    usual credentials.
    """
    import pyarrow as pa
    from pyarrow import fs

    try:
        client: tuple[Any, str] = retry(
            lambda: fs.FileSystem.from_uri(uri)
        )  # asks for the bucket's region
    except (OSError, ValueError, pa.ArrowException) as error:
        error_class = StorageError if may_pass(error) is not None else DataError
        raise error_class(f"{uri} cannot be read: {explain(error)}.") from None
    return client


def _s3_objects(uri: str) -> list[SourceFile]:
    """List the objects of a prefix, or those that match a pattern of *, ** and ?, sorted by path.

    Raises DataError if S3 refuses, StorageError if it fails; soon also if it does not answer at
    all, as the client itself would keep trying.
    """
    from pyarrow import fs

    if reason := s3_outage(uri):
        raise StorageError(f"{uri} cannot be listed: {reason}.")
    wild = re.search(r"[^/]*[*?]", uri)  # from the first level with a wildcard
    client, path = _filesystem(uri[: wild.start()].rstrip("/") if wild else uri)
    scheme = uri.partition("://")[0]
    is_match: Callable[[str], Any] = (
        _pattern(uri[wild.start() :]).fullmatch if wild else lambda name: True
    )
    try:
        path_info = retry(lambda: client.get_file_info(path))
        if path_info.type == fs.FileType.File:
            objects, base = [path_info], path.rpartition("/")[0]
        else:
            selector = fs.FileSelector(path, recursive=True)
            objects, base = retry(lambda: client.get_file_info(selector)), path.rstrip("/")
    except OSError as error:
        error_class = DataError if is_final(error) else StorageError
        raise error_class(f"{uri} cannot be listed: {explain(error)}.") from None
    return [
        SourceFile(f"{scheme}://{entry.path}", name, "", entry.size, str(entry.mtime_ns))
        for entry in sorted(objects, key=lambda entry: entry.path)
        if entry.type == fs.FileType.File and is_match(name := entry.path[len(base) + 1 :])
    ]


def _pattern(text: str) -> re.Pattern[str]:
    """`glob`'s *, ** and ? as a regular expression, for names that are not on this machine."""
    kinds = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile(
        "".join(kinds.get(t) or re.escape(t) for t in re.split(r"(\*\*/|\*\*|\*|\?)", text))
    )
