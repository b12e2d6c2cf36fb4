"""Documents out of files: JSON lines (also gzipped), Parquet, plain text.

A file is cut into blocks of a few MiB, each small enough to travel to a worker process, and a block yields documents
and faults. Where the cuts fall depends on the file alone, so what comes out is the same whatever the number of workers.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from smtrain.errors import DataError

Format = Literal["auto", "jsonl", "parquet", "text"]

BLOCK_BYTES = 2 << 20
_SUFFIXES: dict[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".jsonl.gz"),
    "parquet": (".parquet",),
    "text": (".txt",),
}
_PARQUET_ROWS = 256


@dataclass(frozen=True)
class SourceFile:
    """A file to read: `name` is its path relative to the input folder, which is how reports call it."""

    path: Path
    name: str
    kind: str
    bytes: int


@dataclass(frozen=True)
class Block:
    """A piece of one file (or several whole text files), cut between documents.

    `size` is the share of the files' bytes on the disk, for progress. Uncompressed lines and texts are read by whoever
    opens the block; what has to be decoded in order (gzip, Parquet) is carried in `payload`.
    """

    file: SourceFile
    size: int
    start: int = 0
    stop: int = 0
    payload: Any = None


@dataclass(frozen=True)
class BadLine:
    """A line, row or text file that is no document. `line` counts from 1 (within its block until placed)."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


@dataclass
class Documents:
    """What a block holds: texts in order, faults, and the number of lines, for placing the faults of later blocks."""

    texts: list[str] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)
    lines: int = 0


def find_files(inputs: Path, format: Format = "auto", exclude: Path | None = None) -> list[SourceFile]:
    """The files under `inputs` (a file or a folder) that `format` reads, sorted by name; hidden ones are left out.

    `auto` goes by the ending. A named format reads its own endings in a folder, `text` every file; a single file is
    read as the format says whatever its ending. Raises DataError where nothing is found.
    """
    if format != "auto" and format not in _SUFFIXES:
        raise DataError(f"data.format is {format!r}; it is one of auto, {', '.join(_SUFFIXES)}.")
    if inputs.is_file():
        kind = format if format != "auto" else _kind(inputs.name)
        if kind is None:
            raise DataError(
                f"{inputs} has an ending that says nothing about its format; set data.format to jsonl, parquet or text."
            )
        return [SourceFile(inputs, inputs.name, kind, inputs.stat().st_size)]
    if not inputs.is_dir():
        raise DataError(f"{inputs} does not exist; give a file or a folder of text.")
    # an output folder inside the input must not become input of the next run
    inside = exclude is not None and exclude.resolve().is_relative_to(inputs.resolve())
    skip = exclude.resolve().relative_to(inputs.resolve()) if exclude and inside else None
    found = []
    for path in sorted(p for p in inputs.rglob("*") if p.is_file()):
        relative = path.relative_to(inputs)
        if any(part.startswith(".") for part in relative.parts) or skip in relative.parents:
            continue
        kind = "text" if format == "text" else _kind(path.name)
        if kind is not None and format in ("auto", kind):
            found.append(SourceFile(path, relative.as_posix(), kind, path.stat().st_size))
    if not found:
        endings = [s for k, v in _SUFFIXES.items() if format in ("auto", k) for s in v]
        raise DataError(
            f"{inputs} holds no file that ends in {', '.join(endings)}; "
            "point to one that does, or set data.format to text to read every file as one document."
        )
    return found


def _kind(name: str) -> str | None:
    return next((kind for kind, ends in _SUFFIXES.items() if name.endswith(ends)), None)


def blocks(file: SourceFile, text_column: str = "text") -> Iterator[Block]:
    """The file in pieces of about BLOCK_BYTES."""
    if file.kind == "text":
        yield Block(file, file.bytes)
    elif file.kind == "parquet":
        yield from _parquet_blocks(file, text_column)
    elif file.name.endswith(".gz"):
        yield from _gzip_blocks(file)
    else:
        with file.path.open("rb") as handle:
            start = 0
            while start < file.bytes:
                handle.seek(min(start + BLOCK_BYTES, file.bytes))
                handle.readline()
                stop = min(handle.tell(), file.bytes)
                yield Block(file, stop - start, start, stop)
                start = stop


def _gzip_blocks(file: SourceFile) -> Iterator[Block]:
    with file.path.open("rb") as raw, gzip.open(raw) as handle:
        start = read = 0
        while True:
            try:
                payload = handle.read(BLOCK_BYTES) + handle.readline()
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"{file.path} is not a whole gzip file ({error}); write it again.") from error
            if not payload:
                return
            at = raw.tell()
            yield Block(file, at - read, start, start + len(payload), payload)
            start, read = start + len(payload), at


def _parquet_blocks(file: SourceFile, text_column: str) -> Iterator[Block]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file.path)
        if text_column not in table.schema_arrow.names:
            raise DataError(
                f"{file.path} has no column {text_column!r} but {', '.join(table.schema_arrow.names)}; "
                "set data.text_column to one of them."
            )
        rows = table.metadata.num_rows
        for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=[text_column]):
            yield Block(file, file.bytes * len(batch) // max(rows, 1), payload=_cells(batch.column(0)))
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file.path} cannot be read as Parquet ({_first_line(error)}); write it again.") from error


def _cells(column: Any) -> list[Any]:
    # Python values, because pickling a slice of an Arrow array would carry the whole row group to the worker
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_cell(cell) for cell in column]


def _cell(cell: Any) -> Any:
    try:
        return cell.as_py()
    except UnicodeDecodeError:
        return cell.as_buffer().to_pybytes()


def read_block(block: Block, text_column: str = "text") -> Documents:
    """The documents of a block; raises DataError where a file cannot be read at all."""
    try:
        if block.file.kind == "parquet":
            return _read_rows(block)
        if block.file.kind == "text":
            return _read_text(block)
        data = block.payload
        if data is None:
            with block.file.path.open("rb") as handle:
                handle.seek(block.start)
                data = handle.read(block.stop - block.start)
    except OSError as error:
        raise DataError(f"{block.file.path} cannot be read: {error.strerror or error}.") from error
    return _read_lines(block, data, text_column)


def _read_lines(block: Block, data: bytes, text_column: str) -> Documents:
    found = Documents()
    lines = data.removesuffix(b"\n").split(b"\n")
    if block.start == 0:
        lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
    for found.lines, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        try:
            row = json.loads(raw.decode())
        except UnicodeDecodeError as error:
            fault = f"not UTF-8 at byte {error.start + 1} of the line"
        except (ValueError, RecursionError) as error:
            fault = f"not JSON ({_first_line(error)})"
        else:
            if not isinstance(row, dict):
                fault = f"a JSON {type(row).__name__}, not an object"
            elif text_column not in row:
                fault = f"no column {text_column!r}, only {', '.join(map(repr, row)) or 'nothing'}"
            else:
                fault = _add(found, row[text_column], text_column)
        if fault:
            found.bad.append(BadLine(block.file.name, found.lines, fault))
    return found


def _read_rows(block: Block) -> Documents:
    found = Documents()
    for found.lines, cell in enumerate(block.payload, start=1):
        fault = "bytes that are not UTF-8" if isinstance(cell, bytes) else _add(found, cell, "the text column")
        if fault:
            found.bad.append(BadLine(block.file.name, found.lines, fault))
    return found


def _read_text(block: Block) -> Documents:
    found = Documents(lines=1)
    try:
        found.texts.append(block.file.path.read_bytes().decode())
    except UnicodeDecodeError as error:
        found.bad.append(BadLine(block.file.name, error.object.count(b"\n", 0, error.start) + 1, "not UTF-8"))
    return found


def _add(found: Documents, text: object, column: str) -> str:
    """Take a document, or say what is wrong with it."""
    if not isinstance(text, str):
        return f"{column!r} is {'null' if text is None else type(text).__name__}, not a string"
    try:
        text.encode()  # JSON may spell half a surrogate pair, which no tokenizer takes
    except UnicodeEncodeError:
        return "half a surrogate pair, which is not text"
    found.texts.append(text)
    return ""


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
