"""Questions and answers are what `help()` says on this machine."""

from __future__ import annotations

import collections
import inspect
import shutil

from smtrain.core.demo.documentation import LONGEST_TEXT, describe, documentation


def test_every_answer_is_a_signature_and_a_paragraph() -> None:
    records = list(documentation())
    answers = {record["instruction"]: record["output"] for record in records}
    assert len(answers) == len(records) > 1000
    copy = answers["What is shutil.copyfile in Python?"]
    assert copy.startswith(
        f"copyfile{inspect.signature(shutil.copyfile)}\n    Copy data from src to dst"
    )
    assert answers["What is str.split in Python?"].startswith("split(self, ")
    assert (
        answers["What is len in Python?"]
        == f"len{inspect.signature(len)}\n    {inspect.getdoc(len)}"
    )
    for answer in answers.values():
        _, _, text = answer.partition("\n    ")
        assert 0 < len(text) <= LONGEST_TEXT
        assert "\n" not in text
        assert " at 0x" not in answer


def test_it_is_the_same_each_time() -> None:
    assert list(documentation()) == list(documentation())


def test_what_tells_nothing_is_left_out() -> None:
    def silent(a: int) -> int:
        return a

    def placed(a: object = object()) -> object:
        """Its default is an address."""
        return a

    point = collections.namedtuple("point", "x y")  # its docstring is its signature
    assert describe("silent", silent) is None
    assert describe("placed", placed) is None
    assert describe("point", point) is None
    assert describe("type", 3) is None
