"""What worlds of the nxd engine run; the first argument is the rank."""

from __future__ import annotations

from typing import Any

from smtrain.engine.base import ParallelOptions
from tests.engine import cases
from tests.engine.cases import BATCH, OPTIMIZER, STEPS, Memory, weights
from tests.engine.nxd import shim


def engine(
    config: dict[str, Any], options: ParallelOptions, *, source: Any = None, seed: int | None = None,
    form: Any = "pt", asynchronous: bool = False,
) -> Any:  # fmt: skip
    """An engine of its own process group: the library keeps its groups in globals."""
    import torch.distributed as dist

    shim.install()
    shim.forget_groups()
    from neuronx_distributed.parallel_layers import parallel_state
    from neuronx_distributed.trainer import checkpoint

    from smtrain.engine.nxd.engine import NxdEngine, SaveOptions

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_kv_group()
    checkpoint.g_iostate = None
    if seed is None and source is None:
        source = Memory(config, weights(config))
    each = BATCH // options.dp // options.micro_batch_size
    assert dist.is_initialized()
    return NxdEngine(config, options, OPTIMIZER, source, seed or 0, each, SaveOptions(form, asynchronous))


def train(rank: int, config: dict[str, Any], options: ParallelOptions, count: int = STEPS) -> list[tuple[float, float]]:
    return cases.steps(engine(config, options), 0, count)


def evaluate(rank: int, config: dict[str, Any], options: ParallelOptions) -> float:
    e = engine(config, options)
    loss: float = e.evaluate(*cases.own(e, cases.batch(config, 0)))
    return loss
