"""Errors name what the user typed: a flag for a flag, a key for a key of the config."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from smtrain.cli.dispatch import forget, in_flags, register_flags

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("add text or lower train.seq_len.", "add text or lower --seq-len."),
        ("train.seq_len: got 0", "--seq-len: got 0"),
        (
            "train.seq_length stays, and so does train.seq_len.x",
            "train.seq_length stays, and so does train.seq_len.x",
        ),
        ("to: got 'gguf'; go to the docs", "--to: got 'gguf'; go to the docs"),
        ("replace them with --overwrite (overwrite=True)", "replace them with --overwrite"),
    ],
)
def test_keys_become_the_flags_that_stand_for_them(text: str, said: str) -> None:
    forget()
    register_flags({"train.seq_len": "--seq-len", "to": "--to"})
    assert in_flags(text) == said
    forget()
    assert in_flags(text) == text.replace(" (overwrite=True)", "")


def test_the_page_of_messages_holds_errors_help_and_what_is_said() -> None:
    page = subprocess.run(
        [sys.executable, ROOT / "scripts/messages"], capture_output=True, text=True, check=True
    )
    for sentence in (
        "no such config file",
        "Replace other files of the same names.",
        "Ask a job to stop",
    ):
        assert sentence in page.stdout
    assert int(page.stderr.split()[0]) > 500
