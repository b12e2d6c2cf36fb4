"""One preparation of text or of records, on this machine or on several. The bytes are the same.

Pieces are appended in the order of the text, so the bytes written depend on the input and the
settings only. A few blocks per thread or process are in progress at a time, which bounds the memory
for an input of any size.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smtrain.core.digests import digest
from smtrain.core.errors import DataError
from smtrain.worker.data import resumable
from smtrain.worker.data.manifest import DatasetManifest, files_of, refuse_others
from smtrain.worker.data.part_uploads import PartUploads, StoppedError
from smtrain.worker.data.piece import Piece
from smtrain.worker.data.prepare.dataset_writer import CorpusTally, LocalTally
from smtrain.worker.data.prepare.progress import DataProgress, console
from smtrain.worker.data.prepare.spread.driver import Spread, SpreadJob, spread_out
from smtrain.worker.data.prepare_options import Corpus
from smtrain.worker.data.read.blocks import Block
from smtrain.worker.data.read.hub import HUB
from smtrain.worker.data.read.shards import TextShard
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.resumable import Journal, open_journal, publish
from smtrain.worker.data.tokenize import encoder
from smtrain.worker.data.tokenize.encoder import Encoder, MismatchError, TokenizersEncoder

_FORMAT = 2  # of the marks in the journal
Say = Callable[[str], None]
Report = Callable[[DataProgress], None]
Pieces = Callable[[TextShard, int], Iterator[Piece]]
"""The pieces of a shard but those of its first blocks."""


@dataclass(frozen=True)
class Preparation(ABC):
    """A corpus to prepare from `sources`, with the `commits` of those of the hub at which machines
    read them.
    """

    corpus: Corpus
    tokenizer: Path
    sources: list[str]
    commits: Mapping[str, str]
    say: Say

    @abstractmethod
    def key(self, *, portable: bool) -> str:
        """Equal for runs that write the same bytes; `portable` also on other machines."""

    @abstractmethod
    def pieces(self, encoder: Encoder | None) -> AbstractContextManager[Pieces]:
        """The maker of the pieces of shards on this machine."""

    @abstractmethod
    def blocks(self, file: SourceFile) -> Iterator[Block]:
        """The blocks of a file. Raises DataError if it cannot be read."""

    @abstractmethod
    def piece(self, block: Block) -> Piece:
        """The tokens of one block, by `tokenizers`."""

    @abstractmethod
    def check(self, tally: CorpusTally) -> None:
        """Name what is not read. Raises DataError for a corpus that cannot be trained on."""

    @abstractmethod
    def manifest_facts(self, tally: CorpusTally) -> dict[str, Any]:
        """The fields of the manifest that differ between text and records."""

    def run(
        self,
        output: Path,
        progress: Report | None,
        parts: PartUploads | None,
        spread: Spread | None,
    ) -> DatasetManifest:
        """Write the dataset; `prepare` explains the arguments and errors."""
        self._refuse_folder_of_input(output)
        if not self.corpus.options.overwrite:
            refuse_others(*files_of(output))
        with open_journal(output, parts) as journal, ExitStack() as stack:
            if not self.corpus.options.overwrite:
                refuse_others(*files_of(output))  # another process may have finished it since
            report = progress or stack.enter_context(console())

            def attempt(text_encoder: Encoder | None, name: str) -> CorpusTally:
                if spread is None:
                    return self._write_locally(text_encoder, name, journal, report)
                hub = tuple(
                    (uri, self.commits.get(uri)) for uri in self.sources if uri.startswith(HUB)
                )
                # Next to the output, all machines see the same files, with the same times.
                key = self.key(portable=spread.work is not None)
                job = SpreadJob(key, self.corpus, self.tokenizer, name, hub)
                return stack.enter_context(spread_out(spread, journal, job, report, self.say))

            tally = self._try_encoders(attempt)
            stack.callback(tally.close)
            self.check(tally)
            return publish(journal, self._manifest(tally), output, spread.out if spread else None)

    def _refuse_folder_of_input(self, output: Path) -> None:
        """Raise DataError if the output holds a file of the input, which would lie among tokens
        then.
        """
        output_folder = output.resolve()
        for file in self.corpus.flat:
            if "://" not in file.path and Path(file.path).resolve().is_relative_to(output_folder):
                raise DataError(
                    f"{output} is the output and holds {file.name} of the input; name another"
                    f" folder, such as {output.parent / f'{output_folder.name}-tokens'}."
                )

    def _try_encoders(self, attempt: Callable[[Encoder | None, str], CorpusTally]) -> CorpusTally:
        """The result of an attempt with the fastest encoder, or with `tokenizers` if that one gives
        other ids.
        """
        if self.corpus.sequences:
            return attempt(None, "tokenizers")
        fast, reason = encoder.choose(self.tokenizer, self.corpus.options.workers)
        if reason:
            self.say(f"prepare: tokenizing with {fast.name}: {reason}")
        try:
            return attempt(fast, fast.name)
        except MismatchError as error:
            self.say(f"prepare: beginning again with tokenizers: {error}")
            fallback = TokenizersEncoder(self.tokenizer)
            return attempt(fallback, fallback.name)

    def _write_locally(
        self, text_encoder: Encoder | None, name: str, journal: Journal, report: Report
    ) -> LocalTally:
        """Write everything but the manifest, from the journal's last mark."""
        corpus = self.corpus
        several = any(shard.name for shard in corpus.shards)
        sizes = ["shards", corpus.options.shard_bytes] if several else []
        key = digest([_FORMAT, self.key(portable=journal.parts is not None), name, *sizes])
        tally = self._restore_tally(name, key, journal)
        marker = _Marker(tally, key, journal, report, self.say)
        try:
            with self.pieces(text_encoder) as pieces:
                for number in range(tally.shard, len(corpus.shards)):
                    tally.open_shard(number)
                    for piece in pieces(corpus.shards[number], tally.blocks):
                        tally.add(piece)
                        marker.piece_done()
        except BaseException:
            tally.close()
            raise
        return tally

    def _restore_tally(self, name: str, key: str, journal: Journal) -> LocalTally:
        """The tally at its newest mark with the same key and undamaged files; else empty, and all
        marks are lost.
        """
        for mark in journal.marks(key):
            tally = LocalTally(journal.folder, self.corpus, name)
            if tally.restore(mark):
                return tally
            tally.close()
        journal.clear()
        tally = LocalTally(journal.folder, self.corpus, name)
        tally.begin()
        return tally

    def _manifest(self, tally: CorpusTally) -> DatasetManifest:
        """Write the indexes of all files and describe the dataset."""
        return DatasetManifest(
            **self.corpus.facts.in_manifest(),
            seq_len=self.corpus.options.seq_len,
            documents=tally.documents,
            tokens=tally.tokens,
            sources=tally.source_rows(),
            files=tally.finish(),
            bad_line_count=tally.bad.count,
            bad_lines=tally.bad.kept,
            tokenized_by=tally.tokenized_by,
            left_out=[*self.corpus.left_out, *tally.left_out],
            unread=dict(tally.findings.unread),
            **self.manifest_facts(tally),
        )


class _Marker:
    """Reports progress after every piece, and marks it every so many bytes of input and at a
    stop.
    """

    def __init__(
        self, tally: LocalTally, key: str, journal: Journal, report: Report, say: Say
    ) -> None:
        self._tally, self._key, self._journal, self._report = tally, key, journal, report
        self._total = sum(file.bytes for file in tally.files)
        self._before = self._marked = tally.done_bytes
        self._every = (
            min(resumable.MARK_BYTES, journal.parts.part_bytes)
            if journal.parts
            else resumable.MARK_BYTES
        )
        self._began = time.monotonic()
        if tally.done_bytes:
            say(f"prepare: continuing after {tally.done_bytes / 1e6:,.1f} MB that are done")

    def piece_done(self) -> None:
        """Report and mark after a piece. Raises StoppedError if the machine was asked to end."""
        tally, seconds = self._tally, time.monotonic() - self._began
        done_bytes = tally.done_bytes
        self._report(
            DataProgress(
                done_bytes, self._total, tally.documents, tally.tokens, seconds, self._before
            )
        )
        stop = self._journal.stops
        if done_bytes - self._marked >= self._every or stop:
            self._marked = done_bytes
            mark = {"settings": self._key, **tally.mark()}
            self._journal.mark(mark, tally.sizes(mark))
        if stop:
            raise StoppedError(
                f"stopped after {done_bytes / 1e6:,.1f} MB; run the same command again to resume"
            )
