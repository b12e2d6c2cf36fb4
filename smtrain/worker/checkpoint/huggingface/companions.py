"""The files that go along with weights written elsewhere: all of the model's folder that are not weights.

`smtrain.core.model.hf_folder.companions_in` decides for each file, for all kinds of target alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

from smtrain.core.model import hf_tokenizer
from smtrain.core.model.hf_folder import companions_in
from smtrain.core.text import Say
from smtrain.worker.checkpoint.storage import Place

OF_A_WHOLE_MODEL = {"generation_config.json": "of a whole model; loaders of an adapter read the base model's"}
"""Companions that an adapter's folder has no use for."""


@dataclass(frozen=True)
class Carried:
    """Files that are written next to the weights, and those that are not."""

    files: dict[str, bytes] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Name (of a whole folder, with a slash) -> the reason."""

    def tell(self, say: Say) -> None:
        """Name what is left out: a line for each reason."""
        by_reason = sorted(self.left_out.items(), key=lambda item: item[1])
        for reason, items in groupby(by_reason, key=lambda item: item[1]):
            say(f"left out ({reason}): {', '.join(name for name, _ in items)}")


NOTHING = Carried()


def companions_of(beside: Place, replaced: Mapping[str, str] | None = None) -> Carried:
    """Read all files of a model's folder that go along with its weights; `replaced` are those that are written again.

    Raises CheckpointError if one cannot be read.
    """
    sizes = beside.files()
    found = companions_in(sizes, replaced)
    files = {name: bytes(beside.read(name, 0, sizes[name])) for name in found.kept}
    if (name := "tokenizer_config.json") in files:
        files[name] = _for_everyone(files[name])
    return Carried(files, {**found.left_out, **_links(beside)})


def _links(beside: Place) -> dict[str, str]:
    """Links that nothing was read through: to a folder, and to what is not there."""
    root = beside.path()
    if root is None:
        return {}
    out = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink() and not path.is_file() and not any(part.startswith(".") for part in name.split("/")):
            out[name] = "a link to a folder; copy what is in it" if path.is_dir() else "a link to nothing"
    return out


def _for_everyone(tokenizer_config: bytes) -> bytes:
    """The same file, unless transformers 4 would not read it."""
    try:
        said = json.loads(tokenizer_config)
    except ValueError:
        return tokenizer_config
    if not isinstance(said, dict):
        return tokenizer_config
    written = hf_tokenizer.for_everyone(said)
    return tokenizer_config if written == said else (json.dumps(written, indent=2) + "\n").encode()
