"""A small model whose tokens are words, for checks of data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "worker/golden_dpo/model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(GOLDEN, tmp_path_factory.mktemp("model") / "model"))
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "max_position_embeddings": 512}))
    return folder
