"""docs/neuron-operators.md lists what the engine asks of a device today."""

from __future__ import annotations

import pytest

from tests.worker.engine.neuron import page


@pytest.mark.full  # test_engine.py has a run's operators
def test_the_page_lists_the_operators_of_today() -> None:
    written = page.PAGE.read_text("utf-8")
    if page.versions() not in written:
        pytest.skip(f"the page is not of {page.versions()}, which may call other operators")
    made = page.text(page.recorded())
    assert made == written, (
        "the engine calls other operators: python -m tests.worker.engine.neuron.page"
    )
