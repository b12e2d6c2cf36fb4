"""The files that a preparation appends to, with their counts; all of it can be marked and restored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from smtrain.worker.data.checksums import SUFFIX, Rolling, fingerprint, write_sums
from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.clean.dedup import Deduplicator
from smtrain.worker.data.clean.holdout import HELD, TEST, TRAIN, HoldOut
from smtrain.worker.data.clean.refiner import keep
from smtrain.worker.data.manifest import MASK, PREFIX, VALIDATION, VALIDATION_MASK
from smtrain.worker.data.pack.indexed import index_of_documents
from smtrain.worker.data.prepare.resumable import Appender
from smtrain.worker.data.prepare.shards import TextShard, held_out_names
from smtrain.worker.data.read.reading import BadLines
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.read.unread import UnreadText

if TYPE_CHECKING:
    from smtrain.worker.data.prepare.pieces import TextPiece
    from smtrain.worker.data.tokenize.samples import SamplePiece


class TallyPart:
    """The tokens of one pair of files: PREFIX.bin, and one length per document for the index."""

    def __init__(self, folder: Path, prefix: str, dtype: np.dtype) -> None:
        self.folder, self.prefix, self.dtype = folder, prefix, dtype
        self.documents = self.tokens = 0
        self._files: dict[str, Appender] = {}

    def begin(self) -> None:
        self._files = {end: Appender(self._path(end)) for end in (".bin", ".lengths")}

    def restore(self, mark: dict[str, Any]) -> bool:
        self.documents, self.tokens = mark["documents"], mark["tokens"]
        for end, size_and_hash in mark["files"].items():
            file = Appender.restored(self._path(end), size_and_hash)
            if file is None:
                return False
            self._files[end] = file
        return True

    def add(self, tokens: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> None:
        self._files[".bin"].write(np.ascontiguousarray(tokens, self.dtype).data)
        self._files[".lengths"].write(lengths.astype("<i4").data)
        self.documents += len(lengths)
        self.tokens += len(tokens)

    def mark(self) -> dict[str, Any]:
        files = {end: file.mark() for end, file in self._files.items()}
        return {"documents": self.documents, "tokens": self.tokens, "files": files}

    def sizes(self, mark: dict[str, Any]) -> dict[str, int]:
        return {f"{self.prefix}{end}": file["bytes"] for end, file in mark["files"].items()}

    def row(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "documents": self.documents, "tokens": self.tokens}

    def finish(self) -> dict[str, dict[str, Any]]:
        for file in self._files.values():
            file.close(flush=True)
        index_of_documents(self._path(".lengths"), self._path(".idx"), self.dtype)
        tokens, index = self._files[".bin"], Rolling()
        files = {f"{self.prefix}.bin": tokens.mark(), f"{self.prefix}.idx": fingerprint(self._path(".idx"), index)}
        write_sums(self._path(SUFFIX), tokens.sums, index)
        return files | {f"{self.prefix}{SUFFIX}": fingerprint(self._path(SUFFIX))}

    def close(self, *, flush: bool = False) -> None:
        for file in self._files.values():
            file.close(flush=flush)

    def _path(self, end: str) -> Path:
        return self.folder / f"{self.prefix}{end}"


class TallySet:
    """The tokens of one source, or what is held out: one pair of files, or a shard `PREFIX-NNNNN` for each name."""

    def __init__(self, folder: Path, prefix: str, names: Sequence[str], dtype: np.dtype) -> None:
        self.prefix, self._names = prefix, names
        self._shards = [TallyPart(folder, f"{prefix}{name}", dtype) for name in names]
        self._at = -1

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self._shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self._shards)

    def open(self, name: str) -> None:
        """Close the shard before, and begin the one of this name."""
        if self._at >= 0:
            self._shards[self._at].close(flush=True)
        self._at = self._names.index(name)
        self._shards[self._at].begin()

    def add(self, tokens: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> None:
        self._shards[self._at].add(tokens, lengths)

    def mark(self) -> list[dict[str, Any]]:
        return [shard.mark() for shard in self._shards[: self._at + 1]]

    def restore(self, marks: list[dict[str, Any]]) -> bool:
        for number, mark in enumerate(marks):
            self._at = number
            if not self._shards[number].restore(mark):
                return False
            if number < len(marks) - 1:
                self._shards[number].close()
        return True

    def sizes(self, marks: list[dict[str, Any]]) -> dict[str, int]:
        pairs = zip(self._shards, marks, strict=False)
        return {name: size for shard, mark in pairs for name, size in shard.sizes(mark).items()}

    def row(self, samples: int) -> dict[str, Any]:
        """The row of the manifest."""
        row = {"prefix": self.prefix, "documents": self.documents, "tokens": self.tokens, "samples": samples}
        shards = [shard.row() for shard in self._written] if len(self._shards) > 1 else None
        return row if shards is None else {**row, "shards": shards}

    @property
    def _written(self) -> list[TallyPart]:
        """The shards that are published: of several, those with documents."""
        return [shard for shard in self._shards[: self._at + 1] if shard.documents or len(self._shards) == 1]

    def finish(self) -> dict[str, dict[str, Any]]:
        self.close()
        return {name: file for shard in self._written for name, file in shard.finish().items()}

    def close(self) -> None:
        for shard in self._shards[: self._at + 1]:
            shard.close()


def source_prefixes(count: int) -> list[str]:
    """The prefix of each source's files."""
    return [PREFIX] if count == 1 else [f"{PREFIX}_{number}" for number in range(count)]


class TokenTally:
    """The tokens of all pieces, in the order of the text, and their counts.

    `shards` are those of all `files`. If a `holdout` names text of its own, its files are the last of `files`.
    """

    def __init__(
        self, folder: Path, files: list[list[SourceFile]], dtype: np.dtype, tokenized_by: str, cleaning: Cleaning,
        shards: Sequence[TextShard], holdout: HoldOut | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.files, self.tokenized_by = folder, files, tokenized_by
        self.holdout, self.shards = holdout, shards
        count = len(files) - (holdout is not None and not holdout.from_sources)
        prefixes = source_prefixes(count)
        names = [[shard.name for shard in shards if shard.part == part] for part in range(len(files))]
        self.trained = [TallySet(folder, prefix, names[part], dtype) for part, prefix in enumerate(prefixes)]
        own_text = holdout is not None and count < len(files)
        self._held_names = names[-1] if own_text else held_out_names(shards)
        self.held_out = TallySet(folder, VALIDATION, self._held_names, dtype) if holdout else None
        # one part per source; what is held out of the sources is written along with each of them
        self.parts = [*self.trained, *([self.held_out] if self.held_out and own_text else [])]
        self.held_from_sources = None if own_text else self.held_out
        self._deduplicator = Deduplicator(folder, cleaning)
        self.shard = self.blocks = self.done_bytes = 0
        self._opened = -1
        self.bad = BadLines()
        self.dropped: dict[str, int] = {}
        self.noted: dict[str, int] = {}
        self.examples: dict[str, list[str]] = {}
        self.unread = UnreadText()
        self._line = 0
        self._file = ""
        self._per_file: list[dict[str, int]] = [{} for _ in files]

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.trained)

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.trained)

    @property
    def part(self) -> int:
        """The source of the open shard."""
        return self.shards[self.shard].part

    @property
    def _all_parts(self) -> list[TallySet]:
        return [*self.parts, *([self.held_from_sources] if self.held_from_sources else [])]

    def begin(self) -> None:
        self._deduplicator.begin()
        if self.held_from_sources and len(self._held_names) == 1:
            self.held_from_sources.open("")

    def open_shard(self, number: int) -> None:
        """Continue with this shard, from its beginning unless it was restored."""
        if number == self._opened:
            return
        shard = self.shards[number]
        if self._opened < 0 or shard.part != self.part:
            self._line, self._file = 0, ""
        self.shard = self._opened = number
        self.blocks = 0
        self.parts[shard.part].open(shard.name)
        if self.held_from_sources and len(self._held_names) > 1:
            self.held_from_sources.open(self._held_names[number])

    def add(self, piece: TextPiece, max_bad: int) -> None:
        """Append a piece. Raises DataError beyond `max_bad` bad lines."""
        name = piece.block.file.name
        if name != self._file or piece.block.first:
            self._file, self._line = name, 0
        self.bad.add(piece.bad, self._line, max_bad)
        self._line += piece.lines
        self.unread.count(piece.unread)
        tokens, lengths, sides = piece.tokens, piece.lengths, piece.sides
        self._drop("too short", piece.short)
        for reason, count in piece.dropped.items():
            self._drop(reason, count)
        for kind, count in piece.noted.items():
            self.noted[kind] = self.noted.get(kind, 0) + count
        for kind, texts in piece.examples.items():
            keep(self.examples, kind, *texts)
        unique = self._deduplicator.first(piece)
        if unique is not None:
            new, counts = unique
            for reason, count in counts.items():
                self._drop(reason, count)
            sides = None if sides is None else sides[new]
            tokens, lengths = tokens[np.repeat(new, lengths)], lengths[new]
        if sides is not None and self.held_from_sources:
            of_token = np.repeat(sides, lengths)
            self.held_from_sources.add(tokens[of_token == HELD], lengths[sides == HELD])
            self._drop("in the test part of train.validation.split", int((sides == TEST).sum()))
            tokens, lengths = tokens[of_token == TRAIN], lengths[sides == TRAIN]
        self.parts[self.part].add(tokens, lengths)
        row = self._per_file[self.part]
        row[name] = row.get(name, 0) + len(lengths)
        self.done_bytes += piece.block.size
        self.blocks += 1

    def _drop(self, reason: str, count: int) -> None:
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    def mark(self) -> dict[str, Any]:
        return {
            "shard": self.shard,
            "blocks": self.blocks,
            "done_bytes": self.done_bytes,
            "line": self._line,
            "file": self._file,
            "bad_count": self.bad.count,
            "bad": self.bad.kept,
            "dropped": self.dropped,
            "noted": self.noted,
            "examples": self.examples,
            "unread": self.unread,
            "per_file": self._per_file,
            "parts": [part.mark() for part in self.parts[: self.part + 1]],
            **self._deduplicator.mark(),
            **({"held_out": self.held_from_sources.mark()} if self.held_from_sources else {}),
        }

    def sizes(self, mark: dict[str, Any]) -> dict[str, int]:
        pairs = list(zip(self.parts, mark["parts"], strict=False))
        pairs += [(self.held_from_sources, mark["held_out"])] if self.held_from_sources else []
        sizes = self._deduplicator.sizes(mark)
        for part, part_mark in pairs:
            sizes |= part.sizes(part_mark)
        return sizes

    def restore(self, mark: dict[str, Any]) -> bool:
        if not self._deduplicator.restore(mark):
            return False
        if not all(part.restore(part_mark) for part, part_mark in zip(self.parts, mark["parts"], strict=False)):
            return False
        if self.held_from_sources and not self.held_from_sources.restore(mark["held_out"]):
            return False
        self.shard = self._opened = mark["shard"]
        self.blocks, self.done_bytes = mark["blocks"], mark["done_bytes"]
        self._line, self._file, self._per_file = mark["line"], mark["file"], mark["per_file"]
        self.bad.count, self.bad.kept, self.dropped = mark["bad_count"], mark["bad"], mark["dropped"]
        self.noted, self.examples, self.unread = mark["noted"], mark["examples"], UnreadText(mark["unread"])
        return True

    def source_rows(self) -> list[dict[str, Any]]:
        return [
            {"name": file.name, "bytes": file.bytes, "documents": counts.get(file.name, 0)}
            for part, counts in zip(self.files, self._per_file, strict=True)
            for file in part
        ]

    def refined(self, cleaning: Cleaning, tokenizer: Path) -> dict[str, Any]:
        """The manifest's fields on filters, personal data and near duplicates; empty if the options have none."""
        if not cleaning.refines:
            return {}
        near = self._deduplicator.about(cleaning, tokenizer, self.dropped)
        return {"noted": self.noted, "examples": self.examples, **near}

    def finish(self) -> dict[str, dict[str, Any]]:
        self._deduplicator.close()
        return {name: file for part in self._all_parts for name, file in part.finish().items()}

    def close(self) -> None:
        for part in self._all_parts:
            part.close()
        self._deduplicator.close()


class SampleTally:
    """Tokens and mask of all samples, in the order of the records; the last `others` of `files` are held out whole.

    A sample is `sequences` documents in a row.
    """

    def __init__(
        self, folder: Path, files: list[SourceFile], dtype: np.dtype, shards: Sequence[TextShard],
        holdout: HoldOut | None = None, others: int = 0, sequences: int = 1,
    ) -> None:  # fmt: skip
        pairs = [(PREFIX, MASK), *([(VALIDATION, VALIDATION_MASK)] if holdout else [])]
        kinds, names = (np.dtype(dtype), np.dtype(np.uint8)), [shard.name for shard in shards]
        self._parts = {
            prefix: TallySet(folder, prefix, names, kind)
            for pair in pairs
            for prefix, kind in zip(pair, kinds, strict=True)
        }
        self.shards, self._sequences = shards, sequences
        self._held_out_files = set(files[len(files) - others :]) if others else set()
        self._files, self._number = files, {file: number for number, file in enumerate(files)}
        self.shard = self.blocks = self.done_bytes = 0
        self._opened = -1
        self.bad = BadLines("record", "data")
        self.counts: Counter[str] = Counter()
        self.unread = UnreadText()
        self._samples, self._lines = [0] * len(files), [0] * len(files)

    @property
    def samples(self) -> int:
        return self._parts[PREFIX].documents // self._sequences

    @property
    def tokens(self) -> int:
        return self._parts[PREFIX].tokens

    @property
    def trained(self) -> list[TallySet]:
        return [self._parts[PREFIX]]

    @property
    def held_out(self) -> TallySet | None:
        return self._parts.get(VALIDATION)

    def held_out_row(self) -> dict[str, Any] | None:
        """The manifest's row of the held-out samples; None if none are held out."""
        part = self.held_out
        count = part.documents // self._sequences if part else 0
        return part.row(count) | {"documents": count} if part else None

    def begin(self) -> None:
        """Begin without files; `open_shard` creates them."""

    def open_shard(self, number: int) -> None:
        """Continue with this shard, from its beginning unless it was restored."""
        if number != self._opened:
            self.shard = self._opened = number
            self.blocks = 0
            for part in self._parts.values():
                part.open(self.shards[number].name)

    def add(self, piece: SamplePiece, max_bad: int) -> None:
        """Append a piece. Raises DataError beyond `max_bad` bad records."""
        number = self._number[piece.block.file]
        if piece.block.first:
            self._lines[number] = 0
        self.bad.add(piece.bad, self._lines[number], max_bad)
        self._lines[number] += piece.lines
        self._samples[number] += len(piece.lengths) // self._sequences
        sides = piece.sides
        if sides is None:
            held = piece.block.file in self._held_out_files
            sides = np.full(len(piece.lengths), HELD if held else TRAIN, np.int8)
        of_token = np.repeat(sides, piece.lengths)
        for side, name, mask in ((TRAIN, PREFIX, MASK), (HELD, VALIDATION, VALIDATION_MASK)):
            if name in self._parts:
                self._parts[name].add(piece.tokens[of_token == side], piece.lengths[sides == side])
                self._parts[mask].add(piece.mask[of_token == side], piece.lengths[sides == side])
        self.counts += piece.counts
        self.unread.count(piece.unread)
        self.done_bytes += piece.block.size
        self.blocks += 1

    def mark(self) -> dict[str, Any]:
        return {
            "shard": self.shard,
            "blocks": self.blocks,
            "done_bytes": self.done_bytes,
            "lines": self._lines,
            "samples": self._samples,
            "bad_count": self.bad.count,
            "bad": self.bad.kept,
            "counts": dict(self.counts),
            "unread": self.unread,
            "parts": {name: part.mark() for name, part in self._parts.items()},
        }

    def sizes(self, mark: dict[str, Any]) -> dict[str, int]:
        return {k: v for name, part in self._parts.items() for k, v in part.sizes(mark["parts"][name]).items()}

    def restore(self, mark: dict[str, Any]) -> bool:
        if not all(part.restore(mark["parts"][name]) for name, part in self._parts.items()):
            return False
        self.shard = self._opened = mark["shard"]
        self.blocks, self.done_bytes, self.counts = mark["blocks"], mark["done_bytes"], Counter(mark["counts"])
        self._lines, self._samples = mark["lines"], mark["samples"]
        self.bad.count, self.bad.kept = mark["bad_count"], mark["bad"]
        self.unread = UnreadText(mark["unread"])
        return True

    def source_rows(self) -> list[dict[str, Any]]:
        return [
            {"name": file.name, "bytes": file.bytes, "documents": count}
            for file, count in zip(self._files, self._samples, strict=True)
        ]

    def finish(self) -> dict[str, dict[str, Any]]:
        return {name: file for part in self._parts.values() for name, file in part.finish().items()}

    def close(self) -> None:
        for part in self._parts.values():
            part.close()
