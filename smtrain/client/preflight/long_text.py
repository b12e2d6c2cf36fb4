"""Check that the text has documents long enough for a model extended to longer ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from smtrain.client.findings import Finding
from smtrain.client.preflight.context import CheckUnavailable, Context, described_in
from smtrain.core.config import textfiles
from smtrain.core.files import parse_json
from smtrain.core.model.hf_config import positions_named

_BYTES = 4
"""Bytes of a token, about what English text has under the vocabularies of today's models."""
_SAMPLE = 64 << 20  # bytes read of JSON lines; whole text files are judged by their sizes
_MIN_LONG_SHARE = 0.1
"""Share of long documents below which most rows teach nothing about new positions."""


def documents(context: Context) -> Iterator[Finding]:
    """The share of the text in documents longer than the model's positions without model.rope.

    Text files and JSON lines of this machine only; a document's tokens are guessed by its bytes.
    """
    config = context.chain.given
    if config.model.rope is None or "prepare" not in context.stages:
        return
    try:
        hf_config = described_in(context, context.model_path)
    except CheckUnavailable:
        return
    longest = positions_named(hf_config) if hf_config else None
    sizes = [
        size
        for source in config.data.all_sources
        for size in _sizes(source.path, config.data.text_column)
    ]
    if not longest or not sizes:
        return
    long = sum(size for size in sizes if size > longest * _BYTES) / max(1, sum(sizes))
    share_note = (
        f"about {long:.0%} of the text is in documents longer than the {longest:,} positions that"
        f" the model has without model.rope, at {_BYTES} bytes a token"
    )
    if long >= _MIN_LONG_SHARE:
        yield Finding("text", "ok", share_note)
    else:
        yield Finding(
            "text",
            "warning",
            f"{share_note}, so few rows teach it to use longer ones",
            f"add longer documents, or set data.min_characters: {longest * _BYTES} to leave out"
            " shorter ones",
        )


def _sizes(path: str, column: str) -> Iterator[int]:
    """Bytes of each document of a local file or folder, as far as they can be told without a
    library.
    """
    root = Path(path)
    if "://" in path or not root.exists():
        return
    files = [(root, root.suffix.lower())] if root.is_file() else _select_files(root)
    remaining_bytes = _SAMPLE
    for file, kind in files:
        if kind in (".txt", "text"):
            yield file.stat().st_size
        elif kind in (".jsonl", "jsonl"):
            with file.open("rb") as lines:
                for line in lines:
                    remaining_bytes -= len(line)
                    if remaining_bytes < 0:
                        return
                    yield _text_bytes(line, column)


def _select_files(folder: Path) -> list[tuple[Path, str]]:
    choice, _ = textfiles.choose_in(folder, "auto")
    return [
        (folder / name, kind) for name, kind in choice.read if textfiles.compression(name) is None
    ]


def _text_bytes(line: bytes, column: str) -> int:
    try:
        text = parse_json(line)[column]
    except (ValueError, KeyError, TypeError):
        return 0
    return len(text.encode(errors="replace")) if isinstance(text, str) else 0
