"""`smtrain data`: from text to tokens and back to what others read, in a shell."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.test_cli import smtrain as process
from tests.typed import typed as smtrain
from tests.worker.data.test_exchange import pair


def test_the_whole_way(tmp_path: Path, trained_inputs: dict[str, Path]) -> None:
    text, model, out = str(trained_inputs["text"]), str(trained_inputs["model"]), str(tmp_path / "out")
    done = smtrain("data", "prepare", text, out, "--model", model, "--seq-len", "32", "--separator", "\\n")
    assert done.returncode == 0, done.stderr
    assert "30 documents" in done.stdout
    done = smtrain("data", "inspect", out, "--model", model, "--png", str(tmp_path / "p.png"))
    assert "begins: 'the red fox number 0" in done.stdout
    assert (tmp_path / "p.png").is_file()
    assert json.loads(smtrain("data", "inspect", out, "--json").stdout)["documents"] == 30
    part = str(tmp_path / "part")
    assert smtrain("data", "split", out, part, "0.9", "0.1").stdout.split() == [f"{part}_0", f"{part}_1"]
    assert "30 documents" in smtrain("data", "merge", f"{part}_0", f"{part}_1", str(tmp_path / "again")).stdout
    assert pair(tmp_path / "again") == pair(tmp_path / "out/tokens")
    blocks = str(tmp_path / "blocks")
    assert "blocks of 64" in smtrain("data", "export", out, blocks, "--seq-len", "64").stdout
    done = smtrain("data", "import", blocks, str(tmp_path / "back"), "--model", model, "--seq-len", "64")
    assert "samples of 64" in done.stdout
    done = process("data", "prepare", "hf://x/y", str(tmp_path / "z"), "--model", model, HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("smtrain: hf://x/y ")
