"""A fixture for folders whose tests write many small files: no fsync in the test process.

These tests kill processes, and what a killed process wrote stays without fsync. No test cuts the
power, which fsync is for. One took 8 ms while other workers wrote, and test_staging.py calls it
12,000 times.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def unsynced() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield
