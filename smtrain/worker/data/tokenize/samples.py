"""Conversations to samples: ids, and a mask of those to learn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from smtrain.core.errors import DataError
from smtrain.worker.data.clean.holdout import conversation_hash
from smtrain.worker.data.prepare.prepare_options import PrepareOptions
from smtrain.worker.data.read.blocks import Block
from smtrain.worker.data.read.reading import BadLine
from smtrain.worker.data.read.records import RecordColumns, Records, read_records
from smtrain.worker.data.read.unread import UnreadText
from smtrain.worker.data.tokenize.chat import (
    COLUMNS,
    NAMED,
    ChatTemplate,
    Dialogue,
    RecordFault,
    Rendered,
    Shape,
    conversation,
    named,
    refuse_pairs,
    unread_of,
)
from smtrain.worker.data.tokenize.tokenizer import load_tokenizer

_SPLIT = "conversations that became a sample for each answer"
_CUT = "samples cut to seq_len + 1 tokens"
LONG = "samples longer than seq_len + 1 tokens"
UNLEARNED = "conversations whose answers are all marked as not to be learned"
NO_ANSWER = "samples without an answer in seq_len + 1 tokens"
_GROUP_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class SamplePiece:
    """The samples of one block: tokens and mask end to end, a length per sample, faults, and counts by reason.

    A pair of answers is two samples in a row, chosen and rejected. `sides` is None unless some samples are held out.
    `unread` counts text of the records that no sample has.
    """

    block: Block
    tokens: NDArray[Any]
    mask: NDArray[np.uint8]
    lengths: NDArray[np.int32]
    bad: list[BadLine]
    lines: int
    counts: Counter[str]
    sides: NDArray[np.int8] | None = None
    unread: UnreadText = field(default_factory=UnreadText)

    @classmethod
    def of(
        cls, block: Block, records: Records, samples: Sequence[tuple[NDArray[Any], NDArray[np.uint8]]],
        counts: Counter[str], sides: NDArray[np.int8] | None, unread: UnreadText,
    ) -> SamplePiece:  # fmt: skip
        """The piece of a block with these samples: ids and mask of each."""
        return cls(
            block.without_payload(),
            np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in samples)]),
            np.concatenate([np.zeros(0, np.uint8), *(mask for _, mask in samples)]),
            np.array([len(ids) for ids, _ in samples], np.int32),
            sorted(records.bad, key=lambda bad: bad.line),
            records.lines,
            +counts,
            sides,
            unread,
        )


class SampleMaker:
    """Turns blocks of records into samples; every worker process has one."""

    def __init__(self, folder: Path, options: PrepareOptions) -> None:
        self.folder, self.options = folder, options
        self.shape: Shape = options.format if options.format in ("alpaca", "messages") else "auto"  # type: ignore[assignment]
        self.holdout = options.holdout if options.holdout and options.holdout.from_sources else None
        self.template, self._tokenizer = ChatTemplate(folder), load_tokenizer(folder, lambda _: None)
        refuse_other_tokens(folder, self.template.tokens, self._tokenizer)
        self._limit = options.seq_len + 1

    @property
    def columns(self) -> RecordColumns:
        """The columns that may be read of a table."""
        return RecordColumns((*COLUMNS, *self.options.columns.values()), self._columns_fault)

    sequences = 1
    """Sequences of a sample."""
    reasons = (LONG, NO_ANSWER, UNLEARNED)
    """The counts of what is left out."""

    @property
    def about(self) -> str:
        """A sentence on how answers are found."""
        return self.template.about

    @property
    def decides(self) -> list[Any]:
        """The values, next to the inputs and the tokenizer, that decide which bytes the samples become."""
        return [self.template.source, [self.options.seq_len, self.shape, self.options.overlong]]

    def _columns_fault(self, names: list[str]) -> str | None:
        theirs = self.options.columns.values()
        try:
            refuse_pairs(names, {name: name for name in (*COLUMNS, *theirs)})
        except DataError as error:
            return f": {error}"
        spoken = [*NAMED, *theirs]
        if any(name in spoken for name in names):
            return None
        return (
            f" has the columns {', '.join(names)} and none of {', '.join(spoken)}; name the column of the "
            "conversations in data.columns as messages, or those of the instructions as instruction and output."
        )

    def piece(self, block: Block) -> SamplePiece:
        try:
            return self._piece(block)
        except DataError as error:
            raise DataError(f"{block.file.name}: {error}") from None

    def _piece(self, block: Block) -> SamplePiece:
        records = read_records(block)
        columns = self.options.columns
        rendered: list[Rendered] = []
        hashes: list[int] = []  # of the conversation of each text: all samples of one stay on one side
        counts: Counter[str] = Counter()
        unread = UnreadText(block.unread)
        for line, row in records.rows:
            try:
                dialogue = conversation(named(row, columns), self.shape)
                texts = self.template.render(dialogue)
                unread_here = self._unread(row, dialogue, texts)
            except RecordFault as fault:
                records.bad.append(BadLine(block.file.name, line, str(fault)))
                continue
            rendered += texts
            hashes += [conversation_hash(dialogue.messages)] * len(texts)
            counts[_SPLIT] += len(texts) > 1
            counts[UNLEARNED] += not texts
            unread.count(unread_here)
        fitted = [self._fitted(ids, mask, counts) for ids, mask in self._encoded(rendered)]
        sides = self.holdout.by_hash(np.array(hashes, np.uint64)) if self.holdout else None
        samples = [sample for sample in fitted if sample is not None]
        kept = np.array([sample is not None for sample in fitted], bool)
        sides = None if sides is None else sides[kept]
        return SamplePiece.of(block, records, samples, counts, sides, unread)

    def _unread(self, row: dict[str, Any], dialogue: Dialogue, texts: list[Rendered]) -> UnreadText:
        """The text of a record that its samples do not have."""
        unread = UnreadText(dialogue.unread)
        unread.count(unread_of(row, dialogue, self.options.columns))
        unread.count(self.template.unread(dialogue, texts) if texts else [])
        return unread

    def _encoded(self, rendered: list[Rendered]) -> Iterator[tuple[NDArray[Any], NDArray[np.uint8]]]:
        """Ids and mask of every text.

        A place in a text is mapped to its tokens by encoding the text before it; a token that spans the place counts
        as after it. Offsets are not used, because tokenizers disagree about them at blanks.
        """
        for group in _groups(rendered):
            texts = [piece for r in group for piece in (r.text, *(r.text[:at] for at in _inner(r)))]
            encodings = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
            for r in group:
                ids = np.array(next(encodings).ids, np.int32)
                at = {0: 0, len(r.text): len(ids)}
                for place in _inner(r):
                    at[place] = common_tokens(ids, np.array(next(encodings).ids, np.int32))
                mask = np.zeros(len(ids), np.uint8)
                for start, end in r.answers:
                    mask[at[start] : at[end]] = 1
                yield ids, mask

    def _fitted(
        self, ids: NDArray[Any], mask: NDArray[np.uint8], counts: Counter[str]
    ) -> tuple[NDArray[Any], NDArray[np.uint8]] | None:
        if len(ids) > self._limit:
            drop = self.options.overlong == "drop"
            counts[LONG if drop else _CUT] += 1
            if drop:
                return None
            ids, mask = ids[: self._limit], mask[: self._limit]
        if not mask[1:].any():  # the first token is predicted from nothing
            counts[NO_ANSWER] += 1
            return None
        return ids, mask


def refuse_other_tokens(folder: Path, written: Mapping[str, int], tokenizer: Tokenizer) -> None:
    """Refuse a token that only tokenizer_config.json knows: it would be learned in pieces."""
    for token, number in written.items():
        if tokenizer.token_to_id(token) != number:
            raise DataError(
                f"{folder}: the chat template writes {token!r}, which tokenizer_config.json calls a token and "
                "tokenizer.json does not have; name one that it has, there and in the template."
            )


def _groups(rendered: list[Rendered]) -> Iterator[list[Rendered]]:
    """Groups whose encodings, some hundred bytes per token, do not fill the memory."""
    group: list[Rendered] = []
    characters = 0
    for r in rendered:
        group.append(r)
        characters += len(r.text) + sum(_inner(r))
        if characters > _GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    yield group


def _inner(rendered: Rendered) -> list[int]:
    """The starts and ends of answers within a text, each once."""
    return sorted({at for answer in rendered.answers for at in answer} - {0, len(rendered.text)})


def common_tokens(ids: NDArray[Any], prefix: NDArray[Any]) -> int:
    """The number of tokens with which both begin."""
    count = min(len(ids), len(prefix))
    differing = np.flatnonzero(ids[:count] != prefix[:count])
    return int(differing[0]) if len(differing) else count
