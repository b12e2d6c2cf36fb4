"""Near duplicates by MinHash and locality-sensitive hashing: signatures of documents, and those seen so far.

Documents that agree in all numbers of one band count as near duplicates (`NearDuplicates`); the first in the order of
the text is kept. A document that is left out is remembered too, so its own near duplicates are left out as well.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smtrain.worker.data.clean.cleaning import NearDuplicates, SeenDocuments, require

_SEED = 1
# scripts that put no spaces between words go by characters
_WITHOUT_SPACES = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0002ffff"
_WORD = re.compile(rf"[{_WITHOUT_SPACES}]|[^\W{_WITHOUT_SPACES}]+")


def version() -> str:
    """The version of the signatures' algorithm. Raises DataError if its package is missing."""
    require("data.near_duplicates", "rensa")
    from rensa import RMinHash

    return f"rensa {RMinHash.ALGORITHM_VERSION}"


def band_keys(texts: Sequence[str], near: NearDuplicates) -> NDArray[np.uint64]:
    """64 bits of each band of each document, [documents * bands], grouped by document."""
    from rensa import RMinHash

    bands, rows = near.shape
    matrix: Any = RMinHash.digest_matrix_from_token_sets(
        [shingles(text, near.words) for text in texts], near.permutations, _SEED
    )
    signatures = np.array(matrix.to_rows(), "<u4").reshape(len(texts), near.permutations)
    names = [band.to_bytes(2, "little") for band in range(bands)]
    keys = b"".join(
        hashlib.blake2b(signature[band * rows : (band + 1) * rows].tobytes(), digest_size=8, person=name).digest()
        for signature in signatures
        for band, name in enumerate(names)
    )
    return np.frombuffer(keys, "<u8").astype(np.uint64)


def shingles(text: str, words: int) -> list[str]:
    """The runs of `words` words of a text, in lower case; the text itself if it has no word."""
    every = _WORD.findall(text.lower())
    if not every:
        return [text]
    return [" ".join(every[i : i + words]) for i in range(max(1, len(every) - words + 1))]


class SeenSignatures:
    """The bands of the first `near.documents` documents, in a table that grows with them."""

    def __init__(self, near: NearDuplicates) -> None:
        self._near, self.bands = near, near.shape[0]
        self._table = SeenDocuments(1 << 16)
        self.documents = 0

    def new(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """A mask of the documents (given by `band_keys`) unlike all earlier ones; remembers them."""
        count = len(keys) // self.bands
        met = min(count, self._near.documents - self.documents)
        self.documents += met
        at = met * self.bands
        self._table = self._table.with_room(at)
        fresh = np.concatenate([self._table.new(keys[:at]), ~self._table.known(keys[at:])])
        return np.asarray(fresh.reshape(count, self.bands).all(axis=1))
