"""Ids of many documents at once: by gigatoken if it agrees with `tokenizers`, else by `tokenizers`.

gigatoken is some thirty times faster, but young, so its ids are checked. Documents with characters
that it is known to split or compose differently (`gigatoken_adapt`) go to `tokenizers`. Of every
block of text a part is also encoded by `tokenizers`; one id that differs ends the use of gigatoken
(`MismatchError`).
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from smtrain.core.errors import SmtrainError
from smtrain.core.machine import cores_here
from smtrain.worker.data.read.reading import buffers_of, rows_of
from smtrain.worker.data.tokenize.gigatoken_adapt import (
    DIGIT,
    Differences,
    adapt_tokenizer,
    cut_at_digits,
    other_numerals,
)
from smtrain.worker.data.tokenizer import load_tokenizer, settled_json

# gigatoken keeps every word that it has seen; a new tokenizer after so many bytes of text for each
# core, at least for four cores, bounds that to about 80 MiB a core
_FRESH_AFTER, _LEAST_CORES = 1 << 28, 4
# the text to compare: the beginning of every file, and a piece of every block
_FIRST_CHARACTERS, _DRAWN_CHARACTERS = 20_000, 2_000
_BATCH_BYTES = 1 << 18


class MismatchError(SmtrainError):
    """gigatoken gave other ids than `tokenizers` for a piece of the text."""


class Encoder(Protocol):
    """Turns documents into ids; may be called from several threads at once."""

    name: str

    def encode(self, texts: Any, first: bool) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Ids of all `texts` (an Arrow array of large_string) end to end, and how many each has.

        No special token is added. `first` means that a file begins here; more of it is compared
        then.
        """
        ...


class TokenizersEncoder:
    """`tokenizers` itself, with its own threads."""

    def __init__(self, folder: Path) -> None:
        from importlib.metadata import version

        self.name = f"tokenizers {version('tokenizers')}"
        self._tokenizer = load_tokenizer(folder)

    def encode(self, texts: Any, first: bool) -> tuple[NDArray[Any], NDArray[np.int64]]:
        parts = list(_plainly(self._tokenizer, texts))
        lengths = np.array([len(ids) for ids in parts], np.int64)
        return np.concatenate([np.zeros(0, np.int32), *parts]), lengths


class GigatokenEncoder:
    """gigatoken, compared with `tokenizers` on the beginning of every file and on a piece of every
    block.

    Raises ImportError without gigatoken, ValueError (or its own error) for a tokenizer that
    it does not support.
    """

    def __init__(self, folder: Path) -> None:
        from importlib.metadata import version

        import awkward  # noqa: F401 - a missing dependency of it must fail here, not in the first block
        import gigatoken

        self.name = f"gigatoken {version('gigatoken')}"
        content, self._reference = settled_json(folder)
        form = adapt_tokenizer(content)
        self._digits = form.digits
        self._make: Any = lambda: gigatoken.Tokenizer.from_json(form.content)
        self._tokenizer, self._encoded = self._make(), 0
        self._lock = threading.Lock()
        if not form.is_comparable:
            raise ValueError("its normalizer has not been compared with that of tokenizers")
        self._differences = Differences(other_numerals() if form.digits else "", form.missing_bytes)

    def encode(self, texts: Any, first: bool) -> tuple[NDArray[Any], NDArray[np.int64]]:
        if not len(texts):
            return np.zeros(0, np.uint32), np.zeros(0, np.int64)
        tokenizer = self._tokenizer_for(texts.nbytes)
        parts = cut_at_digits(texts) if self._digits else texts
        mismatches = self._differences.find(parts)
        ids, lengths = _giga(tokenizer, parts)
        if len(mismatches):
            ids, lengths = self._correct_ids(parts, ids, lengths, mismatches)
        if self._digits:
            ends, starts = buffers_of(texts)[0], buffers_of(parts)[0]
            lengths = np.diff(np.append(0, np.cumsum(lengths))[np.searchsorted(starts, ends)])
            mismatches = np.unique(np.searchsorted(ends, starts[mismatches], "right") - 1)
        self._compare(tokenizer, texts, ids, lengths, first, mismatches)
        return ids, lengths

    def _correct_ids(
        self,
        texts: Any,
        ids: NDArray[Any],
        lengths: NDArray[np.int64],
        mismatches: NDArray[np.int64],
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Replace the ids of the texts `mismatches` by those of `tokenizers`."""
        ends = np.cumsum(lengths)
        parts, at = [], 0
        lengths = lengths.copy()
        for number, right in zip(
            mismatches, _plainly(self._reference, rows_of(texts, mismatches)), strict=True
        ):
            parts += [ids[at : ends[number] - lengths[number]], right.astype(ids.dtype)]
            at, lengths[number] = ends[number], len(right)
        return np.concatenate([*parts, ids[at:]]), lengths

    def _tokenizer_for(self, size: int) -> Any:
        """The tokenizer for `size` more bytes of text."""
        with self._lock:
            self._encoded += size
            if self._encoded > _FRESH_AFTER * max(_LEAST_CORES, cores_here()):
                self._tokenizer, self._encoded = self._make(), size
            return self._tokenizer

    def _compare(
        self,
        tokenizer: Any,
        texts: Any,
        ids: NDArray[Any],
        lengths: NDArray[np.int64],
        first: bool,
        mismatches: NDArray[np.int64],
    ) -> None:
        samples = _draw_texts(texts, np.delete(np.arange(len(texts)), mismatches), first)
        reference = encode_texts(self._reference, [sample.text for sample in samples])
        for sample, reference_ids in zip(samples, reference, strict=True):
            start = int(lengths[: sample.number].sum())
            fast_ids = (
                ids[start : start + lengths[sample.number]]
                if sample.is_complete
                else self._ids_of(tokenizer, sample.text)
            )
            if not np.array_equal(fast_ids, reference_ids):
                raise MismatchError(
                    f"{self.name} gives other ids than tokenizers for {sample.text[:60]!r}..."
                )

    def _ids_of(self, tokenizer: Any, text: str) -> list[int]:
        """The ids of one short text."""
        parts = DIGIT.split(text) if self._digits else [text]
        return [id for ids in tokenizer.encode_batch_list(parts, parallel=True) for id in ids]


def choose(folder: Path, threads: int | None = None) -> tuple[Encoder, str]:
    """The fastest encoder for a tokenizer folder, and why it is not gigatoken ("" if it is).

    `threads` bounds its own threads if it is the first one of this process; default: one per core.
    """
    if threads:
        os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    try:
        return GigatokenEncoder(folder), ""
    except ImportError as error:
        lacks = "" if error.name in (None, "gigatoken") else f", which needs {error.name}"
        return TokenizersEncoder(folder), f"gigatoken is not installed{lacks}"
    except Exception as error:  # errors from Rust have no common class
        reason = " ".join(str(error).split())[:200]
        return TokenizersEncoder(folder), f"gigatoken does not take this tokenizer ({reason})"


def _plainly(tokenizer: Tokenizer, texts: Any) -> Iterator[NDArray[Any]]:
    """int32 ids of each text (Arrow large_string) by `tokenizers`."""
    for start, stop in _batches(texts):
        yield from encode_texts(tokenizer, texts.slice(start, stop - start).to_pylist())


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> list[NDArray[Any]]:
    """int32 ids of each text by `tokenizers`, without special tokens."""
    return [
        np.array(e.ids, np.int32)
        for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ]


def with_ends(
    ids: NDArray[Any], lengths: NDArray[np.int64], dtype: np.dtype, eos_id: int | None
) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Convert ids to the dataset's type, and add `eos_id` after every document with tokens."""
    if eos_id is None:
        return ids.astype(dtype), lengths.astype(np.int32)
    has_tokens = lengths > 0
    lengths = lengths + has_tokens
    ends = np.cumsum(lengths)[has_tokens] - 1
    out = np.empty(len(ids) + len(ends), dtype)
    text = np.ones(len(out), bool)
    text[ends] = False
    out[text] = ids
    out[ends] = eos_id
    return out, lengths.astype(np.int32)


def _giga(tokenizer: Any, texts: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Encode Arrow's buffers into numpy's, without copies or a Python object per text."""
    import awkward

    ak: Any = awkward

    offsets, content = buffers_of(texts)
    layout = ak.contents.ListOffsetArray(
        ak.index.Index64(offsets),
        ak.contents.NumpyArray(content, parameters={"__array__": "char"}),
        parameters={"__array__": "string"},
    )
    # by gigatoken's own threads: each has the words that it saw before, and without them callers
    # wait for each other
    token_layout = tokenizer.encode_batch(ak.Array(layout), parallel=True).layout
    bounds = np.asarray(token_layout.offsets.data)
    return np.asarray(token_layout.content.data)[bounds[0] : bounds[-1]], np.diff(bounds)


class _ComparedText(NamedTuple):
    """The beginning of a document, or all of it."""

    number: int
    text: str
    is_complete: bool


def _draw_texts(texts: Any, numbers: NDArray[np.int64], first: bool) -> list[_ComparedText]:
    """Pieces of these documents to compare, chosen by their content, so that every run compares the
    same ones.
    """
    if not len(numbers):
        return []

    def text_start(number: int, max_characters: int) -> _ComparedText:
        text = texts[number].as_py()
        return _ComparedText(number, text[:max_characters], len(text) <= max_characters)

    picked_index = zlib.crc32(str(texts[int(numbers[len(numbers) // 2])]).encode()) % len(numbers)
    samples = [text_start(int(numbers[picked_index]), _DRAWN_CHARACTERS)]
    remaining_characters = _FIRST_CHARACTERS if first else 0
    for number in numbers.tolist() if first else ():
        if remaining_characters <= 0:
            break
        samples.append(text_start(number, remaining_characters))
        remaining_characters -= len(samples[-1].text)
    return samples


def _batches(texts: Any) -> list[tuple[int, int]]:
    """Runs of documents of about _BATCH_BYTES: encodings of `tokenizers` take many times the memory
    of the text.
    """
    offsets, _ = buffers_of(texts)
    cuts, start = [], 0
    while start < len(texts):
        stop = int(np.searchsorted(offsets, offsets[start] + _BATCH_BYTES, "right")) - 1
        stop = max(start + 1, min(stop, len(texts)))
        cuts.append((start, stop))
        start = stop
    return cuts
