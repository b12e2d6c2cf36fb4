"""The work of a search, counted in calls: each distinct stage is timed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from smtrain.client.planner import search, throughput
from smtrain.client.planner.machines import Machine, Mesh, Work, named_shape
from smtrain.client.planner.memory import core_memory, telling_stages
from smtrain.client.planner.throughput import Slot


def test_a_search_times_each_distinct_stage_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = named_shape("llama-3-70b")
    assert shape is not None
    calls: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(throughput, "_stage_time", counted("stage", throughput._stage_time))
    monkeypatch.setattr(search, "core_memory", counted("memory", core_memory))
    monkeypatch.setattr(Slot, "total", property(counted("total", Slot.total.fget)))  # type: ignore[attr-defined]
    some = [Machine.of(kind, n) for kind in ("ml.p5.48xlarge", "ml.trn1.32xlarge") for n in (2, 4, 12, 24)]
    found = search.search(Work(shape, 8192, 1024), some)
    assert len(found) > 50
    # 2,664, 861 and 6,816 on 2026-11-27; without stages that are timed once 8,112, 1,753 and 102,492.
    assert calls["stage"] <= 3200
    assert calls["memory"] <= 1050
    assert calls["total"] <= 8200


@pytest.mark.parametrize(
    "layers", [(), (3, 3, 3, 3, 4, 4, 4, 4, 4), (4, 3, 4, 3, 4, 3, 4, 3, 4), (4, 4, 4, 4, 4, 4, 4, 4, 0)]
)
@pytest.mark.parametrize("global_batch", [8, 64])
def test_no_stage_needs_more_memory_than_those_that_tell(layers: tuple[int, ...], global_batch: int) -> None:
    shape = named_shape("llama-2-7b")
    assert shape is not None
    work, machine = Work(shape, 4096, global_batch), Machine.of("ml.p5.48xlarge", 9)
    mesh = Mesh(2, 9, 4, 2, "full", True, layers=layers)
    needs = [core_memory(work, machine, mesh, stage).total for stage in range(mesh.pp)]
    telling = telling_stages(work, mesh)
    assert max(needs) == max(needs[stage] for stage in telling)
    assert len(telling) <= 5
