"""The files that a preparation appends to, with their counts; all of it can be marked and
restored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from smtrain.worker.data.checksums import SUFFIX, Rolling, fingerprint, write_sums
from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.clean.dedup import NEAR_DUPLICATES, Deduplicator, near_facts
from smtrain.worker.data.clean.holdout import HOLDOUT, TEST, TEST_PART, TRAIN
from smtrain.worker.data.indexed import index_of_documents
from smtrain.worker.data.manifest import VALIDATION, mask_of
from smtrain.worker.data.prepare_options import Corpus
from smtrain.worker.data.read.ignored_fields import Findings
from smtrain.worker.data.read.reading import BadLines
from smtrain.worker.data.resumable import Appender

if TYPE_CHECKING:
    from smtrain.worker.data.piece import Piece


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
            file = Appender.restore(self._path(end), size_and_hash)
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
        files = {
            f"{self.prefix}.bin": tokens.mark(),
            f"{self.prefix}.idx": fingerprint(self._path(".idx"), index),
        }
        write_sums(self._path(SUFFIX), tokens.sums, index)
        return files | {f"{self.prefix}{SUFFIX}": fingerprint(self._path(SUFFIX))}

    def close(self, *, flush: bool = False) -> None:
        for file in self._files.values():
            file.close(flush=flush)

    def _path(self, end: str) -> Path:
        return self.folder / f"{self.prefix}{end}"


class PairSet:
    """The pairs of files of one part of a corpus, or of what is held out: one, or `several`
    shards.
    """

    def __init__(self, prefix: str, several: bool) -> None:
        self.prefix, self.several = prefix, several
        self.rows: list[dict[str, Any]] = []
        """{prefix, documents, tokens} of each pair."""

    @property
    def documents(self) -> int:
        return sum(row["documents"] for row in self.rows)

    @property
    def tokens(self) -> int:
        return sum(row["tokens"] for row in self.rows)


class WrittenSet(PairSet):
    """A set whose files are appended to, shard after shard; with `mask` each pair has one with
    marks of the answers.
    """

    def __init__(
        self, folder: Path, prefix: str, names: Sequence[str], dtype: np.dtype, *, mask: bool
    ) -> None:
        super().__init__(prefix, len(names) > 1)
        self._names = names
        self._shards: list[list[TallyPart]] = []
        for name in names:
            tokens = TallyPart(folder, f"{prefix}{name}", dtype)
            marks = (
                [TallyPart(folder, mask_of(Path(tokens.prefix)).name, np.dtype("u1"))]
                if mask
                else []
            )
            self._shards.append([tokens, *marks])

    def open(self, name: str) -> None:
        """Close the shard before, and begin the one of this name, unless it is open."""
        at = self._names.index(name)
        if at == len(self.rows) - 1:
            return
        for part in self._shards[len(self.rows) - 1] if self.rows else ():
            part.close(flush=True)
        for part in self._shards[at]:
            part.begin()
        self.rows.append(self._shards[at][0].row())

    def add(self, piece: Piece, keep_mask: NDArray[np.bool_] | None = None) -> None:
        """Append the documents of a piece that `keep_mask` selects."""
        lengths = piece.lengths if keep_mask is None else piece.lengths[keep_mask]
        of_token = None if keep_mask is None else np.repeat(keep_mask, piece.lengths)
        for part, values in zip(
            self._shards[len(self.rows) - 1], (piece.tokens, piece.mask), strict=False
        ):
            assert values is not None
            part.add(values if of_token is None else values[of_token], lengths)
        self.rows[-1] = self._shards[len(self.rows) - 1][0].row()

    def mark(self) -> list[list[dict[str, Any]]]:
        return [[part.mark() for part in parts] for parts in self._open_shards]

    def restore(self, marks: list[list[dict[str, Any]]]) -> bool:
        for number, (parts, of) in enumerate(zip(self._shards, marks, strict=False)):
            if not all(part.restore(mark) for part, mark in zip(parts, of, strict=True)):
                return False
            self.rows.append(parts[0].row())
            for part in parts if number < len(marks) - 1 else ():
                part.close()
        return True

    def sizes(self, marks: list[list[dict[str, Any]]]) -> dict[str, int]:
        pairs = (
            zip(parts, of, strict=True) for parts, of in zip(self._shards, marks, strict=False)
        )
        return {
            name: size
            for part_marks in pairs
            for part, mark in part_marks
            for name, size in part.sizes(mark).items()
        }

    def finish(self) -> dict[str, dict[str, Any]]:
        """Write the indexes; a shard of several without a document has no files."""
        self.close()
        parts = [
            part
            for parts in self._open_shards
            for part in parts
            if part.documents or not self.several
        ]
        return {name: file for part in parts for name, file in part.finish().items()}

    @property
    def _open_shards(self) -> list[list[TallyPart]]:
        return self._shards[: len(self.rows)]

    def close(self) -> None:
        for parts in self._shards:
            for part in parts:
                part.close()


class CorpusTally:
    """The counts of a corpus, added up in the order of the text.

    A document of records is a sample, of one or two sequences; `compared` and `near` are of near
    duplicates.
    """

    def __init__(self, corpus: Corpus, tokenized_by: str) -> None:
        self.corpus, self.tokenized_by = corpus, tokenized_by
        self.holdout, self.files = corpus.options.holdout, corpus.flat
        self.bad = BadLines("record", "data") if corpus.sequences else BadLines()
        self.findings = Findings()
        self.per_file = [0] * len(self.files)
        self.left_out: list[str] = []
        self.compared = 0
        self.near: list[tuple[str, list[int]]] = []

    @property
    def sets(self) -> Sequence[PairSet]:
        """The files of the parts, and of what is held out."""
        raise NotImplementedError

    @property
    def training_sets(self) -> list[PairSet]:
        return [pair_set for pair_set in self.sets if pair_set.prefix != VALIDATION]

    @property
    def held_out(self) -> PairSet | None:
        return next((pair_set for pair_set in self.sets if pair_set.prefix == VALIDATION), None)

    @property
    def documents(self) -> int:
        return sum(self.documents_of(pair_set) for pair_set in self.training_sets)

    @property
    def tokens(self) -> int:
        return sum(pair_set.tokens for pair_set in self.training_sets)

    def documents_of(self, pair_set: PairSet) -> int:
        return pair_set.documents // max(1, self.corpus.sequences)

    def row(self, pair_set: PairSet, samples: int) -> dict[str, Any]:
        """The row of the manifest."""
        row = {
            "prefix": pair_set.prefix,
            "documents": self.documents_of(pair_set),
            "tokens": pair_set.tokens,
            "samples": samples,
        }
        return (
            {**row, "shards": [pair for pair in pair_set.rows if pair["documents"]]}
            if pair_set.several
            else row
        )

    def source_rows(self) -> list[dict[str, Any]]:
        return [
            {"name": file.name, "bytes": file.bytes, "documents": documents}
            for file, documents in zip(self.files, self.per_file, strict=True)
        ]

    def refinement_facts(self, tokenizer: Path) -> dict[str, Any]:
        """The manifest's fields on filters, personal data and near duplicates; empty if the options
        have none.
        """
        cleaning, findings = self.corpus.options.cleaning, self.findings
        if not cleaning.refines:
            return {}
        duplicate_facts = near_facts(
            cleaning, tokenizer, findings.dropped[NEAR_DUPLICATES], self.compared, self.near
        )
        return {"noted": dict(findings.noted), "examples": findings.examples, **duplicate_facts}

    def finish(self) -> dict[str, dict[str, Any]]:
        """Size and SHA-256 of each file, by name."""
        raise NotImplementedError

    def close(self) -> None:
        """Close what is open."""


class LocalTally(CorpusTally):
    """The files and counts of all pieces on this machine.

    `begin` starts with empty files; `mark` returns the state for `restore`, which is False if the
    files do not match; `sizes` are the bytes of each file at a mark, by name; `close` leaves the
    files as they are.
    """

    def __init__(self, folder: Path, corpus: Corpus, tokenized_by: str) -> None:
        super().__init__(corpus, tokenized_by)
        records, dtype = corpus.sequences > 0, np.dtype(corpus.facts.dtype)
        self._parts = [
            WrittenSet(
                folder,
                prefix,
                [shard.name for shard in corpus.shards if shard.part == part],
                dtype,
                mask=records,
            )
            for part, prefix in enumerate(corpus.prefixes)
        ]
        self._held = (
            WrittenSet(folder, VALIDATION, corpus.held_names, dtype, mask=records)
            if corpus.has_sides
            else None
        )
        self._deduplicator = Deduplicator(
            folder, Cleaning() if records else corpus.options.cleaning
        )
        self.shard = self.blocks = self.done_bytes = 0
        self._opened = -1

    @property
    def sets(self) -> list[WrittenSet]:
        return [*self._parts, *([self._held] if self._held else [])]

    def begin(self) -> None:
        self._deduplicator.begin()

    def open_shard(self, number: int) -> None:
        """Continue with this shard, from its beginning unless it was restored."""
        if number == self._opened:
            return
        shard = self.corpus.shards[number]
        self.shard = self._opened = number
        self.blocks = 0
        self._parts[shard.part].open(shard.name)
        if self._held:
            self._held.open(self.corpus.held_names[number] if self._held.several else "")

    def add(self, piece: Piece) -> None:
        """Append a piece. Raises DataError beyond `max_bad` bad lines."""
        file, part = piece.block.file.number, self._parts[self.corpus.shards[self.shard].part]
        self.bad.add(file, piece.block.first, piece.lines, piece.bad, self.corpus.options.max_bad)
        self.findings.add(piece.findings)
        keep_mask, sides = self._deduplicator.first(piece, self.findings), piece.sides
        self.compared, self.near = self._deduplicator.compared, self._deduplicator.examples
        if sides is None and self._held:
            sides = np.full(
                len(piece.lengths), HOLDOUT if file in self.corpus.heldout_files else TRAIN, np.int8
            )
        if sides is not None and self._held:
            first_mask = np.ones(len(sides), bool) if keep_mask is None else keep_mask
            self._held.add(piece, first_mask & (sides == HOLDOUT))
            self.findings.dropped += Counter({TEST_PART: int((first_mask & (sides == TEST)).sum())})
            keep_mask = first_mask & (sides == TRAIN)
        part.add(piece, keep_mask)
        count = (
            len(piece.lengths)
            if keep_mask is None or self.corpus.sequences
            else int(keep_mask.sum())
        )
        self.per_file[file] += count // max(1, self.corpus.sequences)
        self.done_bytes += piece.block.size
        self.blocks += 1

    def mark(self) -> dict[str, Any]:
        return {
            "shard": self.shard,
            "blocks": self.blocks,
            "done_bytes": self.done_bytes,
            "bad": vars(self.bad),
            "findings": vars(self.findings),
            "per_file": self.per_file,
            "sets": [written_set.mark() for written_set in self.sets],
            "deduplicator": self._deduplicator.mark(),
        }

    def sizes(self, mark: dict[str, Any]) -> dict[str, int]:
        sizes = self._deduplicator.sizes(mark["deduplicator"])
        for written_set, marks in zip(self.sets, mark["sets"], strict=True):
            sizes |= written_set.sizes(marks)
        return sizes

    def restore(self, mark: dict[str, Any]) -> bool:
        if not self._deduplicator.restore(mark["deduplicator"]):
            return False
        if not all(
            written_set.restore(marks)
            for written_set, marks in zip(self.sets, mark["sets"], strict=True)
        ):
            return False
        self.shard = self._opened = mark["shard"]
        self.blocks, self.done_bytes, self.per_file = (
            mark["blocks"],
            mark["done_bytes"],
            mark["per_file"],
        )
        vars(self.bad).update(mark["bad"])
        self.findings = Findings.of(mark["findings"])
        return True

    def finish(self) -> dict[str, dict[str, Any]]:
        self._deduplicator.close()
        return {
            name: file for written_set in self.sets for name, file in written_set.finish().items()
        }

    def close(self) -> None:
        for written_set in self.sets:
            written_set.close()
        self._deduplicator.close()
