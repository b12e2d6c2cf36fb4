"""Damage to prepared data is noticed and named at the first read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smtrain.core.config import JobConfig
from smtrain.core.errors import DataError
from smtrain.worker.checksum import crc32
from smtrain.worker.data import checksums
from smtrain.worker.data.checksums import BLOCK, Rolling
from smtrain.worker.data.load.loader import TokenLoader
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.pack.exchange import export_blocks, import_tokens, merge, split
from smtrain.worker.train.data_position import Position
from tests.worker.data.chats import talk, tokenizer, write
from tests.worker.data.quiet import prepare, prepare_sft

SEQ = 64
CHATS = [{"messages": talk(f"question {i}", f"this answer {i}")} for i in range(9)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """Prepared data of a little more than three blocks."""
    folder = tmp_path_factory.mktemp("whole")
    rows = [{"text": f"the words {i} of a small text " * 20} for i in range(700)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(folder / "a.jsonl", folder / "out", tokenizer_folder, seq_len=SEQ)
    assert (folder / "out/tokens.bin").stat().st_size > 3 * BLOCK
    return folder / "out"


@pytest.fixture
def data(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    (tmp_path / "data").mkdir()
    for path in whole.iterdir():
        (tmp_path / "data" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "data"


def read_all(folder: Path) -> int:
    """Read an epoch of batches; return their number."""
    loader = TokenLoader(
        folder, seq_len=SEQ, global_batch_size=8, dp_rank=0, dp_size=1, seed=1, vocab_size=512
    )
    try:
        for step in range(loader.samples // 8):
            loader.batch(8 * step)
    finally:
        loader.close()
    return loader.samples // 8


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path: Path, at: int) -> None:
    overwrite(path, at, bytes([path.read_bytes()[at] ^ 4]))


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_checksums_are_of_blocks_however_the_file_was_written(parts: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "BLOCK", 16)
        rolling = Rolling()
        for part in parts:
            rolling.add(part)
        text = b"".join(parts)
        assert rolling.values().tolist() == [
            crc32(text[i : i + 16]) for i in range(0, len(text), 16)
        ]


def test_whole_data_is_read_and_each_block_was_compared(data: Path) -> None:
    assert read_all(data) > 100


@pytest.mark.parametrize("at", [0, BLOCK + 17, -1], ids=["first", "second", "last"])
def test_one_flipped_bit_ends_the_run_with_file_and_block(data: Path, at: int) -> None:
    path = data / "tokens.bin"
    at %= path.stat().st_size
    flip(path, at)
    with pytest.raises(
        DataError, match=rf"tokens\.bin is damaged: block {at // BLOCK} .*prepare the data again"
    ) as caught:
        read_all(data)
    assert "\n" not in str(caught.value)


def test_zeroed_tokens_are_noticed(data: Path) -> None:
    path = data / "tokens.bin"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DataError, match=r"tokens\.bin is damaged"):
        read_all(data)


def test_checksums_that_are_damaged_or_gone_are_named(data: Path) -> None:
    flip(data / "tokens.sums", 40)
    with pytest.raises(DataError, match=r"tokens\.sums is damaged"):
        read_all(data)
    (data / "tokens.sums").unlink()
    with pytest.raises(DataError, match=r"tokens\.sums cannot be read"):
        read_all(data)


def test_a_damaged_index_is_noticed_where_it_is_read(data: Path) -> None:
    flip(data / "tokens.idx", 200)
    options: dict[str, Any] = {
        "seq_len": SEQ,
        "global_batch_size": 8,
        "dp_rank": 0,
        "dp_size": 1,
        "seed": 1,
    }
    TokenLoader(data, **options, vocab_size=512).close()
    with pytest.raises(DataError, match=r"tokens\.idx is damaged: block 0"):
        TokenLoader(data, **options, vocab_size=512, document_mask=True)


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "tokens_mask.bin"])
def test_instruction_data_too(tmp_path: Path, name: str) -> None:
    prepare_sft(
        write(tmp_path / "chats.jsonl", CHATS),
        tmp_path / "out",
        tokenizer(tmp_path / "model", "chatml"),
        seq_len=SEQ,
    )
    flip(tmp_path / "out" / name, 34 + 2)
    with pytest.raises(DataError, match=f"{name} is damaged: block 0".replace(".", r"\.")):
        TokenLoader(
            tmp_path / "out",
            seq_len=SEQ,
            global_batch_size=2,
            dp_rank=0,
            dp_size=1,
            seed=1,
            vocab_size=512,
        ).batch(0)


def test_merge_split_import_and_export_check_what_they_read_and_make_checksums(
    data: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    parts = split(data / "tokens", tmp_path / "part", [3, 1])
    merge(parts, tmp_path / "again")
    assert (tmp_path / "again.sums").read_bytes() == (data / "tokens.sums").read_bytes()
    import_tokens(tmp_path / "again", tmp_path / "imported", tokenizer_folder, SEQ)
    assert (tmp_path / "imported/tokens.sums").read_bytes() == (data / "tokens.sums").read_bytes()
    for prefix in (parts[0], tmp_path / "again"):
        flip(prefix.with_name(prefix.name + ".bin"), 10)
    for act in (
        lambda: merge(parts, tmp_path / "bad"),
        lambda: split(tmp_path / "again", tmp_path / "bad", [1, 1]),
        lambda: import_tokens(tmp_path / "again", tmp_path / "bad", tokenizer_folder, SEQ),
        lambda: export_blocks(tmp_path / "again", tmp_path / "blocks", SEQ),
    ):
        with pytest.raises(DataError, match=r"\.bin is damaged: block 0"):
            act()
    assert not (tmp_path / "bad.idx").exists()
    assert not (tmp_path / "bad/manifest.json").exists()


def test_a_checkpoint_identifies_its_data_by_the_tokens(data: Path) -> None:
    config = JobConfig(name="x", model={"path": "s3://a/b"}, data={"prepared": "s3://a/d"})  # type: ignore[arg-type]
    manifest = DatasetManifest.load(data)

    def identity(files: dict[str, dict[str, Any]]) -> Any:
        return Position(config, dataclasses.replace(manifest, files=files), {}).fixed_values()[
            "data"
        ]

    now = identity(manifest.files)
    assert identity(manifest.content) == now, "checksums follow from the tokens"
    assert (
        identity(
            manifest.files | {"tokens.bin": manifest.files["tokens.bin"] | {"sha256": "0" * 64}}
        )
        != now
    )


def test_blocks_are_compared_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(
        checksums, "crc32", lambda part, *rest: (calls.append(len(part)), crc32(part, *rest))[1]
    )
    read_all(data)
    blocks = -(-(data / "tokens.bin").stat().st_size // BLOCK)
    assert (
        blocks <= len(calls) <= blocks + 1 + 4 * 4
    )  # the .sums file itself; threads that meet in a block
    assert np.sum(calls) > (data / "tokens.bin").stat().st_size
