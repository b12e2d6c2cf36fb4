"""What a file of tests needs that not every environment has."""

from __future__ import annotations

import pytest

from smtrain.core.extras import present


def need(*modules: str) -> None:
    """Skip the whole file where one of them is not installed. None is imported: each of the workers collects every
    file, and one of them runs it."""
    for module in modules:
        if not present(module):
            pytest.skip(f"{module} is not installed", allow_module_level=True)
