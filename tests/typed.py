"""Commands called in the test's own process: no Python to start, and nothing to import that is there already."""

from __future__ import annotations

import os

import pytest

from smtrain.cli import main


def typed(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Call `smtrain`, the first of the words; its exit status, its output and its errors."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch, open(os.devnull) as nothing:
        patch.setattr("sys.argv", words)
        patch.setattr("sys.stdin", nothing)
        with pytest.raises(SystemExit) as left:
            main()
    told = capsys.readouterr()
    return int(left.value.code or 0), told.out, told.err
