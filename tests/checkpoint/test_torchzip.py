from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from smtrain.checkpoint import torchzip
from smtrain.checkpoint.places import Slab, place
from smtrain.checkpoint.writing import Tensor
from smtrain.errors import CheckpointError


def test_files_beyond_four_gigabytes_are_laid_out_right(tmp_path: Path) -> None:
    """Sparse, so that it takes no room: one record of more than 4 GiB, and one that begins beyond it."""
    wide, last = Tensor(torch.bfloat16, (3 << 20, 1 << 10)), Tensor(torch.float32, (5,))
    container = torchzip.container("wide.pt", {"wide": wide, "last": last})
    numbers = torch.arange(5.0)
    with (tmp_path / "wide.pt").open("wb") as file:
        for at, data in container.fixed:
            file.seek(at)
            file.write(data)
        file.seek(container.offsets["wide"] + wide.size)
        file.write(torchzip.descriptor(0, wide.size))
        file.seek(container.offsets["last"])
        file.write(numbers.numpy().tobytes())
        file.seek(container.end)
        file.write(container.tail({"wide": 0, "last": 0}) if container.tail else b"")
    found = torch.load(tmp_path / "wide.pt", weights_only=True, mmap=True)
    assert found["wide"].shape == wide.shape
    assert torch.equal(found["last"], numbers)
    ours = torchzip.load(place(tmp_path), "wide.pt")
    assert ours["wide"].size == wide.size
    assert torch.equal(ours["last"].whole(), numbers)
    with zipfile.ZipFile(tmp_path / "wide.pt") as archive:
        assert max(info.file_size for info in archive.infolist()) == wide.size


def test_any_view_that_torch_saves_is_read(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    saved = {
        "transposed": base.t(),
        "rows": base[2:4],
        "columns": base[:, 3:5],
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.0),
        "parameter": torch.nn.Parameter(base.clone()),
        "nested": {"list": [base[0], 4]},
    }
    torch.save(saved, tmp_path / "views.pt")
    found = torchzip.load(place(tmp_path), "views.pt")
    for name in ("transposed", "rows", "columns", "empty", "scalar", "parameter"):
        assert isinstance(found[name], Slab)
        assert torch.equal(found[name].whole(), saved[name])
    assert torch.equal(found["nested"]["list"][0].whole(), base[0])
    assert torch.equal(found["transposed"].window([(1, 5), (2, 4)]), base.t()[1:5, 2:4])


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"no zip" * 100])
def test_what_is_no_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.pt is no whole checkpoint"):
        torchzip.load(place(tmp_path), "x.pt")
    torch.save({"a": torch.zeros(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"old\.pt is no whole checkpoint"):
        torchzip.load(place(tmp_path), "old.pt")
