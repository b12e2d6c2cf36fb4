"""Check a Slurm cluster before anything is submitted: the head node, and with a job of some seconds the nodes.

The job starts at once or not at all, so that a full cluster does not delay the check. Nothing is changed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from smtrain.client.backends.choose import cluster
from smtrain.client.backends.slurm.paths import SCHEME, path_of
from smtrain.client.backends.slurm.place import SlurmPlace
from smtrain.client.backends.slurm.remote_shell import HeadError
from smtrain.client.backends.slurm.script import (
    bare,
    directive,
    environment_lines,
    node_options,
    on_cpus,
)
from smtrain.client.config.checks.machines import least_time
from smtrain.client.config.slurm_options import options_of
from smtrain.client.launch.stages import Chain
from smtrain.client.preflight.findings import Finding
from smtrain.core.config import JobConfig, Stage
from smtrain.core.config.schema import inputs_of
from smtrain.core.config.units import spell
from smtrain.core.extras import MODULES
from smtrain.core.facts import instance, table
from smtrain.core.facts.engines import is_gpu, is_neuron
from smtrain.core.protocol.entrypoints import EXTRAS, data_needs

_LEAST_FREE = 1e9  # bytes: with less not even a log and a small checkpoint are safe
_PARTITION = "%R|%a|%l|%D|%T"  # name, up or down, time limit, nodes, their state


def look(chain: Chain, stages: Sequence[Stage], *, probe: bool = False) -> Iterator[Finding]:
    """All checks, without those that an earlier fault makes useless. `probe`: also ask the nodes."""
    place = cluster(chain.target)
    try:
        version = place.head.run("sinfo", "--version").decode().strip()
    except HeadError as error:
        yield Finding("head", "fault", str(error))
        return
    yield Finding("head", "ok", f"{place.head.name} has {version}")
    findings = list(_partitions(chain, place, stages))
    if not any(finding.level == "fault" for finding in findings):
        findings += _account(place, stages)
    findings = [*_shared(place), *_inputs(chain, place), *findings]
    yield from findings
    if probe and not any(finding.level == "fault" for finding in findings):  # after a fault no node would start
        yield from ask_nodes(chain.config, place, inputs_in_place(chain))


def _shared(place: SlurmPlace) -> Iterator[Finding]:
    try:
        output = place.head.sh(
            'd="$1"; while [ ! -e "$d" ]; do d=$(dirname "$d"); done; '
            '[ -d "$d" ] || { echo "$d"; exit; }; [ -w "$d" ] && echo yes || echo no; df -Pk "$d" | tail -n 1',
            place.shared,
        )
    except HeadError as error:
        yield Finding("shared", "fault", str(error))
        return
    writable, _, row = output.decode().strip().partition("\n")
    if not row:
        yield Finding("shared", "fault", f"{writable} is not a folder on {place.head.name}", "correct cluster.shared")
        return
    free = int(row.split()[3]) * 1024
    if writable != "yes":
        yield Finding(
            "shared", "fault", f"you may not write to {place.shared} on {place.head.name}",
            "name another folder in cluster.shared, or ask for the right to write there",
        )  # fmt: skip
    elif free < _LEAST_FREE:
        yield Finding(
            "shared", "fault", f"{place.shared} has {free / 1e6:.0f} MB free",
            "delete what is not needed, or name another folder",
        )  # fmt: skip
    else:
        yield Finding("shared", "ok", f"{place.shared} may be written, {free / 1e9:.0f} GB are free")


def _inputs(chain: Chain, place: SlurmPlace) -> Iterator[Finding]:
    """Check that inputs on the cluster exist."""
    paths = inputs_in_place(chain)
    if not paths:
        return
    output = place.head.sh('for p; do [ -e "$p" ] || printf "%s\\n" "$p"; done', *paths).decode(errors="replace")
    here = "" if place.section.host is None else ", nor on this machine"
    for path in output.splitlines():
        yield Finding("inputs", "fault", f"{path} is not on {place.head.name}{here}", "correct the path in the config")
    if not output:
        yield Finding("inputs", "ok", f"{', '.join(paths)}: used in place")


def inputs_in_place(chain: Chain) -> list[str]:
    """The paths that a run reads in place; inputs that it copies first do not exist there yet."""
    config, copied = chain.config, {upload.uri for upload in chain.resolved.uploads}
    return list(
        dict.fromkeys(path_of(uri) for _, uri in inputs_of(config) if uri.startswith(SCHEME) and uri not in copied)
    )


def _partitions(chain: Chain, place: SlurmPlace, stages: Sequence[Stage]) -> Iterator[Finding]:
    rows = [line.split("|") for line in place.head.run("sinfo", "-h", "-o", _PARTITION).decode().splitlines()]
    names = {row[0] for row in rows}
    default = place.head.sh("sinfo -h -o %P | grep '[*]$' | head -n 1").decode().strip().rstrip("*")
    section = place.section
    wanted: dict[str, int] = {}
    keys: dict[str, str] = {}
    for stage in stages:
        own = section.cpu_partition if on_cpus(stage) else None
        name = (own or section.partition) or default
        wanted[name] = max(wanted.get(name, 0), 1 if on_cpus(stage) else chain.config.compute.instance_count)
        keys[name] = "cluster.cpu_partition" if own else "cluster.partition"
    for name, nodes in wanted.items():
        if name not in names:
            what = f"there is no partition {name!r}" if name else "there is no default partition"
            yield Finding("partition", "fault", what, f"set {keys[name]} to one of {', '.join(sorted(names))}")
            continue
        mine = [row for row in rows if row[0] == name]
        yield from _one(chain, name, nodes, mine)


def _one(chain: Chain, name: str, nodes: int, rows: Sequence[Sequence[str]]) -> Iterator[Finding]:
    """One partition, from sinfo's rows: one for each state that its nodes are in."""
    wanted = -(-int(chain.config.cluster.time or chain.config.compute.max_run) // 60)
    limit = minutes_of(rows[0][2])
    there = sum(int(row[3]) for row in rows)
    usable = sum(int(row[3]) for row in rows if not row[4].rstrip("*").startswith(("down", "drain", "fail", "maint")))
    if rows[0][1] != "up":
        yield Finding("partition", "fault", f"{name} is {rows[0][1]}", "take another, or ask the administrators")
    elif nodes > there:
        yield Finding("partition", "fault", f"{name} has {there} nodes, and the run takes {nodes}",
                      "set compute.instance_count to at most that")  # fmt: skip
    elif limit is not None and wanted > limit:
        text = f"{name} allows {spell(limit * 60)}, and the run asks for {spell(wanted * 60)}"
        remedy = f"set cluster.time to at most {limit}m: a train job requeues itself until it is done"
        if limit * 60 < least_time(chain.config):
            remedy = "take a partition with a longer limit, which leaves time to train after cluster.save_before"
        yield Finding("partition", "fault", text, remedy)
    elif nodes > usable:
        yield Finding("partition", "warning", f"{name} has {usable} of {there} nodes that are not down or drained, and "
                      f"the run takes {nodes}: it waits until there are more")  # fmt: skip
    else:
        yield Finding("partition", "ok", f"{name} is up, {usable} nodes")


def _account(place: SlurmPlace, stages: Sequence[Stage]) -> Iterator[Finding]:
    """Test the options of the stages with sbatch, as their scripts have them; nothing is submitted."""
    section = place.section
    kinds = dict.fromkeys(tuple(node_options(stage, section)) for stage in stages)
    for options in kinds:
        lines = ["#!/bin/sh", *map(directive, ["--time=1", "--output=/dev/null", *options]), "true", ""]
        try:
            place.head.run("sh", "-c", f"{bare(section)}bare sbatch --test-only", feed="\n".join(lines).encode())
        except HeadError as error:
            yield Finding("sbatch", "fault", str(error), "correct the section cluster")
            return
    yield Finding("sbatch", "ok", "sbatch takes these options")


def minutes_of(limit: str) -> int | None:
    """Slurm's D-HH:MM:SS, HH:MM:SS or MM:SS in whole minutes; None for infinite and anything that is not a time."""
    days, _, rest = limit.rpartition("-")
    try:
        parts = [int(part) for part in rest.split(":")]
        if len(parts) == 1:
            return None
        hours, minutes = (parts[0], parts[1]) if len(parts) == 3 else (0, parts[0])
        return int(days or 0) * 1440 + hours * 60 + minutes
    except ValueError:
        return None


START_S = 20
"""Time for the nodes to start; nodes that the cloud has to create need minutes."""
CLOCKS_S = 5
"""If clocks differ by more, lines of several nodes come in the wrong order."""
_NEEDS = ("torch", "transformers", "safetensors", "pydantic", "yaml")
_PROBE = """
lacks=$(python3 -c 'import importlib.util as u, sys
print(*[n for n in sys.argv[1:] if u.find_spec(n) is None], sep=",")' "$@" 2>/dev/null) || lacks=python3
version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
[ -w "$shared" ] && [ -e "$token" ] && sees=yes || sees=no
[ -z "$venv" ] || [ -r "$venv/bin/activate" ] || lacks=venv
for p in $inputs; do [ -r "$p" ] || sees=no; done
neuron=$(ls -d /dev/neuron[0-9]* 2>/dev/null | wc -l)
gpu=$(ls -d /dev/nvidia[0-9]* 2>/dev/null | wc -l)
efa=$(ls /sys/class/infiniband 2>/dev/null | wc -l)
# What EC2 calls the machine; elsewhere the board's name, which says nothing.
dmi=/sys/devices/virtual/dmi/id
kind=
[ "$(cat $dmi/sys_vendor 2>/dev/null)" != "Amazon EC2" ] || kind=$(cat $dmi/product_name)
printf '%s|%s|%s|%s|%s|%s|%s|%s|%s\\n' "$SLURMD_NODENAME" "$(date +%s)" \\
  "$version" "$lacks" "$sees" "$neuron" "$gpu" "$efa" "$kind"
"""


@dataclass(frozen=True)
class NodeAnswer:
    """The answer of one node."""

    name: str
    clock: int
    python: str
    lacks: str
    sees_shared: bool
    neuron: int
    gpus: int
    efa: int
    kind: str = ""
    """EC2's instance type, without `ml.`; empty if it is not an EC2 machine."""

    @property
    def type(self) -> str:
        """Its type as compute.instance_type names it; Trainium3, whose names were not public, by its devices."""
        if self.kind.startswith("trn3"):
            kinds = table("instances")["instances"].items()
            own = [kind for kind, row in kinds if kind.startswith("trn3") and row["chips"] == self.neuron]
            return own[0] if own else f"ml.{self.kind}"
        return f"ml.{self.kind}"


def answers(text: str) -> list[NodeAnswer]:
    """The rows of a probe, without other lines that a node's profile may print."""
    rows = []
    for line in sorted(text.splitlines()):
        row = line.split("|")
        if len(row) == 9 and row[1].isdecimal() and all(part.isdecimal() for part in row[5:8]):
            neuron, gpus, efa = (int(part) for part in row[5:8])
            rows.append(NodeAnswer(row[0], int(row[1]), row[2], row[3], row[4] == "yes", neuron, gpus, efa, row[8]))
    return rows


def ask_nodes(config: JobConfig, place: SlurmPlace, inputs: Sequence[str] = ()) -> Iterator[Finding]:
    """Ask the nodes of the train stage; a warning if none is free now. `inputs`: paths that they must see."""
    section = place.section
    if section.container:
        yield Finding("nodes", "warning", "nodes were not checked: their stages run in cluster.container")
        return
    count = config.compute.instance_count
    named = {name: getattr(section, name) for name in ("partition", "account", "qos", "reservation", "constraint")}
    options = [f"--{name}={value}" for name, value in named.items() if value]
    try:
        shared, token = _written(place)
    except HeadError as error:
        yield Finding("nodes", "warning", f"nodes were not checked, as the shared folder may not be written ({error})")
        return
    extra = [module for need in data_needs(config.data.model_dump()) for module in MODULES[EXTRAS[need]]]
    known = {"shared": shared, "token": token, "inputs": " ".join(inputs), "venv": section.venv or ""}
    script = "\n".join(
        [*(f"{name}={shlex.quote(value)}" for name, value in known.items()), *environment_lines(section), _PROBE]
    )
    try:
        output = place.head.sh(
            f'{bare(section)}bare "$@"',
            "srun", f"--nodes={count}", "--ntasks-per-node=1", "--time=2", f"--immediate={START_S}", "--quiet",
            "--job-name=smtrain-check", *options, *options_of(section.srun),
            "bash", "-c", script, "bash", *_NEEDS, *extra,
            seconds=START_S + 100,
        ).decode(errors="replace")  # fmt: skip
    except HeadError as error:
        yield Finding(
            "nodes", "warning", f"nodes were not checked, as {count} did not start within {START_S} s ({error})",
            "nothing needs to be done; the run waits for them",
        )  # fmt: skip
        return
    finally:
        with suppress(HeadError):
            place.head.run("rm", "-f", token)
    yield from node_findings(config, answers(output), count)


def node_findings(config: JobConfig, nodes: Sequence[NodeAnswer], count: int) -> Iterator[Finding]:
    """Findings about nodes that have answered."""
    row = instance(config.compute.instance_type)
    kind, own = config.compute.instance_type, config.own_machine
    neuron = own.kind == "neuron" if own else is_neuron(kind)
    gpus = config.processes_per_instance if is_gpu(kind) or (own and own.kind == "gpu") else 0
    faults: list[tuple[str, list[str], str]] = [
        ("do not see cluster.shared or an input as the head node does, or may not write there",
         [n.name for n in nodes if not n.sees_shared],
         "mount it on every node under the same path, or name another folder"),
        (f"have no {config.cluster.venv}/bin/activate",
         [n.name for n in nodes if n.lacks == "venv"],
         f"make it there (`python3 -m venv {config.cluster.venv}`), or correct cluster.venv"),
        ("have no python3", [n.name for n in nodes if n.lacks == "python3"], "set cluster.venv or cluster.modules"),
        ("have no Neuron device", [n.name for n in nodes if neuron and not n.neuron],
         f"{kind} has some: see that the Neuron driver is installed, or correct compute.instance_type"),
        (f"have fewer than {gpus} GPUs, one for each training process", [n.name for n in nodes if n.gpus < gpus],
         "correct compute.instance_type or compute.processes_per_instance, or ask for nodes that have them"),
    ]  # fmt: skip
    extras = ",".join(["train", *(EXTRAS[need] for need in data_needs(config.data.model_dump()))])
    others = [n for n in nodes if n.lacks and n.lacks not in ("python3", "venv")]
    lacking = sorted({name for n in others for name in n.lacks.split(",")})
    faults.append(
        (f"lack {', '.join(lacking)}", [n.name for n in others],
         f"install smtrain[{extras}] in the nodes' Python, and name it in cluster.venv")
    )  # fmt: skip
    good = True
    for text, names, remedy in faults:
        if names:
            good = False
            yield Finding("nodes", "fault", f"{_listed(names)} {text}", remedy)
    if other := [n for n in nodes if n.kind and n.type != kind]:
        good = False
        kinds = sorted({n.type for n in other})
        given = "" if "instance_type" in config.compute.model_fields_set else ", as the config names no other"
        yield Finding(
            "nodes", "warning",
            f"{_listed([n.name for n in other])}: {' and '.join(kinds)}; the plan is made for {kind}{given}",
            f"set compute.instance_type to {kinds[0]}" if len(kinds) == 1 and instance(kinds[0])
            else "set compute.instance_type to the type that is most like the nodes",
        )  # fmt: skip
    if row and row.get("efa") and count > 1 and (without := [n.name for n in nodes if not n.efa]):
        good = False
        yield Finding("nodes", "warning", f"{_listed(without)} have no EFA device", "turn EFA on, else it is slow")
    clocks = [n.clock for n in nodes]
    if clocks and max(clocks) - min(clocks) > CLOCKS_S:
        good = False
        yield Finding(
            "nodes", "warning", f"the clocks of the nodes differ by {max(clocks) - min(clocks)} s",
            "run chronyd or ntpd on them, else lines of several nodes come in the wrong order",
        )  # fmt: skip
    if good and nodes:
        versions = ", ".join(sorted({n.python for n in nodes}))
        yield Finding("nodes", "ok", f"{len(nodes)} nodes have Python {versions} with all that is needed")
    elif not nodes:
        yield Finding("nodes", "warning", "nodes were asked and did not answer", "look at `srun hostname` by hand")


def _written(place: SlurmPlace) -> tuple[str, str]:
    """The existing part of the shared folder's path, as the first run may make the rest, and an empty file in it: a
    node that does not share the folder may have one of the same path."""
    output = place.head.sh(
        'd="$1"; while [ ! -e "$d" ]; do d=$(dirname "$d"); done; echo "$d"; mktemp "$d/.smtrain-check-XXXXXX"',
        place.shared,
    )
    shared, _, token = output.decode().strip().partition("\n")
    return shared, token


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
