"""The text model within a multimodal one: its config.json and the names of its parameters; pure
Python.

Such a folder describes its parts in one config.json, the text model under `text_config`, and stores
all parts in the same files. smtrain trains the text model and leaves the rest alone. A plain model
is its own text part.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

TEXT = "text_config"
"""The key of the text model's own config.json."""
_SHARED_KEYS = (
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Keys of the whole model that hold for its text part."""
_TEXT_TENSOR = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?P<own>.+)")
"""Names of the text part's tensors, as releases 4 and 5 of transformers write them."""


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a model of several parts, one of them for text."""
    return isinstance(config.get(TEXT), Mapping) and bool(config[TEXT])


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the text model: the given one, or the part of a multimodal model.

    The whole model's word on tied embeddings counts, as transformers 5 ties by it.
    """
    if not is_multimodal(config):
        return dict(config)
    inner = dict(config[TEXT])
    tied = (
        {_SHARED_KEYS[0]: config[_SHARED_KEYS[0]]}
        if config.get(_SHARED_KEYS[0]) is not None
        else {}
    )
    return {
        **{key: config[key] for key in _SHARED_KEYS if config.get(key) is not None},
        **inner,
        **tied,
    }


def text_name(stored_name: str, prefix: str) -> str | None:
    """The text model's own name of a tensor of a multimodal folder; None if it belongs to another
    part.

    `prefix` is the first word of the family's names, such as `model`.
    """
    if stored_name.startswith("lm_head."):
        return stored_name
    match = _TEXT_TENSOR.fullmatch(stored_name)
    if match is None:
        return None
    inner_name = match["own"]
    return (
        inner_name
        if inner_name.startswith(("lm_head.", f"{prefix}."))
        else f"{prefix}.{inner_name}"
    )


def parts_named(names: Iterable[str]) -> str:
    """Name the other parts by the beginnings of their tensors' names, with the number of tensors of
    each.
    """
    counts = Counter(name.removeprefix("model.").partition(".")[0] for name in names)
    return ", ".join(
        f"{part} ({count} tensor{'s' if count > 1 else ''})"
        for part, count in sorted(counts.items())
    )
