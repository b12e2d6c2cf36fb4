"""Check that neuronx-distributed is installed, and join its job."""

from __future__ import annotations

import importlib.util
import os
from importlib import metadata
from typing import Any

from smtrain.core.errors import ConfigError


def require() -> None:
    """Raise `ConfigError` with the image to take if this container lacks the library or its
    requirements.
    """
    from smtrain.core.facts import table

    os.environ.setdefault("NXD_LOG_LEVEL", "warning")  # else it prints every group of ranks
    images = table("images")
    image = f"{images['repository']}:{images['default_tag']}"
    missing_packages = [
        name
        for name in ("torch_xla", "neuronx_distributed")
        if importlib.util.find_spec(name) is None
    ]
    if missing_packages:
        raise ConfigError(
            f"train.engine: nxd needs {' and '.join(missing_packages)}, which this container lacks;"
            f" leave compute.image out for the image {image}, which has it",
            code="package.missing",
        )
    version = metadata.version("transformers")
    if int(version.split(".")[0]) >= 5:  # transformers 5 removed its tracer
        raise ConfigError(
            f"train.engine: nxd needs transformers 4, and this container has {version}; leave "
            f"compute.image out for the image {image}",
            code="package.missing",
        )


def init_distributed() -> None:
    """Join the job that torchrun describes: XLA's process group, or gloo under NXD_CPU_MODE.

    On Trainium1 the library lays out tensor-parallel groups of 4 by hosts of LOCAL_WORLD_SIZE
    ranks, so it must be set.
    """
    import torch.distributed as dist
    from neuronx_distributed.utils import cpu_mode

    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        return
    kind = "gloo"
    if not cpu_mode():
        import torch_xla.distributed.xla_backend  # noqa: F401 - registers the backend

        kind = "xla"
    if "RANK" in os.environ:
        dist.init_process_group(kind)
    else:
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(kind, store=store, rank=0, world_size=1)


class Everyone:
    """Communication of all ranks, always over gloo on the hosts."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def gather(self, value: Any) -> list[Any]:
        """Everyone's `value`, by rank."""
        import torch.distributed as dist

        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self._group)
        return out

    def sum(self, *numbers: float) -> list[float]:
        """Sum everyone's numbers in double precision."""
        import torch
        import torch.distributed as dist

        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return [float(n) for n in total]

    def agree(self, fault: str | None, failure: str) -> None:
        """Raise `CheckpointError` on every rank if any has a `fault`."""
        from smtrain.worker.engine.saving import raise_any

        raise_any(self.gather(fault), failure)
