"""megatron-core's own reader takes what is written here; skipped without megatron-core, which no
extra installs.

`pip install --no-deps --target DIR megatron-core`, then run this with DIR on PYTHONPATH.
"""

from __future__ import annotations

import json
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smtrain.worker.data.tokenizer import load_tokenizer
from tests.worker.data.quiet import prepare
from tests.worker.data.writer import IndexedWriter

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)


@pytest.fixture(scope="module")
def theirs() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of its other imports
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    return IndexedDataset


def documents(data: Any) -> list[list[int]]:
    """The tokens of every document, by document index."""
    return [
        [int(t) for i in range(int(start), int(stop)) for t in data.get(i)]
        for start, stop in pairwise(data.document_indices)
    ]


@pytest.mark.parametrize("mmap", [True, False])
def test_it_reads_what_prepare_wrote(
    theirs: Any, mmap: bool, tmp_path: Path, tokenizer_folder: Path
) -> None:
    texts = [f"the words of text {i} " * (i % 4) for i in range(50)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    manifest = prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer_folder, seq_len=8)
    tokenizer = load_tokenizer(tokenizer_folder)
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    ids = [
        [*document, manifest.eos_id] if document else [] for document in encoded
    ]  # as Megatron's preprocess_data
    data = theirs(str(tmp_path / "out/tokens"), mmap=mmap)
    assert data.index.dtype == np.uint16
    assert documents(data) == ids
    assert sum(data.sequence_lengths) == manifest.tokens


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_it_reads_documents_of_any_number_of_sequences(
    theirs: Any, dtype: str, tmp_path: Path
) -> None:
    made: list[list[list[int]]] = [[[1, 2], [3]], [[65_499]], [], [[4, 5, 6]]]
    with IndexedWriter(tmp_path / "x.bin", tmp_path / "x.idx", dtype) as writer:
        for document in made:
            writer.add_document([np.array(sequence) for sequence in document])
    data = theirs(str(tmp_path / "x"))
    assert data.index.dtype == np.dtype(dtype)
    assert data.document_indices.tolist() == [0, 2, 3, 3, 4]
    assert documents(data) == [[t for sequence in document for t in sequence] for document in made]
    assert data.get(3, offset=1, length=2).tolist() == [5, 6]
