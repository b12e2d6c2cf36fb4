"""`parallel: auto`: the fastest mesh that fits, in the words of the config."""

from __future__ import annotations

from typing import Any

from smtrain.config.schema import JobConfig


def choose(config: JobConfig) -> dict[str, Any]:
    """The section `parallel` for this model, these instances and this global batch.

    Raises `ConfigError` where nothing fits, or where model or instance type are not known to the planner.
    """
    from smtrain.errors import ConfigError
    from smtrain.planner.search import search
    from smtrain.planner.setup import Machine
    from smtrain.planner.subject import shape_of, work_of

    work, recompute = work_of(config, shape_of(config))
    compute = config.compute
    machine = Machine.of(compute.instance_type, compute.instance_count, config.processes_per_instance)
    found = search(work, [machine], recompute=recompute)
    if not found:
        raise ConfigError(
            [
                f"parallel: auto finds no mesh of {compute.instance_count} x {compute.instance_type} that fits the "
                f"model and divides train.global_batch_size = {config.train.global_batch_size}; take more or larger "
                "instances, or another batch"
            ]
        )
    mesh = found[0].mesh
    return {
        "tp": mesh.tp, "pp": mesh.pp, "dp": mesh.dp, "micro_batch_size": mesh.micro_batch,
        "sequence_parallel": mesh.sequence_parallel, "activation_checkpointing": mesh.recompute,
    }  # fmt: skip
