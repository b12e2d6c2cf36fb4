"""Metric expressions are tried in a process that may be lost with one of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from smtrain.plane.server.scanner import SLOW, Scanner


@pytest.fixture
def scanner() -> Iterator[Scanner]:
    scanner = Scanner()
    yield scanner
    scanner.close()


def test_matches_are_the_first_groups_in_the_order_of_the_lines(scanner: Scanner) -> None:
    found = scanner.find([r"a=(\S+)", "(", "none", "(x)?y"], ["a=1 a=2", "b", "a=3 y"])
    assert found[0] == ["1", "2", "3"]
    assert "unterminated subpattern" in found[1]
    assert found[2:] == [[], []]


def test_a_lost_process_is_started_again(scanner: Scanner) -> None:
    assert scanner.find(["(a)"], ["a"]) == [["a"]]
    assert scanner._process
    os.kill(scanner._process.pid, signal.SIGKILL)
    scanner._process.wait()
    assert scanner.find(["(a)"], ["a"]) == [["a"]]


def test_others_are_answered_when_one_takes_too_long(scanner: Scanner) -> None:
    assert scanner.find(["(b)", "((a+)+)$", "(c)"], ["a" * 50 + "!", "b", "c"]) == [["b"], SLOW, ["c"]]
