"""Blocks of records to samples by worker processes, in the order of the text."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Literal

from smtrain.core.errors import DataError
from smtrain.core.machine import cores_here
from smtrain.worker.data.clean.holdout import HoldOut
from smtrain.worker.data.prepare.cluster.shares import Share
from smtrain.worker.data.prepare.cluster.working import ShareWork
from smtrain.worker.data.prepare.workers import end_with_parent
from smtrain.worker.data.read.blocks import BLOCK_BYTES, Block
from smtrain.worker.data.read.records import record_blocks
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.tokenize.chat import Shape
from smtrain.worker.data.tokenize.samples import Maker, SamplePiece


@contextmanager
def share_work(files: list[SourceFile], make: Maker, workers: int | None) -> Iterator[ShareWork]:
    """How shares become samples on this machine, by as many processes as it has cores."""
    count = workers or cores_here()

    def cut(share: Share) -> Iterator[Block]:
        return (block for number, s in share.spans for block in record_blocks(files[number], make.columns, s))

    pool: Executor
    if count == 1:
        pool, piece = ThreadPoolExecutor(1), make.piece
    else:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(count, context, initializer=_start_worker, initargs=make.arguments)
        piece = _work
    try:
        yield ShareWork(cut, lambda block: pool.submit(_listed, piece, block), 2 * count)
    except BrokenProcessPool as error:
        raise _broken(count) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _listed(piece: Callable[[Block], SamplePiece], block: Block) -> list[SamplePiece]:
    return [piece(block)]


def _broken(count: int) -> DataError:
    return DataError(
        f"a process of prepare ended unexpectedly, probably for lack of memory; use fewer than {count} workers."
    )


def sample_pieces(files: list[SourceFile], done: int, make: Maker, workers: int | None) -> Iterator[SamplePiece]:
    """The samples of every block but the first `done`, in the order of the text."""
    found = islice((block for file in files for block in record_blocks(file, make.columns)), done, None)
    count = workers or cores_here()
    if count == 1 or sum(file.bytes for file in files) <= BLOCK_BYTES:
        yield from map(make.piece, found)
        return
    # processes, because templates run under Python's lock; spawned, because a forked copy of threads may hang
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=_start_worker, initargs=make.arguments)
    waiting: deque[Future[SamplePiece]] = deque()
    try:
        for block in found:
            waiting.append(pool.submit(_work, block))
            if len(waiting) >= 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise _broken(count) from error
    finally:
        pool.shutdown(cancel_futures=True)


_maker: Maker


def _start_worker(
    folder: Path, seq_len: int, shape: Shape, overlong: Literal["truncate", "drop"], holdout: HoldOut | None,
    columns: dict[str, str],
) -> None:  # fmt: skip
    global _maker
    # the processes are the parallelism; threads within each would only compete
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    end_with_parent()
    _maker = Maker(folder, seq_len, shape, overlong, holdout, columns)


def _work(block: Block) -> SamplePiece:
    return _maker.piece(block)
