"""Log events that arrive late and out of order, at moments that the test chooses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from smtrain.plane.server import logs_api
from smtrain.plane.server.logs_api import Delivery

from .conftest import follow


def test_a_token_does_not_give_what_arrived_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(logs_api, "time", SimpleNamespace(time=lambda: clock.now))
    monkeypatch.setattr(logs_api, "delivery", Delivery(reorder=0.3, seed=1))
    stream = logs_api.stream_of("behind/algo-1-1000")

    def page(**asked: Any) -> dict[str, Any]:
        return stream.page(asked)

    lines = [f"line {number}" for number in range(400)]
    stream.append([(1_000_000, line) for line in lines])
    early, token = follow(page)
    assert 200 < len(early) < 400
    assert [line for line in lines if line in early] == early
    clock.now += 1.0  # by then all have arrived
    assert follow(page)[0] == lines
    again = follow(page, token)[0]
    assert not set(again) & set(early), "none comes twice"
    assert len(early) + len(again) < 400, "those behind the token are not given by it"
