"""Check a Slurm cluster before anything is submitted: the head node, and with a job of some seconds
the nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from smtrain.client.backends.slurm.backend import SlurmBackend
from smtrain.client.backends.slurm.nodes import ask_nodes
from smtrain.client.backends.slurm.paths import SCHEME, path_of
from smtrain.client.backends.slurm.remote_shell import HeadError
from smtrain.client.backends.slurm.script import define_bare, directive, node_options, on_cpus
from smtrain.client.config.checks.cluster import least_time
from smtrain.client.findings import Finding
from smtrain.core.config import JobConfig, Stage
from smtrain.core.config.schema import inputs_of
from smtrain.core.config.units import spell

_LEAST_FREE = 1e9  # bytes: with less not even a log and a small checkpoint are safe
_PARTITION = "%R|%a|%l|%D|%T"  # name, up or down, time limit, nodes, their state


def run_checks(
    backend: SlurmBackend,
    config: JobConfig,
    stages: Sequence[Stage],
    copied_uris: Collection[str] = (),
    *,
    probe: bool = False,
) -> Iterator[Finding]:
    """Make all checks, without those that an earlier fault makes useless.

    `copied_uris`: URIs that the launch writes first. `probe`: also ask the nodes.
    """
    try:
        version = backend.head.run("sinfo", "--version").decode().strip()
    except HeadError as error:
        yield Finding("head", "fault", str(error))
        return
    yield Finding("head", "ok", f"{backend.head.name} has {version}")
    findings = list(_partitions(config, backend, stages))
    if not any(finding.level == "fault" for finding in findings):
        findings += _account(backend, stages)
    inputs = inputs_in_place(config, copied_uris)
    findings = [*_check_shared_folder(backend), *_inputs(inputs, backend), *findings]
    yield from findings
    if probe and not any(
        finding.level == "fault" for finding in findings
    ):  # after a fault no node would start
        yield from ask_nodes(config, backend, inputs)


def _check_shared_folder(backend: SlurmBackend) -> Iterator[Finding]:
    try:
        output = backend.head.sh(
            'd="$1"; while [ ! -e "$d" ]; do d=$(dirname "$d"); done; [ -d "$d" ] || { echo "$d";'
            ' exit; }; [ -w "$d" ] && echo yes || echo no; df -Pk "$d" | tail -n 1',
            backend.shared_folder,
        )
    except HeadError as error:
        yield Finding("shared", "fault", str(error))
        return
    writable, _, row = output.decode().strip().partition("\n")
    if not row:
        yield Finding(
            "shared",
            "fault",
            f"{writable} is not a folder on {backend.head.name}",
            "correct cluster.shared",
        )
        return
    free = int(row.split()[3]) * 1024
    if writable != "yes":
        yield Finding(
            "shared",
            "fault",
            f"you may not write to {backend.shared_folder} on {backend.head.name}",
            "name another folder in cluster.shared, or ask for the right to write there",
        )
    elif free < _LEAST_FREE:
        yield Finding(
            "shared",
            "fault",
            f"{backend.shared_folder} has {free / 1e6:.0f} MB free",
            "delete what is not needed, or name another folder",
        )
    else:
        yield Finding(
            "shared", "ok", f"{backend.shared_folder} may be written, {free / 1e9:.0f} GB are free"
        )


def _inputs(paths: Sequence[str], backend: SlurmBackend) -> Iterator[Finding]:
    """Check that inputs on the cluster exist."""
    if not paths:
        return
    output = backend.head.sh('for p; do [ -e "$p" ] || printf "%s\\n" "$p"; done', *paths).decode(
        errors="replace"
    )
    local_note = "" if backend.section.host is None else ", nor on this machine"
    for path in output.splitlines():
        yield Finding(
            "inputs",
            "fault",
            f"{path} is not on {backend.head.name}{local_note}",
            "correct the path in the config",
        )
    if not output:
        yield Finding("inputs", "ok", f"{', '.join(paths)}: used in place")


def inputs_in_place(config: JobConfig, copied_uris: Collection[str] = ()) -> list[str]:
    """The paths that a run reads in place; inputs that it copies first do not exist there yet."""
    return list(
        dict.fromkeys(
            path_of(uri)
            for _, uri in inputs_of(config)
            if uri.startswith(SCHEME) and uri not in copied_uris
        )
    )


def _partitions(
    config: JobConfig, backend: SlurmBackend, stages: Sequence[Stage]
) -> Iterator[Finding]:
    rows = [
        line.split("|")
        for line in backend.head.run("sinfo", "-h", "-o", _PARTITION).decode().splitlines()
    ]
    names = {row[0] for row in rows}
    default = (
        backend.head.sh("sinfo -h -o %P | grep '[*]$' | head -n 1").decode().strip().rstrip("*")
    )
    section = backend.section
    nodes_by_partition: dict[str, int] = {}
    keys: dict[str, str] = {}
    for stage in stages:
        cpu_partition = section.cpu_partition if on_cpus(stage) else None
        name = (cpu_partition or section.partition) or default
        nodes_by_partition[name] = max(
            nodes_by_partition.get(name, 0), 1 if on_cpus(stage) else config.compute.instance_count
        )
        keys[name] = "cluster.cpu_partition" if cpu_partition else "cluster.partition"
    for name, nodes in nodes_by_partition.items():
        if name not in names:
            text = f"there is no partition {name!r}" if name else "there is no default partition"
            yield Finding(
                "partition", "fault", text, f"set {keys[name]} to one of {', '.join(sorted(names))}"
            )
            continue
        partition_rows = [row for row in rows if row[0] == name]
        yield from _check_partition(config, name, nodes, partition_rows)


def _check_partition(
    config: JobConfig, name: str, nodes: int, rows: Sequence[Sequence[str]]
) -> Iterator[Finding]:
    """One partition, from sinfo's rows: one for each state that its nodes are in."""
    wanted_minutes = -(-int(config.cluster.time or config.compute.max_run) // 60)
    limit = minutes_of(rows[0][2])
    node_count = sum(int(row[3]) for row in rows)
    usable = sum(
        int(row[3])
        for row in rows
        if not row[4].rstrip("*").startswith(("down", "drain", "fail", "maint"))
    )
    if rows[0][1] != "up":
        yield Finding(
            "partition",
            "fault",
            f"{name} is {rows[0][1]}",
            "take another, or ask the administrators",
        )
    elif nodes > node_count:
        yield Finding(
            "partition",
            "fault",
            f"{name} has {node_count} nodes, and the run takes {nodes}",
            "set compute.instance_count to at most that",
        )
    elif limit is not None and wanted_minutes > limit:
        text = (
            f"{name} allows {spell(limit * 60)}, and the run asks for {spell(wanted_minutes * 60)}"
        )
        remedy = (
            f"set cluster.time to at most {limit}m: a train job requeues itself until it is done"
        )
        if limit * 60 < least_time(config):
            remedy = (
                "take a partition with a longer limit, which leaves time to train after"
                " cluster.save_before"
            )
        yield Finding("partition", "fault", text, remedy)
    elif nodes > usable:
        yield Finding(
            "partition",
            "warning",
            f"{name} has {usable} of {node_count} nodes that are not down or drained, and "
            f"the run takes {nodes}: it waits until there are more",
        )
    else:
        yield Finding("partition", "ok", f"{name} is up, {usable} nodes")


def _account(backend: SlurmBackend, stages: Sequence[Stage]) -> Iterator[Finding]:
    """Test the options of the stages with sbatch, as their scripts have them; nothing is
    submitted.
    """
    section = backend.section
    kinds = dict.fromkeys(tuple(node_options(stage, section)) for stage in stages)
    for options in kinds:
        lines = [
            "#!/bin/sh",
            *map(directive, ["--time=1", "--output=/dev/null", *options]),
            "true",
            "",
        ]
        try:
            backend.head.run(
                "sh",
                "-c",
                f"{define_bare(section)}bare sbatch --test-only",
                feed="\n".join(lines).encode(),
            )
        except HeadError as error:
            yield Finding("sbatch", "fault", str(error), "correct the section cluster")
            return
    yield Finding("sbatch", "ok", "sbatch takes these options")


def minutes_of(limit: str) -> int | None:
    """Slurm's D-HH:MM:SS, HH:MM:SS or MM:SS in whole minutes; None for infinite and anything that
    is not a time.
    """
    days, _, clock = limit.rpartition("-")
    try:
        parts = [int(part) for part in clock.split(":")]
        if len(parts) == 1:
            return None
        hours, minutes = (parts[0], parts[1]) if len(parts) == 3 else (0, parts[0])
        return int(days or 0) * 1440 + hours * 60 + minutes
    except ValueError:
        return None
