"""Windows of text with their documents as segments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smtrain.core.errors import DataError
from smtrain.worker.data.load.loader import TokenLoader
from tests.tiers import examples
from tests.worker.data.writer import IndexedWriter, save_manifest

SEQ_LEN = 8
# lengths of the sequences of each document; an empty document has none
Documents = list[list[int]]


def make(folder: Path, parts: list[Documents]) -> Path:
    """Prepared text in which each token is the number of its document."""
    folder.mkdir(exist_ok=True)
    tokens: dict[str, tuple[int, int]] = {}
    for number, documents in enumerate(parts):
        prefix = f"tokens_{number}"
        with IndexedWriter(folder / f"{prefix}.bin", folder / f"{prefix}.idx", "uint16") as writer:
            for i, sequences in enumerate(documents):
                writer.add_document([np.full(length, i) for length in sequences])
        tokens[prefix] = (len(documents), writer.tokens)
    save_manifest(folder, tokens, SEQ_LEN)
    return folder


def load(folder: Path) -> list[TokenLoader]:
    """A plain loader, and one with a document mask."""
    return [
        TokenLoader(
            folder,
            seq_len=SEQ_LEN,
            global_batch_size=4,
            dp_rank=0,
            dp_size=1,
            seed=1,
            vocab_size=500,
            document_mask=masked,
        )
        for masked in (False, True)
    ]


DOCUMENT = st.lists(st.integers(1, 12), max_size=2)
PART = st.lists(DOCUMENT, min_size=1, max_size=20).filter(lambda ds: sum(map(sum, ds)) > SEQ_LEN)


@given(parts=st.lists(PART, min_size=1, max_size=3))
@settings(deadline=None, max_examples=examples(30))
def test_segments_are_the_documents_and_no_label_reaches_over_their_ends(
    tmp_path_factory: pytest.TempPathFactory, parts: list[Documents]
) -> None:
    plain, masked = load(make(tmp_path_factory.mktemp("text"), parts))
    for consumed in (0, 4, 40):
        ids, labels = plain.batch(consumed)
        input_ids, kept, segments = masked.batch(consumed)
        assert torch.equal(input_ids, ids)  # a token is its document's number here
        assert torch.equal(kept, torch.where(labels == ids, labels, -100))
        assert torch.equal(segments.diff() != 0, ids.diff() != 0)
    plain.close()
    masked.close()


def test_an_index_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, [[[30]]])
    (folder / "tokens_0.idx").write_bytes((folder / "tokens_0.idx").read_bytes()[:-3])
    with pytest.raises(DataError, match="has 59 bytes and its checksums are of 62"):
        load(folder)
