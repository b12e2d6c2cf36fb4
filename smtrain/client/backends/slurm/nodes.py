"""Ask the nodes of a cluster with a job of some seconds: devices, packages, clocks, and the shared
folder.

The job starts at once or not at all, so that a full cluster does not delay the check. Nothing is
changed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from smtrain.client.backends.slurm.backend import SlurmBackend
from smtrain.client.backends.slurm.remote_shell import HeadError
from smtrain.client.backends.slurm.script import define_bare, environment_lines
from smtrain.client.config.slurm_options import options_of
from smtrain.client.findings import Finding
from smtrain.core.config import JobConfig
from smtrain.core.extras import MODULES
from smtrain.core.facts import instance, table
from smtrain.core.facts.engines import is_gpu, is_neuron
from smtrain.core.protocol.entrypoints import EXTRAS, package_needs

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
        """Its type as compute.instance_type names it; Trainium3, whose names were not public, by
        its devices.
        """
        if self.kind.startswith("trn3"):
            kinds = table("instances")["instances"].items()
            matching_kinds = [
                kind
                for kind, row in kinds
                if kind.startswith("trn3") and row["chips"] == self.neuron
            ]
            return matching_kinds[0] if matching_kinds else f"ml.{self.kind}"
        return f"ml.{self.kind}"


def answers(text: str) -> list[NodeAnswer]:
    """The rows of a probe, without other lines that a node's profile may print."""
    rows = []
    for line in sorted(text.splitlines()):
        row = line.split("|")
        if len(row) == 9 and row[1].isdecimal() and all(part.isdecimal() for part in row[5:8]):
            neuron, gpus, efa = (int(part) for part in row[5:8])
            rows.append(
                NodeAnswer(
                    row[0], int(row[1]), row[2], row[3], row[4] == "yes", neuron, gpus, efa, row[8]
                )
            )
    return rows


def ask_nodes(
    config: JobConfig, backend: SlurmBackend, inputs: Sequence[str] = ()
) -> Iterator[Finding]:
    """Ask the nodes of the train stage; a warning if none is free now.

    `inputs`: paths that they must see.
    """
    section = backend.section
    if section.container:
        yield Finding(
            "nodes", "warning", "nodes were not checked: their stages run in cluster.container"
        )
        return
    count = config.compute.instance_count
    option_values = {
        name: getattr(section, name)
        for name in ("partition", "account", "qos", "reservation", "constraint")
    }
    options = [f"--{name}={value}" for name, value in option_values.items() if value]
    try:
        shared_folder, token = _write_token(backend)
    except HeadError as error:
        yield Finding(
            "nodes",
            "warning",
            f"nodes were not checked, as the shared folder may not be written ({error})",
        )
        return
    extra = [
        module for need in package_needs(config.model_dump()) for module in MODULES[EXTRAS[need]]
    ]
    variables = {
        "shared": shared_folder,
        "token": token,
        "inputs": " ".join(inputs),
        "venv": section.venv or "",
    }
    script = "\n".join(
        [
            *(f"{name}={shlex.quote(value)}" for name, value in variables.items()),
            *environment_lines(section),
            _PROBE,
        ]
    )
    try:
        output = backend.head.sh(
            f'{define_bare(section)}bare "$@"',
            "srun",
            f"--nodes={count}",
            "--ntasks-per-node=1",
            "--time=2",
            f"--immediate={START_S}",
            "--quiet",
            "--job-name=smtrain-check",
            *options,
            *options_of(section.srun),
            "bash",
            "-c",
            script,
            "bash",
            *_NEEDS,
            *extra,
            seconds=START_S + 100,
        ).decode(errors="replace")
    except HeadError as error:
        yield Finding(
            "nodes",
            "warning",
            f"nodes were not checked, as {count} did not start within {START_S} s ({error})",
            "nothing needs to be done; the run waits for them",
        )
        return
    finally:
        with suppress(HeadError):
            backend.head.run("rm", "-f", token)
    yield from node_findings(config, answers(output), count)


def node_findings(config: JobConfig, nodes: Sequence[NodeAnswer], count: int) -> Iterator[Finding]:
    """Findings about nodes that have answered."""
    row = instance(config.compute.instance_type)
    kind, custom_machine = config.compute.instance_type, config.own_machine
    neuron = custom_machine.kind == "neuron" if custom_machine else is_neuron(kind)
    gpus = (
        config.processes_per_instance
        if is_gpu(kind) or (custom_machine and custom_machine.kind == "gpu")
        else 0
    )
    faults: list[tuple[str, list[str], str]] = [
        (
            "do not see cluster.shared or an input as the head node does, or may not write there",
            [n.name for n in nodes if not n.sees_shared],
            "mount it on every node under the same path, or name another folder",
        ),
        (
            f"have no {config.cluster.venv}/bin/activate",
            [n.name for n in nodes if n.lacks == "venv"],
            f"make it there (`python3 -m venv {config.cluster.venv}`), or correct cluster.venv",
        ),
        (
            "have no python3",
            [n.name for n in nodes if n.lacks == "python3"],
            "set cluster.venv or cluster.modules",
        ),
        (
            "have no Neuron device",
            [n.name for n in nodes if neuron and not n.neuron],
            (
                f"{kind} has some: see that the Neuron driver is installed, or correct"
                " compute.instance_type"
            ),
        ),
        (
            f"have fewer than {gpus} GPUs, one for each training process",
            [n.name for n in nodes if n.gpus < gpus],
            (
                "correct compute.instance_type or compute.processes_per_instance, or ask for nodes"
                " that have them"
            ),
        ),
    ]
    extras = ",".join(["train", *(EXTRAS[need] for need in package_needs(config.model_dump()))])
    incomplete_nodes = [n for n in nodes if n.lacks and n.lacks not in ("python3", "venv")]
    missing_packages = sorted({name for n in incomplete_nodes for name in n.lacks.split(",")})
    faults.append(
        (
            f"lack {', '.join(missing_packages)}",
            [n.name for n in incomplete_nodes],
            f"install smtrain[{extras}] in the nodes' Python, and name it in cluster.venv",
        )
    )
    good = True
    for text, names, remedy in faults:
        if names:
            good = False
            yield Finding("nodes", "fault", f"{_join_names(names)} {text}", remedy)
    # An entry of `machines` describes the nodes itself, so EC2's name for them is no contradiction.
    other_nodes = [n for n in nodes if n.kind and n.type != kind and not config.has_own_machine]
    if other_nodes:
        good = False
        kinds = sorted({n.type for n in other_nodes})
        yield Finding(
            "nodes",
            "warning",
            f"{_join_names([n.name for n in other_nodes])}: {' and '.join(kinds)}; the plan is made"
            f" for {kind}",
            (
                f"set compute.instance_type to {kinds[0]}"
                if len(kinds) == 1 and instance(kinds[0])
                else "set compute.instance_type to the type most like the nodes"
            ),
        )
    if (
        row
        and row.get("efa")
        and count > 1
        and (nodes_without_efa := [n.name for n in nodes if not n.efa])
    ):
        good = False
        yield Finding(
            "nodes",
            "warning",
            f"{_join_names(nodes_without_efa)} have no EFA device",
            "turn EFA on, else it is slow",
        )
    clocks = [n.clock for n in nodes]
    if clocks and max(clocks) - min(clocks) > CLOCKS_S:
        good = False
        yield Finding(
            "nodes",
            "warning",
            f"the clocks of the nodes differ by {max(clocks) - min(clocks)} s",
            "run chronyd or ntpd on them, else lines of several nodes come in the wrong order",
        )
    if good and nodes:
        versions = ", ".join(sorted({n.python for n in nodes}))
        yield Finding(
            "nodes", "ok", f"{len(nodes)} nodes have Python {versions} with all required packages"
        )
    elif not nodes:
        yield Finding(
            "nodes",
            "warning",
            "nodes were asked and did not answer",
            "look at `srun hostname` by hand",
        )


def _write_token(backend: SlurmBackend) -> tuple[str, str]:
    """The existing part of the shared folder's path, as the first run may make the rest, and an
    empty file in it: a node that does not share the folder may have one of the same path.
    """
    output = backend.head.sh(
        'd="$1"; while [ ! -e "$d" ]; do d=$(dirname "$d"); done; echo "$d"; mktemp'
        ' "$d/.smtrain-check-XXXXXX"',
        backend.shared_folder,
    )
    existing_folder, _, token = output.decode().strip().partition("\n")
    return existing_folder, token


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
