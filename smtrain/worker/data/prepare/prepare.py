"""Text to packed tokens: `tokens.bin` and `tokens.idx` in Megatron's format, and a manifest written last.

One thread reads, as many as there are cores turn blocks into tokens (Arrow, gigatoken and numpy leave Python's lock
alone), and what comes out is appended in the order of the text: the bytes written depend on the input and the settings
alone. A few blocks per thread are under way at a time, which bounds the memory whatever the size of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path

from smtrain.core.config.schema import digest
from smtrain.core.errors import DataError
from smtrain.core.machine import cores_here
from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.clean.holdout import HoldOut
from smtrain.worker.data.clean.refiner import refining
from smtrain.worker.data.manifest import DatasetManifest, files_of, refuse_others
from smtrain.worker.data.prepare.cluster.dealer import Dealer
from smtrain.worker.data.prepare.cluster.desk import Desk
from smtrain.worker.data.prepare.cluster.shares import Share, cut_corpus
from smtrain.worker.data.prepare.cluster.together import (
    MeetingPoint,
    agreed_commits,
    help_others,
    open_desk,
    put_together,
)
from smtrain.worker.data.prepare.cluster.working import ShareWork
from smtrain.worker.data.prepare.dataset_writer import TokenTally
from smtrain.worker.data.prepare.journal import Journal
from smtrain.worker.data.prepare.part_uploads import Parts
from smtrain.worker.data.prepare.pieces import How, TextPiece, pieces, tasks, tokenize
from smtrain.worker.data.prepare.prepare_options import asked_text, named_sources
from smtrain.worker.data.prepare.progress import DataProgress, console
from smtrain.worker.data.prepare.resumable import Marker, forget, gone_on, publish, to_stderr, unfinished
from smtrain.worker.data.read import blocks
from smtrain.worker.data.read.cut import cut_file
from smtrain.worker.data.read.sources import Format, SourceFile
from smtrain.worker.data.read.unread import unread_sentence
from smtrain.worker.data.tokenize import encoder
from smtrain.worker.data.tokenize.encoder import Encoder, MismatchError, Plain


def prepare(
    inputs: Path | str | Sequence[Path | str],
    output: Path,
    tokenizer: Path,
    *,
    seq_len: int,
    text_column: str = "text",
    format: Format = "auto",
    separator: str | None = None,
    cleaning: Cleaning | None = None,
    workers: int | None = None,
    encoding: str | None = None,
    max_bad: int = 0,
    append_eod: bool = True,
    progress: Callable[[DataProgress], None] | None = None,
    say: Callable[[str], None] | None = None,
    parts: Parts | None = None,
    overwrite: bool = True,
    holdout: HoldOut | None = None,
    machines: MeetingPoint | None = None,
) -> DatasetManifest:
    """Tokenize text into `output`, which appears with its manifest or stays as it was.

    `inputs` is a file, folder, glob or URI, or several of them, each of which becomes a part to mix. `tokenizer` is a
    Hugging Face folder. `workers` defaults to every core; `progress` to a bar or lines on stderr, as does `say`, which
    hears what people should know. A run that was killed goes on where it was when it is called again with the same
    input and settings; on another machine from `parts`, where there are any, which knows the input by its files' names
    and sizes. `holdout` says which documents are written beside the others for validation. With `machines` others may
    `assist`, and the result is the same.

    Raises DataError for input that cannot be used: nothing to read, more than `max_bad` bad lines, fewer tokens than
    one sample of `seq_len` + 1, a `holdout` that leaves nothing on one side, a tokenizer that does not fit the model
    beside it, and, without `overwrite`, for an `output` that holds a dataset.
    """
    say = say or to_stderr
    sources = named_sources(inputs, holdout)
    with open_desk(machines, sources, say) as (desk, commits):
        asked = asked_text(
            sources, tokenizer, seq_len, text_column, format, separator, cleaning, workers, append_eod, parts, holdout,
            output, encoding, say, commits,
        )  # fmt: skip
        files, facts = asked.files, asked.how.facts
        if near := asked.how.cleaning.near:
            bands, rows = near.shape
            say(
                f"prepare: near duplicates by {bands} bands of {rows}: at most {near.bytes_a_document} bytes of memory "
                f"a document, for the first {near.documents:,}"
            )
        if not overwrite:
            refuse_others(*files_of(output))
        with unfinished(output, parts) as journal:
            with ExitStack() as stack:
                report = progress or stack.enter_context(console())
                how = replace(asked.how, refine=stack.enter_context(refining(asked.how.cleaning, workers, asked.bytes)))
                if desk is not None:
                    desk.expect(how.digest(files, elsewhere=True))
                tally = _tally(files, how, journal, max_bad, report, say, desk, machines)
                if desk is not None and machines is not None:
                    desk.finish(machines.count - 1, machines.leaves_within)
            if unread := unread_sentence(tally.unread):
                say(f"prepare: {unread}; to read a field, name it in data.text_column, such as '{{title}} {{text}}'")
            tally.check(seq_len, asked.sources)
            manifest = DatasetManifest(
                **facts.in_manifest(),
                append_eod=append_eod,
                seq_len=seq_len,
                documents=tally.documents,
                tokens=tally.tokens,
                samples=sum((part.tokens - 1) // seq_len for part in tally.trained),
                text_column=text_column,
                sources=tally.source_rows(),
                files=tally.finish(),
                bad_line_count=tally.bad.count,
                bad_lines=tally.bad.kept,
                parts=[
                    {
                        "prefix": p.prefix,
                        "documents": p.documents,
                        "tokens": p.tokens,
                        "samples": (p.tokens - 1) // seq_len,
                    }
                    for p in tally.trained
                ],
                dropped=tally.dropped,
                tokenized_by=tally.tokenized_by,
                left_out=asked.left_out,
                unread=dict(tally.unread),
                validation=tally.held_out.row(-(-(tally.held_out.tokens - 1) // seq_len)) if tally.held_out else None,
                **tally.refined(how.cleaning, tokenizer),
            )
            return publish(journal, manifest, output)


def assist(
    inputs: Path | str | Sequence[Path | str],
    tokenizer: Path,
    machines: MeetingPoint,
    *,
    seq_len: int,
    text_column: str = "text",
    format: Format = "auto",
    separator: str | None = None,
    cleaning: Cleaning | None = None,
    workers: int | None = None,
    encoding: str | None = None,
    append_eod: bool = True,
    holdout: HoldOut | None = None,
    say: Callable[[str], None] | None = None,
) -> int:
    """Do shares of what another machine prepares with the same arguments, until it has all; how many were done here.

    Raises DataError where that machine cannot be reached, is gone, or finds other text or settings here.
    """
    say = say or to_stderr
    sources = named_sources(inputs, holdout)
    asked = asked_text(
        sources, tokenizer, seq_len, text_column, format, separator, cleaning, workers, append_eod, None, holdout,
        None, encoding, lambda _: None, agreed_commits(machines, sources),
    )  # fmt: skip
    flat = [file for part in asked.files for file in part]
    fast, why = encoder.choose(tokenizer)
    used: list[Encoder] = [fast]

    def encode_by(name: str) -> None:
        if used[0].name != name:
            used[0] = fast if fast.name == name else Plain(tokenizer)
        if used[0].name != name:
            raise DataError(
                f"this machine tokenizes with {fast.name}{f' ({why})' if why else ''} and the first one with {name}; "
                "install the same packages on both."
            )

    with (
        refining(asked.how.cleaning, workers, asked.bytes) as refine,
        ThreadPoolExecutor(workers or cores_here(), thread_name_prefix="tokenize") as pool,
    ):
        work = _work(flat, replace(asked.how, refine=refine), lambda: used[0], pool)
        return help_others(machines, asked.how.digest(asked.files, elsewhere=True), work, flat, encode_by, say)


def _tally(
    files: list[list[SourceFile]], how: How, journal: Journal, max_bad: int, report: Callable[[DataProgress], None],
    say: Callable[[str], None], desk: Desk | None,
    machines: MeetingPoint | None,
) -> TokenTally:  # fmt: skip
    chosen, why = encoder.choose(how.tokenizer)
    if why:
        say(f"prepare: tokenizing with {chosen.name}: {why}")
    try:
        return _run(files, how, journal, chosen, max_bad, report, say, desk, machines)
    except MismatchError as error:
        say(f"prepare: beginning again with tokenizers: {error}")
        forget(journal, how.parts)
        return _run(files, how, journal, Plain(how.tokenizer), max_bad, report, say, desk, machines)


def _run(
    files: list[list[SourceFile]], how: How, journal: Journal, chosen: Encoder, max_bad: int,
    report: Callable[[DataProgress], None], say: Callable[[str], None], desk: Desk | None,
    machines: MeetingPoint | None,
) -> TokenTally:  # fmt: skip
    """All blocks of all sources, from where the journal is."""
    settings = digest([how.digest(files), chosen.name, *(["shares", machines.size] if machines else [])])

    def empty() -> TokenTally:
        return TokenTally(journal.folder, files, how.facts.dtype, chosen.name, how.cleaning, how.holdout)

    tally = gone_on(empty, settings, journal, how.parts)
    total = sum(file.bytes for part in files for file in part)
    marker = Marker(tally, total, settings, journal, how.parts, report, say)
    try:
        with ThreadPoolExecutor(how.workers or cores_here(), thread_name_prefix="tokenize") as pool:
            if desk is not None and machines is not None:
                _run_on_machines(
                    files, how, journal, chosen, max_bad, marker, settings, say, desk, machines, tally, pool
                )
                return tally
            for part in range(tally.part, len(files)):
                tally.open_part(part)
                found = (b for f in files[part] for b in cut_file(f, how.text_column, how.separator))
                for piece in pieces(islice(found, tally.blocks, None), how, chosen, pool):
                    tally.add(piece, max_bad)
                    marker.piece_done(tally.documents, tally.tokens)
    except BaseException:
        tally.close()
        raise
    return tally


def _run_on_machines(
    files: list[list[SourceFile]], how: How, journal: Journal, chosen: Encoder, max_bad: int, marker: Marker,
    settings: str, say: Callable[[str], None], desk: Desk, machines: MeetingPoint, tally: TokenTally,
    pool: ThreadPoolExecutor,
) -> None:  # fmt: skip
    """All shares from where the tally is, which counts shares of a source in place of its blocks."""
    flat = [file for part in files for file in part]
    shares = cut_corpus(files, how.separator, machines.size)
    firsts = {share.part: share.number for share in reversed(shares)}
    at = firsts.get(tally.part, 0) + tally.blocks
    opened = -1

    def before(share: Share) -> None:
        nonlocal opened
        if share.part != opened:
            tally.open_part(share.part)
            opened = share.part

    def after(share: Share) -> None:
        tally.blocks = share.number - firsts[share.part] + 1
        marker.piece_done(tally.documents, tally.tokens)

    put_together(
        desk, Dealer(shares, at, journal.folder, settings, machines.straggles_s), chosen.name,
        _work(flat, how, lambda: chosen, pool), TextPiece, flat, before, lambda piece: tally.add(piece, max_bad), after,
        lambda: marker.stopped(tally.documents, tally.tokens), say,
    )  # fmt: skip


def _work(files: list[SourceFile], how: How, chosen: Callable[[], Encoder], pool: ThreadPoolExecutor) -> ShareWork:
    def cut(share: Share) -> Iterator[list[blocks.Block]]:
        return tasks(
            block
            for number, stretch in share.spans
            for block in cut_file(files[number], how.text_column, how.separator, stretch=stretch)
        )

    return ShareWork(cut, lambda task: pool.submit(tokenize, task, how, chosen()), (how.workers or cores_here()) + 2)
