"""The bundle holds what the container runs, and its bytes depend on nothing else."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from smtrain.client.launch.bundle import build_bundle, bundle_files
from smtrain.stages import STAGES
from tests import warm

REPO = Path(__file__).resolve().parents[3]


def test_the_same_content_gives_the_same_bytes_in_any_process_and_at_any_time() -> None:
    code = "from smtrain.client.launch.bundle import build_bundle; print(build_bundle().sha256)"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Pacific/Apia"}
    for path in bundle_files().values():
        os.utime(path)
    other = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == build_bundle().sha256


def test_it_holds_the_container_half_and_nothing_of_the_client() -> None:
    with tarfile.open(fileobj=io.BytesIO(build_bundle().data)) as archive:
        names = archive.getnames()
    assert names == sorted(names)
    for stage in (*STAGES, "launch"):
        assert f"entrypoints/{stage}.py" in names
    assert {"entrypoints/requirements.txt", "entrypoints/wheels.txt"} <= set(names)
    assert "smtrain/core/facts/instances.toml" in names
    assert not [
        name
        for name in names
        if name.startswith(("smtrain/client/launch", "smtrain/cli", "smtrain/plane/server"))
    ]
    assert not [name for name in names if "__pycache__" in name]


def test_what_it_holds_imports_by_itself(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(build_bundle().data)) as archive:
        archive.extractall(tmp_path, filter="data")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "sys.modules['boto3'] = sys.modules['sagemaker'] = None\n"  # an import of them fails
        "import smtrain.worker.train.start, smtrain.worker.data.prepare.prepare\n"
        "import smtrain.worker.checkpoint.convert, smtrain.worker.checkpoint.export\n"
        "import smtrain.worker.generation.stage, smtrain\n"
        "assert smtrain.__file__.startswith(sys.argv[1]), smtrain.__file__\n"
    )
    script = tmp_path / "imports.py"
    script.write_text(code)
    run = warm.run([script, tmp_path], dict(os.environ))
    assert run.returncode == 0, run.stderr
