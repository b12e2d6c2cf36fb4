"""The tasks of a preparation on several machines.

Each is a function of the text and the settings, and may run twice.

1. `do_share`: the text of a share becomes tokens, and keys for duplicates.
2. `find_duplicates` for exact duplicates: one task for each range of hashes reads the keys of all shares in it and
   names all documents but the first of each hash. `keep_first`: one task a shard turns that into a
   bit per document.
3. `find_duplicates` for near duplicates, by ranges of bands, among the documents that are left.
4. `write_output`: one task for each output file reads its shares and writes the tokens of the documents that are left.

The memory of 2 and 3 is bounded by the number of ranges, that of 1 and 4 by a few MB and the keys
of one share.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from smtrain.core.errors import DataError
from smtrain.core.protocol.container import Container, ml_root
from smtrain.worker.data.clean.dedup import DUPLICATES, EXAMPLE_TOKENS, NEAR_DUPLICATES
from smtrain.worker.data.clean.holdout import HOLDOUT, TEST, TEST_PART, TRAIN
from smtrain.worker.data.clean.overlap import OverlapFinder
from smtrain.worker.data.clean.refiner import Refiner
from smtrain.worker.data.piece import Piece
from smtrain.worker.data.prepare.dataset_writer import TallyPart
from smtrain.worker.data.prepare.pieces import (
    READ_AHEAD,
    TokenizeSettings,
    pieces,
    span_blocks,
    tasks,
    tokenize,
)
from smtrain.worker.data.prepare.spread.checksummed_blocks import seal
from smtrain.worker.data.prepare.spread.share_files import (
    ShareReader,
    ShareWriter,
    key_range,
    keys_between,
    share_name,
)
from smtrain.worker.data.prepare.spread.shared_folder import place
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.data.read.ignored_fields import EXAMPLES
from smtrain.worker.data.read.records import record_blocks
from smtrain.worker.data.read.shards import Share
from smtrain.worker.data.read.sources import SourceFile, find_files
from smtrain.worker.data.tokenize import encoder
from smtrain.worker.data.tokenize.encoder import Encoder, MismatchError, TokenizersEncoder
from smtrain.worker.data.tokenize.pairs import record_maker
from smtrain.worker.data.tokenize.samples import RecordMaker
from smtrain.worker.data.tokenizer import TokenizerFacts
from smtrain.worker.data.workers import read_ahead
from smtrain.worker.object_store import StorageError, explain, is_of_machine, retry

THREADS = "SMTRAIN_TASK_THREADS"
"""The variable with the cores of a task that can use several."""
Pass = Literal["hashes", "bands"]


@dataclass(frozen=True)
class WorkContext:
    """The settings that all tasks of a preparation share.

    `work` and `out` name the places of shares and of the dataset's files. `root` is /opt/ml of the
    driver, whose paths differ from those of other hosts on the local control plane. `heldout_files`
    are the numbers of files held out whole. `hub` are the sources that every machine has to load by
    itself, with their commits.
    """

    key: str
    sft: bool
    options: PrepareOptions
    tokenizer: str
    facts: TokenizerFacts
    encoder: str
    work: str
    out: str
    root: str
    heldout_files: frozenset[int]
    hub: tuple[tuple[str, str | None], ...] = ()
    tests: OverlapFinder | None = None

    @property
    def can_use_threads(self) -> bool:
        """Whether `do_share` can use several cores; filters and conversations are Python, which
        runs one thread.
        """
        return not self.sft and not self.options.cleaning.refines


@dataclass(frozen=True)
class ShareTotals:
    """The shares that are done: documents of each [shares], and the first share of each shard and
    the end [shards + 1].

    The files of later passes have `tag` in their names. `exact_offsets` and `near_offsets` are the
    offsets [ranges, shards + 1] of each shard in the files of `find_duplicates`, and `survivors`
    the documents of each shard that are no exact duplicates.
    """

    tag: str
    documents: NDArray[np.int64]
    firsts: NDArray[np.int64]
    lost_shares: frozenset[int] = frozenset()
    exact_offsets: NDArray[np.int64] | None = None
    survivors: NDArray[np.int64] | None = None
    near_offsets: NDArray[np.int64] | None = None

    def shares(self, shard: int) -> list[int]:
        return [
            n
            for n in range(int(self.firsts[shard]), int(self.firsts[shard + 1]))
            if n not in self.lost_shares
        ]

    def in_shard(self, shard: int) -> int:
        """The number of its documents."""
        return int(sum(self.documents[self.shares(shard)]))


@dataclass(frozen=True)
class OutputPair:
    """A pair of files to write: the documents of one `side` (None: all) of some shards, with their
    masks for sft.
    """

    number: int
    prefix: str
    mask: str
    shards: tuple[int, ...]
    side: int | None

    @property
    def counts(self) -> bool:
        """Whether it counts the documents of its shards; what is held out of them is in a second
        output.
        """
        return self.side in (None, TRAIN)


class _TaskProcess:
    """The tokenizer and filters, which a process keeps between tasks."""

    def __init__(self, context: WorkContext) -> None:
        self.key = context.key
        tokenizer = Path(path_on_host(context.tokenizer, context.root))
        options = context.options
        self.maker: RecordMaker | None = None
        if context.sft:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one core
            self.maker = record_maker(tokenizer, options)
            return
        cleaning = options.cleaning
        if cleaning.languages and cleaning.languages.model:
            model = path_on_host(cleaning.languages.model, context.root)
            cleaning = replace(cleaning, languages=replace(cleaning.languages, model=model))
        refine = Refiner(cleaning, context.tests).refine if cleaning.refines else None
        self.settings = TokenizeSettings(options, tokenizer, context.facts, refine)
        self.encoder = named_encoder(tokenizer, context.encoder)
        self.hub: dict[str, SourceFile] | None = None


_machine: _TaskProcess | None = None


def _task_process(context: WorkContext) -> _TaskProcess:
    global _machine
    if _machine is None or _machine.key != context.key:
        _machine = _TaskProcess(context)
    return _machine


def named_encoder(tokenizer: Path, name: str) -> Encoder:
    """The encoder that the driver uses. Raises DataError if this machine lacks it."""
    fast, reason = encoder.choose(tokenizer, _threads())
    text_encoder = fast if fast.name == name else TokenizersEncoder(tokenizer)
    if text_encoder.name != name:
        raise DataError(
            f"{socket.gethostname()} tokenizes with {fast.name}{f' ({reason})' if reason else ''}"
            f" and the driver with {name}; install the same packages on both."
        )
    return text_encoder


def _threads() -> int:
    return int(os.environ.get(THREADS, "1"))


def path_on_host(path: str, root: str) -> str:
    """The driver's path as this host names it."""
    host_root = str(ml_root())
    return (
        host_root + path[len(root) :]
        if root and host_root != root and path.startswith(f"{root}/")
        else path
    )


@dataclass
class TaskOutcome:
    """The result of a task, or the error in the text that it met, and what the log says of its
    machine.
    """

    value: Any = None
    error: str = ""
    mismatch: bool = False
    has_crashed: bool = False
    unavailable: bool = False
    """A store, the network or a disk failed: the task may succeed later."""
    is_damaged: bool = False
    """It failed because of a damaged file of earlier work, which the next attempt makes again."""
    host: str = ""
    seconds: float = 0.0


def outcome(function: Any, *arguments: Any) -> TaskOutcome:
    """Call a task; errors that a second try would meet again become part of the result."""
    began = time.monotonic()
    try:
        value = function(*arguments)
        return TaskOutcome(value, host=host_name(), seconds=time.monotonic() - began)
    except MismatchError as error:
        return TaskOutcome(error=str(error), mismatch=True)
    except StorageError as error:
        return TaskOutcome(
            error=str(error), unavailable=True, is_damaged=error.damaged, host=host_name()
        )
    except DataError as error:
        return TaskOutcome(error=str(error))
    except OSError as error:
        if not is_of_machine(error):
            raise
        return TaskOutcome(
            error=f"{host_name()}: {explain(error)}.", unavailable=True, host=host_name()
        )


def outcomes(
    function: Any, several: list[tuple[Any, ...]], *common_arguments: Any
) -> list[TaskOutcome]:
    """Call a task with each of several arguments at the same time."""
    with ThreadPoolExecutor(len(several)) as pool:
        return list(
            pool.map(lambda arguments: outcome(function, *common_arguments, *arguments), several)
        )


def host_name() -> str:
    """The name of this host in its job, or of this machine."""
    container = Container.from_files()
    return container.host if len(container.hosts) > 1 else socket.gethostname()


def do_share(context: WorkContext, share: Share, files: Mapping[int, SourceFile]) -> dict[str, Any]:
    """Tokenize a share and return its record.

    Raises DataError for text that cannot be used, or is not here.
    """
    machine = _task_process(context)
    host_files = {number: _same_file(context, file) for number, file in files.items()}
    with ShareWriter(place(context.work), share, np.dtype(context.facts.dtype)) as writer:
        for piece in _pieces(context, machine, share, host_files):
            writer.add(piece, _sides(context, piece))
        return writer.finish()


def _pieces(
    context: WorkContext, machine: _TaskProcess, share: Share, files: Mapping[int, SourceFile]
) -> Iterator[Piece]:
    if machine.maker is not None:
        for number, stretch in share.spans:
            yield from map(
                machine.maker.piece, record_blocks(files[number], machine.maker.columns, stretch)
            )
        return
    todo = span_blocks(share.spans, files, context.options)
    threads = _threads()
    if context.can_use_threads and threads > 1:
        settings = replace(machine.settings, options=replace(context.options, workers=threads))
        with ThreadPoolExecutor(threads, thread_name_prefix="tokenize") as pool:
            yield from pieces(todo, settings, machine.encoder, pool)
        return
    for task in tasks(read_ahead(todo, READ_AHEAD)):
        yield from tokenize(task, machine.settings, machine.encoder)


def _sides(context: WorkContext, piece: Piece) -> NDArray[np.int8] | None:
    if piece.sides is not None or not context.sft or context.options.holdout is None:
        return piece.sides
    is_held_out = piece.block.file.number in context.heldout_files
    return np.full(len(piece.lengths), HOLDOUT if is_held_out else TRAIN, np.int8)


def _same_file(context: WorkContext, file: SourceFile) -> SourceFile:
    """The file as this machine reads it.

    Raises StorageError if it is not here, DataError if it is another.
    """
    if "://" in file.path:
        return replace(file)
    path = path_on_host(file.path, context.root)
    if not os.path.exists(path) and context.hub:
        machine = _task_process(context)
        if machine.hub is None:
            file_lists = (
                find_files(uri, commits={uri: at} if at else None) for uri, at in context.hub
            )
            machine.hub = {hub_file.name: hub_file for files in file_lists for hub_file in files}
        path = machine.hub[file.name].path if file.name in machine.hub else path
    try:
        size = retry(lambda: os.stat(path).st_size)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read on {socket.gethostname()} ({error.strerror}); every machine"
            " must see the text: name a shared folder or s3://."
        ) from None
    if size != file.bytes:
        raise DataError(
            f"{path} has {size} bytes on {socket.gethostname()} and {file.bytes} on the driver;"
            " give all machines the same text."
        )
    return replace(file, path=path)


def find_duplicates(
    context: WorkContext, totals: ShareTotals, kind: Pass, ranges: int, number: int
) -> dict[str, Any]:
    """Name the documents of range `number` of `ranges` that repeat an earlier one; returns how many
    each shard has.

    Of near duplicates, only the first `documents` are compared with.
    """
    target = place(context.work)
    first, last = key_range(number, ranges)
    keys, positions, ranks = [np.zeros(0, "<u8")], [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    earlier_survivors = 0
    for shard in range(len(totals.firsts) - 1):
        survivors = _survivor_mask(context, totals, shard) if kind == "bands" else None
        rank = None if survivors is None else earlier_survivors + np.cumsum(survivors) - 1
        earlier_survivors += 0 if survivors is None else int(survivors.sum())
        at = 0
        for share in totals.shares(shard):
            count = int(totals.documents[share])
            rows = (
                keys_between(target, share, kind, first, last)
                if count
                else np.zeros(0, [("key", "u8")])
            )
            if count and survivors is not None and rank is not None:
                rows = rows[survivors[at + rows["document"].astype(np.int64)]]
                ranks.append(rank[at + rows["document"].astype(np.int64)])
            if len(rows):
                keys.append(rows["key"])
                positions.append(
                    (np.uint64(share) << np.uint64(32)) | rows["document"].astype(np.uint64)
                )
            at += count
    all_keys, places = np.concatenate(keys), np.concatenate(positions)
    order = np.argsort(all_keys, kind="stable")
    all_keys = all_keys[order]
    leads = np.ones(len(all_keys), bool)
    leads[1:] = all_keys[1:] != all_keys[:-1]
    repeats = ~leads
    near_duplicates = context.options.cleaning.near
    if kind == "bands" and near_duplicates is not None:
        rank_of = np.concatenate(ranks)[order]
        lead = (
            np.maximum.accumulate(np.where(leads, np.arange(len(all_keys)), 0))
            if len(all_keys)
            else all_keys.astype(int)
        )
        repeats &= rank_of[lead] < near_duplicates.documents
    losers = np.unique(places[order[repeats]])
    name = f"{kind}-{totals.tag}{ranges}-{number:04}"
    target.write(f"{name}.losers", seal(losers.astype("<u8").tobytes()))
    bounds = np.searchsorted(losers, totals.firsts.astype(np.uint64) << np.uint64(32))
    return {"offsets": bounds.tolist()}


def _losers(
    context: WorkContext, totals: ShareTotals, kind: Pass, offsets: NDArray[np.int64], shard: int
) -> NDArray[Any]:
    """The documents of a shard that `find_duplicates` named, as numbers within the shard."""
    position_parts = [np.zeros(0, "<u8")]
    for number, row in enumerate(offsets):
        first, stop = int(row[shard]), int(row[shard + 1])
        if stop > first:
            name = f"{kind}-{totals.tag}{len(offsets)}-{number:04}"
            raw = place(context.work).read_sealed(
                f"{name}.losers", f"{name}.json", 8 * first, 8 * stop
            )
            if len(raw) != 8 * (stop - first):
                raise place(context.work).damage_error(f"{name}.losers", f"{name}.json")
            position_parts.append(np.frombuffer(raw, "<u8"))
    positions = np.unique(np.concatenate(position_parts))
    shares = totals.shares(shard)
    bases = np.zeros(int(totals.firsts[-1]) + 1, np.int64)
    bases[shares] = np.cumsum([0, *totals.documents[shares]])[:-1]
    of_share = (positions >> np.uint64(32)).astype(np.int64)
    return np.asarray(bases[of_share] + (positions & np.uint64(0xFFFFFFFF)).astype(np.int64))


def keep_first(context: WorkContext, totals: ShareTotals, shard: int) -> dict[str, Any]:
    """Write a bit per document of a shard, set unless it is an exact duplicate; returns how many
    are left.
    """
    assert totals.exact_offsets is not None
    keep_mask = np.ones(totals.in_shard(shard), bool)
    keep_mask[_losers(context, totals, "hashes", totals.exact_offsets, shard)] = False
    place(context.work).write(
        f"{_kept_name(totals, shard)}.bits", seal(np.packbits(keep_mask).tobytes())
    )
    return {"left": int(keep_mask.sum())}


def _kept_name(totals: ShareTotals, shard: int) -> str:
    return f"kept-{totals.tag}{shard:05}"


def _survivor_mask(context: WorkContext, totals: ShareTotals, shard: int) -> NDArray[np.bool_]:
    """A mask of the documents of a shard that are no exact duplicates."""
    count = totals.in_shard(shard)
    if totals.exact_offsets is None:
        return np.ones(count, bool)
    name = _kept_name(totals, shard)
    raw = place(context.work).read_sealed(f"{name}.bits", f"{name}.json")
    if len(raw) != -(-count // 8):
        raise place(context.work).damage_error(f"{name}.bits", f"{name}.json")
    return np.unpackbits(np.frombuffer(raw, np.uint8), count=count).astype(bool)


def write_output(context: WorkContext, totals: ShareTotals, output: OutputPair) -> dict[str, Any]:
    """Write one pair of files, with masks for sft, and return its files and counts, which are also
    kept as a record.
    """
    work, out, dtype = place(context.work), place(context.out), np.dtype(context.facts.dtype)
    drop_counts: Counter[str] = Counter()
    examples: list[tuple[int, list[int]]] = []
    per_file: dict[int, int] = {}
    with out.scratch() as folder, ExitStack() as stack:
        tallies = [TallyPart(folder, output.prefix, dtype)]
        tallies += [TallyPart(folder, output.mask, np.dtype("u1"))] if output.mask else []
        for tally in tallies:
            tally.begin()
            stack.callback(tally.close)
        for shard in output.shards:
            first = _survivor_mask(context, totals, shard)
            survivors = first.copy()
            if totals.near_offsets is not None:
                survivors[_losers(context, totals, "bands", totals.near_offsets, shard)] = False
            at = 0
            for share in totals.shares(shard):
                record = work.record(f"{share_name(share)}.json")
                if record is None:
                    raise StorageError(
                        f"share {share} is not in {work.uri} any more; run the same command again."
                    )
                reader = ShareReader(work, record, dtype)
                rows = slice(at, at + int(totals.documents[share]))
                at = rows.stop
                output_mask = survivors[rows]
                if output.counts:
                    drop_counts[DUPLICATES] += int((~first[rows]).sum())
                    drop_counts[NEAR_DUPLICATES] += int((first[rows] & ~output_mask).sum())
                    _keep_examples(examples, reader, first[rows] & ~output_mask)
                sides = reader.column("sides", "i1")
                if sides is not None and output.side is not None:
                    if output.counts:
                        drop_counts[TEST_PART] += int((output_mask & (sides == TEST)).sum())
                    output_mask = output_mask & (sides == output.side)
                for tally, mask in zip(tallies, (False, True), strict=False):
                    for tokens, lengths in reader.tokens(
                        None if output_mask.all() else output_mask, mask=mask
                    ):
                        tally.add(tokens, lengths)
                _count_files(per_file, record["runs"], output_mask)
        files: dict[str, Any] = {}
        documents, tokens = tallies[0].documents, tallies[0].tokens
        for tally in tallies:
            files |= tally.finish()
        if not documents and "-" in output.prefix:
            files = {}  # a shard without a document
        for name in files:
            out.put(folder / name, name)
    return {
        "documents": documents,
        "tokens": tokens,
        "files": files,
        "dropped": +drop_counts,
        "examples": examples,
        "per_file": list(per_file.items()),
    }


def is_output_whole(context: WorkContext, files: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether files that `write_output` wrote still have their sizes and SHA-256."""
    out = place(context.out)
    return all(out.fingerprint(name) == dict(mark) for name, mark in files.items())


def _count_files(
    counts: dict[int, int], runs: list[list[Any]], keep_mask: NDArray[np.bool_]
) -> None:
    """Add the documents that each file keeps; a run of a record is [file, first, lines, documents,
    ...].
    """
    ends = np.concatenate([[0], np.cumsum(keep_mask)])
    at = 0
    for number, _, _, documents, *_ in runs:
        counts[number] = counts.get(number, 0) + int(ends[at + documents] - ends[at])
        at += documents


def _keep_examples(
    examples: list[tuple[int, list[int]]], reader: ShareReader, left_out: NDArray[np.bool_]
) -> None:
    """Keep the first tokens of the first few documents, with the numbers of their files."""
    numbers = np.flatnonzero(left_out)[: EXAMPLES - len(examples)]
    if not len(numbers):
        return
    example_mask = np.zeros(len(left_out), bool)
    example_mask[numbers] = True
    ends = np.cumsum([run[3] for run in reader.record["runs"]])
    file_of = [
        reader.record["runs"][int(np.searchsorted(ends, number, "right"))][0] for number in numbers
    ]
    at = 0
    for tokens, lengths in reader.tokens(example_mask):
        starts = np.concatenate([[0], np.cumsum(lengths)])
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=False):
            examples.append(
                (file_of[at], tokens[start : start + min(length, EXAMPLE_TOKENS)].tolist())
            )
            at += 1
