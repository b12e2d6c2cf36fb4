"""The processes that other tests of engines run in."""

from __future__ import annotations

import time

import pytest

from tests.worker.engine import world


def sleeps(rank: int) -> int:
    if rank == 1:
        time.sleep(600)
    return rank


@pytest.mark.full
def test_a_rank_that_gives_no_answer_is_shown_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    two = world.World(2)
    try:
        assert two.run(abs) == [0, 1]
        monkeypatch.setattr(world, "PATIENCE", 10)
        with pytest.raises(TimeoutError, match=r"1\] gave no answer in 10 s\n(.*\n)+.* in sleeps"):
            two.run(sleeps)
        monkeypatch.undo()
        assert two.run(abs) == [0, 1], "it starts again"
    finally:
        two.stop()
