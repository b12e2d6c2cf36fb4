"""Text to packed tokens: `tokens.bin` and `tokens.idx` in Megatron's format, and a manifest written last.

One thread reads and one thread per core tokenizes (Arrow, gigatoken and numpy release Python's lock). Results are
appended in the order of the text, so the bytes written depend on the input and the settings only. A few blocks per
thread are in progress at a time, which bounds the memory for an input of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from smtrain.core.config.schema import digest
from smtrain.core.errors import DataError
from smtrain.worker.data.clean.refiner import Refine, refine_versions, refining
from smtrain.worker.data.manifest import VALIDATION, DatasetManifest, files_of, refuse_others
from smtrain.worker.data.prepare.dataset_writer import TallySet, TokenTally, source_prefixes
from smtrain.worker.data.prepare.part_uploads import PartUploads
from smtrain.worker.data.prepare.pieces import TokenizeSettings, pieces, span_blocks
from smtrain.worker.data.prepare.prepare_options import PrepareOptions, ResolvedInputs, resolve
from smtrain.worker.data.prepare.progress import DataProgress, console
from smtrain.worker.data.prepare.resumable import Journal, Marker, forget, publish, restored, to_stderr, unfinished
from smtrain.worker.data.prepare.shards import cut_shards
from smtrain.worker.data.prepare.spread.driver import HubSource, Spread, SpreadJob, hub_sources, spread_out
from smtrain.worker.data.prepare.spread.tally import OutputRows, SpreadTally
from smtrain.worker.data.read.hub import commits_of
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
    spread: Spread | None = None,
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
        spread: Several machines to prepare on; the result is the same. They keep finished work themselves, without
            `parts`.

    Raises:
        DataError: If the input cannot be used: no text, more bad lines than allowed, fewer tokens than one sample, a
            holdout that leaves one side empty, a tokenizer that does not fit the model in its folder, or an `output`
            that holds a dataset and may not be overwritten.
    """
    say = say or to_stderr
    sources = options.sources(inputs)
    commits = commits_of(sources) if spread else {}
    resolved = _resolve(sources, tokenizer, options, output, commits, say)
    if near := options.cleaning.near:
        bands, rows = near.shape
        say(
            f"prepare: near duplicates by {bands} bands of {rows}: at most {near.bytes_a_document} bytes of memory "
            f"a document, for the first {near.documents:,}"
        )
    if not options.overwrite:
        refuse_others(*files_of(output))
    with unfinished(output, parts) as journal, ExitStack() as stack:
        report = progress or stack.enter_context(console())
        tally: TokenTally | SpreadTally
        if spread is not None:
            settings = TokenizeSettings(options, tokenizer, resolved.facts, True)
            hub = hub_sources(sources, commits)
            tally = stack.enter_context(_on_machines(spread, resolved, settings, hub, journal, report, say))
        else:
            refine = stack.enter_context(_refining(resolved, options))
            settings = TokenizeSettings(options, tokenizer, resolved.facts, parts is not None, refine)
            tally = _Preparation(resolved.files, settings, journal, parts, report, say).run()
        if unread := unread_sentence(tally.unread):
            say(f"prepare: {unread}; to read a field, name it in data.text_column, such as '{{title}} {{text}}'")
        _check_tokens(tally, options.seq_len, sources)
        left_out = [*resolved.left_out, *(tally.left_out if isinstance(tally, SpreadTally) else [])]
        return publish(journal, _manifest(tally, settings, left_out), output, spread.out if spread else None)


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
        options = self.settings.options
        shards = cut_shards(self.files, options.separator, options.shard_bytes)
        sizes = ["shards", options.shard_bytes] if len(shards) > len(self.files) else []
        key = digest([self.settings.digest(self.files), chosen.name, *sizes])

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
                flat = [file for part in self.files for file in part]
                for number in range(tally.shard, len(shards)):
                    tally.open_shard(number)
                    todo = span_blocks(shards[number].spans, flat, options)
                    for piece in pieces(islice(todo, tally.blocks, None), self.settings, chosen, pool):
                        tally.add(piece, options.max_bad)
                        marker.piece_done(tally.documents, tally.tokens)
        except BaseException:
            tally.close()
            raise
        return tally


def _on_machines(
    spread: Spread, resolved: ResolvedInputs, settings: TokenizeSettings, hub: Sequence[HubSource], journal: Journal,
    report: Callable[[DataProgress], None], say: Callable[[str], None],
) -> AbstractContextManager[SpreadTally]:  # fmt: skip
    """Have the machines prepare everything but the manifest; their shares are kept until the context ends."""
    options = settings.options
    shards = cut_shards(resolved.files, options.separator, options.shard_bytes)
    own_text = options.holdout is not None and not options.holdout.from_sources
    prefixes = source_prefixes(len(resolved.files) - own_text) + [VALIDATION] * own_text
    fast, why = encoder.choose(settings.tokenizer)
    if why:
        say(f"prepare: tokenizing with {fast.name}: {why}")
    key = settings.digest(resolved.files, elsewhere=True)
    job = SpreadJob(
        key, False, options, settings.tokenizer, resolved, fast.name, shards, prefixes, tuple(hub),
    )  # fmt: skip
    try:
        return spread_out(spread, journal, job, report, say)
    except MismatchError as error:
        say(f"prepare: beginning again with tokenizers: {error}")
        return spread_out(
            spread, journal, replace(job, encoder=TokenizersEncoder(settings.tokenizer).name), report, say
        )


def _check_tokens(tally: TokenTally | SpreadTally, seq_len: int, sources: list[str]) -> None:
    """Refuse a source without one sample, and a holdout that holds out nothing. Raises DataError."""
    if tally.bad.count and not tally.documents:
        tally.close()
        raise DataError(tally.bad.nothing_else(", ".join(sources)))
    held_out, key = tally.held_out, tally.holdout.key if tally.holdout else ""
    trained: Sequence[TallySet | OutputRows] = tally.trained
    for part, source in zip(trained, sources, strict=False):  # the last may be held out
        if part.tokens < seq_len + 1:
            tally.close()
            held = tally.held_from_sources
            left = f" (without {held.documents} that {key} holds out)" if held else ""
            dropped = ", ".join(f"{count} {reason}" for reason, count in tally.dropped.items())
            dropped = f" (left out: {dropped})" if dropped else ""
            remedy = f"add text, hold out less ({key}) or lower train.seq_len" if left else ""
            raise DataError(
                f"{source} gives {part.tokens} tokens in {part.documents} documents{left}{dropped}, and one sample "
                f"needs seq_len + 1 = {seq_len + 1}; {remedy or 'add text or lower train.seq_len'}."
            )
    if held_out and held_out.tokens < 2:
        tally.close()
        if not tally.held_from_sources:
            raise DataError(f"{key}: {sources[-1]} gives {held_out.tokens} tokens; give text to validate on.")
        raise DataError(
            f"{key}: holds out none of {tally.documents} documents; raise it, cut the text into more documents "
            "(data.separator), or give other text (train.validation.path)."
        )


def _manifest(tally: TokenTally | SpreadTally, settings: TokenizeSettings, left_out: list[str]) -> DatasetManifest:
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
