"""Check that this host's Neuron devices, driver and packages fit the engine, before a cluster
spends minutes on it.

The launcher asks before it starts training. Standard library only. Whatever cannot be read counts
as right: the fault must be certain, as it ends the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path("/")
REFUSED_DRIVER = (2, 26)
"""The newest driver that the runtime of Neuron 2.30 and later refuses (release notes of the
containers, 2026-05-21).
"""
XLA_OF_230 = (2, 9, 0, 2, 14)
"""torch-neuronx of Neuron 2.30."""
TORCHNEURON = (2, 13)
"""The first torch-neuronx with a native device of torch; earlier ones are PyTorch/XLA (release
notes 2.33.0).
"""
PLANE_ACCOUNT = "123456789012"
"""The account in the ARNs of the control plane's jobs (smtrain.plane.client), which no customer of
AWS has.
"""
LNC = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
LS_SECONDS = 30


@dataclass(frozen=True)
class Host:
    """A host, as far as it can be read."""

    device: bool
    """Whether the container sees a Neuron device."""
    driver: str | None
    packages: dict[str, str]
    """Versions of torch, torch-neuronx and neuronx-distributed, if installed."""
    cores: int | None
    """Physical Neuron cores; None if `neuron-ls` is not there or does not say."""


def inspect_host() -> Host:
    """Read the host; tools that are missing or fail leave their value unknown."""
    packages = {}
    for name in ("torch", "torch-neuronx", "neuronx-distributed"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    driver = None
    with contextlib.suppress(OSError):
        driver = (ROOT / "sys/module/neuron/version").read_text().strip() or None
    device = (ROOT / "dev/neuron0").exists()
    return Host(device, driver, packages, _cores() if device else None)


def _cores() -> int | None:
    program = shutil.which("neuron-ls") or shutil.which("neuron-ls", path="/opt/aws/neuron/bin")
    if program is None:
        return None
    try:
        process = subprocess.run(
            [program, "--json-output"], capture_output=True, text=True, timeout=LS_SECONDS
        )
        devices = json.loads(process.stdout)
        # Releases differ in whether nc_count is of logical cores or of physical ones: the larger
        # reading is taken.
        cores = sum(
            max(
                int(device["nc_count"]),
                len(device["neuroncore_ids"]) * int(device["logical_neuroncore_config"]),
            )
            for device in devices
        )
        return cores or None
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError):
        return None


def numbers(version: str | None) -> tuple[int, ...]:
    """The numbers that a version begins with: (2, 14, 3, 0) for 2.14.3.0.123+abc; empty for
    None.
    """
    match = re.match(r"\d+(\.\d+)*", version or "")
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def fault(engine: str, instance_type: str, processes: int, host: Host) -> str | None:
    """The reason why training cannot work here, with its remedy; None if it may work."""
    if not host.device:
        # The control plane and Slurm's test nodes run jobs of any type on CPUs.
        on_cpu = "SMTRAIN_ML_ROOT" in os.environ or PLANE_ACCOUNT in os.environ.get(
            "TRAINING_JOB_ARN", ""
        ).split(":")
        if instance_type.startswith("ml.trn") and not on_cpu:
            return (
                f"this host of {instance_type} shows no Neuron device (/dev/neuron0), and its CPU"
                " would train; launch again, and if it happens again report the job to AWS"
            )
        return None
    return (
        _wrong_packages(engine, host.packages)
        or _old_driver(engine, host)
        or _few_cores(processes, host)
    )


def _wrong_packages(engine: str, packages: dict[str, str]) -> str | None:
    torch, neuronx = packages.get("torch"), packages.get("torch-neuronx")
    if torch is None or neuronx is None:
        torch_problem = "no torch" if torch is None else f"torch {torch} and no torch-neuronx"
        return (
            f"the image has {torch_problem}, so it cannot use the Neuron devices; take an image for"
            " Neuron (compute.image)"
        )
    native = numbers(neuronx)[:2] >= TORCHNEURON
    if engine == "native" and not native:
        return (
            f"the image has torch-neuronx {neuronx}, which is PyTorch/XLA, and engine native needs"
            f" TorchNeuron ({_format_version(TORCHNEURON)} or later); take an image of Neuron 2.33"
            " or later (compute.image)"
        )
    if engine == "nxd" and native:
        return (
            f"the image has torch-neuronx {neuronx}, which is TorchNeuron, and engine nxd needs"
            " PyTorch/XLA; leave compute.image out for an image that has it"
        )
    if engine == "nxd" and "neuronx-distributed" not in packages:
        return (
            "the image has no neuronx-distributed, which engine nxd needs; leave compute.image out"
            " for one that has it"
        )
    pair = numbers(neuronx)[:2]
    if numbers(torch)[:2] != pair:
        return (
            f"the image has torch {torch}, and torch-neuronx {neuronx} is made for torch"
            f" {_format_version(pair)}; install the torch that belongs to it, or take AWS's image"
            " (compute.image)"
        )
    return None


def _old_driver(engine: str, host: Host) -> str | None:
    driver = numbers(host.driver)[:2]
    if (
        not driver
        or driver > REFUSED_DRIVER
        or numbers(host.packages.get("torch-neuronx")) < XLA_OF_230
    ):
        return None
    nxd = engine == "nxd"
    remedy = (
        "take an image of Neuron 2.28 or 2.29 (compute.image)"
        if nxd
        else "launch again for other hosts"
    )
    return (
        f"the host's Neuron driver is {host.driver}, and the image's runtime refuses drivers up to"
        f" {_format_version(REFUSED_DRIVER)}; {remedy}, or update the driver on nodes of your own"
        " (aws-neuronx-dkms)"
    )


def _few_cores(processes: int, host: Host) -> str | None:
    lnc = next((os.environ[name] for name in LNC if os.environ.get(name, "").isdigit()), "1")
    wanted_cores = processes * max(1, int(lnc))
    if host.cores is None or wanted_cores <= host.cores:
        return None
    return (
        f"{processes} processes with LNC {lnc} need {wanted_cores} physical Neuron cores, and this"
        f" host has {host.cores}; set compute.processes_per_instance:"
        f" {host.cores // max(1, int(lnc))}"
    )


def _format_version(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
