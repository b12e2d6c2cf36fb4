"""The cases of test_generations.py, which runs in `scripts/test --full` only, with weights to try
them on.
"""

from __future__ import annotations

import pytest

from tests.core.model.generations import CASES, spelled
from tests.worker.engine import cases


@pytest.mark.parametrize("generation", [4, 5])
def test_each_case_has_weights_that_differ(generation: int) -> None:
    for family, rope in CASES:
        values = cases.weights(spelled(family, rope, generation))
        assert all(value.std() > 0.01 for value in values.values() if value.dim() > 1), (
            family,
            rope,
        )
