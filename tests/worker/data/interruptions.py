"""A preparation, interrupted after each block and then called again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from smtrain.worker.data.prepare.progress import DataProgress

Run = Callable[[Path, Callable[[DataProgress], None]], None]


def resumes_after_every_block(
    run: Run, folder: Path, least: int, after: Callable[[], None] = lambda: None
) -> None:
    """Check that an interrupted `run(output, progress)` resumes to the same bytes and repeats no
    marked block.

    The run must have at least `least` blocks; `after` is called after each interruption.
    """

    def counted(out: Path, last: int | None = None) -> tuple[int, dict[str, bytes]]:
        seen = 0

        def stop(_: DataProgress) -> None:
            nonlocal seen
            seen += 1
            if seen == last:
                raise InterruptedError

        run(out, stop)
        return seen, {path.name: path.read_bytes() for path in out.iterdir()}

    out = folder / "out"
    whole, wanted = counted(folder / "undisturbed")
    assert whole >= least
    for read in range(1, whole + 1):
        with pytest.raises(InterruptedError):
            counted(out, read)
        after()
        left, made = counted(out)
        assert made == wanted
        assert left == whole - read + 1, "marked blocks were done again"
        shutil.rmtree(out)
