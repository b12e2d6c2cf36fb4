"""Text to packed tokens: `tokens.bin` and `tokens.idx` in Megatron's format, and a manifest written
last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from smtrain.core.errors import DataError
from smtrain.worker.data.clean.refiner import Refine, open_refiner, refine_versions
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.part_uploads import PartUploads
from smtrain.worker.data.piece import Piece
from smtrain.worker.data.prepare.dataset_writer import CorpusTally
from smtrain.worker.data.prepare.pieces import TokenizeSettings, pieces, span_blocks, tokenize
from smtrain.worker.data.prepare.preparation import Pieces, Preparation
from smtrain.worker.data.prepare.progress import DataProgress
from smtrain.worker.data.prepare.spread.driver import Spread
from smtrain.worker.data.prepare_options import PrepareOptions, resolve
from smtrain.worker.data.read.blocks import Block
from smtrain.worker.data.read.hub import commits_of
from smtrain.worker.data.read.ignored_fields import ignored_text_sentence
from smtrain.worker.data.read.shards import TextShard
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.read.split_files import cut_file
from smtrain.worker.data.resumable import to_stderr
from smtrain.worker.data.tokenize.encoder import Encoder, TokenizersEncoder


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

    A killed run resumes when it is called again with the same arguments; on another machine if
    `parts` keeps copies.

    Args:
        inputs: A file, folder, glob or URI, or several of them; each becomes a part to mix.
        output: The folder to write.
        tokenizer: A Hugging Face folder.
        options: How text becomes tokens.
        progress: Receives the progress; default: a bar or lines on stderr.
        say: Receives sentences for the user; default: stderr.
        parts: Copies of finished work in a folder that outlives the machine.
        spread: Several machines to prepare on; the result is the same. They keep finished work
            themselves, without `parts`.

    Raises:
        DataError: If the input cannot be used: no text, more bad lines than allowed, fewer tokens
            than one sample, a holdout that leaves one side empty, a tokenizer that does not fit the
            model in its folder, or an `output` that holds a dataset and may not be overwritten.
    """
    say = say or to_stderr
    sources = options.sources(inputs)
    commits = commits_of(sources) if spread else {}
    if near_duplicates := options.cleaning.near:
        bands, rows = near_duplicates.shape
        say(
            f"prepare: near duplicates by {bands} bands of {rows}: at most"
            f" {near_duplicates.bytes_a_document} bytes of memory a document, for the first"
            f" {near_duplicates.documents:,}"
        )
    return text_preparation(sources, tokenizer, options, output, commits, say).run(
        output, progress, parts, spread
    )


def text_preparation(
    sources: list[str],
    tokenizer: Path,
    options: PrepareOptions,
    output: Path | None,
    commits: Mapping[str, str],
    say: Callable[[str], None],
    file_lists: Mapping[str, list[SourceFile]] | None = None,
) -> Preparation:
    """Find the files of text and check that they fit the options. Raises DataError."""
    corpus = resolve(sources, tokenizer, options, options.format, output, commits, say, file_lists)
    if options.append_eod and corpus.facts.eos_id is None:
        raise DataError(
            f"{tokenizer} names no eos_token in tokenizer_config.json that tokenizer.json knows; "
            "name one, or set append_eod to false."
        )
    text = next((file for file in corpus.flat if file.kind != "megatron"), None)
    if options.holdout and options.holdout.split is not None and text is not None:
        raise DataError(
            f"train.validation.split: {text.name} is no Megatron pair, whose documents it goes by;"
            " set train.validation.fraction instead."
        )
    refine_versions(options.cleaning)  # raises if a package is missing
    tokens = next((file for file in corpus.flat if file.kind == "megatron"), None)
    if options.cleaning.refines and tokens:
        raise DataError(
            f"{tokens.name} is tokens, which cannot be filtered as text; leave out data.filters,"
            " data.near_duplicates, data.pii, data.language, data.fix_mojibake and"
            " data.decontaminate, or give the text."
        )
    return _TextPreparation(corpus, tokenizer, sources, commits, say)


class _TextPreparation(Preparation):
    """Text to tokens, by one thread per core: Arrow, gigatoken and numpy release Python's lock."""

    def key(self, *, portable: bool) -> str:
        return self._settings(None).digest(self.corpus.files, portable=portable)

    def _settings(self, refine: Refine | None) -> TokenizeSettings:
        return TokenizeSettings(self.corpus.options, self.tokenizer, self.corpus.facts, refine)

    @contextmanager
    def pieces(self, encoder: Encoder | None) -> Iterator[Pieces]:
        options, flat = self.corpus.options, self.corpus.flat
        assert encoder is not None
        with (
            open_refiner(
                options.cleaning, options.workers, sum(file.bytes for file in flat)
            ) as refine,
            ThreadPoolExecutor(options.worker_count, thread_name_prefix="tokenize") as pool,
        ):
            settings = self._settings(refine)

            def of_shard(shard: TextShard, done_blocks: int) -> Iterator[Piece]:
                return pieces(
                    islice(span_blocks(shard.spans, flat, options), done_blocks, None),
                    settings,
                    encoder,
                    pool,
                )

            yield of_shard

    def blocks(self, file: SourceFile) -> Iterator[Block]:
        return cut_file(file, self.corpus.options.text_column, self.corpus.options.separator)

    def piece(self, block: Block) -> Piece:
        return tokenize([block], self._settings(None), self._plain_encoder)[0]

    @cached_property
    def _plain_encoder(self) -> Encoder:
        return TokenizersEncoder(self.tokenizer)

    def check(self, tally: CorpusTally) -> None:
        """Refuse a source without one sample, and a holdout that holds out nothing.

        Raises DataError.
        """
        if ignored_sentence := ignored_text_sentence(tally.findings.unread):
            self.say(
                f"prepare: {ignored_sentence}; to read a field, name it in data.text_column, such"
                " as '{title} {text}'"
            )
        if tally.bad.count and not tally.documents:
            raise DataError(tally.bad.nothing_else(", ".join(self.sources)))
        seq_len, held_out, holdout = self.corpus.options.seq_len, tally.held_out, tally.holdout
        key, from_sources = (
            (holdout.key if holdout else ""),
            holdout is not None and holdout.from_sources,
        )
        for part, source in zip(
            tally.training_sets, self.sources, strict=False
        ):  # the last may be held out
            if part.tokens < seq_len + 1:
                holdout_set = held_out if from_sources else None
                holdout_note = (
                    f" (without {holdout_set.documents} that {key} holds out)"
                    if holdout_set
                    else ""
                )
                dropped_note = ", ".join(
                    f"{count} {reason}" for reason, count in tally.findings.dropped.items()
                )
                dropped_note = f" (left out: {dropped_note})" if dropped_note else ""
                remedy = (
                    f"add text, hold out less ({key}) or lower train.seq_len"
                    if holdout_note
                    else ""
                )
                raise DataError(
                    f"{source} gives {part.tokens} tokens in {part.documents}"
                    f" document{'s' * (part.documents != 1)}{holdout_note}{dropped_note}, and one"
                    f" sample needs seq_len + 1 = {seq_len + 1}; {remedy or 'add text or lower train.seq_len'}."
                )
        if held_out and held_out.tokens < 2:
            if not from_sources:
                raise DataError(
                    f"{key}: {self.sources[-1]} gives {held_out.tokens} tokens; give text to"
                    " validate on."
                )
            raise DataError(
                f"{key}: holds out 0 of {tally.documents} documents; raise it, cut the text into"
                " more documents (data.separator), or give other text (train.validation.path)."
            )

    def manifest_facts(self, tally: CorpusTally) -> dict[str, Any]:
        options, held_out = self.corpus.options, tally.held_out
        parts = [
            tally.row(part, (part.tokens - 1) // options.seq_len) for part in tally.training_sets
        ]
        return {
            "append_eod": options.append_eod,
            "samples": sum(row["samples"] for row in parts),
            "text_column": options.text_column,
            "parts": parts,
            "dropped": dict(tally.findings.dropped),
            # the last row of validation may be shorter, so samples are rounded up
            "validation": (
                tally.row(held_out, -(-(held_out.tokens - 1) // options.seq_len))
                if held_out
                else None
            ),
            **tally.refinement_facts(self.tokenizer),
        }
