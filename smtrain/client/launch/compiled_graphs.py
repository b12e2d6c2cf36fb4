"""Compiled graphs: their prefix in S3, and for engine nxd whether all of them exist.

Neuron's own cache finds a graph by compiler version, flags and the graph itself, so what is said
here never decides what a job runs, only what is compiled when.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smtrain.client.backends.base import Backend
from smtrain.core.config import JobConfig
from smtrain.core.config.identity import identity_of
from smtrain.core.config.schema import GRAPHS_COMPLETE
from smtrain.core.digests import digest
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.files import parse_json
from smtrain.core.protocol.entrypoints import GRAPHS
from smtrain.core.text import Say
from smtrain.version import __version__

VARIABLE, FLAGS = "NEURON_COMPILE_CACHE_URL", "NEURON_CC_FLAGS"
CACHES = (VARIABLE, GRAPHS)
"""Variables that name the cache of a job, of engine nxd and of native."""
# Keys of a model's config.json that depend on the program that saved it, not on the model.
_NOISE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def cache_root(config: JobConfig) -> str:
    """s3:// prefix of all caches of an output folder, ending in "/"."""
    return f"{(config.output.s3_uri or '').rstrip('/')}/neuron-cache/"


def cache_uri(
    config: JobConfig,
    image: str,
    environment: Mapping[str, str],
    model_config: Mapping[str, Any] | None,
) -> str:
    """The S3 prefix of this config's graphs: one folder for all that changes a graph.

    That is compiler (by image), flags, instance family, engine, model shape, mesh, sequence length,
    micro-batches, precision, recomputation, adapter, whether samples of a row are kept apart, and
    our own version. A model whose config.json (`model_config`) cannot be read from here counts by
    its name.
    """
    parallel, train = config.parallel, config.train
    model = (
        {k: v for k, v in model_config.items() if k not in _NOISE}
        if model_config
        else config.model.path
    )
    set_here = {
        name: value
        for name, value in environment.items()
        if name.startswith(("NEURON_", "XLA_"))
        and not name.startswith("NEURON_RT_")
        and name != VARIABLE
    }
    identity = {
        "version": __version__,
        "image": image,
        "flags": set_here,
        "family": config.compute.instance_type.split(".")[1],
        "processes": [config.compute.instance_count, config.processes_per_instance],
        "model": model,
        "parallel": {**identity_of(parallel), "dp": config.dp},
        "micro_batches": train.global_batch_size // (config.dp * parallel.micro_batch_size),
        "train": train.model_dump(
            mode="json", include={"engine", "seq_len", "precision", "stochastic_rounding"}
        ),
    }
    if config.needs_attention_mask:
        identity["apart"] = True  # masks and positions are part of every step
    if train.adapter is not None:
        identity["adapter"] = identity_of(train.adapter)
    return f"{cache_root(config)}{digest(identity)[:16]}"


def compile_cache_uri(config: JobConfig, environment: Mapping[str, str]) -> str:
    """The cache that stage compile fills; raises `ConfigError` if there is nothing to compile."""
    uri, user_variables = environment.get(VARIABLE), config.compute.environment
    if config.train.engine != "nxd":
        fault = (
            "train.engine: native compiles as it runs, stage compile has nothing to do; leave the"
            " stage out"
        )
    elif VARIABLE in user_variables or "--cache_dir" in user_variables.get(FLAGS, ""):
        fault = (
            f"compute.environment: moves the compile cache ({VARIABLE} or --cache_dir), so stage"
            " compile cannot keep it; leave that out, the cache is below output.s3_uri"
        )
    elif config.network.isolation:
        fault = (
            "network.isolation: keeps stage compile from the cache in S3; leave the stage out, or"
            " allow the network"
        )
    elif uri is None:
        fault = (
            f"compute.instance_type: {config.compute.instance_type} is no Neuron instance, so there"
            " are no graphs to compile; leave stage compile out"
        )
    else:
        return uri
    raise ConfigError([fault], code="config.combination")


def read_marker(target: Backend, uri: str) -> dict[str, Any] | None:
    """The marker of the job that compiled this cache; None if the cache has no marker."""
    try:
        marker = parse_json(target.read(f"{uri}/{GRAPHS_COMPLETE}"))
    except (JobError, ValueError):
        return None
    return marker if isinstance(marker, dict) and {"graphs", "job"} <= marker.keys() else None


def announce_compiling(
    target: Backend, config: JobConfig, request: Mapping[str, Any], say: Say
) -> None:
    """Say before a train job of engine nxd starts whether the cache holds its graphs."""
    uri = request["Environment"].get(VARIABLE, "")
    if config.train.engine != "nxd" or not uri.startswith(cache_root(config)):
        return
    if marker := read_marker(target, uri):
        say(f"graphs: all {marker['graphs']} were compiled by {marker['job']} ({uri})")
    else:
        say(
            "graphs: not compiled ahead, so all instances wait for the compiler in the first"
            f" steps; stage compile compiles them on one ({uri})"
        )
