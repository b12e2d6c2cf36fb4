from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.dtypes import BF16, FP32, tensor
from smtrain.worker.checkpoint.storage import place
from smtrain.worker.checkpoint.tensor_files import Tensor
from smtrain.worker.checkpoint.tensor_ranges import Slab
from smtrain.worker.checkpoint.torch_files import zip as torchzip
from smtrain.worker.checkpoint.torch_files import zip_writer as torchzip_writer


def test_files_beyond_four_gigabytes_are_laid_out_right(tmp_path: Path) -> None:
    """A sparse file with one record of more than 4 GiB, and one that begins beyond it."""
    wide, last = Tensor(BF16, (3 << 20, 1 << 10)), Tensor(FP32, (5,))
    container = torchzip_writer.container("wide.pt", {"wide": wide, "last": last})
    numbers = torch.arange(5.0)
    with (tmp_path / "wide.pt").open("wb") as file:
        for at, data in container.fixed_blocks:
            file.seek(at)
            file.write(data)
        file.seek(container.offsets["wide"] + wide.size)
        file.write(torchzip_writer.descriptor(0, wide.size))
        file.seek(container.offsets["last"])
        file.write(numbers.numpy().tobytes())
        file.seek(container.end)
        file.write(container.tail({"wide": 0, "last": 0}) if container.tail else b"")
    tensors = torch.load(tmp_path / "wide.pt", weights_only=True, mmap=True)
    assert tensors["wide"].shape == wide.shape
    assert torch.equal(tensors["last"], numbers)
    ours = torchzip.load(place(tmp_path), "wide.pt")
    assert ours["wide"].size == wide.size
    assert torch.equal(tensor(ours["last"].read_all(), FP32), numbers)
    with zipfile.ZipFile(tmp_path / "wide.pt") as archive:
        assert max(info.file_size for info in archive.infolist()) == wide.size


def test_any_view_that_torch_saves_is_read(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    saved: dict[str, Any] = {
        "transposed": base.t(),
        "rows": base[2:4],
        "columns": base[:, 3:5],
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.0),
        "parameter": torch.nn.Parameter(base.clone()),
        "nested": {"list": [base[0], 4]},
    }
    torch.save(saved, tmp_path / "views.pt")
    tensors = torchzip.load(place(tmp_path), "views.pt")
    for name in ("transposed", "rows", "columns", "empty", "scalar", "parameter"):
        assert isinstance(tensors[name], Slab)
        assert torch.equal(tensor(tensors[name].read_all(), FP32), saved[name])
    assert torch.equal(tensor(tensors["nested"]["list"][0].read_all(), FP32), base[0])
    assert torch.equal(
        tensor(tensors["transposed"].bits([(1, 5), (2, 4)]), FP32), base.t()[1:5, 2:4]
    )


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"no zip" * 100])
def test_what_is_no_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.pt is (empty|not a complete torch checkpoint)"):
        torchzip.load(place(tmp_path), "x.pt")


def pickled(where: Path, body: bytes) -> Path:
    """A torch file whose pickle is `body`."""
    with zipfile.ZipFile(where, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + body + b".")
        archive.writestr("x/byteorder", b"little")
    return where


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"cos\nsystem\n(X\4\0\0\0truetR", "would call os.system"),
        (b"cbuiltins\neval\n(X\1\0\0\x001tR", "would call builtins.eval"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n}b", "gives attributes to another object"),
        (b"ctorch._utils\n_rebuild_parameter\n)\x81", "creates an object"),
        (b"ctorch.storage\nUntypedStorage\n)R", "calls what cannot be called"),
        (b"(X\4\0\0\0truetcos\nsystem\nR", "would call os.system"),
        (b"X\xff\xff\xff\x7fa", "cut short"),
        (b"\x8c\2os\x8c\6system\x93", "would call os.system"),
        (b"(i", "opcode"),
        (b"}(}u", "other keys than names and numbers"),
        (b"}(K\1u", "argument"),
        (b"h\7", "7"),
        (b"}r\xff\xff\xff\x7f0", "opcode"),
    ],
)
def test_a_pickle_does_nothing_but_describe_tensors(
    tmp_path: Path, body: bytes, words: str
) -> None:
    pickled(tmp_path / "x.pt", body)
    with pytest.raises(
        CheckpointError, match=rf"x\.pt is not (safe|a complete torch checkpoint).*{words}"
    ):
        torchzip.load(place(tmp_path), "x.pt")


def test_what_xser_says_of_its_tensors_is_what_torch_reads(tmp_path: Path) -> None:
    info = torchzip_writer.pickle_info([Tensor(BF16, (2, 3)), Tensor(FP32, ())])
    container = torchzip_writer.container("x.pt", {}, info)
    tail = container.tail({}) if container.tail else b""
    (tmp_path / "x.pt").write_bytes(b"".join(data for _, data in container.fixed_blocks) + tail)
    tensors = torch.load(tmp_path / "x.pt", weights_only=True)
    assert tensors == {
        0: {"dtype": torch.bfloat16, "shape": torch.Size([2, 3]), "expert_model_parallel": False},
        1: {"dtype": torch.float32, "shape": torch.Size([]), "expert_model_parallel": False},
    }


def nested(make: bytes) -> bytes:
    """A pickle of a value that holds the next several times, 100 deep."""
    body = b"]q\0"
    for _ in range(100):
        body += make
    return body


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (nested(b"h\0h\0\x87q\0"), "more than 1,000,000 values"),
        (
            b"}(" + b")q\0" + b"h\0\x86q\0" * 100 + b"K\1u",
            "other keys than names and numbers",
        ),
        (b"(" + b")q\0" + b"h\0\x86q\0" * 100 + b"K\1K\1K\1K\1tQ", "refers to tuple"),
        (b"ccollections\nOrderedDict\n](" + b"]K\1\x86" + b"e\x85R", "other keys than names"),
        (b"ccollections\nOrderedDict\n](K\1e\x85R", "other items than pairs"),
    ],
    ids=["shared lists", "keys", "a persistent id", "pairs", "no pairs"],
)
def test_what_refers_to_itself_without_end_is_bounded_work(
    tmp_path: Path, body: bytes, words: str
) -> None:
    pickled(tmp_path / "x.pt", body)
    with pytest.raises(CheckpointError, match=words):
        torchzip.load(place(tmp_path), "x.pt")


def test_a_pickle_without_end_is_bounded_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("smtrain.worker.checkpoint.torch_files.unpickle._STEPS", 1000)
    pickled(tmp_path / "x.pt", b"N" * 1001)
    with pytest.raises(CheckpointError, match="more than 1,000 operations"):
        torchzip.load(place(tmp_path), "x.pt")
