"""The clock of a step's parts: what is within another is not counted twice, and nothing is lost
between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smtrain.worker.engine.step_timing import PARTS, StepTimer, mark_parts, part

trees: Any = st.recursive(
    st.integers(1, 9),
    lambda inner: st.lists(
        st.one_of(st.integers(1, 9), st.tuples(st.sampled_from(PARTS), inner)), max_size=4
    ),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.sampled_from(PARTS), trees)
def test_every_second_is_the_innermost_parts(
    monkeypatch: pytest.MonkeyPatch, name: Any, tree: Any
) -> None:
    now, expected = 0.0, dict.fromkeys(PARTS, 0.0)
    monkeypatch.setattr("smtrain.worker.engine.step_timing.time.perf_counter", lambda: now)

    def do(within: Any, what: Any) -> None:
        nonlocal now
        if isinstance(what, int):
            now += what
            expected[within] += what
        elif isinstance(what, tuple):
            with part(what[0]):
                do(*what)
        else:
            for each in what:
                do(within, each)

    clock = StepTimer()
    with mark_parts(clock), part(name):
        do(name, tree)
    assert clock.seconds == expected


def test_unmarked_a_part_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepTimer()
    with pytest.raises(RuntimeError), mark_parts(clock), part("data"):
        raise RuntimeError
    before = dict(clock.seconds)
    with part("data"):
        pass
    assert clock.seconds == before


def test_the_device_is_waited_for_where_a_part_ends() -> None:
    calls: list[str] = []

    def places() -> Iterator[str]:
        with mark_parts(StepTimer(lambda: calls.append("settled"))), part("optimizer"):
            yield "within"
            with part("data parallel"):
                yield "further within"

    for at in places():
        calls.append(at)
    assert calls == ["within", "settled", "further within", "settled", "settled"]
