"""Choose which files of a source are read as text, and give the reason for each other file.

Pure Python, as both the client and the job report this: otherwise a file could be lost unseen.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import itertools
import lzma
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from smtrain.core.errors import DataError
from smtrain.core.files import parse_json

ENDINGS: dict[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "megatron": (".idx",),
    "text": (".txt",),
    "json": (),  # one array; its first bytes distinguish it from lines
    "csv": (".csv", ".tsv"),
    "mediawiki": (".xml",),
    "wikiextractor": (),  # wiki_00, wiki_01...
    "warc": (".warc", ".wet"),
    "tar": (".tar",),
}
COMPRESSIONS = {
    ".gz": "gzip",
    ".bz2": "bz2",
    ".xz": "xz",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".lz4": "lz4",
}
"""Compressions of a whole file, for the kinds in STREAMS."""
STREAMS = ("jsonl", "text", "json", "csv", "mediawiki", "wikiextractor", "warc", "tar")
"""Kinds that are read from beginning to end, so that they may be compressed."""
_WIKI_FILE = re.compile(r"wiki_\d+")
_DESCRIPTIONS = ("dataset_info.json", "dataset_dict.json", "state.json")
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev)-\d{5}-of-\d{5}\b.*")
_HEAD = 1 << 16
DEEPEST = 100
"""Most nested folders below a source.

More are made by mistake, such as a folder copied into itself.
"""
_OF_SYSTEM = ("/", "/dev", "/proc", "/sys")
_TOO_DEEP = (
    f"it lies below {DEEPEST} folders, and deeper ones are not read; name a folder nearer to it"
)
_MASK = re.compile(r"(.+)_mask((?:-\d{5,})?\.idx)")
_HELD_OUT = re.compile(r"(.+)_validation((?:-\d{5,})?\.idx)")
_VALIDATION = re.compile(r"validation(-\d{5,})?\.idx")


@dataclass(frozen=True)
class LeftOut:
    """A skipped file, with its name in the source."""

    name: str
    reason: str


@dataclass
class TextFiles:
    """The files to read, in order, each with its kind (a key of ENDINGS), and the files that are
    left out.
    """

    read: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def sentences(self) -> list[str]:
        """The files that are left out: one sentence per reason."""
        by_reason: dict[str, list[str]] = {}
        for file in self.left_out:
            by_reason.setdefault(file.reason, []).append(file.name)
        return [
            f"{_format_names(names)} {'is' if len(names) == 1 else 'are'} left out: {reason}"
            for reason, names in by_reason.items()
        ]


def _format_names(names: Sequence[str]) -> str:
    suffix = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + suffix


def encoding_like(data: bytes) -> str:
    """Guess the encoding of bytes that are not UTF-8, by a name that iconv and Python know; empty
    if not text.
    """
    for mark, name in (
        (b"\xff\xfe\0\0", "UTF-32"),
        (b"\xff\xfe", "UTF-16"),
        (b"\xfe\xff", "UTF-16"),
    ):
        if data.startswith(mark):
            return name
    if b"\0" in data:
        even, odd = data[::2].count(0), data[1::2].count(0)
        half = len(data) // 2
        if max(even, odd) > half * 0.6 and min(even, odd) < half * 0.05:
            return "UTF-16LE" if odd > even else "UTF-16BE"
        return ""
    controls = sum(byte < 32 and byte not in b"\t\n\r\f\x1b" for byte in data)
    if controls > len(data) * 0.02:
        return ""
    return "cp1252" if any(0x80 <= byte < 0xA0 for byte in data) else "ISO-8859-1"


def encoding_remedy(data: bytes, file: object = "FILE") -> str:
    """End of a sentence about bytes that are not UTF-8: their probable encoding, and how to read or
    convert them.
    """
    name = encoding_like(data)
    if not name:
        return "it looks like no text at all, so leave this file out, or save it as text"
    return (
        f"it looks like {name}: set data.encoding to {name.lower()}, or convert it, "
        f"`iconv -f {name} -t UTF-8 {file} > NEW`"
    )


def compression(name: str) -> str | None:
    """gzip, bz2, xz, zstd, lz4 or None, by the file's ending."""
    return COMPRESSIONS.get(PurePosixPath(name.lower()).suffix)


def kind(name: str) -> str | None:
    """A key of ENDINGS, by the file's ending; None if it is unknown."""
    if _WIKI_FILE.fullmatch(PurePosixPath(_bare(name)).name):
        return "wikiextractor"
    kinds = STREAMS if compression(name) else tuple(ENDINGS)
    return next((kind for kind in kinds if _bare(name).endswith(ENDINGS[kind])), None)


def _bare(name: str) -> str:
    """The name in lower case, without the ending of a compression."""
    small = name.lower()
    return small.removesuffix(PurePosixPath(small).suffix) if compression(name) else small


def folder_fault(folder: Path) -> str:
    """The reason why no text is read below a folder, with the remedy; empty if nothing is wrong."""
    if str(folder.resolve()) in _OF_SYSTEM:
        return f"{folder} holds the files of the whole system; give the folder of the text"
    if not os.access(folder, os.R_OK | os.X_OK):
        return f"{folder} may not be read by this user; give this user the right to read it"
    return ""


def folder_files(folder: Path, skip: Path | None = None) -> tuple[list[Path], list[LeftOut]]:
    """All files below a folder that are not hidden, sorted, and what is left out; `skip` is not
    entered.

    Loops instead of recursing: before Python 3.12 `os.walk` fails at a thousand nested folders.
    """
    paths: list[Path] = []
    left_out: list[LeftOut] = []
    pending = [(folder, 0)]
    while pending:
        directory, depth = pending.pop()
        try:
            with os.scandir(directory) as scan:
                entries = [(entry.name, _is_folder(entry)) for entry in scan]
        except OSError as error:
            left_out.append(
                LeftOut(
                    f"{directory.relative_to(folder).as_posix()}/",
                    f"it cannot be opened ({error.strerror})",
                )
            )
            continue
        for name, is_folder in entries:
            path = directory / name
            reason = "it is hidden" if name.startswith(".") else _no_file(path, is_folder)
            if not reason and is_folder and depth == DEEPEST:
                reason = _TOO_DEEP
            if reason:
                left_out.append(
                    LeftOut(path.relative_to(folder).as_posix() + "/" * is_folder, reason)
                )
            elif not is_folder:
                paths.append(path)
            elif path != skip:
                pending.append((path, depth + 1))
    return sorted(paths), sorted(left_out, key=lambda file: file.name)


def matches(pattern: Path | str) -> list[Path]:
    """Files and folders that a pattern matches, sorted.

    Raises DataError if its folders are nested too deeply.
    """
    parts = Path(pattern).parts
    if "**" in parts:
        fixed_parts = itertools.takewhile(lambda part: not glob.has_magic(part), parts)
        if deep := next(
            (file.name for file in folder_files(Path(*fixed_parts))[1] if file.reason == _TOO_DEEP),
            None,
        ):
            raise DataError(
                f"{pattern}: a folder is too deep ({deep[:40]}...): {_TOO_DEEP}",
                code="data.not_found",
            )
    return sorted(Path(name) for name in glob.glob(str(pattern), recursive=True))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """True for a folder, and a link to one."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _no_file(path: Path, is_folder: bool) -> str:
    if is_folder:
        return (
            "it is a link to a folder, which is not followed; name that folder itself"
            if path.is_symlink()
            else ""
        )
    try:
        mode = path.stat().st_mode
    except OSError:
        return "it is a link to nothing" if path.is_symlink() else "it cannot be looked at"
    return "" if stat.S_ISREG(mode) else "it is no ordinary file"


def choose(
    files: Iterable[tuple[str, int]],
    form: str,
    open_file: Callable[[str], IO[bytes]],
    left_out: Iterable[LeftOut] = (),
) -> TextFiles:
    """Choose which of `files` (name, bytes) a source of format `form` reads.

    `open_file` opens one by its name, to read small descriptions and the first bytes of .json
    files.
    """
    text_files = TextFiles()
    sizes = dict(files)
    splits = _other_splits(sizes, open_file)
    dataset_files = _dataset_files(sizes, open_file)
    for name, size in sizes.items():
        file_kind = kind_of(name, open_file) if size else kind(name)
        path = PurePosixPath(name)
        if splits and (
            split := next(
                (splits[ancestor] for ancestor in (path, *path.parents) if ancestor in splits), ""
            )
        ):
            reason = split
        elif not size:
            reason = "it is empty"
        elif form == "text":
            reason, file_kind = "", "text"
        elif path.name in _DESCRIPTIONS:
            reason = "it describes a data set and holds no text"
        elif (
            path.suffix in (".bin", ".sums")
            and f"{path.with_suffix('')}.idx" in sizes
            and form in ("auto", "megatron")
        ):
            continue  # read with its .idx
        elif path.suffix == ".bin" and form in ("auto", "megatron"):
            reason = f"its index {path.with_suffix('.idx').name} is not next to it; copy that too"
        elif file_kind is None:
            ending = path.suffix or "a name without an ending"
            reason = (
                f"{ending} belongs to no format; set data.format: text to read every file as one"
                " document"
            )
        elif form not in ("auto", file_kind):
            reason = f"data.format is {form}"
        elif (
            file_kind == "arrow"
            and path.parent in dataset_files
            and path.name not in dataset_files[path.parent]
        ):
            reason = "it is not of the data set that the state.json next to it describes"
        elif file_kind == "megatron" and (companion := _companion(path, sizes)):
            reason = companion
        else:
            reason = (
                _no_lines(name, open_file)
                if _bare(name).endswith(".json") and file_kind == "jsonl"
                else ""
            )
            if (
                file_kind == "mediawiki"
                and form == "auto"
                and b"<mediawiki" not in _head(name, open_file)
            ):
                reason = "it is XML and no MediaWiki dump; give text of it"
        if reason:
            text_files.left_out.append(LeftOut(name, reason))
        else:
            text_files.read.append((name, str(file_kind)))
    text_files.left_out += left_out
    return text_files


def _companion(index: PurePosixPath, sizes: dict[str, int]) -> str:
    """The reason why an index in a folder is not text to train on: a mask of another pair, or held
    out of one.
    """
    if (match := _MASK.fullmatch(index.name)) and str(
        index.with_name(match[1] + match[2])
    ) in sizes:
        return (
            f"it marks the answers in {match[1]}{match[2]}, which are read as text; data.prepared"
            " keeps the marks"
        )
    match = _HELD_OUT.fullmatch(index.name)
    source = index.with_name(match[1] + match[2]) if match else None
    if _VALIDATION.fullmatch(index.name):  # of a prepared folder
        source = index.with_name("manifest.json")
    return "it is held out for validation; name the file to read it" if str(source) in sizes else ""


def choose_in(folder: Path, form: str) -> tuple[TextFiles, dict[str, int]]:
    """Choose the files of a local folder; also returns the bytes of each file."""
    paths, left_out = folder_files(folder)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    return choose(sizes.items(), form, lambda name: (folder / name).open("rb"), left_out), sizes


def _other_splits(
    sizes: dict[str, int], open_file: Callable[[str], IO[bytes]]
) -> dict[PurePosixPath, str]:
    """Folders and files of splits other than train, with the reason: those of a DatasetDict, and
    those with the hub's names (test-00000-of-00001.parquet next to train-...).
    """
    reasons: dict[PurePosixPath, str] = {}
    for name in sizes:
        path = PurePosixPath(name)
        if path.name == "dataset_dict.json":
            splits = _json(name, open_file).get("splits")
            names = [str(split) for split in splits] if isinstance(splits, list) else []
            if "train" in names:
                reason = "it is of another split than train; name its folder to read it"
                reasons |= {path.parent / split: reason for split in names if split != "train"}
    by_folder: dict[PurePosixPath, dict[PurePosixPath, str]] = {}
    for name in sizes:
        path = PurePosixPath(name)
        if match := _SPLIT.fullmatch(path.name):
            by_folder.setdefault(path.parent, {})[path] = match[1]
    for splits in by_folder.values():
        if "train" in splits.values():
            reason = "by its name it is of another split than train; name the file to read it"
            reasons |= {path: reason for path, split in splits.items() if split != "train"}
    return reasons


def _dataset_files(
    sizes: dict[str, int], open_file: Callable[[str], IO[bytes]]
) -> dict[PurePosixPath, set[str]]:
    """The data files of each folder that was saved by `datasets`."""
    splits = {}
    for name in sizes:
        path = PurePosixPath(name)
        if path.name == "state.json":
            files = _json(name, open_file).get("_data_files")
            if isinstance(files, list) and files:
                splits[path.parent] = {
                    str(row.get("filename")) for row in files if isinstance(row, dict)
                }
    return splits


def _json(name: str, open_file: Callable[[str], IO[bytes]]) -> dict[str, Any]:
    try:
        with open_file(name) as file:
            content = parse_json(file.read())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def kind_of(name: str, open_file: Callable[[str], IO[bytes]]) -> str | None:
    """A key of ENDINGS, by the file's ending, and for .json also by its first bytes."""
    file_kind = kind(name)
    if file_kind == "jsonl" and _bare(name).endswith(".json"):
        head = _head(name, open_file).removeprefix(b"\xef\xbb\xbf").lstrip()
        return "json" if head.startswith(b"[") else file_kind
    return file_kind


def _head(name: str, open_file: Callable[[str], IO[bytes]]) -> bytes:
    """The decompressed beginning of a file; empty if it cannot be decompressed."""
    openers: dict[str | None, Any] = {
        None: lambda raw: raw,
        "gzip": gzip.open,
        "bz2": bz2.open,
        "xz": lzma.open,
    }
    unpack = openers.get(compression(name))
    if unpack is None:
        return b""  # zstd and lz4 are not in the standard library
    try:
        with open_file(name) as raw:
            head: bytes = unpack(raw).read(_HEAD)
    except (OSError, EOFError, lzma.LZMAError, zlib.error):
        return b""
    return head


def _no_lines(name: str, open_file: Callable[[str], IO[bytes]]) -> str:
    """The reason why a .json file is not JSON lines; empty if it is, or if only reading can
    tell.
    """
    head = _head(name, open_file)
    if not head:
        return ""
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    line, end, remainder = head.partition(b"\n")
    if not end and len(head) >= _HEAD - 3:
        return ""  # a long line
    try:
        is_whole_object = isinstance(parse_json(line), dict)
    except ValueError:
        is_whole_object = False
    if is_whole_object and remainder.strip():
        return ""
    return "it is one JSON value; write a record a line, as .jsonl"
