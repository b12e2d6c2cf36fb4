"""Rules for machines: the mesh, the instances, the network, and the names that AWS restricts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from math import gcd

from smtrain.client.config.checks.mesh import BATCH, given_batch, would_do
from smtrain.client.config.checks.rule import ConfigRule as Rule
from smtrain.client.config.checks.rule import Fault, all_set, rule_faults
from smtrain.client.config.checks.uris import uris_of
from smtrain.core.config.schema import JobConfig
from smtrain.core.config.track import MLFLOW_ARN
from smtrain.core.facts import instance, is_known, table
from smtrain.core.facts.engines import TRAINIUM2, lnc_fault, sagemaker_lack
from smtrain.core.facts.name_suggestions import instance_meant
from smtrain.core.facts.trainium2 import (
    first_group_off_torus,
    nearest_tiling_mesh,
    pairs_of,
    torus_chip,
)
from smtrain.core.protocol.uris import A_URI, data_source, is_mounted, object_store
from smtrain.core.suggest import nearest
from smtrain.core.targets import TARGETS

MESH_KEYS = {
    "parallel.tp",
    "parallel.pp",
    "parallel.dp",
    "parallel.cp",
    "compute.instance_count",
    "compute.processes_per_instance",
    "compute.instance_type",
}
_MESH = " ".join(sorted(MESH_KEYS))
_BUCKET = re.compile(r"(?!\d+\.\d+\.\d+\.\d+$)(?!xn--)[a-z0-9](?!.*\.\.)[a-z0-9.-]{1,61}[a-z0-9]")
"""General purpose buckets: Amazon S3 User Guide, "Bucket naming rules"."""
REGIONAL_KEYS = (
    "output.s3_uri",
    "output.kms_key",
    "output.volume_kms_key",
    "output.model_package_group",
    "checkpoint.s3_uri",
    "network.subnets",
    "compute.training_plan",
    "compute.keep_alive",
    "track.managed",
)
"""Keys whose values belong to one region of AWS."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""AWS's pattern; Slurm's job script exports these names."""
_ROLE = re.compile(r"arn:aws[\w-]*:iam::\d{12}:role/[\w+=,.@/-]{1,512}|[\w+=,.@-]{1,64}")


def mesh_fits(config: JobConfig) -> bool:
    """Whether tp x pp x cp x dp is the number of the job's processes."""
    mesh, dp = _mesh(config), config.parallel.dp
    return config.world_size % mesh == 0 if dp is None else dp * mesh == config.world_size


def _mesh(config: JobConfig) -> int:
    return config.parallel.tp * config.parallel.pp * config.parallel.cp


def _processes(config: JobConfig) -> str:
    """The training processes of a job, and how their number comes about."""
    count, per_machine = config.compute.instance_count, config.processes_per_instance
    machines = "1 machine" if count == 1 else f"{count} machines"
    return (
        f"{machines} x {per_machine} {'process' if per_machine == 1 else 'processes'} ="
        f" {config.world_size} in all"
    )


def _wrong_dp(config: JobConfig) -> str:
    mesh, world = _mesh(config), config.world_size
    long = config.parallel.cp > 1
    other_degrees = "tp, pp, cp" if long else "tp, pp"
    remedy = (
        _spread(config, {}, world // mesh)
        if world % mesh == 0
        else f"change {other_degrees} or compute"
    )
    if way := _on_torus(config):
        tp, pp = way
        remedy = _spread(
            config, {"tp": tp, "pp": pp, **({"cp": 1} if long else {})}, world // (tp * pp)
        )
    product = mesh * (config.parallel.dp or 1)
    factors = "tp x pp x cp x dp" if long else "tp x pp x dp"
    return (
        f"parallel.dp: {factors} = {product}, but the processes are {_processes(config)}; {remedy}"
    )


def _spread(config: JobConfig, degrees: dict[str, int], dp: int) -> str:
    """The remedy of `degrees` with this dp, and with the ep and batch that it takes if the config's
    do not fit.
    """
    parallel, batch = config.parallel, given_batch(config) or 0
    ep, unit = gcd(parallel.ep, dp * degrees.get("cp", parallel.cp)), dp * parallel.micro_batch_size
    degrees = {**degrees, "dp": dp, **({"ep": ep} if ep != parallel.ep else {})}
    return would_do({**degrees, **({BATCH: -(-batch // unit) * unit} if batch % unit else {})})


def _not_divided(config: JobConfig) -> str:
    way, long = _on_torus(config), config.parallel.cp > 1
    remedy = (
        f"change tp, pp, {'cp, ' if long else ''}compute.instance_count or"
        " compute.processes_per_instance"
    )
    if way:
        remedy = f"tp = {way[0]}{', cp = 1' if long else ''} and pp = {way[1]} would do"
    keys, factors = ("parallel.tp, parallel.pp", "tp x pp")
    if long:
        keys, factors = f"{keys}, parallel.cp", f"{factors} x cp"
    return (
        f"{keys}: {factors} = {_mesh(config)} does not divide the number of processes,"
        f" {_processes(config)}; {remedy}"
    )


def _on_torus(config: JobConfig) -> tuple[int, int] | None:
    """The (tp, pp) most like the config's that the machines' torus connects; None if it has no such
    rule.
    """
    chip = torus_chip(config.compute.instance_type, config.lnc)
    if chip is None or config.own_machine is not None or TARGETS[config.target].here:
        return None
    return nearest_tiling_mesh(
        config.parallel.tp,
        config.parallel.pp,
        config.world_size,
        config.processes_per_instance,
        chip,
    )


def _parts(config: JobConfig) -> int:
    """The parts into which a sequence is cut."""
    return config.parallel.cp * (config.parallel.tp if config.parallel.sequence_parallel else 1)


def _wrong_batch(config: JobConfig) -> str:
    batch, micro = config.train.global_batch_size, config.parallel.micro_batch_size
    per_slot = config.dp * micro
    previous_multiple = batch // per_slot * per_slot
    options = " or ".join(str(n) for n in (previous_multiple, previous_multiple + per_slot) if n)
    return (
        f"train.global_batch_size: {batch} is not a multiple of dp x micro_batch_size = {config.dp}"
        f" x {micro}; {options} would do"
    )


MESH = (
    Rule(_MESH, lambda c: c.parallel.dp is None and not mesh_fits(c), _not_divided),
    Rule(_MESH, lambda c: c.parallel.dp is not None and not mesh_fits(c), _wrong_dp),
    Rule(
        f"{_MESH} train.global_batch_size parallel.micro_batch_size",
        lambda c: mesh_fits(c) and c.train.global_batch_size % (c.dp * c.parallel.micro_batch_size),
        _wrong_batch,
    ),
    Rule(
        f"{_MESH} parallel.ep",
        lambda c: mesh_fits(c) and c.shards % c.parallel.ep,
        lambda c: (
            f"parallel.ep: {c.parallel.ep} must divide dp{' x cp' if c.parallel.cp > 1 else ''} ="
            f" {c.shards}, whose processes divide the experts; ep = 1 would do, or a divisor of"
            " both it and the experts"
        ),
    ),
    Rule(
        "train.seq_len parallel.tp parallel.cp parallel.sequence_parallel",
        lambda c: (
            c.parallel.sequence_parallel and c.parallel.cp == 1 and c.train.seq_len % c.parallel.tp
        ),
        lambda c: (
            f"train.seq_len: {c.train.seq_len} cannot be cut over tp = {c.parallel.tp} for "
            "parallel.sequence_parallel; use a multiple of tp"
        ),
    ),
    Rule(
        "train.seq_len parallel.cp parallel.tp parallel.sequence_parallel",
        lambda c: c.parallel.cp > 1 and c.train.seq_len % _parts(c),
        lambda c: (
            f"train.seq_len: {c.train.seq_len} cannot be cut over parallel.cp = {c.parallel.cp}"
            + (
                f" and, for parallel.sequence_parallel, tp = {c.parallel.tp}"
                if c.parallel.sequence_parallel
                else ""
            )
            + f"; use a multiple of {_parts(c)}"
        ),
    ),
)

COMPUTE = (
    Rule(
        "network.subnets network.security_group_ids",
        lambda c: bool(c.network.subnets) != bool(c.network.security_group_ids),
        "network.subnets, network.security_group_ids: only one is set; a VPC needs both",
    ),
    Rule(
        "compute.max_wait compute.spot",
        lambda c: c.compute.max_wait is not None and not c.compute.spot,
        "compute.max_wait: has no effect unless compute.spot is true; leave it out",
    ),
    Rule(
        "compute.max_wait compute.max_run",
        lambda c: (
            c.compute.spot
            and c.compute.max_wait is not None
            and c.compute.max_wait < c.compute.max_run
        ),
        lambda c: (
            f"compute.max_wait: {c.compute.max_wait} s is shorter than compute.max_run ="
            f" {c.compute.max_run} s; raise it"
        ),
    ),
    *(
        Rule(
            f"compute.spot compute.{name}",
            all_set("compute.spot", f"compute.{name}"),
            f"compute.{name}: has no effect with compute.spot: SageMaker itself waits for spot"
            " machines until compute.max_wait; leave it out and raise that",
        )
        for name in ("capacity_wait", "fallback_instance_types", "fallback_regions")
    ),
    *(
        Rule(
            " ".join(("compute.fallback_regions", key, "target")),
            lambda c, key=key: (  # type: ignore[misc]
                TARGETS[c.target].sagemaker and all_set("compute.fallback_regions", key)(c)
            ),
            f"compute.fallback_regions: {key} is in one region only; leave one of the two out",
        )
        for key in REGIONAL_KEYS
    ),
    Rule(
        "compute.fallback_regions compute.image",
        lambda c: c.compute.fallback_regions and ".dkr.ecr." in (c.compute.image or ""),
        "compute.image: a registry of one region does not serve compute.fallback_regions; name a"
        " tag, or leave it out",
    ),
    Rule(
        "compute.fallback_regions",
        lambda c: (
            len({*c.compute.fallback_regions}) < len(c.compute.fallback_regions)
            or c.compute.region in c.compute.fallback_regions
        ),
        "compute.fallback_regions: names a region twice; leave it out",
    ),
    Rule(
        "compute.price compute.spot",
        lambda c: (
            isinstance(c.compute.price, str) and (c.compute.price == "spot") != c.compute.spot
        ),
        lambda c: (
            f"compute.price: {c.compute.price} is not what machines cost with compute.spot: "
            f"{str(c.compute.spot).lower()}; leave it out"
        ),
    ),
    Rule(
        "compute.pool_wait compute.keep_alive",
        lambda c: c.compute.pool_wait and not c.compute.keep_alive,
        "compute.pool_wait: only a job with compute.keep_alive gets a warm pool; set that too",
    ),
    Rule(
        "compute.instance_group compute.keep_alive",
        lambda c: c.compute.instance_group and c.compute.keep_alive,
        "compute.keep_alive: SageMaker keeps no warm pool of instance groups; set only one of"
        " the two",
    ),
    Rule(
        "compute.spot compute.keep_alive",
        lambda c: c.compute.spot and c.compute.keep_alive,
        "compute.keep_alive: warm pools have no spot machines; set only one of the two",
    ),
    Rule(
        "compute.spot checkpoint.resume",
        lambda c: c.compute.spot and not c.checkpoint.resume,
        "compute.spot: needs checkpoint.resume, or every interruption starts the run over; set"
        " checkpoint.resume: true or compute.spot: false",
    ),
    Rule(
        "compute.training_plan compute.spot",
        all_set("compute.training_plan", "compute.spot"),
        "compute.spot: cannot go with compute.training_plan, whose machines are reserved; leave one"
        " out",
    ),
    Rule(
        "compute.environment",
        lambda c: [name for name in c.compute.environment if not _VARIABLE.fullmatch(name)],
        lambda c: (
            "compute.environment:"
            f" {next(name for name in c.compute.environment if not _VARIABLE.fullmatch(name))!r} is"
            " not the name of a variable; a name has letters, digits and _, and no digit first"
        ),
    ),
    Rule(
        "compute.environment",
        lambda c: any(
            "/opt/ml/checkpoints" in value
            for name, value in c.compute.environment.items()
            if name.startswith(("NEURON_", "NKI_", "TORCH"))
        ),
        "compute.environment: the compile cache must not be in /opt/ml/checkpoints, as every graph"
        " would be synced with the checkpoints; use an s3:// URI or leave it to smtrain",
    ),
    Rule(
        "track.wandb",
        lambda c: (
            c.track.wandb
            and (key := c.track.wandb.key)
            and (key.secret is None) == (key.ssm is None)
        ),
        "track.wandb.key: must name one of secret (Secrets Manager) and ssm (a parameter)",
    ),
    *(
        Rule(
            f"{key} target",
            lambda c, key=key: all_set(key)(c) and not TARGETS[c.target].sagemaker,  # type: ignore[misc]
            f"{key}: applies to SageMaker only; leave it out",
        )
        for key in ("track.managed", "output.model_package_group")
    ),
    Rule(
        "track.managed track.mlflow",
        lambda c: c.track.managed and not (c.track.mlflow and MLFLOW_ARN.fullmatch(c.track.mlflow)),
        "track.managed: SageMaker writes to its own MLflow only; set track.mlflow to the ARN of a"
        " tracking server or app",
    ),
    Rule(
        "output.source_model_package output.model_package_group",
        lambda c: c.output.source_model_package and not c.output.model_package_group,
        "output.source_model_package: has no effect without output.model_package_group; set"
        " that too",
    ),
    Rule(
        "track.by network.isolation",
        lambda c: c.track.by == "job" and c.network.isolation,
        "track.by: a job with network.isolation cannot reach a tracker; set track.by: client",
    ),
    Rule(
        "compute.role",
        lambda c: c.compute.role is not None and not _ROLE.fullmatch(c.compute.role),
        lambda c: (
            f"compute.role: {c.compute.role!r} is not a role's ARN"
            " (arn:aws:iam::123456789012:role/NAME) or name"
        ),
    ),
)


def machine_faults(config: JobConfig) -> Iterator[Fault]:
    """Machines, network and names that cannot be used together."""
    yield from rule_faults(COMPUTE, config)
    yield from _name_faults(config)
    if TARGETS[config.target].rented:
        compute = config.compute
        if fault := lnc_fault(
            compute.instance_type, compute.environment, config.processes_per_instance
        ):
            yield (
                {
                    "compute.environment",
                    "compute.processes_per_instance",
                    "compute.instance_type",
                },
                fault,
            )
    if section := TARGETS[config.target].section:
        # The rules of a target are in the module that has the name of its section.
        yield from import_module(f"{__package__}.{section}").section_faults(config)


def _name_faults(config: JobConfig) -> Iterator[Fault]:
    """Names that AWS, or the file systems and machines of a config, cannot have.

    Checked offline.
    """
    for key, uri in uris_of(config):
        if uri.startswith("s3://") and not _BUCKET.fullmatch(bucket := uri[5:].partition("/")[0]):
            yield (
                {key},
                (
                    f"{key}: {bucket!r} cannot be a bucket's name, which has 3 to 63 lower-case"
                    " letters, digits, hyphens and dots"
                ),
            )
        elif is_mounted(uri) and key == "model.path":
            store = object_store(config.target)
            yield (
                {key},
                f"{key}: {uri} cannot lie on a file system; give a folder or {A_URI[store]}",
            )
        elif is_mounted(uri) and data_source(uri) is None:
            yield {key}, f"{key}: {uri} must look like fsx://fs-0123456789abcdef0/folder"
    for tag in config.tags:
        if tag.lower().startswith("aws:"):
            yield (
                {f"tags.{tag}"},
                f"tags.{tag}: keys that begin with aws: are AWS's own; give it another name",
            )
    if fault := _own_machine_fault(config):
        yield {"compute.instance_type", "target"}, f"compute.instance_type: {fault}"
    kind = config.compute.cpu_instance_type
    if not is_known(kind) and kind not in config.machines:
        yield {"compute.cpu_instance_type"}, f"compute.cpu_instance_type: {_unknown_type(kind)}"


def missing_type_fault(config: JobConfig) -> str | None:
    """The fault of a target whose machines smtrain cannot know, if the config names no type; None
    for other configs. The default type would plan, check and count devices of other machines.
    """
    record = TARGETS[config.target]
    if "instance_type" in config.compute.model_fields_set or not (
        record.own_machines or record.described
    ):
        return None
    if config.machines:
        names = " or ".join(config.machines)
        return f"compute.instance_type: is missing; set it to {names}, as under machines"
    if record.described:
        return (
            "compute.instance_type: is missing; describe the GPUs of a pod under machines, and name"
            " that entry"
        )
    return (
        "compute.instance_type: is missing, and a cluster has no default; set it to the type of the"
        " nodes, such as ml.p5.48xlarge, or describe a node under machines and name that entry"
    )


def _own_machine_fault(config: JobConfig) -> str | None:
    """The reason why a machine other than SageMaker's cannot train this run."""
    name = config.compute.instance_type
    if (
        TARGETS[config.target].rented
        and config.own_machine is None
        and (lack := sagemaker_lack(name))
    ):
        return f"{lack}; {trainium2_instead(config)}"
    if TARGETS[config.target].described:
        return (
            None
            if config.own_machine
            else (
                f"{name} is not one of {TARGETS[config.target].service}; describe the GPUs of a pod"
                " under machines, and name that entry"
            )
        )
    if config.own_machine is None and name.startswith("ml.trn3") and not is_known(name):
        return f"{sagemaker_lack(str(instance_meant(name)))}; take {TRAINIUM2}"
    if config.own_machine is None and name.startswith("ml.") and not is_known(name):
        return _unknown_type(name)
    if name.startswith("ml.") or (config.own_machine is None and instance(name)):
        return None
    can_describe = TARGETS[config.target].own_machines or TARGETS[config.target].here
    if config.own_machine is None:
        describe_hint = f", or describe {name} under machines" if can_describe else ""
        return f"{name} is no instance type; take one, such as ml.p5.48xlarge{describe_hint}"
    if can_describe:
        return None
    return (
        f"{name} is a machine of yours, and AWS has no such type; name an instance type, or run on"
        f" {name} itself with target: local"
    )


def _unknown_type(kind: str) -> str:
    """The fault of a type of AWS's that the table lacks.

    A guess at its devices would pay for idle ones.
    """
    instances = table("instances")
    sizes = (
        f"ml.{family}.{size}"
        for family, sizes_of_family in instances["cpu_sizes"].items()
        for size in sizes_of_family
    )
    suggestion = nearest(kind, [*instances["instances"], *sizes], cutoff=0.0)
    return (
        f"{kind} is no instance type that smtrain knows (did you mean {suggestion}?), so the number"
        f" of its devices is unknown; take {suggestion}, or describe {kind} under machines"
    )


def trainium2_instead(config: JobConfig) -> str:
    """The keys to set for SageMaker's Trainium2 machines, with the planner's mesh if the given one
    does not fit.
    """
    trainium2_config = config.model_copy(
        update={"compute": config.compute.model_copy(update={"instance_type": TRAINIUM2})}
    )
    parallel, chip = trainium2_config.parallel, torus_chip(TRAINIUM2, trainium2_config.lnc) or 1
    keeps_mesh = "parallel" not in config.model_fields_set or (
        mesh_fits(trainium2_config)
        and trainium2_config.train.global_batch_size
        % (trainium2_config.dp * parallel.micro_batch_size)
        == 0
        and not first_group_off_torus(
            parallel.tp,
            parallel.pp,
            trainium2_config.dp,
            trainium2_config.processes_per_instance,
            chip,
            pairs_of(parallel.pp, tied=True),
            parallel.cp,
            parallel.ep,
        )
    )
    return f"set compute.instance_type: {TRAINIUM2}" + ("" if keeps_mesh else " and parallel: auto")
