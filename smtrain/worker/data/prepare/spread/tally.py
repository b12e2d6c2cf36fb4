"""The counts of a preparation on several machines, added up in the order of the text, as the tallies of one machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.clean.dedup import near_facts
from smtrain.worker.data.clean.refiner import EXAMPLES, count, keep
from smtrain.worker.data.manifest import VALIDATION
from smtrain.worker.data.prepare.shards import TextShard
from smtrain.worker.data.prepare.spread.work import OutputPair, WorkContext
from smtrain.worker.data.read.reading import BadLine, BadLines
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.read.unread import UnreadText


@dataclass
class OutputRows:
    """The pairs of files of one source, or of what is held out."""

    prefix: str
    several: bool
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def documents(self) -> int:
        return sum(row["documents"] for row in self.rows)

    @property
    def tokens(self) -> int:
        return sum(row["tokens"] for row in self.rows)

    def row(self, samples: int) -> dict[str, Any]:
        """The row of the manifest."""
        row = {"prefix": self.prefix, "documents": self.documents, "tokens": self.tokens, "samples": samples}
        return {**row, "shards": [one for one in self.rows if one["documents"]]} if self.several else row


class SpreadTally:
    """Has what `check_tokens` and the manifests need of a TokenTally or SampleTally."""

    def __init__(self, files: Sequence[SourceFile], context: WorkContext, shards: Sequence[TextShard]) -> None:
        self._files, self._context, self._shards = files, context, shards
        self.holdout, self.tokenized_by = context.options.holdout, context.encoder
        self.bad = BadLines("record", "data") if context.sft else BadLines()
        self.dropped: dict[str, int] = {}
        self.noted: dict[str, int] = {}
        self.examples: dict[str, list[str]] = {}
        self.counts: Counter[str] = Counter()
        self.unread = UnreadText()
        self.compared = self.read_documents = self.read_tokens = 0
        self.left_out: list[str] = []
        self.outputs: list[OutputRows] = []
        self._near: list[tuple[str, list[int]]] = []
        self._per_file = [0] * len(files)
        self._number = {file: number for number, file in enumerate(files)}
        self._made: dict[str, dict[str, Any]] = {}
        self._place = (-1, 0)  # the file of the last run, and its lines so far

    def add_share(self, record: dict[str, Any]) -> None:
        """Add the counts of the next share. Raises DataError beyond `max_bad` bad lines."""
        most = self._context.options.max_bad
        for number, first, lines, documents, bad, kept in record["runs"]:
            before = 0 if first or number != self._place[0] else self._place[1]
            self.bad.add([BadLine(*one) for one in kept], before, most, bad - len(kept))
            self._place = (number, before + lines)
            if self._context.sft:
                self._per_file[self._number[self._files[number]]] += documents // self._context.sequences
        for reason, number in record["dropped"].items():
            count(self.dropped, reason, number)
        for kind, number in record["noted"].items():
            count(self.noted, kind, number)
        for kind, texts in record["examples"].items():
            keep(self.examples, kind, *texts)
        self.counts.update(record["counts"])
        self.unread.count(dict(record["unread"]))
        self.read_documents += record["documents"]
        self.read_tokens += record["tokens"]

    def add_outputs(self, outputs: Sequence[OutputPair], made: Sequence[dict[str, Any]]) -> None:
        """Add the files that were written, in their order."""
        for output, result in zip(outputs, made, strict=True):
            prefix, dash, _ = output.prefix.partition("-")
            if not self.outputs or self.outputs[-1].prefix != prefix:
                self.outputs.append(OutputRows(prefix, bool(dash)))
            row = {"prefix": output.prefix, "documents": result["documents"], "tokens": result["tokens"]}
            self.outputs[-1].rows.append(row)
            if result["documents"] or not dash:
                self._made |= result["files"]
            if output.counts:
                for reason, number in result["dropped"].items():
                    count(self.dropped, reason, number)
                self._near += [(self._files[n].name, ids) for n, ids in result["examples"]][
                    : EXAMPLES - len(self._near)
                ]
                if not self._context.sft:
                    for number, documents in result["per_file"]:
                        self._per_file[number] += documents

    @property
    def trained(self) -> list[OutputRows]:
        return [one for one in self.outputs if one.prefix != VALIDATION]

    @property
    def held_out(self) -> OutputRows | None:
        return next((one for one in self.outputs if one.prefix == VALIDATION), None)

    def held_out_row(self) -> dict[str, Any] | None:
        """The manifest's row of the held-out samples; None if none are held out."""
        part = self.held_out
        count = part.documents // self._context.sequences if part else 0
        return part.row(count) | {"documents": count} if part else None

    @property
    def held_from_sources(self) -> OutputRows | None:
        return self.held_out if self.holdout and self.holdout.from_sources else None

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.trained)

    @property
    def samples(self) -> int:
        return self.documents // self._context.sequences

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.trained)

    def source_rows(self) -> list[dict[str, Any]]:
        return [
            {"name": file.name, "bytes": file.bytes, "documents": documents}
            for file, documents in zip(self._files, self._per_file, strict=True)
        ]

    def refined(self, cleaning: Cleaning, tokenizer: Path) -> dict[str, Any]:
        """The manifest's fields on filters, personal data and near duplicates; empty if the options have none."""
        if not cleaning.refines:
            return {}
        near = near_facts(cleaning, tokenizer, self.dropped, self.compared, self._near)
        return {"noted": self.noted, "examples": self.examples, **near}

    def finish(self) -> dict[str, dict[str, Any]]:
        """Size and SHA-256 of each file, by name."""
        return self._made

    def close(self) -> None:
        """Nothing is open."""
