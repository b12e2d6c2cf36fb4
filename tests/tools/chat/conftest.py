"""The model that tests of chat talk to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.model.test_generate import make
from tests.worker.generation.test_generating import TEMPLATE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make(tmp_path_factory.mktemp("models") / "base", "llama")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made
