"""Numbers for people, in the unit that they fill."""

from __future__ import annotations

import pytest

from smtrain.core.config.units import count, format_parameters


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (6_738_415_616, "6.74 B"),
        (999_900_000, "1.00 B"),
        (999_400_000, "999 M"),
        (134_515_008, "135 M"),
        (41_000, "0.041 M"),
    ],
)
def test_parameters_are_counted_in_billions_or_millions(parameters: int, words: str) -> None:
    assert format_parameters(parameters) == words


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2e9", 2 * 10**9),
        ("1.5B", 15 * 10**8),
        ("500 M", 5 * 10**8),
        ("3_000", 3000),
        ("0.1T", 10**11),
    ],
)
def test_counts_are_read_as_people_write_them(text: str, number: int) -> None:
    assert count(text) == number
