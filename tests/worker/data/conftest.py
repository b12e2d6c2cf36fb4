from __future__ import annotations

from pathlib import Path

import pytest

from smtrain.core.demo.inputs import save_tokenizer
from tests.unsynced import unsynced

__all__ = ["unsynced"]

GOLDEN = Path(__file__).resolve().parents[4] / "shared" / "golden" / "megatron"


@pytest.fixture(scope="session")
def golden() -> Path:
    if not GOLDEN.is_dir():
        pytest.skip(f"{GOLDEN} is not here: the golden files are next to the checkout")
    return GOLDEN


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 300 ids with an end of text, as a Hugging Face folder without a model."""
    folder = tmp_path_factory.mktemp("tokenizer")
    documents = ["the words of a small text " * 20, "def words(text): return text.split()"]
    save_tokenizer(documents, folder, vocabulary=300, end="<|end|>")
    return folder
