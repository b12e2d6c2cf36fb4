"""The driver of a preparation on several machines: it gives out tasks and adds up their counts.

It keeps nothing outside the place of the shares, so it may be killed at any time: the next
one lists what is there and gives out the rest. The tokens never pass through it.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from smtrain.core.digests import digest
from smtrain.core.errors import DataError, SmtrainError
from smtrain.core.protocol.container import ml_root
from smtrain.worker.data.clean.overlap import read_tests
from smtrain.worker.data.manifest import MASK, PREFIX, VALIDATION, VALIDATION_MASK
from smtrain.worker.data.part_uploads import StoppedError
from smtrain.worker.data.prepare.progress import LINE_SECONDS, DataProgress
from smtrain.worker.data.prepare.spread.share_files import share_name
from smtrain.worker.data.prepare.spread.shared_folder import SharedPlace, place
from smtrain.worker.data.prepare.spread.totals import SpreadTally
from smtrain.worker.data.prepare.spread.work import (
    OutputPair,
    Pass,
    ShareTotals,
    TaskOutcome,
    WorkContext,
    do_share,
    find_duplicates,
    is_output_whole,
    keep_first,
    write_output,
)
from smtrain.worker.data.prepare_options import Corpus
from smtrain.worker.data.read.shards import SHARE_BYTES, Share, cut_shares
from smtrain.worker.data.resumable import Journal
from smtrain.worker.data.tokenize.encoder import MismatchError
from smtrain.worker.object_store import StorageError

PASS_BYTES = 512 << 20
"""Memory of one task that looks for duplicates."""
_BYTES_A_KEY = 64  # key, position, rank, order and their sorted copies
_RANGES = 16
_READERS = 16
_UNAVAILABLE = 4
"""Further tries of a task that a store, the network or a disk has failed, which by itself has tried
for a minute.
"""
_SHARES = f".{PREFIX}.shares"
_FORMAT = 4  # of the files in it


class CrashedError(SmtrainError):
    """Shares whose tasks crashed again and again were set aside; the rest is kept for the next
    attempt.
    """


class TaskExecutor(Protocol):
    """Runs tasks somewhere.

    `run` calls `function(*common_arguments, *arguments)` for each item (label, arguments).

    It yields (label, outcome) as tasks end, in any order. `outcome.has_crashed` says that the
    process of a task died each time it was tried. At most a few items for each core are taken
    ahead. A `large` task needs disk or memory: a machine runs at most two. One with `threads` can
    use several cores. `on_wait` is called about once a second.
    """

    def run(
        self,
        function: Callable[..., Any],
        common_arguments: tuple[Any, ...],
        items: Iterator[tuple[Any, tuple[Any, ...]]],
        on_wait: Callable[[], None],
        *,
        large: bool = False,
        threads: bool = False,
    ) -> Iterator[tuple[Any, TaskOutcome]]: ...


@dataclass(frozen=True)
class Spread:
    """The machines of a preparation.

    `work` is the place of the shares, a path or an s3:// URI that all machines see (default: next
    to the output). `out` is an s3:// prefix for the files of the dataset; without it they are
    written to the output folder, which all machines must see. `max_crashed` shares may be left out
    after they crashed. `stop` asks the driver to end.
    """

    executor: TaskExecutor
    work: str | None = None
    out: str | None = None
    share_bytes: int = SHARE_BYTES
    max_crashed: int = 0
    stop: threading.Event = field(default_factory=threading.Event)


class Driver:
    """One preparation of a corpus."""

    def __init__(
        self,
        spread: Spread,
        context: WorkContext,
        corpus: Corpus,
        report: Callable[[DataProgress], None],
        say: Callable[[str], None],
    ) -> None:
        self.spread, self.context, self.corpus, self._report, self._say = (
            spread,
            context,
            corpus,
            report,
            say,
        )
        self.files, self.shards = corpus.flat, corpus.shards
        self.tally = SpreadTally(corpus, context.encoder)
        self._place = SharedPlace(
            context.work
        )  # creates the folder, which an earlier run may have deleted
        self._began = self._said = time.monotonic()
        self._total = sum(shard.bytes for shard in self.shards)
        self._done_bytes = self._before = 0
        self._hosts: dict[str, list[float]] = {}
        self._lost: dict[int, Share] = {}

    def run(self) -> SpreadTally:
        """Do all remaining work. Raises DataError for text that cannot be used, MismatchError
        if the encoder gave other ids, CrashedError for crashed shares, StoppedError if it was asked
        to end.
        """
        totals = self._tokenize()
        cleaning = self.context.options.cleaning
        if cleaning.deduplicate and not self.context.sft:
            exact = self._duplicates(totals, "hashes", int(totals.documents.sum()))
            totals = replace(totals, exact_offsets=exact)
            numbers = range(len(self.shards))
            name = f"kept-{totals.tag}{{:05}}.json"
            survivor_records = self._stage(name, keep_first, totals, [(n, (n,)) for n in numbers])
            totals = replace(
                totals, survivors=np.array([survivor_records[n]["left"] for n in numbers], np.int64)
            )
        if cleaning.near is not None and not self.context.sft:
            document_count = int(
                (totals.documents if totals.survivors is None else totals.survivors).sum()
            )
            self.tally.compared, bands = document_count, cleaning.near.shape[0]
            totals = replace(
                totals, near_offsets=self._duplicates(totals, "bands", document_count * bands)
            )
        outputs = self._outputs()
        output_records = self._stage(
            f"output-{totals.tag}{{:05}}.json",
            write_output,
            totals,
            [(output.number, (output,)) for output in outputs],
            large=True,
        )
        self.tally.add_outputs(outputs, [output_records[output.number] for output in outputs])
        return self.tally

    def _tokenize(self) -> ShareTotals:
        """Have every share done; fold the records in the order of the text."""
        recorded_shares = {
            name[6:13]
            for name in self._place.names()
            if name.startswith("share-") and name.endswith(".json")
        }
        documents: list[int] = []
        firsts = np.zeros(len(self.shards) + 1, np.int64)
        pending_records: dict[int, dict[str, Any] | None] = {}
        count = 0

        def fold() -> None:
            while len(documents) in pending_records:
                record = pending_records.pop(len(documents))
                documents.append(record["documents"] if record else 0)
                if record:
                    self.tally.add_share(record)

        def ready(share: Share, record: dict[str, Any] | None) -> None:
            self._done_bytes += share.bytes if record else 0
            pending_records[share.number] = record
            fold()

        def missing_shares() -> Iterator[tuple[Share, tuple[Any, ...]]]:
            nonlocal count
            shares = cut_shares(
                self.shards, self.files, self.context.options.separator, self.spread.share_bytes
            )
            with ThreadPoolExecutor(_READERS) as pool:
                while share_batch := list(islice(shares, 4 * _READERS)):
                    finished_shares = [
                        s for s in share_batch if f"{s.number:07}" in recorded_shares
                    ]
                    read = dict(
                        zip(
                            (s.number for s in finished_shares),
                            pool.map(self._record, finished_shares),
                            strict=True,
                        )
                    )
                    for share in share_batch:
                        count = share.number + 1
                        firsts[share.shard + 1] = count
                        if record := read.get(share.number):
                            self._before += share.bytes
                            ready(share, record)
                            continue
                        yield (
                            share,
                            (
                                share,
                                {number: self.files[number] for number, _ in share.spans},
                            ),
                        )

        context = self.context
        for share, outcome in self._run(
            do_share, (context,), missing_shares(), threads=context.can_use_threads
        ):
            if outcome.has_crashed:
                self._lost[share.number] = share
                self._say(f"prepare: {self._describe_share(share)} is set aside: {outcome.error}")
            self._count_host(share, outcome)
            ready(share, None if outcome.has_crashed else self._value(outcome))
            self._report_progress()
        self._report_progress()
        np.maximum.accumulate(firsts, out=firsts)
        if self._before:
            self._say(f"prepare: {self._before / 1e6:,.1f} MB were done by an earlier attempt")
        self._refuse_lost()
        tag = f"without-{digest(sorted(self._lost))[:16]}-" if self._lost else ""
        return ShareTotals(tag, np.array(documents, np.int64), firsts, frozenset(self._lost))

    def _record(self, share: Share) -> dict[str, Any] | None:
        return self._place.record(f"{share_name(share.number)}.json")

    def _duplicates(self, totals: ShareTotals, kind: Pass, keys: int) -> NDArray[np.int64]:
        """The offsets of each shard in the files of a pass."""
        min_ranges = _RANGES if len(totals.documents) > _RANGES else 1
        ranges = max(min_ranges, -(-keys * _BYTES_A_KEY // PASS_BYTES))
        self._say(
            f"prepare: looking for {'exact' if kind == 'hashes' else 'near'} duplicates in {ranges}"
            " ranges"
        )
        items = [(number, (kind, ranges, number)) for number in range(ranges)]
        range_records = self._stage(
            f"{kind}-{totals.tag}{ranges}-{{:04}}.json", find_duplicates, totals, items
        )
        return np.array([range_records[number]["offsets"] for number in range(ranges)], np.int64)

    def _stage(
        self,
        name: str,
        function: Callable[..., Any],
        totals: ShareTotals,
        items: Sequence[tuple[int, tuple[Any, ...]]],
        *,
        large: bool = False,
    ) -> dict[int, dict[str, Any]]:
        """The results of the tasks by number; those of earlier attempts are not done again."""
        results: dict[int, dict[str, Any]] = {}
        names = set(self._place.names())
        for number, _ in items:
            record = (
                self._place.record(name.format(number)) if name.format(number) in names else None
            )
            if record is not None:
                results[number] = record
        for number in self._damaged_outputs(results) if large else ():
            self._say(
                f"prepare: {name.format(number)[:-5]} is not what was written; it is written again"
            )
            del results[number]
        todo = ((number, arguments) for number, arguments in items if number not in results)
        for number, outcome in self._run(function, (self.context, totals), todo, large=large):
            if outcome.has_crashed:
                raise CrashedError(
                    f"task {name.format(number)} crashed three times ({outcome.error}); give the"
                    " machines more memory, and run the same command again to resume."
                )
            results[number] = self._value(outcome)
            self._place.write_record(name.format(number), results[number])
        return results

    def _damaged_outputs(self, records: Mapping[int, dict[str, Any]]) -> list[int]:
        """The records whose files are missing or changed; the machines read them."""
        todo = ((number, (record["files"],)) for number, record in records.items())
        check_outcomes = self._run(is_output_whole, (self.context,), todo, large=True)
        return [
            number
            for number, outcome in check_outcomes
            if outcome.has_crashed or not self._value(outcome)
        ]

    def _run(
        self,
        function: Callable[..., Any],
        common_arguments: tuple[Any, ...],
        items: Iterable[tuple[Any, tuple[Any, ...]]],
        *,
        large: bool = False,
        threads: bool = False,
    ) -> Iterator[tuple[Any, TaskOutcome]]:
        """The outcome of each task; one that a store, the network or a disk failed is given out
        again later.

        Raises StorageError if that has no success.
        """
        tries, running_arguments = Counter[Any](), dict[Any, tuple[Any, ...]]()

        def start(
            tasks: Iterable[tuple[Any, tuple[Any, ...]]],
        ) -> Iterator[tuple[Any, tuple[Any, ...]]]:
            for label, arguments in tasks:
                running_arguments[label] = arguments
                yield label, arguments

        todo, run = items, self.spread.executor.run
        while True:
            failed_tasks = []
            for label, outcome in run(
                function,
                common_arguments,
                start(todo),
                self._check_stop,
                large=large,
                threads=threads,
            ):
                arguments = running_arguments.pop(label)
                if not outcome.unavailable:
                    yield label, outcome
                    continue
                tries[label] += 1
                if outcome.is_damaged or tries[label] > _UNAVAILABLE:
                    raise StorageError(outcome.error)
                failed_tasks.append((label, arguments))
                reason = outcome.error
            if not failed_tasks:
                return
            self._say(
                f"prepare: {len(failed_tasks)} tasks are given out again; the last one: {reason}"
            )
            todo = failed_tasks

    def _check_stop(self) -> None:
        if self.spread.stop.is_set():
            raise StoppedError(
                f"stopped after {self._done_bytes / 1e6:,.1f} MB; run the same command again to"
                " resume"
            )

    def _value(self, outcome: TaskOutcome) -> Any:
        if outcome.mismatch:
            raise MismatchError(outcome.error)
        if outcome.error:
            raise DataError(outcome.error)
        return outcome.value

    def _report_progress(self) -> None:
        seconds = time.monotonic() - self._began
        documents, tokens = self.tally.read_documents, self.tally.read_tokens
        self._report(
            DataProgress(self._done_bytes, self._total, documents, tokens, seconds, self._before)
        )

    def _count_host(self, share: Share, outcome: TaskOutcome) -> None:
        """Log now and then how fast each machine is; SageMaker makes a metric of it."""
        row = self._hosts.setdefault(outcome.host, [0, 0])
        row[0] += 1
        row[1] += share.bytes
        if time.monotonic() - self._said >= LINE_SECONDS:
            self.say_hosts()

    def say_hosts(self) -> None:
        self._said = time.monotonic()
        seconds = max(self._said - self._began, 1e-9)
        for host, (shares, size) in sorted(self._hosts.items()):
            if host:
                rate = size / 1e6 / seconds
                self._say(
                    f"prepare: host={host} shares={shares:.0f} mb={size / 1e6:.1f}"
                    f" mb_per_s={rate:.1f}"
                )

    def _describe_share(self, share: Share) -> str:
        """The share by its files."""
        number, stretch = share.spans[0]
        part = f" from {stretch.start:,} to {stretch.stop:,}" if stretch else ""
        suffix = f" and {len(share.spans) - 1} more files" if len(share.spans) > 1 else ""
        return f"share {share.number} ({self.files[number].name}{part}{suffix})"

    def _refuse_lost(self) -> None:
        if not self._lost:
            return
        share_names = [self._describe_share(share) for share in self._lost.values()]
        self.tally.left_out = [
            f"{name} is left out: its task crashed three times" for name in sorted(share_names)
        ]
        if len(share_names) > self.spread.max_crashed:
            suffix = f" and {len(share_names) - 1} more" if len(share_names) > 1 else ""
            raise CrashedError(
                f"{share_names[0]}{suffix} crashed three times, probably for lack of memory or"
                " because of a defect in a library; all other shares are done. Correct or remove"
                f" that text, or leave it out with data.max_crashed: {len(share_names)}."
            )

    def _outputs(self) -> list[OutputPair]:
        """The files to write: a pair for each shard, and those of what is held out."""
        corpus, sft = self.corpus, self.context.sft
        outputs: list[OutputPair] = []

        def add(prefix: str, mask: str, name: str, shards: Sequence[int], side: int | None) -> None:
            outputs.append(
                OutputPair(
                    len(outputs),
                    f"{prefix}{name}",
                    f"{mask}{name}" if sft else "",
                    tuple(shards),
                    side,
                )
            )

        for number, shard in enumerate(self.shards):
            add(
                corpus.prefixes[shard.part],
                MASK,
                shard.name,
                [number],
                0 if corpus.has_sides else None,
            )
        if corpus.has_sides:
            names = corpus.held_names
            for number, name in enumerate(names):
                shards = range(len(self.shards)) if len(names) == 1 else [number]
                add(VALIDATION, VALIDATION_MASK, name, shards, 1)
        return outputs


@dataclass(frozen=True)
class SpreadJob:
    """A preparation: the digest of text and settings, and what `WorkContext` and `Driver` need.

    `hub` are the hf:// paths that every machine loads by itself, with the commits at which they are
    read.
    """

    key: str
    corpus: Corpus
    tokenizer: Path
    encoder: str
    hub: tuple[tuple[str, str | None], ...]


@contextmanager
def spread_out(
    spread: Spread,
    journal: Journal,
    job: SpreadJob,
    report: Callable[[DataProgress], None],
    say: Callable[[str], None],
) -> Iterator[SpreadTally]:
    """Have the machines write the files of a dataset, to the journal's folder or to `spread.out`.

    The shares are deleted when the context ends, unless by a fault that another attempt may not
    meet.
    """
    corpus, options = job.corpus, job.corpus.options
    key = digest([_FORMAT, job.key, job.encoder, options.shard_bytes, spread.share_bytes])
    work = _work_folder(spread.work or str(journal.folder.with_name(_SHARES)), key)
    context = WorkContext(
        key,
        corpus.sequences > 0,
        options,
        str(job.tokenizer.absolute()),
        corpus.facts,
        job.encoder,
        work,
        spread.out or str(journal.folder.absolute()),
        str(ml_root()),
        corpus.heldout_files,
        job.hub,
        read_tests(options.cleaning.tests) if options.cleaning.tests else None,
    )
    driver = Driver(spread, context, corpus, report, say)
    try:
        try:
            tally = driver.run()
        finally:
            driver.say_hosts()
        yield tally
    except DataError:
        _clear(work)
        raise
    _clear(work)


def _clear(work: str) -> None:
    with suppress(DataError, StorageError):  # a role that may not delete leaves them in S3
        place(work).clear()
    if (folder := Path(work).parent).name == _SHARES:
        with suppress(OSError):
            folder.rmdir()


def _work_folder(location: str, key: str) -> str:
    """The place of the shares of this text and these settings; removes shares of other settings on
    a shared disk.
    """
    if "://" in location:
        return f"{location.rstrip('/')}/{key[:16]}"
    folder = Path(location).absolute()
    if folder.is_dir():
        for subfolder in folder.iterdir():
            if subfolder.is_dir() and subfolder.name != key[:16]:
                shutil.rmtree(subfolder, ignore_errors=True)
    return str(folder / key[:16])
