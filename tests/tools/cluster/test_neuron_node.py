"""The script that installs Neuron's driver on a node, run with stand-ins for package managers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from smtrain.tools.cluster.parallelcluster import NEURON_SCRIPT

PROGRAMS = ("apt-get", "dnf", "rpm", "modprobe", "curl", "gpg", "sleep")


def node(folder: Path, system: str) -> Path:
    """A machine's root, whose programs record their calls; modprobe makes the device if it may."""
    (folder / "etc").mkdir()
    (folder / "dev").mkdir()
    (folder / "etc/os-release").write_text(system)
    (folder / "bin").mkdir()
    for name in PROGRAMS:
        made = f'touch "{folder}/dev/neuron0"' if name == "modprobe" else ":"
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >>"{folder}/called"\n{made}\n')
        program.chmod(0o755)
    return folder


def run(root: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{root}/bin:{os.environ['PATH']}", "ROOT": str(root)}
    return subprocess.run(
        ["bash", "-c", NEURON_SCRIPT], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("system", "manager", "source"),
    [
        ("ID=ubuntu\nVERSION_CODENAME=jammy\n", "apt-get", "etc/apt/sources.list.d/neuron.list"),
        ('ID="amzn"\nVERSION_ID="2023"\n', "dnf", "etc/yum.repos.d/neuron.repo"),
    ],
)
def test_it_installs_driver_libraries_and_tools_once(
    tmp_path: Path, system: str, manager: str, source: str
) -> None:
    root = node(tmp_path, system)
    first = run(root)
    assert (first.returncode, first.stdout) == (0, "neuron: installed\n"), first.stderr
    called = (root / "called").read_text()
    (installed,) = [
        line for line in called.splitlines() if line.startswith(manager) and " install " in line
    ]
    assert {"aws-neuronx-dkms", "aws-neuronx-collectives", "aws-neuronx-runtime-lib"} <= set(
        installed.split()
    )
    assert "repos.neuron.amazonaws.com" in (root / source).read_text()
    assert run(root).stdout == "neuron: the driver is there\n"
    assert (root / "called").read_text() == called


def test_a_system_without_packages_is_named(tmp_path: Path) -> None:
    done = run(node(tmp_path, 'ID=rocky\nPRETTY_NAME="Rocky Linux 9"\n'))
    assert done.returncode == 1
    assert "no packages for Rocky Linux 9" in done.stderr
    assert not (tmp_path / "called").exists()


def test_a_driver_without_a_device_fails_the_node(tmp_path: Path) -> None:
    root = node(tmp_path, "ID=ubuntu\nVERSION_CODENAME=noble\n")
    (root / "bin/modprobe").write_text("#!/bin/sh\n")
    done = run(root)
    assert done.returncode == 1
    assert "shows no device" in done.stderr
