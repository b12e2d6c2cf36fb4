"""Numbers from the requests of a run's jobs."""

from __future__ import annotations

from typing import Any

from smtrain.core.protocol.requests import rate_changes


def described(rate: str | None) -> dict[str, Any]:
    return {"HyperParameters": {} if rate is None else {"lr": rate}}


def test_a_resume_with_another_learning_rate_is_found_at_its_first_step() -> None:
    attempts = [
        (described("0.1"), 1.0),
        (described("0.1"), 40.0),
        (described("0.01"), 60.0),
        (described(None), 70.0),
        (described("0.1"), 80.0),
    ]
    assert rate_changes(attempts) == [(60.0, "0.1", "0.01"), (80.0, "0.01", "0.1")]


def test_a_training_from_its_beginning_is_no_resume() -> None:
    assert rate_changes([(described("0.1"), 1.0), (described("0.01"), 1.0)]) == []
    assert rate_changes([(described("0.1"), 1.0), (described("0.01"), None)]) == []
