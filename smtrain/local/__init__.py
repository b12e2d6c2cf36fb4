"""The local control plane: SageMaker's training API on 127.0.0.1, with this machine as its instances.

    endpoint = ensure_running()
    sagemaker = endpoint.session().client("sagemaker")
    plane().faults(throttle=0.3)      # what can be made to go wrong: smtrain/testing/switches.py

Only the client part lives here; moto and the executor are imported by the server process alone
(`python -m smtrain.local.serve`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smtrain.aws.local_plane import Endpoint, ensure_running, running, shut_down
    from smtrain.testing.switches import Plane, plane

_MODULES = {
    "Endpoint": "endpoint", "ensure_running": "endpoint", "running": "endpoint", "shut_down": "endpoint",
    "Plane": "switches", "plane": "switches",
}  # fmt: skip
__all__ = ["Endpoint", "Plane", "ensure_running", "plane", "running", "shut_down"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"smtrain.local.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
