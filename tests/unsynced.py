"""A fixture for folders whose tests write many small files: no fsync in this process.

Tests kill processes, and what a process wrote outlives it without fsync. A loss of power, for which it is there, is not
tested. Each fsync waits for all that other workers write: a file of tests took 68 s on a busy disk, and 12 s without.
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
