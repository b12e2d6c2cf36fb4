"""`smtrain convert` and `checkpoint` take the models that configs name, and say which places they
cannot read.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import smtrain.tools.convert as convert_module
from smtrain.cli.checkpoint import app as checkpoint
from smtrain.cli.convert import app as convert
from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.summary import inspect


@pytest.mark.full
def test_a_model_of_the_demo_is_converted_and_compared_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = str(tmp_path / "shards")
    convert(args=["demo://tiny-llama", shards, "--to", "nxd", "--tp", "2"], standalone_mode=False)
    assert inspect(shards).kind == "nxd"
    checkpoint(args=["diff", "demo://tiny-llama", shards], standalone_mode=False)
    assert "the same, bit for bit" in capsys.readouterr().out


def test_a_place_that_is_not_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="weights are not read from nowhere://; give a folder or an s3:// URI"
    ):
        convert(args=["nowhere://a/b", str(tmp_path / "to"), "--to", "nxd"], standalone_mode=False)


def test_a_conversion_on_disks_imports_no_backend() -> None:
    """The backend of OSS takes as long to import as everything else of a conversion."""
    tree = ast.parse(Path(convert_module.__file__ or "").read_text())
    modules = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert "smtrain.core.protocol.uris" in modules
    assert not [
        name for name in modules if name.startswith(("smtrain.client", "smtrain.core.config"))
    ]
