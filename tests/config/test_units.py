"""Numbers for people, in the unit that they fill."""

from __future__ import annotations

import pytest

from smtrain.config.units import counted


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (6_738_415_616, "6.74 B"), (999_900_000, "1.00 B"), (999_400_000, "999 M"), (134_515_008, "135 M"),
        (41_000, "0.041 M"),
    ],
)  # fmt: skip
def test_parameters_are_counted_in_billions_or_millions(parameters: int, words: str) -> None:
    assert counted(parameters) == words
