"""Conversion from and to object stores: nothing is copied here first, and nothing appears there before it is whole."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from smtrain.checkpoint.about import diff, inspect
from smtrain.checkpoint.convert import convert
from smtrain.errors import CheckpointError
from tests.checkpoint.folders import LLAMA, hf_folder


@pytest.fixture
def store() -> Iterator[str]:
    yield "memory://bucket/models"
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


@pytest.mark.parametrize("form", ["pt", "xser"])
def test_there_and_back(tmp_path: Path, store: str, form: str) -> None:
    source = hf_folder(tmp_path / "hf", LLAMA)
    fsspec.filesystem("memory").pipe_file("/bucket/models/mine", b"kept")
    convert(source, f"{store}/nxd", tp=2, pp=2, form=form)  # type: ignore[arg-type]
    assert inspect(f"{store}/nxd").topology == {"tp": 2, "pp": 2}
    convert(source, tmp_path / "here", tp=2, pp=2, form=form)  # type: ignore[arg-type]
    here = {p.relative_to(tmp_path / "here").as_posix(): p.read_bytes() for p in (tmp_path / "here").rglob("*.pt")}
    memory = fsspec.filesystem("memory")
    assert here == {name: memory.cat_file(f"/bucket/models/nxd/{name}") for name in here}
    convert(f"{store}/nxd", f"{store}/hf", to="hf", max_shard_size=6000)
    assert not list(diff(source, f"{store}/hf"))
    convert(f"{store}/hf", tmp_path / "back", to="native", tp=2)
    assert not list(diff(f"{store}/nxd", tmp_path / "back"))
    with pytest.raises(CheckpointError, match="overlap"):
        convert(f"{store}/nxd", f"{store}/nxd/below", tp=1)


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is None, reason="s3fs is not installed")
def test_s3(tmp_path: Path, local_home: Path) -> None:
    from smtrain.local import ensure_running

    endpoint = ensure_running()
    s3 = endpoint.session().client("s3")
    s3.create_bucket(Bucket="conversions")
    source = hf_folder(tmp_path / "hf", {**LLAMA, "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 6000})
    code = (
        "import sys; from pathlib import Path; from smtrain.errors import CheckpointError\n"
        "from smtrain.checkpoint.convert import convert; s, b, t = sys.argv[1:]\n"
        "convert(s, f'{b}/nxd', tp=2, pp=2)\n"
        "convert(f'{b}/nxd', f'{b}/hf', to='hf')\n"
        "convert(f'{b}/hf', t, to='hf')\n"
        "file = next(Path(f'{t}/../broken/model').glob('*tp_rank_01*'))\n"
        "data = bytearray(file.read_bytes()); data[len(data) // 2] ^= 1; file.write_bytes(data)\n"
        "try: convert(f'{t}/../broken', f'{b}/none', to='hf')\n"
        "except CheckpointError as error: print(error)\n"
    )
    convert(source, tmp_path / "broken", tp=2, pp=1)
    command = [sys.executable, "-c", code, str(source), "s3://conversions/m", str(tmp_path / "back")]
    told = subprocess.run(
        command, env={**os.environ, **endpoint.environment()}, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    assert not list(diff(source, tmp_path / "back"))
    assert "is not what was written" in told.stdout
    held = [o["Key"] for o in s3.list_objects_v2(Bucket="conversions")["Contents"]]
    assert "m/nxd/manifest.json" in held
    assert not [key for key in held if key.startswith("m/none")]
    assert not s3.list_multipart_uploads(Bucket="conversions").get("Uploads")
