"""Companion files: everything in a model's folder next to the weights, copied along with them.

`smtrain.core.model.hf_folder.companions_in` decides for each file, for all kinds of target alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from smtrain.core.files import parse_json
from smtrain.core.model import hf_tokenizer
from smtrain.core.model.hf_folder import companions_in
from smtrain.core.text import Say
from smtrain.worker.checkpoint.storage import Place

OF_A_WHOLE_MODEL = {
    "generation_config.json": "of a whole model; loaders of an adapter read the base model's"
}
"""Companions that an adapter's folder does not need."""


@dataclass(frozen=True)
class CompanionFiles:
    """Files to write next to the weights, and those left out."""

    files: dict[str, bytes] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Name (of a whole folder with a slash) -> the reason."""

    def with_config(self, config: dict[str, Any]) -> dict[str, bytes]:
        """The files and config.json."""
        return {**self.files, "config.json": (json.dumps(config, indent=2) + "\n").encode()}

    def tell(self, say: Say) -> None:
        """Report what is left out: a line for each reason."""
        by_reason = sorted(self.left_out.items(), key=lambda item: item[1])
        for reason, items in groupby(by_reason, key=lambda item: item[1]):
            say(f"left out ({reason}): {', '.join(name for name, _ in items)}")


NO_COMPANIONS = CompanionFiles()


def companions_of(
    folder: Place, replacement_reasons: Mapping[str, str] | None = None
) -> CompanionFiles:
    """Read the companion files of a model's folder, without those `replacement_reasons` (name ->
    reason) by new ones.

    Raises CheckpointError if one cannot be read.
    """
    sizes = folder.files()
    companions = companions_in(sizes, replacement_reasons)
    files = {name: bytes(folder.read(name, 0, sizes[name])) for name in companions.copied_names}
    # transformers 5 writes a class name and a list of special tokens that 4 cannot read.
    if (name := "tokenizer_config.json") in files:
        files[name] = _for_everyone(files[name])
    return CompanionFiles(files, {**companions.left_out, **_links(folder)})


def _links(folder: Place) -> dict[str, str]:
    """Links that were not followed: to folders, and broken ones."""
    root = folder.path()
    if root is None:
        return {}
    out = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if (
            # files() follows a link to a file, which is copied as a file. Hidden names are never
            # copied, so they need no line.
            path.is_symlink()
            and not path.is_file()
            and not any(part.startswith(".") for part in name.split("/"))
        ):
            out[name] = (
                "a link to a folder; copy what is in it" if path.is_dir() else "a link to nothing"
            )
    return out


def _for_everyone(tokenizer_config: bytes) -> bytes:
    """Rewrite a tokenizer_config.json so that transformers 4 and 5 read it; unchanged if they do
    already.
    """
    try:
        config = parse_json(tokenizer_config)
    except ValueError:
        return tokenizer_config
    if not isinstance(config, dict):
        return tokenizer_config
    common = hf_tokenizer.for_everyone(config)
    # Dumping an equal config would change its bytes, and all other files of an export stay
    # byte for byte.
    return tokenizer_config if common == config else (json.dumps(common, indent=2) + "\n").encode()
