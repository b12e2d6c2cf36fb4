"""Stand-ins that let neuronx-distributed train on a CPU over gloo, for parts of XLA that its CPU
mode still needs.

Never part of the package: the engine itself knows nothing of it. `install()` before the first
import of the library, with NXD_CPU_MODE=1 and PJRT_DEVICE=CPU in the environment. Each function
below is one work-around of docs/nxd.md.
"""

from __future__ import annotations

import copy
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

# The compiler, the runtime and the kernels: only their names are asked for when the library is
# imported.
ABSENT = (
    "torch_neuronx",
    "libneuronxla",
    "neuronxcc",
    "nki",
    "nkilib",
    "neuronx_distributed.trace",
)


class _Anything:
    """Stands for whatever an absent module should hold; it can be decorated with, subclassed and
    looked into.
    """

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **_kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else _Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __getitem__(self, _key: Any) -> Any:
        return _Anything()


def _any_name(name: str) -> type[_Anything]:
    """Stand for any name of an absent module, but not for __file__ and such, which `inspect` reads."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type("Anything", (_Anything,), {})


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves an empty package for every name below ABSENT."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if any(name == root or name.startswith(f"{root}.") for root in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = []
        if spec.name == "torch_neuronx.utils":
            # trn1 or trn2 decides in which order repeated key/value heads lie
            vars(module)["get_platform_target"] = lambda: os.environ.get(
                "SMTRAIN_TEST_PLATFORM", "trn1"
            )
        vars(module)["__getattr__"] = _any_name
        return module

    def exec_module(self, _module: ModuleType) -> None:
        pass


def available() -> bool:
    """Whether the library and torch_xla can be imported here at all."""
    return all(
        importlib.util.find_spec(name) is not None for name in ("torch_xla", "neuronx_distributed")
    )


def install() -> None:
    """Make `import neuronx_distributed` give a library that runs here. Once is enough."""
    if any(isinstance(finder, _Absent) for finder in sys.meta_path):
        return
    install_absent()
    _device()
    _steps()
    _collectives()
    _ordinals()
    _zero1_shards()
    import neuronx_distributed  # noqa: F401

    _contiguous_gradients()


def install_absent() -> None:
    """Only what is not there: enough for a real XLA device."""
    import torch_xla  # noqa: F401 - before the stand-ins, whose names it looks for

    sys.meta_path.insert(0, _Absent())
    _host_world_size()


def _host_world_size() -> None:
    """get_local_world_size reads a variable whose name torch_xla 2.9 no longer has."""
    import torch_xla.core.xla_env_vars as names

    names.HOST_WORLD_SIZE = "SMTRAIN_TEST_HOSTS"
    os.environ.setdefault("SMTRAIN_TEST_HOSTS", "1")


def _device() -> None:
    import torch
    import torch_xla.core.xla_model as xm

    xm.xla_device = lambda *_args, **_kwargs: torch.device("cpu")


def _steps() -> None:
    """Nothing is traced, so there is nothing to cut; a rendezvous is a barrier while there is a
    group.
    """
    import torch.distributed as dist
    import torch_xla
    import torch_xla.core.xla_model as xm

    def meet(*_args: Any, **_kwargs: Any) -> None:
        if dist.is_initialized():
            dist.barrier()

    xm.rendezvous = meet
    xm.mark_step = torch_xla.sync = xm.unlazy = lambda *_args, **_kwargs: None
    xm.add_step_closure = lambda closure, args=(), run_async=False: closure(*args)
    torch_xla._XLAC._xla_sync_multi = lambda *_args, **_kwargs: None


_GROUPS: dict[Any, Any] = {}


def forget_groups() -> None:
    """Forget an earlier process group; a test process lives through several."""
    _GROUPS.clear()


def _group(mesh: Any) -> Any:
    """This rank's gloo group of a mesh (a list of lists of ranks), which every rank makes in the
    mesh's order.
    """
    import torch.distributed as dist

    if mesh is None:
        return dist.group.WORLD
    if not isinstance(mesh, (list, tuple)):
        return mesh
    key = tuple(tuple(ranks) for ranks in mesh)
    if key not in _GROUPS:
        made = [(ranks, dist.new_group(list(ranks), backend="gloo")) for ranks in key]
        _GROUPS[key] = next((group for ranks, group in made if dist.get_rank() in ranks), None)
    return _GROUPS[key]


def _collectives() -> None:
    import torch
    import torch.distributed as dist
    import torch_xla.core.xla_model as xm

    kinds = {
        xm.REDUCE_SUM: dist.ReduceOp.SUM,
        xm.REDUCE_MAX: dist.ReduceOp.MAX,
        xm.REDUCE_MIN: dist.ReduceOp.MIN,
    }

    def all_reduce(
        kind: str, inputs: Any, scale: float = 1.0, groups: Any = None, **_rest: Any
    ) -> Any:
        one = torch.is_tensor(inputs)
        out = []
        for x in [inputs] if one else inputs:
            y = x.clone() if one else x  # xm's is in place for a list only
            dist.all_reduce(y, op=kinds[kind], group=_group(groups))
            out.append(y.mul_(scale) if scale != 1.0 else y)
        return out[0] if one else out

    def gathered(x: Any, dim: int, groups: Any) -> Any:
        group = _group(groups)
        parts = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    def all_gather(
        x: Any, dim: int = 0, groups: Any = None, output: Any = None, **_rest: Any
    ) -> Any:
        if not torch.is_tensor(x):
            return [gathered(one, dim, groups) for one in x]
        whole = gathered(x, dim, groups)
        return whole if output is None else output.copy_(whole)

    def scattered(kind: str, x: Any, scale: float, dim: int, groups: Any) -> Any:
        group = _group(groups)
        whole = x.contiguous().clone()
        dist.all_reduce(whole, op=kinds[kind], group=group)
        return (
            whole.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous() * scale
        )

    def reduce_scatter(
        kind: str,
        x: Any,
        scale: float,
        scatter_dim: int,
        _count: int = 0,
        groups: Any = None,
        output: Any = None,
        **_rest: Any,
    ) -> Any:
        if not torch.is_tensor(x):
            return [scattered(kind, one, scale, scatter_dim, groups) for one in x]
        part = scattered(kind, x, scale, scatter_dim, groups)
        return part if output is None else output.copy_(part)

    def by_name(
        kind: str, x: Any, scale: float, scatter_dim: int, shard_count: int = 0, **rest: Any
    ) -> Any:
        return reduce_scatter(kind, x, scale, scatter_dim, shard_count, **rest)

    xm.all_reduce, xm.all_gather, xm.reduce_scatter = all_reduce, all_gather, by_name
    xm.all_gather_bucketized, xm.reduce_scatter_bucketized = all_gather, by_name


def _ordinals() -> None:
    import torch.distributed as dist
    import torch_xla.runtime as xr

    xr.global_ordinal = lambda: (
        dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    )
    xr.world_size = lambda: (
        dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    )
    xr.global_device_count = xr.world_size
    xr.local_ordinal = lambda: int(os.environ.get("LOCAL_RANK", "0"))


def _zero1_shards() -> None:
    """torch_xla's ZeRO-1 cuts parameters that are on an XLA device; here they are on the CPU."""
    import torch
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    def shards(self: Any) -> list[dict[str, Any]]:
        self.device = torch.device("cpu")
        groups = []
        for group in self.param_groups:
            parts = []
            for parameter in group["params"]:
                part = self._shard_tensor(parameter.data).to(self.optimizer_dtype).clone()
                parts.append(torch.nn.Parameter(part, requires_grad=parameter.requires_grad))
                if self.use_grad_acc_hook:
                    self._register_hook(parameter, parts[-1])
            groups.append({**copy.copy(group), "params": parts})
        return groups

    ZeroRedundancyOptimizer._shard_parameters = shards


def _contiguous_gradients() -> None:
    """The column-parallel backward views gradients that sequence parallelism has permuted."""
    import torch
    from neuronx_distributed.modules import qkv_linear
    from neuronx_distributed.parallel_layers import layers

    setup, gradients = layers._linear_autograd_base_setup_bwd, qkv_linear._compute_gradients

    def set_up(ctx: Any, grad: Any) -> tuple[Any, ...]:
        weight = 1
        result = setup(ctx, grad)
        return tuple(
            x.contiguous() if torch.is_tensor(x) and i != weight else x
            for i, x in enumerate(result)
        )

    layers._linear_autograd_base_setup_bwd = set_up
    qkv_linear._compute_gradients = lambda x, weight, grad, bias: gradients(
        x, weight, grad.contiguous(), bias
    )
