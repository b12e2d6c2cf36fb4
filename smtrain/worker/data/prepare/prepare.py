"""Text to packed tokens: `tokens.bin` and `tokens.idx` in Megatron's format, and a manifest written last.

One thread reads and one thread per core tokenizes (Arrow, gigatoken and numpy release Python's lock). Results are
appended in the order of the text, so the bytes written depend on the input and the settings only. A few blocks per
thread are in progress at a time, which bounds the memory for an input of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from smtrain.core.config.schema import digest
from smtrain.core.errors import DataError
from smtrain.worker.data.clean.refiner import Refine, refine_versions, refining
from smtrain.worker.data.manifest import DatasetManifest, files_of, refuse_others
from smtrain.worker.data.prepare.cluster.coordination import (
    agreed_commits,
    assist_coordinator,
    collect_shares,
    open_coordinator,
)
from smtrain.worker.data.prepare.cluster.coordinator import Coordinator, MeetingPoint
from smtrain.worker.data.prepare.cluster.dealer import Dealer
from smtrain.worker.data.prepare.cluster.shares import Share, cut_corpus
from smtrain.worker.data.prepare.cluster.working import ShareWork
from smtrain.worker.data.prepare.dataset_writer import TokenTally
from smtrain.worker.data.prepare.part_uploads import PartUploads
from smtrain.worker.data.prepare.pieces import TextPiece, TokenizeSettings, pieces, tasks, tokenize
from smtrain.worker.data.prepare.prepare_options import PrepareOptions, ResolvedInputs, resolve
from smtrain.worker.data.prepare.progress import DataProgress, console
from smtrain.worker.data.prepare.resumable import Journal, Marker, forget, publish, restored, to_stderr, unfinished
from smtrain.worker.data.prepare.shards import Span, cut_shards
from smtrain.worker.data.read import blocks
from smtrain.worker.data.read.cut import cut_file
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.read.unread import unread_sentence
from smtrain.worker.data.tokenize import encoder
from smtrain.worker.data.tokenize.encoder import Encoder, MismatchError, TokenizersEncoder


def prepare(
    inputs: Path | str | Sequence[Path | str],
    output: Path,
    tokenizer: Path,
    options: PrepareOptions,
    *,
    progress: Callable[[DataProgress], None] | None = None,
    say: Callable[[str], None] | None = None,
    parts: PartUploads | None = None,
    machines: MeetingPoint | None = None,
) -> DatasetManifest:
    """Tokenize text into `output`, which appears with its manifest or stays as it was.

    A killed run resumes when it is called again with the same arguments; on another machine if `parts` keeps copies.

    Args:
        inputs: A file, folder, glob or URI, or several of them; each becomes a part to mix.
        output: The folder to write.
        tokenizer: A Hugging Face folder.
        options: How text becomes tokens.
        progress: Receives the progress; default: a bar or lines on stderr.
        say: Receives sentences for the user; default: stderr.
        parts: Copies of finished work in a folder that outlives the machine.
        machines: The meeting point of other machines, which call `assist`; the result is the same.

    Raises:
        DataError: If the input cannot be used: no text, more bad lines than allowed, fewer tokens than one sample, a
            holdout that leaves one side empty, a tokenizer that does not fit the model in its folder, or an `output`
            that holds a dataset and may not be overwritten.
    """
    say = say or to_stderr
    sources = options.sources(inputs)
    with open_coordinator(machines, sources, say) as (coordinator, commits):
        resolved = _resolve(sources, tokenizer, options, output, commits, say)
        if near := options.cleaning.near:
            bands, rows = near.shape
            say(
                f"prepare: near duplicates by {bands} bands of {rows}: at most {near.bytes_a_document} bytes of memory "
                f"a document, for the first {near.documents:,}"
            )
        if not options.overwrite:
            refuse_others(*files_of(output))
        with unfinished(output, parts) as journal:
            with ExitStack() as stack:
                report = progress or stack.enter_context(console())
                refine = stack.enter_context(_refining(resolved, options))
                settings = TokenizeSettings(options, tokenizer, resolved.facts, parts is not None, refine)
                if coordinator is not None:
                    coordinator.expect(settings.digest(resolved.files, elsewhere=True))
                tally = _Preparation(resolved.files, settings, journal, parts, report, say, coordinator).run()
                if coordinator is not None:
                    coordinator.finish()
            if unread := unread_sentence(tally.unread):
                say(f"prepare: {unread}; to read a field, name it in data.text_column, such as '{{title}} {{text}}'")
            tally.check(options.seq_len, sources)
            return publish(journal, _manifest(tally, settings, resolved.left_out), output)


def assist(
    inputs: Path | str | Sequence[Path | str],
    tokenizer: Path,
    options: PrepareOptions,
    machines: MeetingPoint,
    *,
    say: Callable[[str], None] | None = None,
) -> int:
    """Do shares of a preparation that runs on another machine, until all are done; return the number done here.

    Raises DataError if that machine cannot be reached, disappears, or has other text or settings.
    """
    sources = options.sources(inputs)
    resolved = _resolve(sources, tokenizer, options, None, agreed_commits(machines, sources), lambda _: None)
    fast, why = encoder.choose(tokenizer)
    used: list[Encoder] = [fast]

    def encode_by(name: str) -> None:
        if used[0].name != name:
            used[0] = fast if fast.name == name else TokenizersEncoder(tokenizer)
        if used[0].name != name:
            raise DataError(
                f"this machine tokenizes with {fast.name}{f' ({why})' if why else ''} and the first one with {name}; "
                "install the same packages on both."
            )

    with _refining(resolved, options) as refine, _threads(options) as pool:
        settings = TokenizeSettings(options, tokenizer, resolved.facts, refine=refine)
        work = _work(resolved.flat, settings, lambda: used[0], pool)
        digest = settings.digest(resolved.files, elsewhere=True)
        return assist_coordinator(machines, digest, work, resolved.flat, encode_by, say or to_stderr)


def _resolve(
    sources: list[str], tokenizer: Path, options: PrepareOptions, output: Path | None, commits: Mapping[str, str],
    say: Callable[[str], None],
) -> ResolvedInputs:  # fmt: skip
    resolved = resolve(sources, tokenizer, options, options.format, output, commits, say)
    if options.append_eod and resolved.facts.eos_id is None:
        raise DataError(
            f"{tokenizer} names no eos_token in tokenizer_config.json that tokenizer.json knows; "
            "name one, or set append_eod to false."
        )
    text = next((file for file in resolved.flat if file.kind != "megatron"), None)
    if options.holdout and options.holdout.split is not None and text is not None:
        raise DataError(
            f"train.validation.split: {text.name} is no Megatron pair, whose documents it goes by; set "
            "train.validation.fraction instead."
        )
    refine_versions(options.cleaning)  # raises if a package is missing
    tokens = next((file for file in resolved.flat if file.kind == "megatron"), None)
    if options.cleaning.refines and tokens:
        raise DataError(
            f"{tokens.name} is tokens, which cannot be filtered as text; leave out data.filters, "
            "data.near_duplicates, data.pii, data.language, data.fix_mojibake and data.decontaminate, or give the text."
        )
    return resolved


def _refining(resolved: ResolvedInputs, options: PrepareOptions) -> AbstractContextManager[Refine | None]:
    return refining(options.cleaning, options.workers, sum(file.bytes for file in resolved.flat))


def _threads(options: PrepareOptions) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(options.worker_count, thread_name_prefix="tokenize")


@dataclass(frozen=True)
class _Preparation:
    """One run over all blocks of all sources, from the journal's last mark."""

    files: list[list[SourceFile]]
    settings: TokenizeSettings
    journal: Journal
    parts: PartUploads | None
    report: Callable[[DataProgress], None]
    say: Callable[[str], None]
    coordinator: Coordinator | None

    def run(self) -> TokenTally:
        fast, why = encoder.choose(self.settings.tokenizer)
        if why:
            self.say(f"prepare: tokenizing with {fast.name}: {why}")
        try:
            return self._run(fast)
        except MismatchError as error:
            self.say(f"prepare: beginning again with tokenizers: {error}")
            forget(self.journal, self.parts)
            return self._run(TokenizersEncoder(self.settings.tokenizer))

    def _run(self, chosen: Encoder) -> TokenTally:
        options, shares = self.settings.options, ["shares", self.coordinator.machines.size] if self.coordinator else []
        shards = cut_shards(self.files, options.separator, 1 << 62 if self.coordinator else options.shard_bytes)
        sizes = ["shards", options.shard_bytes] if len(shards) > len(self.files) else []
        key = digest([self.settings.digest(self.files), chosen.name, *shares, *sizes])

        def empty() -> TokenTally:
            return TokenTally(
                self.journal.folder, self.files, self.settings.facts.dtype, chosen.name, options.cleaning, shards,
                options.holdout,
            )  # fmt: skip

        tally = restored(empty, key, self.journal, self.parts)
        total = sum(file.bytes for part in self.files for file in part)
        marker = Marker(tally, total, key, self.journal, self.parts, self.report, self.say)
        try:
            with _threads(options) as pool:
                if self.coordinator is not None:
                    self._on_machines(self.coordinator, chosen, marker, key, tally, pool)
                    return tally
                flat = [file for part in self.files for file in part]
                for number in range(tally.shard, len(shards)):
                    tally.open_shard(number)
                    todo = _blocks(shards[number].spans, flat, options)
                    for piece in pieces(islice(todo, tally.blocks, None), self.settings, chosen, pool):
                        tally.add(piece, options.max_bad)
                        marker.piece_done(tally.documents, tally.tokens)
        except BaseException:
            tally.close()
            raise
        return tally

    def _on_machines(
        self,
        coordinator: Coordinator,
        chosen: Encoder,
        marker: Marker,
        key: str,
        tally: TokenTally,
        pool: ThreadPoolExecutor,
    ) -> None:
        """Do all shares; the tally counts shares of a source instead of its blocks."""
        options = self.settings.options
        flat = [file for part in self.files for file in part]
        shares = cut_corpus(self.files, options.separator, coordinator.machines.size)
        firsts = {share.part: share.number for share in reversed(shares)}
        at = firsts.get(tally.part, 0) + tally.blocks
        opened = -1

        def before(share: Share) -> None:
            nonlocal opened
            if share.part != opened:
                tally.open_shard(share.part)
                opened = share.part

        def after(share: Share) -> None:
            tally.blocks = share.number - firsts[share.part] + 1
            marker.piece_done(tally.documents, tally.tokens)

        collect_shares(
            coordinator, Dealer(shares, at, self.journal.folder, key, coordinator.machines.straggles_s), chosen.name,
            _work(flat, self.settings, lambda: chosen, pool), TextPiece, flat, before,
            lambda piece: tally.add(piece, options.max_bad), after,
            lambda: marker.stopped(tally.documents, tally.tokens), self.say,
        )  # fmt: skip


def _work(
    files: list[SourceFile], settings: TokenizeSettings, chosen: Callable[[], Encoder], pool: ThreadPoolExecutor
) -> ShareWork:
    options = settings.options

    def cut(share: Share) -> Iterator[list[blocks.Block]]:
        return tasks(_blocks(share.spans, files, options))

    return ShareWork(cut, lambda task: pool.submit(tokenize, task, settings, chosen()), options.worker_count + 2)


def _blocks(spans: Sequence[Span], files: Sequence[SourceFile], options: PrepareOptions) -> Iterator[blocks.Block]:
    for number, stretch in spans:
        yield from cut_file(files[number], options.text_column, options.separator, stretch=stretch)


def _manifest(tally: TokenTally, settings: TokenizeSettings, left_out: list[str]) -> DatasetManifest:
    """Write the indexes of all files and describe the dataset."""
    options = settings.options

    def samples(tokens: int) -> int:
        return (tokens - 1) // options.seq_len

    trained, held_out = [part.row(samples(part.tokens)) for part in tally.trained], tally.held_out
    return DatasetManifest(
        **settings.facts.in_manifest(),
        append_eod=options.append_eod,
        seq_len=options.seq_len,
        documents=tally.documents,
        tokens=tally.tokens,
        samples=sum(row["samples"] for row in trained),
        text_column=options.text_column,
        sources=tally.source_rows(),
        files=tally.finish(),
        bad_line_count=tally.bad.count,
        bad_lines=tally.bad.kept,
        parts=trained,
        dropped=tally.dropped,
        tokenized_by=tally.tokenized_by,
        left_out=left_out,
        unread=dict(tally.unread),
        # the last row of validation may be shorter, so samples are rounded up
        validation=held_out.row(-(-(held_out.tokens - 1) // options.seq_len)) if held_out else None,
        **tally.refined(options.cleaning, settings.tokenizer),
    )
