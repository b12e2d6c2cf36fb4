"""The files that `prepare` appends to and the counts beside them: all of it can be marked and restored."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from smtrain.core.errors import DataError
from smtrain.worker.data.checksums import SUFFIX, Rolling, write_sums
from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.clean.dedup import Unlike
from smtrain.worker.data.clean.holdout import HELD, TEST, TRAIN, HoldOut
from smtrain.worker.data.clean.refiner import keep
from smtrain.worker.data.manifest import PREFIX, VALIDATION
from smtrain.worker.data.pack.indexed import index_of_documents
from smtrain.worker.data.prepare.journal import Appender
from smtrain.worker.data.read.bad_lines import Bad
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.read.unread import UnreadText

if TYPE_CHECKING:
    from smtrain.worker.data.prepare.pieces import TextPiece


class TallyPart:
    """The tokens of one source: PREFIX.bin, and a length per document for the index."""

    def __init__(self, folder: Path, prefix: str, dtype: np.dtype) -> None:
        self.folder, self.prefix, self.dtype = folder, prefix, dtype
        self.documents = self.tokens = 0
        self._files: dict[str, Appender] = {}

    def begin(self) -> None:
        self._files = {end: Appender(self._path(end)) for end in (".bin", ".lengths")}

    def restore(self, mark: dict[str, Any]) -> bool:
        self.documents, self.tokens = mark["documents"], mark["tokens"]
        for end, about in mark["files"].items():
            found = Appender.restored(self._path(end), about)
            if found is None:
                return False
            self._files[end] = found
        return True

    def add(self, tokens: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> None:
        self._files[".bin"].write(np.ascontiguousarray(tokens, self.dtype).data)
        self._files[".lengths"].write(lengths.astype("<i4").data)
        self.documents += len(lengths)
        self.tokens += len(tokens)

    def mark(self) -> dict[str, Any]:
        files = {end: file.mark() for end, file in self._files.items()}
        return {"documents": self.documents, "tokens": self.tokens, "files": files}

    def row(self, samples: int) -> dict[str, Any]:
        """What the manifest says of it."""
        return {"prefix": self.prefix, "documents": self.documents, "tokens": self.tokens, "samples": samples}

    def finish(self) -> dict[str, dict[str, Any]]:
        """Write the index and the checksums; name, size and hash of the files of the data set."""
        for file in self._files.values():
            file.close(flush=True)
        index_of_documents(self._path(".lengths"), self._path(".idx"), self.dtype)
        tokens, index = self._files[".bin"], Rolling()
        about = {f"{self.prefix}.bin": tokens.mark(), f"{self.prefix}.idx": fingerprint(self._path(".idx"), index)}
        write_sums(self._path(SUFFIX), tokens.sums, index)
        return about | {f"{self.prefix}{SUFFIX}": fingerprint(self._path(SUFFIX))}

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _path(self, end: str) -> Path:
        return self.folder / f"{self.prefix}{end}"


class TokenTally:
    """Counts over all pieces, in the order of the text, and the files they are about."""

    def __init__(
        self, folder: Path, files: list[list[SourceFile]], dtype: np.dtype, tokenized_by: str, cleaning: Cleaning,
        holdout: HoldOut | None = None,
    ) -> None:  # fmt: skip
        """With a `holdout` of other text that is the last of `files`."""
        self.folder, self.files, self.tokenized_by = folder, files, tokenized_by
        self._holdout = holdout
        count = len(files) - (holdout is not None and not holdout.from_sources)
        prefixes = [PREFIX] if count == 1 else [f"{PREFIX}_{i}" for i in range(count)]
        self.parts = [TallyPart(folder, prefix, dtype) for prefix in prefixes]
        self.held_out = TallyPart(folder, VALIDATION, dtype) if holdout else None
        if self.held_out and count < len(files):
            self.parts.append(self.held_out)
        self._unlike = Unlike(folder, cleaning)
        self.part = self.blocks = self.done_bytes = 0
        self.bad = Bad()
        self.dropped: dict[str, int] = {}
        self.noted: dict[str, int] = {}
        self.examples: dict[str, list[str]] = {}
        self.unread = UnreadText()
        self._line = 0
        self._file = ""
        self._per_file: list[dict[str, int]] = [{} for _ in files]

    @property
    def trained(self) -> list[TallyPart]:
        """The parts that are trained on."""
        return [part for part in self.parts if part is not self.held_out]

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.trained)

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.trained)

    def begin(self) -> None:
        """Start with empty files."""
        self._unlike.begin()
        if self._beside:
            self._beside.begin()

    @property
    def _beside(self) -> TallyPart | None:
        """What is held out, where it comes out of the sources and so is written beside each of them."""
        return self.held_out if self.held_out and self.held_out not in self.parts else None

    def open_part(self, part: int) -> None:
        """Go on with this source, from its beginning unless it was restored."""
        if part != self.part or not (self.blocks or self.parts[part].documents):
            self.part, self.blocks, self._line, self._file = part, 0, 0, ""
            self.parts[part].begin()

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
        for what, count in piece.noted.items():
            self.noted[what] = self.noted.get(what, 0) + count
        for what, texts in piece.examples.items():
            keep(self.examples, what, *texts)
        found = self._unlike.first(piece)
        if found is not None:
            new, counts = found
            for reason, count in counts.items():
                self._drop(reason, count)
            sides = None if sides is None else sides[new]
            tokens, lengths = tokens[np.repeat(new, lengths)], lengths[new]
        if sides is not None and self._beside:
            of_token = np.repeat(sides, lengths)
            self._beside.add(tokens[of_token == HELD], lengths[sides == HELD])
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
        """What `restore` needs."""
        return (
            {
                "part": self.part,
                "blocks": self.blocks,
                "done_bytes": self.done_bytes,
                "line": self._line,
                "file": self._file,
                "bad_count": self.bad.count,
                "bad": self.bad.kept,
                "dropped": self.dropped,
                "per_file": self._per_file,
                "parts": [part.mark() for part in self.parts[: self.part + 1]],
            }
            | self._unlike.mark()
            | ({"noted": self.noted, "examples": self.examples} if self.noted or self.examples else {})
            | ({"held_out": self._beside.mark()} if self._beside else {})
            | {"unread": self.unread}
        )

    def sizes(self, mark: dict[str, Any]) -> dict[str, int]:
        """Bytes of each file at a mark, by its name in the folder."""
        pairs = list(zip(self.parts, mark["parts"], strict=False))
        pairs += [(self._beside, mark["held_out"])] if self._beside else []
        found = {
            f"{part.prefix}{end}": about["bytes"] for part, marked in pairs for end, about in marked["files"].items()
        }
        return found | self._unlike.sizes(mark)

    def restore(self, mark: dict[str, Any]) -> bool:
        """Go back to a mark; False where the files are not what it says."""
        if not self._unlike.restore(mark):
            return False
        if not all(part.restore(about) for part, about in zip(self.parts, mark["parts"], strict=False)):
            return False
        if self._beside and not self._beside.restore(mark["held_out"]):
            return False
        self.part, self.blocks, self.done_bytes = mark["part"], mark["blocks"], mark["done_bytes"]
        self._line, self._file, self._per_file = mark["line"], mark["file"], mark["per_file"]
        self.bad.count, self.bad.kept, self.dropped = mark["bad_count"], mark["bad"], mark["dropped"]
        self.noted, self.examples = mark.get("noted", {}), mark.get("examples", {})
        self.unread = UnreadText(mark.get("unread", {}))
        return True

    def check(self, seq_len: int, sources: list[str]) -> None:
        """Raises DataError where a source has not one sample, or nothing is held out that should be."""
        if self.bad.count and not self.documents:
            self.close()
            raise DataError(self.bad.nothing_else(", ".join(sources)))
        held_out, key = self.held_out, self._holdout.key if self._holdout else ""
        for part, source in zip(self.trained, sources, strict=False):  # the last may be held out
            if part.tokens < seq_len + 1:
                self.close()
                left = f" beside {held_out.documents} that {key} holds out" if held_out and self._beside else ""
                remedy = f"add text, hold out less ({key}) or lower train.seq_len" if left else ""
                raise DataError(
                    f"{source} gives {part.tokens} tokens in {part.documents} documents{left}, and one sample needs "
                    f"seq_len + 1 = {seq_len + 1}; {remedy or 'add text or lower train.seq_len'}."
                )
        if held_out and held_out.tokens < 2:
            self.close()
            if not self._beside:
                raise DataError(f"{key}: {sources[-1]} gives {held_out.tokens} tokens; give text to validate on.")
            raise DataError(
                f"{key}: holds out none of {self.documents} documents; raise it, cut the text into more documents "
                "(data.separator), or give other text (train.validation.path)."
            )

    def source_rows(self) -> list[dict[str, Any]]:
        """A row per file, for the manifest."""
        return [
            {"name": file.name, "bytes": file.bytes, "documents": counts.get(file.name, 0)}
            for part, counts in zip(self.files, self._per_file, strict=True)
            for file in part
        ]

    def refined(self, cleaning: Cleaning, tokenizer: Path) -> dict[str, Any]:
        """What the manifest says of filters, personal data and near duplicates; nothing where none was asked for."""
        if not cleaning.refines:
            return {}
        return {"noted": self.noted, "examples": self.examples} | self._unlike.about(cleaning, tokenizer, self.dropped)

    def finish(self) -> dict[str, dict[str, Any]]:
        """Close everything and write the indexes; the files of the data set."""
        self._unlike.close()
        parts = [*self.parts, *([self._beside] if self._beside else [])]
        return {name: about for part in parts for name, about in part.finish().items()}

    def close(self) -> None:
        """Close everything as it is."""
        for part in [*self.parts, *([self._beside] if self._beside else [])]:
            part.close()
        self._unlike.close()


def fingerprints(prefix: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of a pair that is written, and of the checksums of its blocks, which are written here."""
    tokens, index = Rolling(), Rolling()
    bin_path, idx_path, sums_path = (prefix.with_name(prefix.name + end) for end in (".bin", ".idx", SUFFIX))
    about = {bin_path.name: fingerprint(bin_path, tokens), idx_path.name: fingerprint(idx_path, index)}
    write_sums(sums_path, tokens, index)
    return about | {sums_path.name: fingerprint(sums_path)}


def fingerprint(path: Path, sums: Rolling | None = None) -> dict[str, Any]:
    """Size and SHA-256 of a file, which `sums` is told of too."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
            if sums is not None:
                sums.add(block)
    return {"bytes": path.stat().st_size, "sha256": found.hexdigest()}
