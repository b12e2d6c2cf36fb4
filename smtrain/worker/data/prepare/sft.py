"""Instruction data to samples: tokens in Megatron's format, and beside them which of them are to be learned.

`tokens.bin/.idx` hold a sample a document, `tokens_mask.bin/.idx` the same documents in uint8, 1 where a token belongs
to an answer. Blocks of records go to worker processes and come back in the order of the text, so the bytes written
depend on the input and the settings alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from smtrain.core.config.schema import digest
from smtrain.core.errors import DataError
from smtrain.worker.data.clean.holdout import HoldOut
from smtrain.worker.data.manifest import PREFIX, DatasetManifest, files_of, refuse_others
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
from smtrain.worker.data.prepare.part_uploads import Parts
from smtrain.worker.data.prepare.prepare_options import named_sources
from smtrain.worker.data.prepare.progress import DataProgress, console
from smtrain.worker.data.prepare.resumable import Marker, gone_on, publish, to_stderr, unfinished
from smtrain.worker.data.prepare.sample_tally import SampleTally
from smtrain.worker.data.prepare.sample_workers import sample_pieces, share_work
from smtrain.worker.data.read.blocks import BLOCK_BYTES
from smtrain.worker.data.read.sources import SourceFile, find_files
from smtrain.worker.data.read.unread import unread_sentence
from smtrain.worker.data.tokenize.chat import Shape
from smtrain.worker.data.tokenize.samples import LONG, NO_ANSWER, UNLEARNED, Maker, SamplePiece
from smtrain.worker.data.tokenize.tokenizer import TokenizerFacts, tokenizer_facts


def prepare_sft(
    inputs: Sequence[Path | str],
    output: Path,
    tokenizer: Path,
    *,
    seq_len: int,
    format: str = "auto",
    overlong: Literal["truncate", "drop"] = "truncate",
    workers: int | None = None,
    encoding: str | None = None,
    max_bad: int = 0,
    progress: Callable[[DataProgress], None] | None = None,
    say: Callable[[str], None] | None = None,
    parts: Parts | None = None,
    overwrite: bool = True,
    holdout: HoldOut | None = None,
    machines: MeetingPoint | None = None,
    columns: Mapping[str, str] | None = None,
) -> DatasetManifest:
    """Write records of conversations as samples into `output`, which appears with its manifest or stays as it was.

    `inputs` are files, folders, globs or URIs of jsonl, Parquet or Arrow. `format` is that of the files, or how a
    record spells a conversation (alpaca, messages); what it does not say goes by the files' names and the records'
    fields. `tokenizer` is a Hugging Face folder, whose chat template is used. `workers` defaults to every core; `say`
    hears what people should know. A run that was killed goes on where it was when it is called again with the same
    input and settings, on another machine from `parts`. Call it from under `if __name__ == "__main__"`: the workers are
    spawned. `holdout` says which conversations are written beside the others for validation, `columns` {ours: theirs}
    how the records call what is called messages, instruction, input, output, system or tools here.

    Raises DataError for input that cannot be used: nothing to read, more than `max_bad` bad records, no sample on
    either side of a `holdout`, a tokenizer that does not fit the model beside it or has no chat template, and, without
    `overwrite`, an `output` that holds a dataset.
    """
    say = say or to_stderr
    with open_desk(machines, named_sources(inputs, holdout), say) as (desk, commits):
        asked = _asked(inputs, output, tokenizer, seq_len, format, overlong, holdout, encoding, say, columns, commits)
        files, facts, make, left_out = asked.files, asked.facts, asked.make, asked.left_out
        say(f"prepare: {make.template.about}")
        if not overwrite:
            refuse_others(*files_of(output))
        settings = _digest(asked, parts is not None)
        if machines is not None:
            settings = digest([settings, "shares", machines.size])
        with unfinished(output, parts) as journal:

            def empty() -> SampleTally:
                return SampleTally(journal.folder, files, facts.dtype, holdout, asked.others)

            tally = gone_on(empty, settings, journal, parts)
            try:
                with ExitStack() as stack:
                    report = progress or stack.enter_context(console())
                    total = sum(file.bytes for file in files)
                    marker = Marker(tally, total, settings, journal, parts, report, say)
                    if machines is None:
                        for piece in sample_pieces(files, tally.blocks, make, workers):
                            tally.add(piece, max_bad)
                            marker.piece_done(tally.samples, tally.tokens)
                    elif desk is not None:
                        desk.expect(_digest(asked, True))
                        dealer = Dealer(
                            cut_corpus([files], None, machines.size), tally.blocks, journal.folder, settings,
                            machines.straggles_s,
                        )  # fmt: skip
                        _on_machines(desk, dealer, asked, tally, marker, max_bad, workers, say)
                        desk.finish(machines.count - 1, machines.leaves_within)
            except BaseException:
                tally.close()
                raise
            for what, count in tally.told.items():
                say(f"prepare: {count} {what}")
            if unread := unread_sentence(tally.unread):
                say(f"prepare: {unread}; a field of another name than ours is read if data.columns names it")
            held_out = tally.held_out
            if not tally.samples:
                tally.close()
                if held_out and held_out.documents and holdout and holdout.from_sources:
                    raise DataError(f"{holdout.key}: holds out all {held_out.documents} samples; lower it or add data.")
                named = ", ".join(map(str, inputs))
                if tally.bad.count and not tally.told:
                    raise DataError(tally.bad.nothing_else(named))
                why = ", ".join(f"{count} {what}" for what, count in tally.told.items()) or "the files are empty"
                raise DataError(f"{named} gives no sample ({why}); give other conversations.")
            if holdout and held_out and not held_out.documents:
                tally.close()
                raise DataError(
                    f"{holdout.key}: "
                    + (
                        f"holds out none of {tally.samples} samples; raise it or give other data "
                        "(train.validation.path)."
                        if holdout.from_sources
                        else f"{holdout.path} gives no sample; give conversations to validate on."
                    )
                )
            return publish(journal, _manifest(tally, facts, seq_len, left_out), output)


def assist_sft(
    inputs: Sequence[Path | str],
    tokenizer: Path,
    machines: MeetingPoint,
    *,
    seq_len: int,
    format: str = "auto",
    overlong: Literal["truncate", "drop"] = "truncate",
    workers: int | None = None,
    encoding: str | None = None,
    holdout: HoldOut | None = None,
    say: Callable[[str], None] | None = None,
    columns: Mapping[str, str] | None = None,
) -> int:
    """Do shares of what another machine prepares with the same arguments, until it has all; how many were done here.

    Raises DataError where that machine cannot be reached, is gone, or finds other records or settings here.
    """
    commits = agreed_commits(machines, named_sources(inputs, holdout))
    asked = _asked(
        inputs, None, tokenizer, seq_len, format, overlong, holdout, encoding, lambda _: None, columns, commits
    )
    with share_work(asked.files, asked.make, workers) as work:
        return help_others(machines, _digest(asked, True), work, asked.files, lambda _: None, say or to_stderr)


def _on_machines(
    desk: Desk, dealer: Dealer, asked: _AskedSamples, tally: SampleTally, marker: Marker, max_bad: int,
    workers: int | None, say: Callable[[str], None],
) -> None:  # fmt: skip
    """All shares from where the tally is, which counts them in place of its blocks."""

    def after(share: Share) -> None:
        tally.blocks = share.number + 1
        marker.piece_done(tally.samples, tally.tokens)

    with share_work(asked.files, asked.make, workers) as work:
        put_together(
            desk, dealer, "tokenizers", work, SamplePiece, asked.files, lambda _: None,
            lambda piece: tally.add(piece, max_bad), after, lambda: marker.stopped(tally.samples, tally.tokens), say,
        )  # fmt: skip


@dataclass(frozen=True)
class _AskedSamples:
    """What the arguments come to; the last `others` of the files are held out whole."""

    files: list[SourceFile]
    others: int
    facts: TokenizerFacts
    make: Maker
    left_out: list[str]


def _asked(
    inputs: Sequence[Path | str], output: Path | None, tokenizer: Path, seq_len: int, format: str,
    overlong: Literal["truncate", "drop"], holdout: HoldOut | None, encoding: str | None, say: Callable[[str], None],
    columns: Mapping[str, str] | None, commits: Mapping[str, str],
) -> _AskedSamples:  # fmt: skip
    if seq_len < 1:
        raise DataError(f"train.seq_len is {seq_len}; give at least 1.")
    facts = tokenizer_facts(tokenizer, lambda sentence: say(f"prepare: {sentence}"))
    shape: Shape = "alpaca" if format == "alpaca" else "messages" if format == "messages" else "auto"
    kind: Any = "auto" if format == shape else format
    left_out: list[str] = []
    files = [f for s in inputs for f in find_files(s, kind, output, left_out.append, encoding, commits)]
    others = (
        []
        if holdout is None or holdout.path is None
        else find_files(holdout.path, kind, None, left_out.append, encoding, commits)
    )
    files += others
    for sentence in left_out:
        say(f"prepare: {sentence}")
    if other := next((file for file in files if file.kind not in ("jsonl", "json", "parquet", "arrow")), None):
        raise DataError(
            f"{other.name} is {'tokens' if other.kind == 'megatron' else 'plain text'}, and train.objective: sft "
            "learns from records (jsonl, json, parquet, arrow); remove it, or set train.objective: pretrain."
        )
    make = Maker(tokenizer, seq_len, shape, overlong, holdout if holdout and holdout.from_sources else None, columns)
    return _AskedSamples(files, len(others), facts, make, left_out)


def _digest(asked: _AskedSamples, elsewhere: bool) -> str:
    """Equal for runs that write the same bytes."""
    _, *settings, holdout, columns = asked.make.arguments
    return digest(
        [
            [file.identity(elsewhere=elsewhere) for file in asked.files],
            asked.facts.sha256,
            asked.make.template.source,
            settings,
            BLOCK_BYTES,
            *([str(holdout)] if holdout else [asked.others] if asked.others else []),
            *([columns] if columns else []),
        ]
    )


def _manifest(tally: SampleTally, facts: TokenizerFacts, seq_len: int, left_out: list[str]) -> DatasetManifest:
    count, tokens = tally.samples, tally.tokens
    return DatasetManifest(
        **facts.in_manifest(),
        append_eod=False,
        seq_len=seq_len,
        documents=count,
        tokens=tokens,
        samples=count,
        text_column="",
        sources=tally.source_rows(),
        files=tally.finish(),
        bad_line_count=tally.bad.count,
        bad_lines=tally.bad.kept,
        parts=[{"prefix": PREFIX, "documents": count, "tokens": tokens, "samples": count}],
        dropped={reason: tally.told[reason] for reason in (LONG, NO_ANSWER, UNLEARNED) if tally.told[reason]},
        objective="sft",
        tokenized_by="tokenizers",
        left_out=left_out,
        unread=dict(tally.unread),
        validation=tally.held_out.row(tally.held_out.documents) if tally.held_out else None,
    )
