"""Conversations to samples: ids, and the loss mask, which says which of them are learned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from smtrain.core.errors import DataError
from smtrain.worker.data.clean.holdout import conversation_hash
from smtrain.worker.data.piece import Piece
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.data.read.blocks import Block
from smtrain.worker.data.read.ignored_fields import Findings, IgnoredText
from smtrain.worker.data.read.reading import BadLine
from smtrain.worker.data.read.records import RecordColumns, read_records
from smtrain.worker.data.tokenize.chat import ChatTemplate
from smtrain.worker.data.tokenize.dialogue import (
    COLUMNS,
    MAPPABLE_COLUMNS,
    Shape,
    conversation,
    ignored_fields_of,
    map_columns,
    refuse_pairs,
)
from smtrain.worker.data.tokenize.template_losses import Rendering
from smtrain.worker.data.tokenize.turns import RecordFault, holds_other_turns
from smtrain.worker.data.tokenizer import load_tokenizer, model_vocabulary, unknown_token

OTHER_TURNS = "answers with turns of a user or of tools in them, which are learned like the answer"
SPLIT = "conversations that became a sample for each answer"
_CUT = "samples cut to seq_len + 1 tokens"
LONG = "samples longer than seq_len + 1 tokens"
ALL_SKIPPED = "conversations whose answers are all marked as not to be learned"
NO_ANSWER = "samples without an answer in seq_len + 1 tokens"
_GROUP_CHARACTERS = 1 << 20
Document = tuple[NDArray[Any], NDArray[np.uint8]]
"""Ids, and a mask of those to learn."""


class RecordMaker(ABC):
    """Turns blocks of records into samples; every worker process has one.

    A sample is `sequences` documents in a row.

    `reasons` are the counts of what is left out, `slips` those of what is learned and seldom meant.
    `about` is a sentence on what becomes of the records, and `decides` the values, next to the
    inputs and the tokenizer, that decide which bytes they become.
    """

    sequences: ClassVar[int]
    known_columns: ClassVar[tuple[str, ...]]
    """Every column of a table to read, refuse or count."""
    reasons: tuple[str, ...]
    slips: tuple[str, ...] = (OTHER_TURNS,)
    about: str

    def __init__(self, folder: Path, options: PrepareOptions) -> None:
        self.folder, self.options, self._vocabulary = folder, options, model_vocabulary(folder)
        self.holdout = options.holdout if options.holdout and options.holdout.from_sources else None

    @property
    def columns(self) -> RecordColumns:
        """The columns that may be read of a table."""
        return RecordColumns(
            (*self.known_columns, *self.options.columns.values()), self._columns_fault
        )

    @property
    @abstractmethod
    def decides(self) -> list[Any]: ...

    @abstractmethod
    def _columns_fault(self, names: list[str]) -> str | None: ...

    @abstractmethod
    def _read(self, row: dict[str, Any]) -> tuple[Any, IgnoredText]:
        """The part of a record that becomes samples, and counts of the rest. Raises RecordFault."""

    @abstractmethod
    def _samples(
        self, read: list[Any], counts: Counter[str]
    ) -> Iterator[tuple[int, Any, list[Document]]]:
        """The documents of each text or pair, with the index of its record in `read` and what
        decides its side.

        All samples of a record come in a row and stay on one side.
        """

    def piece(self, block: Block) -> Piece:
        """The samples of a block."""
        records = read_records(block)
        findings = Findings(unread=IgnoredText(block.ignored_text))
        read: list[Any] = []
        lines: list[int] = []
        documents: list[Document] = []
        hashes: list[int] = []
        try:
            for line, row in records.rows:
                try:
                    record, ignored_text = self._read(row)
                except RecordFault as fault:
                    records.bad.append(BadLine(block.file.name, line, str(fault)))
                    continue
                read.append(record)
                lines.append(line)
                findings.unread.count(ignored_text)
            for at, of_one in groupby(self._samples(read, findings.noted), key=itemgetter(0)):
                samples = [(decides, record_documents) for _, decides, record_documents in of_one]
                if reason := self._unknown_token(
                    ids for _, record_documents in samples for ids, _ in record_documents
                ):
                    records.bad.append(BadLine(block.file.name, lines[at], reason))
                    continue
                for decides, record_documents in samples:
                    documents += record_documents
                    hashes += (
                        [conversation_hash(decides)] * len(record_documents) if self.holdout else []
                    )
        except DataError as error:
            raise DataError(f"{block.file.name}: {error}") from None
        findings.noted = +findings.noted
        return Piece(
            block.without_payload(),
            np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in documents)]),
            np.array([len(ids) for ids, _ in documents], np.int32),
            sorted(records.bad, key=lambda bad: bad.line),
            records.lines,
            findings,
            np.concatenate([np.zeros(0, np.uint8), *(mask for _, mask in documents)]),
            self.holdout.by_hash(np.array(hashes, np.uint64)) if self.holdout else None,
        )

    def _unknown_token(self, ids: Iterable[NDArray[Any]]) -> str:
        """The reason to refuse a record with these ids if the model lacks one; else empty."""
        return next(
            filter(
                None, (unknown_token(token_ids, self._vocabulary, self.folder) for token_ids in ids)
            ),
            "",
        )


class SampleMaker(RecordMaker):
    """Turns conversations into samples."""

    sequences = 1
    known_columns = COLUMNS
    reasons = (LONG, NO_ANSWER, ALL_SKIPPED)

    def __init__(self, folder: Path, options: PrepareOptions) -> None:
        super().__init__(folder, options)
        self.shape: Shape = options.format if options.format in ("alpaca", "messages") else "auto"  # type: ignore[assignment]
        self.template = ChatTemplate(folder, options.chat_template_kwargs)
        self._tokenizer = load_tokenizer(folder, lambda _: None)
        refuse_other_tokens(folder, self.template.tokens, self._tokenizer)
        self.about = self.template.about
        self._limit = options.seq_len + 1

    @property
    def decides(self) -> list[Any]:
        settings = [self.options.seq_len, self.shape, self.options.overlong]
        return [
            self.template.source,
            settings,
            *([self.template.options] if self.template.options else []),
        ]

    def _columns_fault(self, names: list[str]) -> str | None:
        source_columns = self.options.columns.values()
        try:
            refuse_pairs(names, {name: name for name in (*COLUMNS, *source_columns)})
        except DataError as error:
            return f": {error}"
        spoken = [*MAPPABLE_COLUMNS, *source_columns]
        if any(name in spoken for name in names):
            return None
        return (
            f" has the columns {', '.join(names)} without {', '.join(spoken)}; name the column"
            " of the conversations in data.columns as messages, or those of the instructions as"
            " instruction and output."
        )

    def _read(self, row: dict[str, Any]) -> tuple[Any, IgnoredText]:
        dialogue = conversation(map_columns(row, self.options.columns), self.shape)
        texts = self.template.render(dialogue)
        ignored_text = IgnoredText(dialogue.ignored_text)
        ignored_text.count(ignored_fields_of(row, dialogue, self.options.columns))
        ignored_text.count(self.template.unwritten_names(dialogue, texts) if texts else [])
        return (dialogue.messages, texts), ignored_text

    def _samples(
        self, read: list[Any], counts: Counter[str]
    ) -> Iterator[tuple[int, Any, list[Document]]]:
        for turns, texts in read:
            counts[SPLIT] += len(texts) > 1
            counts[ALL_SKIPPED] += not texts
            answers = (m.get("content") for m in turns if m["role"] == "assistant")
            counts[OTHER_TURNS] += any(holds_other_turns(answer) for answer in answers if answer)
        of = [(at, messages) for at, (messages, texts) in enumerate(read) for _ in texts]
        renderings = [text for _, texts in read for text in texts]
        for (at, messages), (ids, mask) in zip(of, self._encode_texts(renderings), strict=True):
            yield at, messages, self._fit_sample(ids, mask, counts)

    def _encode_texts(self, renderings: list[Rendering]) -> Iterator[Document]:
        """Ids and mask of every text.

        A place in a text is mapped to its tokens by encoding the text before it; a token that spans
        the place counts as after it. Offsets are not used, because tokenizers disagree about them
        at blanks.
        """
        for group in _groups(renderings):
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

    def _fit_sample(
        self, ids: NDArray[Any], mask: NDArray[np.uint8], counts: Counter[str]
    ) -> list[Document]:
        if len(ids) > self._limit:
            drop = self.options.overlong == "drop"
            counts[LONG if drop else _CUT] += 1
            if drop:
                return []
            ids, mask = ids[: self._limit], mask[: self._limit]
        if not mask[1:].any():  # the first token is predicted from nothing
            counts[NO_ANSWER] += 1
            return []
        return [(ids, mask)]


def refuse_other_tokens(
    folder: Path, template_tokens: Mapping[str, int], tokenizer: Tokenizer
) -> None:
    """Refuse a token that only tokenizer_config.json knows: it would be learned in pieces."""
    for token, number in template_tokens.items():
        if tokenizer.token_to_id(token) != number:
            raise DataError(
                f"{folder}: the chat template writes {token!r}, which tokenizer_config.json calls a"
                " token and tokenizer.json does not have; name one that it has, there and in the"
                " template."
            )


def _groups(renderings: list[Rendering]) -> Iterator[list[Rendering]]:
    """Groups whose encodings, some hundred bytes per token, do not fill the memory."""
    group: list[Rendering] = []
    characters = 0
    for r in renderings:
        group.append(r)
        characters += len(r.text) + sum(_inner(r))
        if characters > _GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    yield group


def _inner(rendering: Rendering) -> list[int]:
    """The starts and ends of answers within a text, each once."""
    return sorted({at for answer in rendering.answers for at in answer} - {0, len(rendering.text)})


def common_tokens(ids: NDArray[Any], prefix: NDArray[Any]) -> int:
    """The number of tokens with which both begin."""
    count = min(len(ids), len(prefix))
    differing = np.flatnonzero(ids[:count] != prefix[:count])
    return int(differing[0]) if len(differing) else count
