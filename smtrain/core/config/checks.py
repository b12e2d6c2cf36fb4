"""Combinations that cannot run, found before anything starts: each fault with the keys it concerns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from smtrain.core.config.checks_cluster import cluster_faults
from smtrain.core.config.checks_data import Fault, data_faults, id_faults, path_faults, prepared_faults, template_faults
from smtrain.core.config.checks_engine import engine_faults
from smtrain.core.config.checks_hub import HUB, hub_faults
from smtrain.core.config.checks_places import place_faults
from smtrain.core.config.checks_tasks import task_faults
from smtrain.core.config.checks_validation import validation_faults, validation_path_faults
from smtrain.core.config.checks_weights import file_faults, shape_and_run, weights_faults
from smtrain.core.config.cluster_paths import readable_schemes
from smtrain.core.config.schema import JobConfig
from smtrain.core.config.secrets import is_secret
from smtrain.core.errors import first_line
from smtrain.core.facts.models import positions
from smtrain.core.model.remedies import broken_link, file_misfit, folder_misfit
from smtrain.core.near import near_path
from smtrain.core.protocol.uris import HUBS, respelled

_MODEL_PLACES = ("s3://", "demo://", *HUBS)
MESH_KEYS = {
    "parallel.tp", "parallel.pp", "parallel.dp",
    "compute.instance_count", "compute.processes_per_instance", "compute.instance_type",
}  # fmt: skip


def mesh_fits(config: JobConfig) -> bool:
    """Whether tp x pp x dp is the number of the job's processes."""
    mesh, dp = config.parallel.tp * config.parallel.pp, config.parallel.dp
    return config.world_size % mesh == 0 if dp is None else dp * mesh == config.world_size


def _processes(config: JobConfig) -> str:
    """The training processes of a job, with what the numbers are."""
    count, each = config.compute.instance_count, config.processes_per_instance
    machines = "1 machine" if count == 1 else f"{count} machines"
    return f"{machines} x {each} {'process' if each == 1 else 'processes'} = {config.world_size} in all"


def combination_faults(config: JobConfig) -> Iterator[Fault]:
    """What the config alone shows."""
    parallel, train, compute = config.parallel, config.train, config.compute
    mesh = parallel.tp * parallel.pp
    mesh_keys = MESH_KEYS
    world = _processes(config)
    fits = True
    if parallel.dp is None and config.world_size % mesh:
        fits = False
        yield (
            mesh_keys,
            (
                f"parallel.tp, parallel.pp: tp x pp = {mesh} does not divide the number of processes, {world}; "
                "change tp, pp, compute.instance_count or compute.processes_per_instance"
            ),
        )
    elif parallel.dp is not None and parallel.dp * mesh != config.world_size:
        fits = False
        yield (
            mesh_keys,
            (
                f"parallel.dp: tp x pp x dp = {parallel.dp * mesh}, but the processes are {world}; "
                + (
                    f"dp = {config.world_size // mesh} would do"
                    if config.world_size % mesh == 0
                    else "change tp, pp or compute"
                )
            ),
        )
    per_slot = config.dp * parallel.micro_batch_size
    if fits and train.global_batch_size % per_slot:
        below = train.global_batch_size // per_slot * per_slot
        options = " or ".join(str(n) for n in (below, below + per_slot) if n)
        yield (
            mesh_keys | {"train.global_batch_size", "parallel.micro_batch_size"},
            (
                f"train.global_batch_size: {train.global_batch_size} is not a multiple of dp x micro_batch_size = "
                f"{config.dp} x {parallel.micro_batch_size}; {options} would do"
            ),
        )
    if train.max_global_batch_size is not None and train.global_batch_size > train.max_global_batch_size:
        yield (
            {"train.global_batch_size", "train.max_global_batch_size"},
            (
                f"train.global_batch_size: {train.global_batch_size} is above train.max_global_batch_size = "
                f"{train.max_global_batch_size}; leave one of the two out"
            ),
        )
    if parallel.sequence_parallel and train.seq_len % parallel.tp:
        yield (
            {"train.seq_len", "parallel.tp", "parallel.sequence_parallel"},
            (
                f"train.seq_len: {train.seq_len} cannot be cut over tp = {parallel.tp} for parallel.sequence_parallel; "
                "use a multiple of tp"
            ),
        )
    if train.warmup > train.steps > 0:
        yield (
            {"train.warmup_steps", "train.steps"},
            (f"train.warmup_steps: {train.warmup_steps} is more than train.steps = {train.steps}; use at most that"),
        )
    if train.min_lr > train.lr:
        yield {"train.min_lr", "train.lr"}, f"train.min_lr: {train.min_lr} is above train.lr = {train.lr}; lower it"
    for i, beta in enumerate(train.betas):
        if not 0 <= beta < 1:
            yield {"train.betas"}, f"train.betas: number {i + 1} is {beta}; it must be at least 0 and below 1"
    if train.adapter and config.model.init == "scratch":
        yield (
            {"train.adapter", "model.init"},
            "train.adapter: needs trained weights, and model.init: scratch has none; leave one of the two out",
        )
    if train.adapter and train.adapter.targets == ():
        yield {"train.adapter.targets"}, "train.adapter.targets: names no layer; leave it out for all linear layers"
    if config.export.merge and not train.adapter:
        yield {"export.merge", "train.adapter"}, "export.merge: has no effect unless train.adapter is set"
    yield from data_faults(config)
    yield from place_faults(config)
    yield from weights_faults(config)
    yield from cluster_faults(config)
    if bool(config.network.subnets) != bool(config.network.security_group_ids):
        yield (
            {"network.subnets", "network.security_group_ids"},
            ("network.subnets, network.security_group_ids: only one is set; a VPC needs both"),
        )
    if compute.max_wait is not None and not compute.spot:
        yield {"compute.max_wait", "compute.spot"}, "compute.max_wait: has no effect unless compute.spot is true"
    if compute.max_wait is not None and compute.spot and compute.max_wait < compute.max_run:
        yield (
            {"compute.max_wait", "compute.max_run"},
            (f"compute.max_wait: {compute.max_wait} s is shorter than compute.max_run = {compute.max_run} s; raise it"),
        )
    for key in ("capacity_wait", "fallback_instance_types"):
        if compute.spot and getattr(compute, key):
            yield (
                {"compute.spot", f"compute.{key}"},
                f"compute.{key}: has no effect with compute.spot: SageMaker itself waits for spot machines until "
                "compute.max_wait; raise that",
            )
    if compute.pool_wait and not compute.keep_alive:
        yield (
            {"compute.pool_wait", "compute.keep_alive"},
            "compute.pool_wait: only a job with compute.keep_alive gets a warm pool; set that too",
        )
    if compute.instance_group and compute.keep_alive:
        yield (
            {"compute.instance_group", "compute.keep_alive"},
            "compute.keep_alive: SageMaker keeps no warm pool of instance groups; set only one of the two",
        )
    if compute.spot and compute.keep_alive:
        yield (
            {"compute.spot", "compute.keep_alive"},
            "compute.keep_alive: warm pools have no spot machines; set only one of the two",
        )

    yield from hub_faults(config)
    wandb_key = config.track.wandb.key if config.track.wandb else None
    if wandb_key and (wandb_key.secret is None) == (wandb_key.ssm is None):
        yield {"track.wandb"}, "track.wandb.key: must name one of secret (Secrets Manager) and ssm (a parameter)"
    if config.track.by == "job" and config.network.isolation:
        yield (
            {"track.by", "network.isolation"},
            "track.by: a job with network.isolation cannot reach a tracker; set track.by: client",
        )
    if compute.spot and not config.checkpoint.resume:
        yield (
            {"compute.spot", "checkpoint.resume"},
            "compute.spot: needs checkpoint.resume, or every interruption starts the run over; set only one of the two",
        )

    cache = " ".join(compute.environment.get(name, "") for name in ("NEURON_COMPILE_CACHE_URL", "NEURON_CC_FLAGS"))
    if "/opt/ml/checkpoints" in cache:
        yield (
            {"compute.environment"},
            "compute.environment: the compile cache must not be in /opt/ml/checkpoints, where every graph would be "
            "synced with the checkpoints; use an s3:// URI or leave it to smtrain",
        )
    yield from engine_faults(config)
    yield from validation_faults(config)


def secret_faults(config: JobConfig) -> Iterator[Fault]:
    """Secrets written out: whoever may describe the job could read them. The value is never repeated."""
    for key, value in _texts(config.model_dump(mode="json")):
        if is_secret(value, key.rpartition(".")[2] if key.startswith(("compute.environment.", "tags.")) else ""):
            yield (
                {key},
                f"{key}: looks like a secret, and anyone who may describe the job could read it; keep it in Secrets "
                "Manager and let the job read it with its role (a Hugging Face token: model.token)",
            )


def _texts(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield key, str(name)  # told as the place it stands in: the name may be the secret
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item, key)
    elif isinstance(value, str):
        yield key, value


def model_faults(config: JobConfig, *, shape_alone: bool = False) -> Iterator[Fault]:
    """What the model's own files show, and whether the text is there: all that can be read without a network.

    shape_alone: the model's folder needs no more than its config.json, which is enough for a plan.
    """
    yield from path_faults(config)
    yield from validation_path_faults(config)
    yield from task_faults(config)
    yield from prepared_faults(config)
    if told := respelled_model(config):
        yield {"model.path"}, f"model.path: {told}"
        return
    if "://" in config.model.path:
        if config.model.path.startswith(HUBS):
            longest = positions(config.model.path)
            if longest is not None and longest < config.train.seq_len:
                yield (
                    {"model.path", "train.seq_len"},
                    f"train.seq_len: {config.train.seq_len} is beyond the {longest} positions of "
                    f"{config.model.path.removeprefix('hf://')}; use at most that",
                )
        elif not config.model.path.startswith((*_MODEL_PLACES, *readable_schemes(config.target))):
            yield (
                {"model.path"},
                f"model.path: {config.model.path} is neither a folder, s3://, hf://, modelscope:// nor demo://",
            )
        return
    folder = Path(config.model.path)
    if not folder.is_dir():
        asked = Path(config.model.path)
        name = "/".join(asked.parts[-2:])
        hub = (
            f" (a model of the hub is hf://{name})"
            if not asked.parent.exists() and HUB.fullmatch(f"hf://{name}")
            else ""
        )
        yield (
            {"model.path"},
            f"model.path: {folder} is not a folder; {near_path(folder)}give a Hugging Face model folder or s3:// URI"
            f"{hub}",
        )
    elif not (folder / "config.json").is_file():
        names = [path.relative_to(folder).as_posix() for path in folder.glob("*")]
        names += [path.relative_to(folder).as_posix() for path in folder.glob("*/*")]
        why = (
            broken_link(folder)
            or folder_misfit(names, folder)
            or f"{folder} holds no config.json; give a Hugging Face model folder"
        )
        yield {"model.path"}, f"model.path: {why}"
    elif strange := file_misfit(folder / "config.json"):
        yield {"model.path"}, f"model.path: {strange}"
    else:
        try:
            described = json.loads((folder / "config.json").read_text("utf-8"))
        except (OSError, ValueError) as error:
            yield (
                {"model.path"},
                f"model.path: {folder / 'config.json'} cannot be read ({first_line(error)}); mend it there, or copy "
                "this one file again",
            )
            return
        if not isinstance(described, dict):
            yield {"model.path"}, f"model.path: {folder / 'config.json'} is a {type(described).__name__}, not a mapping"
            return
        yield from shape_faults(config, described)
        if not shape_alone:
            yield from file_faults(config, folder, described)
            yield from template_faults(config, folder)
            yield from id_faults(config, folder, described)


def respelled_model(config: JobConfig) -> str | None:
    """Say how the address in `model.path` is written here, if it is one in another spelling."""
    path = config.model.path
    return None if path.startswith(readable_schemes(config.target)) else respelled(path, _MODEL_PLACES)


def shape_faults(config: JobConfig, described: dict[str, object]) -> Iterator[Fault]:
    """What the model's shape rules out, given its config.json."""
    from smtrain.core.errors import SmtrainError
    from smtrain.core.model.hf_config import normalise, positions_named

    tp, pp = config.parallel.tp, config.parallel.pp
    keys = {"model.path", "parallel.tp", "parallel.pp"}
    try:
        model = normalise(described)
    except SmtrainError as error:
        yield {"model.path"}, f"model.path: {error}"
        return
    shape = model.shape
    padding = described.get("pad_token_id")
    if isinstance(padding, int) and not -shape.vocab <= padding < shape.vocab:
        yield (
            {"model.path"},
            f"model.path: pad_token_id is {padding} and the model has the ids 0 to {shape.vocab - 1} (vocab_size "
            f"{shape.vocab}); correct pad_token_id in its config.json, or set it to null",
        )
    yield from shape_and_run(config, model, positions_named(described))
    if config.train.adapter and (targets := config.train.adapter.targets):
        from smtrain.core.errors import ConfigError
        from smtrain.core.model.lora import targets_of

        try:
            targets_of(shape, targets)
        except ConfigError as error:
            yield {"model.path", "train.adapter.targets"}, error.faults[0]
    for fault in shape.mesh_faults(tp, pp):
        yield keys, fault
