from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smtrain.core.errors import DataError
from smtrain.worker.data.indexed import IndexedDataset, token_dtype
from tests.worker.data.writer import IndexedWriter

NAMES = ["corpus", "corpus_noeod", "sentences", "merged", "int32", "multimodal"]


@pytest.mark.parametrize("name", NAMES)
def test_reads_what_megatron_wrote(golden: Path, name: str) -> None:
    expected = json.loads((golden / "expected.json").read_text())[f"{name}_text_document"]
    data = IndexedDataset(golden / f"{name}_text_document")
    assert data.dtype.name == expected["dtype"]
    assert data.lengths.tolist() == expected["lengths"]
    assert data.offsets.tolist() == expected["pointers"]
    assert data.document_index.tolist() == expected["doc_idx"]
    assert (None if data.modes is None else data.modes.tolist()) == expected["modes"]
    assert data.tokens.tolist() == expected["tokens"]
    assert [token for i in range(len(data)) for token in data[i].tolist()] == expected["tokens"]


@pytest.mark.parametrize("name", NAMES)
def test_writes_the_bytes_that_megatron_wrote(golden: Path, tmp_path: Path, name: str) -> None:
    data = IndexedDataset(golden / f"{name}_text_document")
    with IndexedWriter(tmp_path / "x.bin", tmp_path / "x.idx", data.dtype) as writer:
        for start, stop in pairwise(data.document_index):
            modes = None if data.modes is None else data.modes[start:stop].tolist()
            writer.add_document([data[i] for i in range(start, stop)], modes)
    for end in ("bin", "idx"):
        assert (tmp_path / f"x.{end}").read_bytes() == (
            golden / f"{name}_text_document.{end}"
        ).read_bytes()


@given(
    st.lists(st.lists(st.integers(0, 65_499), max_size=5), max_size=12),
    st.sampled_from(["uint16", "int32", "int64"]),
    st.data(),
)
@settings(deadline=None)
def test_documents_in_batches_read_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    dtype: str,
    data: st.DataObject,
) -> None:
    prefix = tmp_path_factory.mktemp("indexed") / "x"
    cut = data.draw(st.integers(0, len(documents)))
    with IndexedWriter(prefix.with_name("x.bin"), prefix.with_name("x.idx"), dtype) as writer:
        for part in (documents[:cut], documents[cut:]):
            flat = np.array([t for document in part for t in document], np.int32)
            writer.add_documents(flat, np.array([len(d) for d in part], np.int32))
    read = IndexedDataset(prefix)
    read_back = [
        [t for i in range(a, b) for t in read[i].tolist()] for a, b in pairwise(read.document_index)
    ]
    assert read_back == documents
    assert (writer.sequences, writer.tokens) == (len(read), len(read.tokens))


@pytest.mark.parametrize("cut", [0, 5, 33, 100, 429])
def test_a_cut_index_is_named(golden: Path, tmp_path: Path, cut: int) -> None:
    (tmp_path / "x.idx").write_bytes((golden / "corpus_text_document.idx").read_bytes()[:cut])
    (tmp_path / "x.bin").write_bytes((golden / "corpus_text_document.bin").read_bytes())
    with pytest.raises(DataError, match=r"x\.idx"):
        IndexedDataset(tmp_path / "x")


def test_a_cut_bin_and_a_missing_one_are_named(golden: Path, tmp_path: Path) -> None:
    (tmp_path / "x.idx").write_bytes((golden / "corpus_text_document.idx").read_bytes())
    with pytest.raises(DataError, match=r"x\.bin is missing"):
        IndexedDataset(tmp_path / "x")
    (tmp_path / "x.bin").write_bytes((golden / "corpus_text_document.bin").read_bytes()[:-2])
    with pytest.raises(DataError, match="1834 bytes and its index says 1836"):
        IndexedDataset(tmp_path / "x")


def test_the_type_follows_the_vocabulary() -> None:
    assert [token_dtype(v).name for v in (512, 65_499, 65_500, 150_000)] == [
        "uint16",
        "uint16",
        "int32",
        "int32",
    ]
