"""Commands that write: two at once, and killed and run again with other inputs.

Never a mixture, never half a file.
"""

from __future__ import annotations

import re
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from smtrain import cli
from tests import tiers
from tests.cli.commands import in_the_package
from tests.cli.moments import Moments, error_of, in_fork, tree
from tests.cli.writers import CALLS, COVERED, DESTINATIONS, NO_FILES, make_inputs

REFUSED = re.compile(
    r"(smtrain: )?\S+ (is being written by another process; wait|is there already)"
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    make_inputs(root)
    return root


class Writer:
    """A command that writes below `out`, for input a or b."""

    def __init__(self, name: str, inputs: Path, out: Path) -> None:
        self.name, self.inputs, self.out = name, inputs, out

    def write(self, letter: str) -> None:
        CALLS[self.name](self.inputs, letter, self.out)

    def begin(self) -> None:
        """Only a config is there."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        shutil.copy(self.inputs / "run.yaml", self.out)

    def after(self, letters: str) -> dict[str, bytes]:
        """The output after calls that follow each other."""
        self.begin()
        for letter in letters:
            error_of(lambda letter=letter: self.write(letter))  # type: ignore[misc]
        return tree(self.out)


def chosen(changes: int) -> list[int]:
    """Changes to interrupt: all or, in the gate, one in the middle and two of those that replace
    the old output.
    """
    return (
        list(range(changes))
        if tiers.full()
        else sorted({changes // 2, max(0, changes - 3), changes - 1})
    )


def every_second(first: int) -> list[Any]:
    """Writers of a test: all or, in the gate, every second one, so that each is in one of two."""
    return [
        pytest.param(name, marks=[] if n % 2 == first else [pytest.mark.full])
        for n, name in enumerate(CALLS)
    ]


@pytest.mark.parametrize("name", every_second(0))
def test_two_at_once_have_one_owner(name: str, inputs: Path, tmp_path: Path) -> None:
    writer = Writer(name, inputs, tmp_path / "out")

    def check(moments: Moments) -> None:
        writer.begin()
        for number in chosen(moments.count(lambda: writer.write("a"))):
            writer.begin()
            errors = moments.interrupted(
                lambda: writer.write("a"), number, lambda: writer.write("b")
            )
            assert all(not error or REFUSED.match(error) for error in errors), errors
            left, done = (
                tree(writer.out),
                "".join(one for one, error in zip("ab", errors, strict=True) if not error),
            )
            assert left in [writer.after(order) for order in {done, done[::-1]}], (
                f"at change {number}: {done}"
            )

    in_fork(writer.out, check)


@pytest.mark.parametrize("name", every_second(1))
def test_a_killed_call_leaves_no_mixture_and_the_next_one_writes_its_output(
    name: str, inputs: Path, tmp_path: Path
) -> None:
    writer, old = (
        Writer(name, inputs, tmp_path / "out"),
        ("" if name in ("data export", "chat") else "b"),
    )

    def check(moments: Moments) -> None:
        before, new = writer.after(old), writer.after(old + "a")
        results = [writer.after(old + "b"), writer.after(old + "ab")]
        writer.after(old)
        for number in chosen(moments.count(lambda: writer.write("a"))):
            writer.after(old)
            moments.killed(lambda: writer.write("a"), number)
            left = tree(writer.out).items()
            assert left <= before.items() or left <= new.items(), (
                f"at change {number}: {[file for file, _ in left]}"
            )
            error = error_of(lambda: writer.write("b"))
            assert not error or REFUSED.match(error), error
            assert tree(writer.out) in results, f"at change {number}"

    in_fork(writer.out, check)


def test_every_command_that_writes_is_in_the_table() -> None:
    tables = [set(CALLS), set(COVERED), NO_FILES]
    assert sorted(name for table in tables for name in table) == sorted(in_the_package()), (
        "each in one table"
    )
    assert all(Path(test).is_file() for test in COVERED.values())
    for name in NO_FILES:
        first, *rest = name.split()
        command = get_command(import_module(cli.COMMANDS[first][0]).app)
        for word in rest:
            command = command.commands[word]  # type: ignore[attr-defined]
        assert not DESTINATIONS & {param.name for param in command.params}, name
