"""Indexed datasets for tests, of any documents and modes; the product itself uses
`dataset_writer`.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from smtrain.worker.data.checksums import fingerprints
from smtrain.worker.data.indexed import write_index
from smtrain.worker.data.manifest import DatasetManifest


class IndexedWriter:
    """Streams tokens into `bin_path` and leaves `idx_path` when closed without an error.

    A document is one or more sequences. Empty sequences are not stored; an empty document is an
    entry of the document index and nothing else, as Megatron's own preprocessing leaves it.
    """

    def __init__(self, bin_path: Path, idx_path: Path, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._idx_path = idx_path
        self._bin = bin_path.open("wb")
        self._lengths: list[NDArray[np.int32]] = []
        self._starts: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self._modes: list[NDArray[np.int8]] = []
        self.sequences = 0
        self.tokens = 0

    def add_document(self, sequences: list[NDArray[Any]], modes: list[int] | None = None) -> None:
        """One document made of several sequences (sentences, or text and image parts that differ in
        `modes`).
        """
        kept = [i for i, part in enumerate(sequences) if len(part)]
        if kept:
            self._append(
                np.concatenate([sequences[i] for i in kept]),
                np.array([len(sequences[i]) for i in kept], np.int32),
            )
        if modes is not None:
            self._modes.append(np.array([modes[i] for i in kept], np.int8))
        self._starts.append(np.array([self.sequences], np.int64))

    def add_documents(self, tokens: NDArray[Any], lengths: NDArray[Any]) -> None:
        """Many documents of one sequence each: their tokens end to end, and int[n] lengths (0 =
        empty document).
        """
        stored = lengths > 0
        starts = self.sequences + np.cumsum(stored, dtype=np.int64)
        self._append(tokens, lengths[stored].astype(np.int32))
        self._starts.append(starts)

    def _append(self, tokens: NDArray[Any], lengths: NDArray[np.int32]) -> None:
        if len(tokens) != int(lengths.sum(dtype=np.int64)):
            raise ValueError("the lengths do not add up to the tokens")
        self._bin.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self._lengths.append(lengths)
        self.sequences += len(lengths)
        self.tokens += len(tokens)

    def close(self) -> None:
        """Write the index, and sync both files to the disk."""
        self._bin.flush()
        os.fsync(self._bin.fileno())
        self._bin.close()
        lengths = np.concatenate([np.zeros(0, np.int32), *self._lengths])
        modes = np.concatenate(self._modes) if self._modes else None
        write_index(self._idx_path, self.dtype, lengths, np.concatenate(self._starts), modes)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._bin.close()


def save_manifest(
    folder: Path,
    parts: dict[str, tuple[int, int]],
    seq_len: int,
    model_vocab_size: int | None = None,
) -> None:
    """Write checksums of the pairs `parts` {prefix: (documents, tokens)} of uint16 ids, and their
    manifest.
    """
    rows: list[dict[str, Any]] = []
    for prefix, (documents, tokens) in parts.items():
        fingerprints(folder / prefix)
        samples = (tokens - 1) // seq_len
        rows.append(
            {"prefix": prefix, "documents": documents, "tokens": tokens, "samples": samples}
        )
    total: dict[str, Any] = {
        key: sum(row[key] for row in rows) for key in ("documents", "tokens", "samples")
    }
    DatasetManifest(
        vocab_size=500,
        model_vocab_size=model_vocab_size,
        tokenizer_sha256="",
        eos_id=0,
        append_eod=True,
        seq_len=seq_len,
        dtype="uint16",
        text_column="text",
        sources=[],
        files={},
        bad_line_count=0,
        bad_lines=[],
        parts=rows,
        **total,
    ).save(folder)
