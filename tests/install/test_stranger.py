"""A newcomer who runs the README's commands gets AWS's requests, and a model trained on this
machine.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.install.conftest import REPOSITORY, Installed
from tests.install.stranger import Stranger, Typed, faults
from tests.notebooks.test_notebooks import shorten

pytestmark = [pytest.mark.slow, pytest.mark.full]

ALONE = {"pp: 2": "pp: 1", "instance_count: 2": "instance_count: 1"}


def test_the_readme_leads_to_a_request_for_aws_and_to_a_model(
    installed: Installed, tmp_path: Path
) -> None:
    examples = tmp_path / "examples"
    shutil.copytree(REPOSITORY / "examples", examples)
    tiny = examples / "tiny-llama.yaml"
    text = shorten(tiny.read_text("utf-8"))
    for several, single in ALONE.items():
        text = text.replace(several, single)
    tiny.write_text(text, "utf-8")
    folder = tmp_path / "new"
    folder.mkdir()
    stranger = Stranger(REPOSITORY / "README.md", examples, folder, installed.environment())
    typed: list[Typed] = []
    try:
        for one in stranger.walk():
            typed.append(one)
            print(f"{one.seconds:6.1f} s  {one.command}")
            assert not faults(one), f"{one.command}: {faults(one)}\n{one.output}{one.errors}"
    finally:
        stranger.type("smtrain local stop")
    outputs = {one.command: one.output for one in typed}
    assert len(typed) > 20
    assert (
        '"TrainingJobName": "my-run-train-'
        in outputs["smtrain launch aws.yaml --dry-run --target aws"]
    )
    assert "g6e.12xlarge" in outputs["smtrain plan aws.yaml"]
    assert re.search(r"\btrain +Completed .*-train-\w+", outputs["smtrain list"])
    assert (folder / "my-model/model.safetensors").stat().st_size > 1_000_000
