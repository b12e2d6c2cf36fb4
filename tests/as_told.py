"""The environment that a user is told (`smtrain local env`): every test with a real client takes it
from here.

A test adds nothing to it. What a client needs beyond it is a fault of ours.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from smtrain.plane.client import ensure_running

if TYPE_CHECKING:
    import pytest

    from smtrain.plane.client import Endpoint

CLIENTS = ("AWS_", "SAGEMAKER_")
"""Prefixes of environment variables that configure a client."""


def variables(endpoint: Endpoint | None = None) -> dict[str, str]:
    """The variables alone, of this control plane or of the one of SMTRAIN_HOME."""
    return (endpoint or ensure_running()).environment()


def environment(endpoint: Endpoint | None = None) -> dict[str, str]:
    """A whole environment for a process: this one's, without what other tests may have set for
    clients.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(CLIENTS)}
    return {**kept, **variables(endpoint)}


def tell(monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint | None = None) -> None:
    """Give this process the environment, for clients in it."""
    set_here = environment(endpoint)
    for name in [name for name in os.environ if name not in set_here]:
        monkeypatch.delenv(name)
    for name, value in variables(endpoint).items():
        monkeypatch.setenv(name, value)
