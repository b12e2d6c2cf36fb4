"""Merge and split indexed datasets, pair by pair: `PREFIX.bin/.idx` of any writer, documents kept whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np

from smtrain.core.errors import DataError
from smtrain.worker.data.checksums import SUFFIX, fingerprints
from smtrain.worker.data.manifest import refuse_others
from smtrain.worker.data.pack.indexed import IndexedDataset, write_index

_CHUNK = 1 << 22


def merge(prefixes: Sequence[Path], target: Path, *, overwrite: bool = False) -> int:
    """Append the datasets to one another as Megatron's own tool does; return the number of documents.

    Raises DataError if their token types differ, only some have modes or, without `overwrite`, the target exists.
    """
    _refuse_target(target, overwrite)
    parts = [IndexedDataset(prefix) for prefix in prefixes]
    kinds = {part.dtype.name for part in parts}
    if len(kinds) > 1:
        raise DataError(f"the datasets hold {' and '.join(sorted(kinds))}; prepare them with one tokenizer.")
    if len({part.modes is None for part in parts}) > 1:
        raise DataError("some of the datasets are multimodal and some are not; merge only those of a kind.")
    lengths = np.concatenate([part.lengths for part in parts])
    ends, before = [np.zeros(1, np.int64)], 0
    for part in parts:
        ends.append(part.document_index[1:] + before)
        before += len(part)
    modes = np.concatenate([part.modes for part in parts]) if parts[0].modes is not None else None
    partial = _partial(target, ".bin")
    with partial.open("wb") as out:
        for part in parts:
            for at in range(0, len(part.tokens), _CHUNK):
                out.write(np.ascontiguousarray(part.read(at, min(at + _CHUNK, len(part.tokens)))).data)
    documents = np.concatenate(ends)
    write_index(_partial(target, ".idx"), parts[0].dtype, lengths, documents, modes)
    _finish(target)
    return len(documents) - 1


def split(prefix: Path, target: Path, shares: Sequence[float], *, overwrite: bool = False) -> list[Path]:
    """Cut a dataset between documents into `TARGET_0`, `TARGET_1`..., each with its share of the tokens, in order.

    Returns their prefixes. Raises DataError for shares that are not positive, if a part would have no document or,
    without `overwrite`, if a target exists.
    """
    if len(shares) < 2 or not all(0 < share < inf for share in shares):
        raise DataError(f"the shares {list(shares)} must be two or more positive numbers, as 0.98 0.01 0.01.")
    if not target.name:
        raise DataError(f"{target} is a folder; give the PREFIX of the files to write.")
    for number in range(len(shares)):
        _refuse_target(target.with_name(f"{target.name}_{number}"), overwrite)
    data = IndexedDataset(prefix)
    documents = np.asarray(data.document_index)
    tokens = np.concatenate([[0], np.cumsum(data.lengths, dtype=np.int64)])
    ends_in_tokens = tokens[documents]
    wanted = np.cumsum(shares)[:-1] / sum(shares) * tokens[-1]
    cuts = [0, *np.searchsorted(ends_in_tokens, wanted).tolist(), len(documents) - 1]
    if min(np.diff(cuts)) < 1:
        raise DataError(f"{prefix} has {len(documents) - 1} documents, too few for these shares; use fewer parts.")
    written = []
    for number, (first, last) in enumerate(pairwise(cuts)):
        part = target.with_name(f"{target.name}_{number}")
        start, stop = int(documents[first]), int(documents[last])
        with _partial(part, ".bin").open("wb") as out:
            for at in range(int(tokens[start]), int(tokens[stop]), _CHUNK):
                out.write(np.ascontiguousarray(data.read(at, min(at + _CHUNK, int(tokens[stop])))).data)
        modes = None if data.modes is None else data.modes[start:stop]
        index = documents[first : last + 1] - start
        write_index(_partial(part, ".idx"), data.dtype, data.lengths[start:stop], index, modes)
        _finish(part)
        written.append(part)
    return written


def _refuse_target(target: Path, overwrite: bool) -> None:
    if not target.name:
        raise DataError(f"{target} is a folder; give the PREFIX of the files to write, such as {target / 'tokens'}.")
    if not overwrite:
        refuse_others(*(target.with_name(target.name + end) for end in (".bin", ".idx")))


def _partial(prefix: Path, end: str) -> Path:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    return prefix.with_name(f".{prefix.name}.partial{end}")


def _finish(prefix: Path) -> None:
    fingerprints(_partial(prefix, ""))
    for end in (".bin", SUFFIX, ".idx"):  # the index last: without it there is no dataset
        _partial(prefix, end).replace(prefix.with_name(prefix.name + end))
