"""Optional packages of a test file: skip the file if they are missing."""

from __future__ import annotations

import pytest

from smtrain.core.extras import present


def need(*modules: str) -> None:
    """Skip the whole file if one of them is not installed. They are not imported: each of the
    workers collects every file, and one of them runs it.
    """
    for module in modules:
        if not present(module):
            pytest.skip(f"{module} is not installed", allow_module_level=True)
