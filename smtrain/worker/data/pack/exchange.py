"""Import and export of Arrow blocks and Megatron pairs (`PREFIX.bin/.idx` of any writer), and their
merge and split.

A block is `seq_len` tokens in the columns input_ids, attention_mask (ones) and labels (the same
ids), in a folder that `datasets.load_from_disk` opens. The files are written with pyarrow only.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from smtrain.core.errors import DataError
from smtrain.core.files import only_writer
from smtrain.worker.data.checksums import SUFFIX, fingerprint, fingerprints
from smtrain.worker.data.indexed import JoinedPairs, write_index
from smtrain.worker.data.manifest import (
    MASK,
    PREFIX,
    VALIDATION,
    VALIDATION_MASK,
    DatasetManifest,
    files_of,
    is_marked,
    mask_of,
    refuse_others,
    shards_of,
)
from smtrain.worker.data.read.blocks import MODES
from smtrain.worker.data.read.ignored_fields import IgnoredText
from smtrain.worker.data.read.sources import SourceFile, find_files
from smtrain.worker.data.read.split_files import cut_file
from smtrain.worker.data.read.tables import column_batches
from smtrain.worker.data.resumable import open_journal, publish
from smtrain.worker.data.tokenizer import TokenizerFacts, tokenizer_facts

_ROWS_PER_BATCH = 256
_FILE_BYTES = 500_000_000
_ENDS = (".bin", SUFFIX, ".idx")
"""Files of a pair. The index comes last: without it there is no dataset."""
_COLUMNS = {"input_ids": pa.int32(), "attention_mask": pa.int8(), "labels": pa.int64()}


def prefixes(path: Path, *, answers: bool = False) -> list[list[Path]]:
    """The indexed datasets at a path: those of a prepared folder, or the one with this prefix.

    Each is a list of pairs of files to be read end to end, more than one for the shards
    `PREFIX-00000`... of a set.

    Raises DataError for prepared instruction or preference data, unless the caller handles the mask
    of `answers`.
    """
    parts = _prefixes(path)
    if not answers and any(is_marked(pair) for pairs in parts for pair in pairs):
        raise DataError(
            f"{path} holds data whose answers are marked in separate files, which would be"
            " lost; change the records and prepare them again, or append whole folders with"
            " `smtrain data merge`."
        )
    return parts


def _prefixes(path: Path) -> list[list[Path]]:
    if path.is_dir():
        return [
            [path / shard.prefix for shard in shards_of(part)]
            for part in DatasetManifest.load(path).parts
        ]
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if prefix.with_name(f"{prefix.name}.idx").is_file():
        return [[prefix]]
    number = re.compile(re.escape(prefix.name) + r"-(\d{5,})\.idx")
    matches = [(number.fullmatch(file.name), file) for file in prefix.parent.glob("*-*.idx")]
    shards = sorted((int(match[1]), file.with_suffix("")) for match, file in matches if match)
    return [[shard for _, shard in shards] or [prefix]]


def held_out(path: Path) -> list[Path]:
    """The pairs that a prepared folder holds out for validation, in the order of the text."""
    row = _held_out_row(path)
    return [path / shard.prefix for shard in shards_of(row)] if row else []


def held_out_note(path: Path) -> str:
    """A sentence on the held-out documents of a prepared folder, which `prefixes` leaves out; ""
    without any.
    """
    row = _held_out_row(path)
    return (
        f"{path}: its {row['documents']:,} documents held out for validation are not in it"
        if row
        else ""
    )


def _held_out_row(path: Path) -> dict[str, Any] | None:
    return DatasetManifest.load(path).validation if path.is_dir() else None


def export_blocks(source: Path, output: Path, seq_len: int) -> int:
    """Write a dataset as blocks of `seq_len` tokens into the new folder `output`; return their
    number.

    Tokens left at the end are dropped. Raises DataError if `output` exists or there is not one
    block.
    """
    if seq_len < 1:
        raise DataError(f"seq_len is {seq_len}; give at least 1.")
    # The lock before the look: of two exports at once, the second finds the first one's folder.
    with only_writer(output, DataError):
        if output.exists():
            raise DataError(f"{output} is there already; give a new folder.")
        return _export(source, output, seq_len)


def _export(source: Path, output: Path, seq_len: int) -> int:
    parts = [JoinedPairs(pairs) for pairs in prefixes(source)]
    counts = [part.total // seq_len for part in parts]
    if not sum(counts):
        raise DataError(f"{source} holds fewer than {seq_len} tokens; lower --seq-len.")
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed export
    partial.mkdir(parents=True)
    batches = (
        np.asarray(part.read(at * seq_len, min(at + _ROWS_PER_BATCH, count) * seq_len))
        for part, count in zip(parts, counts, strict=True)
        for at in range(0, count, _ROWS_PER_BATCH)
    )
    names = _write_arrow(partial, batches, seq_len)
    # The two files that datasets.load_from_disk reads, with the keys of Dataset.save_to_disk.
    feature = {"_type": "List", "length": -1}
    features = {
        name: {"feature": {"dtype": str(kind), "_type": "Value"}, **feature}
        for name, kind in _COLUMNS.items()
    }
    (partial / "dataset_info.json").write_text(json.dumps({"features": features}))
    state: dict[str, Any] = dict.fromkeys(("_format_columns", "_format_type", "_split"))
    state |= {"_format_kwargs": {}, "_output_all_columns": False}
    state["_data_files"] = [{"filename": name} for name in names]
    # datasets names its caches by it, so other tokens must have another one.
    state["_fingerprint"] = fingerprint(partial / names[0])["sha256"][:16]
    (partial / "state.json").write_text(json.dumps(state))
    partial.rename(output)
    return sum(counts)


def _write_arrow(folder: Path, batches: Iterator[NDArray[Any]], seq_len: int) -> list[str]:
    schema = pa.schema([(name, pa.list_(kind)) for name, kind in _COLUMNS.items()])
    names: list[str] = []
    writer: Any = None
    file_bytes = 0
    for tokens in batches:
        if writer is None or file_bytes > _FILE_BYTES:
            if writer is not None:
                writer.close()
            names.append(f"data-{len(names):05}.arrow")
            writer, file_bytes = pa.ipc.new_stream(str(folder / names[-1]), schema), 0
        offsets = pa.array(np.arange(0, len(tokens) + 1, seq_len, dtype=np.int32))
        # Labels are not shifted: models of transformers shift them themselves.
        columns = (tokens, np.ones(len(tokens), np.int8), tokens)
        batch = pa.record_batch(
            [
                pa.ListArray.from_arrays(offsets, pa.array(values.astype(kind.to_pandas_dtype())))
                for values, kind in zip(columns, _COLUMNS.values(), strict=True)
            ],
            schema=schema,
        )
        writer.write_batch(batch)
        file_bytes += batch.nbytes
    writer.close()
    return names


def import_tokens(
    source: Path, output: Path, tokenizer: Path, seq_len: int, *, overwrite: bool = False
) -> DatasetManifest:
    """Make a prepared dataset of a Megatron pair (its prefix) or of Arrow or Parquet rows with a
    column input_ids.

    Raises DataError if ids are beyond the tokenizer's vocabulary, there is not one sample of
    `seq_len` + 1 or, without `overwrite`, `output` holds a dataset.
    """
    facts = tokenizer_facts(tokenizer)
    if not overwrite:
        refuse_others(*files_of(output))
    if seq_len < 1:
        raise DataError(f"seq_len is {seq_len}; give at least 1.")
    # An import never resumes, so what a killed preparation left here is of no use.
    with open_journal(output, None) as journal:
        journal.clear()
        try:
            return publish(journal, _import(source, journal.folder, facts, seq_len), output)
        except BaseException:
            journal.clear()
            raise


def _import(source: Path, folder: Path, facts: TokenizerFacts, seq_len: int) -> DatasetManifest:
    """Write the pair of files; returns the manifest that makes it a dataset."""
    bin_path, idx_path = (folder / f"{PREFIX}{end}" for end in (".bin", ".idx"))
    left_out: list[str] = []
    pairs = prefixes(source)[0] if not source.is_dir() else [source]  # refuses marked ones
    if pairs[0].with_name(pairs[0].name + ".idx").is_file():
        pair = JoinedPairs(pairs)
        with bin_path.open("wb") as out:
            for dataset in pair.pairs:
                for tokens in dataset.chunks():
                    # Before the cast: uint16 would turn an id above its range into another one.
                    facts.check(tokens, dataset.bin_path)
                    out.write(np.ascontiguousarray(tokens, facts.dtype).data)
        lengths, documents = np.asarray(pair.lengths), np.asarray(pair.document_index)
        ignored_text = IgnoredText({} if pair.modes is None else {MODES: len(pair)})
        rows = [
            {
                "name": dataset.bin_path.stem,
                "bytes": len(dataset.tokens) * facts.dtype.itemsize,
                "documents": len(dataset.document_index) - 1,
            }
            for dataset in pair.pairs
        ]
    else:
        source_files = find_files(source, say=left_out.append)
        files = [file for file in source_files if file.kind in ("arrow", "parquet")]
        left_out += [
            f"{f.name} is left out: rows of tokens are Arrow or Parquet"
            for f in source_files
            if f not in files
        ]
        lengths, ignored_text = _copy_rows(files, bin_path, facts)
        # Each row is a document.
        documents = np.arange(len(lengths) + 1, dtype=np.int64)
        rows = [{"name": file.name, "bytes": file.bytes, "documents": 0} for file in files]
    write_index(idx_path, facts.dtype, lengths, documents, None)
    data = JoinedPairs([bin_path.with_suffix("")])
    total = data.total
    if total < seq_len + 1:
        raise DataError(
            f"{source} gives {total} tokens, and one sample needs seq_len + 1 = {seq_len + 1}."
        )
    # append_eod is found out, not asked: true only if each document ends with the id.
    has_tokens = np.diff(data.document_index) > 0
    ends = np.cumsum(data.lengths, dtype=np.int64)[data.document_index[1:][has_tokens] - 1] - 1
    last = data.pairs[0].tokens[ends]
    count, samples = len(documents) - 1, (total - 1) // seq_len
    return DatasetManifest(
        **facts.in_manifest(),
        append_eod=facts.eos_id is not None and bool((last == facts.eos_id).all()),
        seq_len=seq_len,
        text_column="",
        sources=rows,
        files=fingerprints(folder / PREFIX),
        bad_line_count=0,
        bad_lines=[],
        tokenized_by="imported",
        unread=dict(ignored_text),
        left_out=left_out,
        documents=count,
        tokens=total,
        samples=samples,
        parts=[{"prefix": PREFIX, "documents": count, "tokens": total, "samples": samples}],
    )


def _copy_rows(
    files: list[SourceFile], target: Path, facts: TokenizerFacts
) -> tuple[NDArray[Any], IgnoredText]:
    """Write the tokens of all rows; return the rows' lengths and counts of what is not read."""
    ignored_text = IgnoredText()
    lengths: list[NDArray[Any]] = [np.zeros(0, np.int64)]
    with target.open("wb") as out:
        for file in files:
            for block in cut_file(file, "input_ids", payload_kind="ids"):
                kind = block.payload.type
                if not (
                    pa.types.is_list(kind)
                    or pa.types.is_large_list(kind)
                    or pa.types.is_fixed_size_list(kind)
                ):
                    raise DataError(
                        f"{file.path}: input_ids holds {kind} and not lists of ids; write lists."
                    )
                ignored_text.count(block.ignored_text)
                tokens = block.payload.flatten().to_numpy(zero_copy_only=False)
                facts.check(tokens, file.path)
                out.write(np.ascontiguousarray(tokens, facts.dtype).data)
                lengths.append(
                    pa.compute.list_value_length(block.payload).to_numpy(zero_copy_only=False)
                )
            for batch in column_batches(file, ("input_ids", "labels", "attention_mask")):
                ignored_text.count(_lost_labels(batch))
    row_lengths = np.concatenate(lengths)
    return row_lengths[row_lengths > 0], ignored_text


def _lost_labels(batch: Any) -> IgnoredText:
    """Count rows with tokens marked as not to be learned, or as padding: an import learns all
    tokens.
    """
    ignored_rows = IgnoredText()
    ids = batch["input_ids"].to_pylist()
    for name, label in (
        ("labels", "rows with other labels than input_ids"),
        ("attention_mask", "rows with padding"),
    ):
        if name in batch.schema.names:
            plain_values = ids if name == "labels" else [[1] * len(row or ()) for row in ids]
            lost_count = sum(
                a != b for a, b in zip(batch[name].to_pylist(), plain_values, strict=True)
            )
            ignored_rows.count({label: lost_count} if lost_count else {})
    return ignored_rows


def merge(
    datasets: Sequence[Path],
    target: Path,
    held_out: Sequence[Path] = (),
    *,
    overwrite: bool = False,
) -> tuple[int, int]:
    """Append the pairs with these prefixes as Megatron's own tool does; return the documents, and
    those held out.

    Those that are `held_out` become the pair `TARGET_validation`. Raises DataError if their token
    types differ, only some have modes or, without `overwrite`, a target exists.
    """
    jobs = [(JoinedPairs(datasets), target)]
    if held_out:
        jobs.append((JoinedPairs(held_out), target.with_name(f"{target.name}_{VALIDATION}")))
    with _written_together([prefix for _, prefix in jobs], overwrite):
        for data, prefix in jobs:
            _append(data, _partial(prefix))
    documents = [len(data.document_index) - 1 for data, _ in jobs]
    return documents[0], sum(documents[1:])


def _append(data: JoinedPairs, prefix: Path) -> None:
    # Tokens before the index: readers take a pair with an index for whole.
    with prefix.with_name(f"{prefix.name}.bin").open("wb") as out:
        for chunk in data.chunks():
            out.write(chunk.data)
    index = prefix.with_name(f"{prefix.name}.idx")
    write_index(index, data.dtype, data.lengths, data.document_index, data.modes)


def merge_marked(
    folders: Sequence[Path], output: Path, *, overwrite: bool = False
) -> DatasetManifest:
    """Append prepared instruction or preference data, with its masks and what is held out, as a
    prepared folder.

    Raises DataError if the folders were prepared with different settings or, without `overwrite`,
    `output` holds a dataset.
    """
    manifests = [DatasetManifest.load(folder) for folder in folders]
    # What the manifest says once for all documents must be true of all folders.
    for name in ("objective", "tokenizer_sha256", "seq_len", "dtype", "eos_id"):
        values = [getattr(manifest, name) for manifest in manifests]
        if mismatch := next((at for at, value in enumerate(values) if value != values[0]), None):
            raise DataError(
                f"{folders[0]} was prepared with {name} {values[0]} and {folders[mismatch]} with"
                f" {values[mismatch]}; prepare both with the same settings."
            )
    if any(output.resolve() == folder.resolve() for folder in folders):
        raise DataError(f"{output} is one of the folders to merge; give another folder.")
    if not overwrite:
        refuse_others(*files_of(output))
    with open_journal(output, None) as journal:
        journal.clear()
        return publish(journal, _merge_marked(folders, manifests, journal.folder), output)


def _merge_marked(
    folders: Sequence[Path], manifests: Sequence[DatasetManifest], output: Path
) -> DatasetManifest:
    """Write all pairs of files into `output`; returns the manifest of the whole."""
    validation_rows = [manifest.validation for manifest in manifests if manifest.validation]
    pairs: dict[str, list[Path]] = {PREFIX: [], MASK: [], VALIDATION: [], VALIDATION_MASK: []}
    for folder, manifest in zip(folders, manifests, strict=True):
        for row in [*manifest.parts, *([manifest.validation] if manifest.validation else [])]:
            for shard in shards_of(row):
                name = PREFIX if row is not manifest.validation else VALIDATION
                pairs[name].append(folder / shard.prefix)
                # In the same order as the tokens, or masks would mark other answers.
                pairs[mask_of(Path(name)).name].append(folder / shard.mask)
    for name, prefixes_ in pairs.items():
        if prefixes_:
            _append(JoinedPairs(prefixes_), output / name)
    files: dict[str, dict[str, Any]] = {}
    for name, prefixes_ in pairs.items():
        if prefixes_:
            files |= fingerprints(output / name)
    total = _total([vars(manifest) for manifest in manifests])
    return dataclasses.replace(
        manifests[0],
        documents=total["documents"],
        tokens=total["tokens"],
        samples=total["samples"],
        sources=[row for manifest in manifests for row in manifest.sources],
        files=files,
        bad_line_count=sum(manifest.bad_line_count for manifest in manifests),
        bad_lines=[line for manifest in manifests for line in manifest.bad_lines],
        parts=[{"prefix": PREFIX, **total}],
        dropped=_add_counts(manifest.dropped for manifest in manifests),
        tokenized_by=" and ".join(dict.fromkeys(manifest.tokenized_by for manifest in manifests)),
        left_out=[line for manifest in manifests for line in manifest.left_out],
        validation={"prefix": VALIDATION, **_total(validation_rows)} if validation_rows else None,
        unread=_add_counts(manifest.unread for manifest in manifests),
        noted=_add_counts(manifest.noted for manifest in manifests),
    )


def _total(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {name: sum(row[name] for row in rows) for name in ("documents", "tokens", "samples")}


def _add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = IgnoredText()
    for part_counts in counts:
        total.count(part_counts)
    return dict(total)


def split(
    dataset: Path | Sequence[Path],
    target: Path,
    shares: Sequence[float],
    *,
    overwrite: bool = False,
) -> list[Path]:
    """Cut a dataset, one or several pairs, between documents into `TARGET_0`, `TARGET_1`..., in
    order.

    Each part has its share of the tokens. Returns their prefixes. Raises DataError for shares that
    are not positive, if a part would have no document or, without `overwrite`, if a target exists.
    """
    if len(shares) < 2 or not all(0 < share < inf for share in shares):
        raise DataError(
            f"the shares {list(shares)} must be two or more positive numbers, as 0.98 0.01 0.01."
        )
    if not target.name:
        raise DataError(f"{target} is a folder; give the PREFIX of the files to write.")
    parts = [target.with_name(f"{target.name}_{number}") for number in range(len(shares))]
    pairs = [dataset] if isinstance(dataset, Path) else dataset
    data = JoinedPairs(pairs)
    documents = np.asarray(data.document_index)
    tokens = np.concatenate([[0], np.cumsum(data.lengths, dtype=np.int64)])
    ends_in_tokens = tokens[documents]
    cut_tokens = np.cumsum(shares)[:-1] / sum(shares) * tokens[-1]
    # Only between documents: at the first end at or after each share.
    cuts = [0, *np.searchsorted(ends_in_tokens, cut_tokens).tolist(), len(documents) - 1]
    if min(np.diff(cuts)) < 1:
        raise DataError(
            f"{pairs[0]} has {len(documents) - 1} documents, too few for these shares; use fewer"
            " parts."
        )
    with _written_together(parts, overwrite):
        for part, (first, last) in zip(parts, pairwise(cuts), strict=True):
            start, stop = int(documents[first]), int(documents[last])
            with _partial(part, ".bin").open("wb") as out:
                for chunk in data.chunks(int(tokens[start]), int(tokens[stop])):
                    out.write(chunk.data)
            modes = None if data.modes is None else data.modes[start:stop]
            # A pair's index counts from its own first sequence.
            index = documents[first : last + 1] - start
            write_index(_partial(part, ".idx"), data.dtype, data.lengths[start:stop], index, modes)
    return parts


@contextmanager
def _written_together(targets: Sequence[Path], overwrite: bool) -> Iterator[None]:
    """Give pairs their names after the block has written them under partial ones; old pairs of
    these names go first.

    A kill leaves no mixture of old and new pairs. Raises DataError for a target that another
    process writes or, without `overwrite`, that exists.
    """
    if not targets[0].name:
        example = targets[0] / "tokens"
        raise DataError(
            f"{targets[0]} is a folder; give the PREFIX of the files to write, such as {example}."
        )
    with ExitStack() as locks:
        for target in targets:
            locks.enter_context(only_writer(target, DataError))
        if not overwrite:
            # After the locks, as another process may be writing these names.
            refuse_others(
                *(
                    target.with_name(target.name + end)
                    for target in targets
                    for end in (".bin", ".idx")
                )
            )
        try:
            yield
            for target in targets:
                # Before the old pairs go: an error here leaves them as they were.
                fingerprints(_partial(target))
        except BaseException:
            for target in targets:
                for end in _ENDS:
                    _partial(target, end).unlink(missing_ok=True)
            raise
        for target in targets:
            # The old index goes first, the new one comes last: no index is ever next to other
            # tokens.
            for end in reversed(_ENDS):
                target.with_name(target.name + end).unlink(missing_ok=True)
        for target in targets:
            for end in _ENDS:
                _partial(target, end).replace(target.with_name(target.name + end))


def _partial(prefix: Path, end: str = "") -> Path:
    return prefix.with_name(f".{prefix.name}.partial{end}")
