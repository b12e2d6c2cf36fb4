"""The cut of a corpus into shards, its output files, and of each shard into shares, the units of
work.

Both cuts depend on the files and the sizes only, not on the machines:

- A shard is consecutive text of one source, of `PrepareOptions.shard_bytes` (a file that cannot be
  cut stays whole).
  Its tokens are one pair of files. A source of one shard is `PREFIX.bin/.idx`; the shards of a
  larger one are `PREFIX-00000.bin/.idx`, `PREFIX-00001`..., numbered within the source, and
  `shards` in its row of the manifest lists their names, documents and tokens in the order of the
  text. A shard without a document has no files and no row.
- What is held out of the sources is one pair `validation`, or, if a source has several shards,
  `validation-NNNNN` for
  each shard of the corpus, numbered over all sources.
- A share is a part of one shard of about `share_bytes`. Shares are numbered over the whole corpus.
  A work folder keeps
  the tokens of share 12 as `share-0000012.*`, and they are whole once `share-0000012.json` is
  there.

The tokens of the shards in their order are the tokens of the same corpus in one shard, byte for
byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from smtrain.worker.data.read import blocks
from smtrain.worker.data.read.blocks import Stretch
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.read.split_files import can_be_cut
from smtrain.worker.data.read.tables import row_groups

SHARD_BYTES = 8 * 10**9
SHARE_BYTES = 64 << 20
Span = tuple[int, "Stretch | None"]
"""The number of a file in the whole corpus, and a stretch of it or None for all of it."""


@dataclass(frozen=True)
class TextShard:
    """Consecutive text of source `part`, in bytes on the disk.

    `name` ends its files' names: "" or "-00003".
    """

    part: int
    name: str
    spans: tuple[Span, ...]
    bytes: int


@dataclass(frozen=True)
class Share:
    """Consecutive text of shard number `shard` of the corpus."""

    number: int
    shard: int
    part: int
    spans: tuple[Span, ...]
    bytes: int


def cut_shards(
    parts: Sequence[Sequence[SourceFile]], separator: str | None, size: int
) -> list[TextShard]:
    """Cut all sources, in order, into shards of about `size` bytes, at least one each.

    A compressed file, and one whose separators can only be found from its beginning, stays whole.
    Raises DataError for a Parquet file that cannot be read.
    """
    size = _whole_blocks(size)
    shards: list[TextShard] = []
    number = 0
    for part, files in enumerate(parts):
        spans = [(number + at, None) for at in range(len(files))]
        flat: dict[int, SourceFile] = {number + at: file for at, file in enumerate(files)}
        groups = list(_group_spans(spans, flat, separator, size)) or [((), 0)]
        names = [f"-{at:05}" for at in range(len(groups))] if len(groups) > 1 else [""]
        shards += [TextShard(part, name, *group) for name, group in zip(names, groups, strict=True)]
        number += len(files)
    return shards


def cut_shares(
    shards: Sequence[TextShard], files: Sequence[SourceFile], separator: str | None, size: int
) -> Iterator[Share]:
    """Cut shards into shares of about `size` bytes; `files` are those of all sources."""
    number = 0
    for at, shard in enumerate(shards):
        for spans, share_bytes in _group_spans(shard.spans, files, separator, _whole_blocks(size)):
            yield Share(number, at, shard.part, spans, share_bytes)
            number += 1


def _whole_blocks(size: int) -> int:
    return max(blocks.BLOCK_BYTES, size // blocks.BLOCK_BYTES * blocks.BLOCK_BYTES)


def _group_spans(
    spans: Sequence[Span],
    files: Sequence[SourceFile] | dict[int, SourceFile],
    separator: str | None,
    size: int,
) -> Iterator[tuple[tuple[Span, ...], int]]:
    """Cut spans into groups of about `size` bytes; each with its bytes."""
    group: list[Span] = []
    group_bytes = 0
    for number, span_stretch in spans:
        for stretch, count in _stretches(files[number], span_stretch, separator, size):
            if group and group_bytes + count > size:
                yield tuple(group), group_bytes
                group, group_bytes = [], 0
            group.append((number, stretch))
            group_bytes += count
    if group:
        yield tuple(group), group_bytes


def _stretches(
    file: SourceFile, span_stretch: Stretch | None, separator: str | None, size: int
) -> Iterator[tuple[Stretch | None, int]]:
    if file.kind == "parquet" and (span_stretch or file.bytes > size):
        groups = row_groups(file)
        row_groups_span = span_stretch or Stretch(0, len(groups))
        start, stretch_bytes = row_groups_span.start, 0
        for group in range(row_groups_span.start, row_groups_span.stop):
            stretch_bytes += groups[group]
            if stretch_bytes >= size or group == row_groups_span.stop - 1:
                yield Stretch(start, group + 1), stretch_bytes
                start, stretch_bytes = group + 1, 0
    elif span_stretch is None and (file.bytes <= size or not can_be_cut(file, separator)):
        yield None, file.bytes
    else:
        begin, end = (span_stretch.start, span_stretch.stop) if span_stretch else (0, file.bytes)
        for start in range(begin, end, size):
            stop = min(start + size, end)
            yield Stretch(start, stop), stop - start
