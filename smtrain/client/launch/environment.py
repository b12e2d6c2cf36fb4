"""The container's environment: by Neuron SDK generation of its image, by instance capability, by
mesh.

Source: the table and rules of AWS's own examples from SDK 2.18 to 2.30 (neuronx-distributed, NxDT).
What the config names in compute.environment wins over everything here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smtrain.client.launch import compiled_graphs
from smtrain.client.planner.this_machine import is_here
from smtrain.core.config import JobConfig, Stage
from smtrain.core.facts import instance
from smtrain.core.facts.engines import LNC, is_gpu, lnc_of
from smtrain.core.facts.images import sdk_release
from smtrain.core.facts.warm_pools import WARM_POOL_CACHE
from smtrain.core.protocol.entrypoints import GRAPHS, GRAPHS_FOLDER
from smtrain.stages import stage_named


def environment(
    config: JobConfig, stage: Stage, image: str, model_config: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Environment variables of a stage's containers; `config.output.s3_uri` is filled in.

    `model_config` is the model's config.json if it can be read; it names the cache of compiled
    graphs.
    """
    variables = {"PYTHONUNBUFFERED": "1"}
    row = None if is_here(config) else _machine(config)
    if not stage_named(stage).on_accelerators:
        row = None
    if row and is_gpu(config.compute.instance_type):
        variables |= _nccl(row)
    elif row:
        if row["efa"]:
            # The platform sets FI_PROVIDER for ml.trn1.32xlarge alone.
            variables |= {
                "FI_PROVIDER": "efa",
                "FI_EFA_USE_DEVICE_RDMA": "1",
                "FI_EFA_FORK_SAFE": "1",
            }
        if row.get("logical_cores", 1) > 1:
            # The compiler's --lnc must be the same.
            variables[LNC] = str(lnc_of(config.compute.instance_type, config.compute.environment))
        native = config.train.engine == "native"
        if native and config.compute.keep_alive:
            variables[GRAPHS_FOLDER] = f"{WARM_POOL_CACHE}/neuron"
        elif not native:
            variables |= _xla(config, sdk_release(image))
        if not config.network.isolation:
            variables[GRAPHS if native else compiled_graphs.VARIABLE] = compiled_graphs.cache_uri(
                config, image, variables | config.compute.environment, model_config
            )
    return variables | config.compute.environment


def _machine(config: JobConfig) -> Mapping[str, Any] | None:
    """The row of the train stage's type, or what the config describes of a type that has none."""
    kind, machine = config.compute.instance_type, config.own_machine
    row = instance(kind)
    if row is None and machine is not None and kind.startswith("ml."):
        return {"efa": machine.efa}
    return row


def _nccl(row: Mapping[str, Any]) -> dict[str, str]:
    """Variables of a GPU job: NCCL's log level, and EFA if the type has it (docs/gpus.md).

    NCCL_SOCKET_IFNAME is the launcher's: only the container knows its interface.
    """
    variables = {"NCCL_DEBUG": "WARN"}
    if row["efa"]:
        variables |= {"FI_PROVIDER": "efa", "FI_EFA_FORK_SAFE": "1"}
    if row.get("rdma"):
        variables["FI_EFA_USE_DEVICE_RDMA"] = "1"
    return variables


def _xla(config: JobConfig, release: tuple[int, int, int] | None) -> dict[str, str]:
    """Variables of PyTorch/XLA, on which engine nxd runs.

    TorchNeuron does not read them; the launcher sets the folders of its caches
    (entrypoints/launch.py).
    """
    pipeline = config.parallel.pp > 1
    variables = {"MALLOC_ARENA_MAX": "128" if pipeline else "64"}
    if config.compute.keep_alive or not config.network.isolation:
        # With a network the cache is in S3 instead; without either the compiler has its own place
        # on the disk.
        variables[compiled_graphs.VARIABLE] = f"{WARM_POOL_CACHE}/neuron"
    if release is None or release >= (2, 31, 0):
        # No PyTorch/XLA from 2.31 on, and the runtime ignores the variable of asynchronous
        # requests.
        return variables
    # XLA_USE_BF16 and XLA_DOWNCAST_BF16 are never set: from 2.25 on the model is cast instead.
    return variables | {
        "NEURON_CC_FLAGS": "--model-type=transformer --retry_failed_compilation",
        "NEURON_FUSE_SOFTMAX": "1",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "7" if pipeline else "3",
        "XLA_DISABLE_FUNCTIONALIZATION": "0",
    }
