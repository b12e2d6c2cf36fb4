"""The local control plane: SageMaker's training API on 127.0.0.1, with this machine as its instances.

    endpoint = ensure_running()
    sagemaker = endpoint.session().client("sagemaker")

Only the client part lives here; moto and the executor are imported by the server process alone
(`python -m smtrain.local.serve`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smtrain.local.endpoint import Endpoint, ensure_running, running, shut_down

__all__ = ["Endpoint", "ensure_running", "running", "shut_down"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from smtrain.local import endpoint

        return getattr(endpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
