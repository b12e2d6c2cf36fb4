"""Import and export of Megatron pairs and of the blocks of the SageMaker samples; merge and
split.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smtrain.core.errors import DataError
from smtrain.worker.data.indexed import IndexedDataset
from smtrain.worker.data.load.loader import TokenLoader
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.pack.exchange import export_blocks, import_tokens, merge, split
from smtrain.worker.data.summary import inspect, ranks, save_picture
from tests.worker.data.quiet import prepare
from tests.worker.data.writer import IndexedWriter


@pytest.fixture
def prepared(tmp_path: Path, tokenizer_folder: Path) -> Path:
    rows = [json.dumps({"text": f"the words of text {i} " * (i % 5)}) + "\n" for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(rows))
    prepare(tmp_path / "a.jsonl", tmp_path / "prepared", tokenizer_folder, seq_len=32)
    return tmp_path / "prepared"


def pair(prefix: Path) -> tuple[bytes, bytes]:
    return tuple(prefix.with_name(prefix.name + end).read_bytes() for end in (".bin", ".idx"))  # type: ignore[return-value]


def test_merges_the_bytes_that_megatron_merged(golden: Path, tmp_path: Path) -> None:
    parts = [golden / f"{name}_text_document" for name in ("corpus", "sentences")]
    merge(parts, tmp_path / "out" / "merged")
    assert pair(tmp_path / "out/merged") == pair(golden / "merged_text_document")
    merge([golden / "multimodal_text_document"] * 2, tmp_path / "twice")
    one, twice = (
        IndexedDataset(golden / "multimodal_text_document"),
        IndexedDataset(tmp_path / "twice"),
    )
    assert twice.modes is not None
    assert one.modes is not None
    assert twice.modes.tolist() == one.modes.tolist() * 2
    with pytest.raises(DataError, match="some are not"):
        merge([golden / "int32_text_document", golden / "multimodal_text_document"], tmp_path / "x")
    with pytest.raises(DataError, match="int32 and uint16"):
        merge([parts[0], golden / "int32_text_document"], tmp_path / "x")


@given(
    documents=st.lists(st.lists(st.integers(0, 60_000), max_size=6), min_size=4, max_size=20),
    shares=st.lists(st.floats(0.1, 5), min_size=2, max_size=4),
)
@settings(deadline=None)
def test_merging_what_was_split_is_what_it_was(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], shares: list[float]
) -> None:
    folder = tmp_path_factory.mktemp("split")
    with IndexedWriter(folder / "x.bin", folder / "x.idx", "uint16") as writer:
        for document in documents:
            writer.add_document([np.array(document[:2]), np.array(document[2:])])
    try:
        parts = split(folder / "x", folder / "part", shares)
    except DataError:  # too few documents for so many parts
        return
    merge(parts, folder / "again")
    assert pair(folder / "again") == pair(folder / "x")


@pytest.mark.parametrize("name", ["corpus", "sentences", "int32"])
def test_a_megatron_pair_becomes_a_prepared_dataset_and_input_of_one(
    golden: Path, tmp_path: Path, name: str
) -> None:
    source, vocabulary = golden / f"{name}_text_document", golden / "tokenizer"
    if name == "int32":
        with pytest.raises(DataError, match="has the id"):
            import_tokens(source, tmp_path / "out", vocabulary, 16)
        return
    made = import_tokens(source, tmp_path / "out", vocabulary, 16)
    assert pair(tmp_path / "out/tokens") == pair(source)
    assert made == DatasetManifest.load(tmp_path / "out")
    prepare(source.with_name(source.name + ".idx"), tmp_path / "again", vocabulary, seq_len=16)
    documents = [IndexedDataset(tmp_path / folder / "tokens") for folder in ("out", "again")]
    assert documents[0].tokens.tolist() == documents[1].tokens.tolist()
    ends = [np.cumsum(d.lengths)[d.document_index[1:] - 1].tolist() for d in documents]
    assert ends[0] == ends[1]
    loader = TokenLoader(
        tmp_path / "out",
        seq_len=16,
        global_batch_size=2,
        dp_rank=0,
        dp_size=1,
        seed=0,
        vocab_size=made.vocab_size,
    )
    assert loader.batch(0)[0].shape == (2, 16)
    loader.close()


def test_blocks_are_what_datasets_loads_and_come_back(
    prepared: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    tokens = IndexedDataset(prepared / "tokens").tokens
    count = export_blocks(prepared, tmp_path / "blocks", 32)
    loaded = datasets.load_from_disk(str(tmp_path / "blocks"))
    assert len(loaded) == count == len(tokens) // 32
    assert loaded.column_names == ["input_ids", "attention_mask", "labels"]
    assert [i for row in loaded for i in row["input_ids"]] == tokens[: count * 32].tolist()
    assert loaded[1]["labels"] == loaded[1]["input_ids"]
    assert set(loaded[0]["attention_mask"]) == {1}
    made = import_tokens(tmp_path / "blocks", tmp_path / "back", tokenizer_folder, 32)
    assert IndexedDataset(tmp_path / "back/tokens").tokens.tolist() == tokens[: count * 32].tolist()
    assert (made.documents, made.append_eod) == (count, False)
    loaded.select(range(2)).to_parquet(str(tmp_path / "rows/a.parquet"))
    import_tokens(tmp_path / "rows", tmp_path / "rows-back", tokenizer_folder, 32)
    assert IndexedDataset(tmp_path / "rows-back/tokens").lengths.tolist() == [32, 32]


def test_what_cannot_be_exchanged_is_refused(
    prepared: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    with pytest.raises(DataError, match="fewer than 1000000 tokens"):
        export_blocks(prepared, tmp_path / "out", 1_000_000)
    with pytest.raises(DataError, match="is there already"):
        export_blocks(prepared, prepared, 8)
    with pytest.raises(DataError, match="is there already"):
        import_tokens(prepared / "tokens", prepared, tokenizer_folder, 8)
    pq.write_table(pa.table({"input_ids": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="holds string and not lists of ids"):
        import_tokens(tmp_path / "a.parquet", tmp_path / "x", tokenizer_folder, 8)
    with pytest.raises(DataError, match="positive numbers"):
        split(prepared / "tokens", tmp_path / "part", [1.0, 0.0])


def test_a_dataset_is_described(prepared: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    about = inspect(prepared, tokenizer_folder)
    data = IndexedDataset(prepared / "tokens")
    assert (about.facts["documents"], about.facts["empty_documents"], about.facts["tokens"]) == (
        60,
        12,
        len(data.tokens),
    )
    assert about.counts.sum() == len(data.tokens)
    assert about.top[0][2] == max(about.counts) / about.counts.sum()
    assert about.sample is not None
    assert about.sample.startswith("the words of text 1 <|end|>the words of text 2 the")
    curve = ranks(about.counts)
    assert all(a >= b for a, b in pairwise(curve))
    save_picture(about, tmp_path / "picture.png", "tokens")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    save_picture(about, tmp_path / "picture.png", "drawn again")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"notes\.txt is there already and is no PNG picture"):
        save_picture(about, tmp_path / "notes.txt", "tokens")
    assert inspect(prepared / "tokens").facts["tokens"] == len(data.tokens)
    with pytest.raises(
        DataError, match=r"nothing is not a folder of prepared data .* holds no nothing\.idx"
    ):
        inspect(tmp_path / "nothing")


def test_what_an_import_cannot_keep_of_rows_is_counted(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    rows = [
        {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "attention_mask": [1, 1, 1], "note": "a"},
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1], "note": ""},
        {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "attention_mask": [1, 1, 0], "note": "b"},
    ]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/more.jsonl").write_text("{}\n")
    table = pa.Table.from_pylist(rows)
    for form, notes in (("arrow", 2), ("parquet", 3)):
        for old in (tmp_path / "in").glob("a.*"):
            old.unlink()
        if form == "parquet":
            pq.write_table(table, tmp_path / "in/a.parquet")
        else:
            with pa.ipc.new_stream(tmp_path / "in/a.arrow", table.schema) as stream:
                stream.write_table(table)
        made = import_tokens(tmp_path / "in", tmp_path / form, tokenizer_folder, 4)
        assert made.unread == {
            "note": notes,
            "rows with other labels than input_ids": 1,
            "rows with padding": 1,
        }
        assert any("more.jsonl" in sentence for sentence in made.left_out)
