"""Cleaning between reading and tokenizing: options, repair, a minimum length, hashes for
duplicates.

Languages, filters, personal data and signatures, which look at documents one by one, are in
`refiner`.
"""

from __future__ import annotations

import hashlib
import unicodedata
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from smtrain.core.errors import DataError
from smtrain.core.extras import missing_module, present
from smtrain.worker.data.read.reading import buffers_of

if TYPE_CHECKING:
    from smtrain.core.config.data import Data

# C0 but tab, line feed and carriage return; DEL, C1, zero-width space, word joiner, byte-order mark
_CONTROL = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x{80}-\x{9f}\x{200b}\x{2060}\x{feff}]"
TOO_SHORT = "too short"
_MIN_RECALL = 0.9  # of the pairs with exactly the similarity in the options


def require(key: str, *modules: str) -> None:
    """Raise DataError for the first missing module; `key` is the option that needs it."""
    if module := next((name for name in modules if not present(name)), None):
        raise DataError(f"{key}: {missing_module(module)}.", code="package.missing")


@dataclass(frozen=True)
class NearDuplicates:
    """Options of near duplicates; the first `documents` documents are remembered.

    A document is the set of its runs of `words` words. Its signature of `permutations` numbers is
    cut into bands, and two documents must agree in all numbers of one band. Of pairs of Jaccard
    similarity s, 1 - (1 - s^rows)^bands do.
    """

    similarity: float = 0.8
    words: int = 5
    permutations: int = 128
    documents: int = 20_000_000

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(bands, rows): the most rows that still find nine of ten pairs of exactly this
        similarity.
        """
        for rows in range(self.permutations, 1, -1):
            bands = self.permutations // rows
            if 1 - (1 - self.similarity**rows) ** bands >= _MIN_RECALL:
                return bands, rows
        return self.permutations, 1

    @property
    def bytes_a_document(self) -> int:
        """Maximum memory of a remembered document: 8 bytes per band, in a table that has just grown
        and is three eighths full, plus the table before it.
        """
        return self.shape[0] * 32


@dataclass(frozen=True)
class Languages:
    """Languages to keep, by their ISO 639-1 codes; `model` is a fastText file in place of the
    packaged one.
    """

    codes: tuple[str, ...]
    threshold: float = 0.65
    model: str | None = None


@dataclass(frozen=True)
class EvaluationTexts:
    """Text that a model will be tested on: a file, folder or hf:// set, and the field of its
    records.
    """

    path: str
    text_column: str = "text"


@dataclass(frozen=True)
class Cleaning:
    """Options of cleaning: `unicode` normalization, control characters, texts of fewer characters,
    exact duplicates, quality `filters` by name, personal data (`pii`), near duplicates, mojibake,
    languages, text of tests.
    """

    unicode: Literal["none", "nfc", "nfkc"] = "none"
    strip_control: bool = False
    min_characters: int = 0
    deduplicate: bool = False
    filters: tuple[str, ...] = ()
    pii: Literal["mask", "drop", "count"] | None = None
    phone_region: str | None = None
    near: NearDuplicates | None = None
    fix_mojibake: bool = False
    languages: Languages | None = None
    tests: EvaluationTexts | None = None

    @classmethod
    def of(cls, data: Data) -> Cleaning:
        """The cleaning of a config's section."""
        near_duplicates, language, tests = data.near_duplicates, data.language, data.decontaminate
        return cls(
            data.unicode,
            data.strip_control,
            data.min_characters,
            data.deduplicate,
            data.filters,
            data.pii,
            data.phone_region,
            NearDuplicates(**near_duplicates.model_dump()) if near_duplicates else None,
            data.fix_mojibake,
            Languages(language.keep, language.threshold, language.model) if language else None,
            EvaluationTexts(tests.path, tests.text_column) if tests else None,
        )

    @property
    def basic_cleaning(self) -> Cleaning:
        """The options that need no further package and no model of a language."""
        return Cleaning(self.unicode, self.strip_control, self.min_characters, self.deduplicate)

    @property
    def refines(self) -> bool:
        """Whether documents are looked at one by one."""
        return bool(
            self.filters
            or self.pii
            or self.near
            or self.fix_mojibake
            or self.languages
            or self.tests
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Every option by name.

        Those that came later are left out unless set, so older digests stay the same.
        """
        later = {"fix_mojibake", "languages", "tests"}
        return {name: value for name, value in asdict(self).items() if value or name not in later}

    def apply(self, texts: Any) -> tuple[Any, int]:
        """The repaired texts (large_string) that are long enough, and the number of dropped
        ones.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        if self.unicode != "none":
            form: Any = self.unicode.upper()
            # not pyarrow's utf8_normalize: its NFC does not compose (seen in 25.0)
            texts = pa.array(
                [unicodedata.normalize(form, text) for text in texts.to_pylist()], pa.large_string()
            )
        if self.strip_control:
            texts = pc.replace_substring(texts, "\r\n", "\n")
            texts = pc.replace_substring_regex(texts, _CONTROL, "")
        if not self.min_characters:
            return texts, 0
        long_texts = texts.filter(
            pc.greater_equal(pc.utf8_length(texts), pa.scalar(self.min_characters))
        )
        return long_texts, len(texts) - len(long_texts)


def hashes(texts: Any) -> NDArray[np.uint64]:
    """64 bits of BLAKE2 of each text (large_string): two of n texts share one by chance with n^2 /
    2^65.
    """
    bounds, content = buffers_of(texts)
    view = memoryview(content)  # type: ignore[arg-type]  # numpy's stubs do not call an array a buffer
    digests = b"".join(
        hashlib.blake2b(view[a:b], digest_size=8).digest() for a, b in pairwise(bounds.tolist())
    )
    return np.frombuffer(digests, np.uint64)


def hashes_of(ids: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.uint64]:
    """64 bits of BLAKE2 of each document of tokens, ids end to end and a length each, whatever the
    ids' type.
    """
    wide = ids.astype("<i8")
    bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).tolist()
    digests = b"".join(
        hashlib.blake2b(wide[a:b].tobytes(), digest_size=8).digest() for a, b in pairwise(bounds)
    )
    return np.frombuffer(digests, np.uint64)
