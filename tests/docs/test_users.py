"""The page of known problems answers every entry, and each named test exists."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT

ENTRIES = 29  # in the list of users' problems, gathered 2026-11


def test_every_entry_has_an_answer_and_a_test_that_exists() -> None:
    page = (ROOT / "docs/users.md").read_text("utf-8")
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in page.splitlines()
        if re.match(r"\| \d", row)
    ]
    assert [int(row[0]) for row in rows] == list(range(1, ENTRIES + 1))
    for number, pain, answer, proof in rows:
        assert pain, number
        assert answer, number
        file, _, test = proof.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text("utf-8"), proof
