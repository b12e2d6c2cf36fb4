"""`prepare` and `prepare_sft` for tests: options as keyword arguments, and no output unless a test
asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.prepare import prepare as text
from smtrain.worker.data.prepare import sft
from smtrain.worker.data.prepare_options import PrepareOptions


def ignore(_: object) -> None:
    pass


def _call(
    run: Callable[..., DatasetManifest],
    inputs: Any,
    output: Path,
    tokenizer: Path,
    options: dict[str, Any],
) -> DatasetManifest:
    calls = {"progress": ignore, "say": ignore}
    calls |= {
        name: options.pop(name)
        for name in ("progress", "say", "parts", "spread")
        if name in options
    }
    return run(inputs, output, tokenizer, PrepareOptions(**options), **calls)


def prepare(inputs: Any, output: Path, tokenizer: Path, **options: Any) -> DatasetManifest:
    return _call(text.prepare, inputs, output, tokenizer, options)


def prepare_sft(source: Path, output: Path, tokenizer: Path, **options: Any) -> DatasetManifest:
    return _call(sft.prepare_sft, [source], output, tokenizer, options)
