"""The counts of a preparation on several machines, added up in the order of the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from smtrain.worker.data.prepare.dataset_writer import CorpusTally, PairSet
from smtrain.worker.data.prepare.spread.work import OutputPair
from smtrain.worker.data.prepare_options import Corpus
from smtrain.worker.data.read.ignored_fields import EXAMPLES, Findings
from smtrain.worker.data.read.reading import BadLine


class SpreadTally(CorpusTally):
    """The counts of the shares and of the files that the machines wrote."""

    def __init__(self, corpus: Corpus, tokenized_by: str) -> None:
        super().__init__(corpus, tokenized_by)
        self.read_documents = self.read_tokens = 0
        self._made: dict[str, dict[str, Any]] = {}
        self._sets: list[PairSet] = []

    @property
    def sets(self) -> list[PairSet]:
        return self._sets

    def add_share(self, record: dict[str, Any]) -> None:
        """Add the counts of the next share. Raises DataError beyond `max_bad` bad lines."""
        for number, first, lines, documents, bad, bad_rows in record["runs"]:
            bad_lines = [BadLine(*row) for row in bad_rows]
            self.bad.add(
                number, first, lines, bad_lines, self.corpus.options.max_bad, bad - len(bad_rows)
            )
            if self.corpus.sequences:
                self.per_file[number] += documents // self.corpus.sequences
        self.findings.add(Findings.of(record))
        self.read_documents += record["documents"]
        self.read_tokens += record["tokens"]

    def add_outputs(self, outputs: Sequence[OutputPair], results: Sequence[dict[str, Any]]) -> None:
        """Add the files that were written, in their order."""
        for output, result in zip(outputs, results, strict=True):
            prefix, dash, _ = output.prefix.partition("-")
            if not self._sets or self._sets[-1].prefix != prefix:
                self._sets.append(PairSet(prefix, bool(dash)))
            row = {
                "prefix": output.prefix,
                "documents": result["documents"],
                "tokens": result["tokens"],
            }
            self._sets[-1].rows.append(row)
            if result["documents"] or not dash:
                self._made |= result["files"]
            if output.counts:
                self.findings.dropped += Counter(result["dropped"])
                self.near += [(self.files[n].name, ids) for n, ids in result["examples"]][
                    : EXAMPLES - len(self.near)
                ]
                for number, documents in () if self.corpus.sequences else result["per_file"]:
                    self.per_file[number] += documents

    def finish(self) -> dict[str, dict[str, Any]]:
        return self._made
