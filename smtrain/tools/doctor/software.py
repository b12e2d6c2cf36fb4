"""Python, the packages, the processor, memory, disks and limits of this machine, and their
faults.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from smtrain.client.findings import Level
from smtrain.client.planner.machines import GIB
from smtrain.client.planner.this_machine import PROCESS
from smtrain.core.errors import first_line
from smtrain.core.extras import MODULES, install, missing_module
from smtrain.core.files import home_path, probe
from smtrain.core.machine import CGROUP, cores_here, memory_here, memory_limit_here, processor_here
from smtrain.tools.doctor.doctor_report import SYSTEM, Diagnostics, first_word, numbers
from smtrain.version import __version__

TRAINING_PACKAGES = ("torch", "transformers")
"""Packages without which nothing trains; the stages before and after training need the rest of the
extra `train`.
"""
REPORTED_PACKAGES = (
    *(
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "numpy",
        "huggingface_hub",
        "triton",
        "zlib-ng",
    ),
    *(
        "pyarrow",
        "gigatoken",
        "tensorboard",
        "peft",
        "accelerate",
        "boto3",
        "sagemaker",
        "sagemaker-train",
    ),
    *("torch-neuronx", "neuronx-cc", "nki", "libneuronxla", "torch-xla", "neuronx-distributed"),
    *(
        "nvidia-nccl-cu12",
        "nvidia-nccl-cu13",
        "nvidia-cudnn-cu12",
        "nvidia-cudnn-cu13",
        "flash-attn",
    ),
)
FULL = 0.25 * GIB
"""Free bytes below which a disk is full: the smallest run with its checkpoints takes more."""
_ROOM = {"the temporary folder": 2 * GIB, "SMTRAIN_HOME": 10 * GIB, "the working folder": 1 * GIB}

_MOVE = {
    "the temporary folder": "free some, or set TMPDIR to a folder on a larger disk",
    "SMTRAIN_HOME": (
        "free some (`smtrain local clean` says what can go), or set SMTRAIN_HOME to a folder"
        " elsewhere"
    ),
    "the working folder": "free some, or change to another folder",
}
SHM = 1 * GIB
_VARIABLES = re.compile(
    r"(CUDA|NVIDIA|NCCL|FI|NEURON|TORCH|TORCHINDUCTOR|PYTORCH|GLOO|OMP|MKL|HIP|ROCR|XLA|NKI|OFI)_\w+|CC|CXX|LD_PRELOAD"
)


def software(diagnostics: Diagnostics) -> None:
    """Python and the packages."""
    diagnostics.fact("software", "smtrain", __version__)
    diagnostics.fact(
        "software", "Python", f"{platform.python_implementation()} {platform.python_version()}"
    )
    diagnostics.fact(
        "software", "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    )
    diagnostics.fact("software", "C library", " ".join(platform.libc_ver()).strip() or None)
    diagnostics.fact(
        "software",
        "in a container",
        any((SYSTEM / name).exists() for name in (".dockerenv", "run/.containerenv")),
    )
    _python(diagnostics)
    versions = {name: _version(name) for name in REPORTED_PACKAGES}
    for name, version in versions.items():
        diagnostics.fact("packages", name, version)
    lowest_versions = _lowest_versions()
    for name in TRAINING_PACKAGES:
        version = versions[name]
        if version is None:
            diagnostics.add(
                "packages", "fault", f"{name} is not installed", f"run `{_install_command(name)}`"
            )
        elif numbers(version) < numbers(lowest_versions.get(name, "0")):
            diagnostics.add(
                "packages",
                "fault",
                f"{name} {version} is too old; smtrain needs {lowest_versions[name]}",
                f"run `pip install '{name}>={lowest_versions[name]}'`",
            )
    if not diagnostics.findings[1:]:
        diagnostics.add(
            "packages", "ok", ", ".join(f"{name} {versions[name]}" for name in TRAINING_PACKAGES)
        )
    missing_names = [
        name for name in lowest_versions if name not in TRAINING_PACKAGES and _version(name) is None
    ]
    if missing_names and versions["torch"] is not None:
        diagnostics.add(
            "packages",
            "warning",
            f"not installed: {', '.join(missing_names)}, which the stages before and after use",
            f"run `{install('train', ' '.join(missing_names))}`",
        )
    _check_torch_neuronx(diagnostics, versions["torch"], versions["torch-neuronx"])


def _python(diagnostics: Diagnostics) -> None:
    allowed_versions = _metadata_field("Requires-Python") or ""
    violations = [
        part
        for part in allowed_versions.replace(" ", "").split(",")
        if (match := re.fullmatch(r"(>=|<=|<|>|!=|==)([\d.]+?)(\.\*)?", part))
        and not _satisfies(sys.version_info[: len(numbers(match[2]))], match[1], numbers(match[2]))
    ]
    if violations or platform.python_implementation() != "CPython":
        text = (
            f"Python {platform.python_version()} ({platform.python_implementation()}) is not one"
            " that smtrain runs on"
        )
        remedy = (
            "make an environment with CPython"
            f" {', '.join(sorted(allowed_versions.split(','), reverse=True))}"
        )
        diagnostics.add("python", "fault", text, f"{remedy} (`smtrain help install`)")
    elif sys.maxsize < 2**32:
        diagnostics.add(
            "python",
            "fault",
            "this Python is a 32-bit program, for which there is no torch",
            "install a 64-bit one",
        )
    else:
        diagnostics.add("python", "ok", f"Python {platform.python_version()}")


def _satisfies(our_parts: tuple[object, ...], sign: str, bound: tuple[int, ...]) -> bool:
    our_version = tuple(int(str(part)) for part in our_parts)
    return {
        ">=": our_version >= bound,
        "<=": our_version <= bound,
        "<": our_version < bound,
        ">": our_version > bound,
        "!=": our_version != bound,
        "==": our_version == bound,
    }[sign]


def _check_torch_neuronx(diagnostics: Diagnostics, torch: str | None, neuronx: str | None) -> None:
    """torch-neuronx is built for one minor version of torch, which its own version begins with."""
    if torch is None or neuronx is None:
        return
    if numbers(torch)[:2] != numbers(neuronx)[:2]:
        version_prefix = ".".join(map(str, numbers(neuronx)[:2]))
        diagnostics.add(
            "packages",
            "fault",
            f"torch-neuronx {neuronx} is built for torch {version_prefix}, and torch {torch} is"
            " installed",
            f"run `pip install 'torch=={version_prefix}.*'`, or install the torch-neuronx of your"
            " torch",
        )


def _install_command(name: str) -> str:
    """The command of the package's extra, which also brings what goes with it."""
    sentence = missing_module(name)
    return sentence.partition("`")[2].partition("`")[0] or f"pip install {name}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
    except Exception:  # a damaged record of an installation
        return "damaged"


def _metadata_field(key: str) -> str | None:
    try:
        return metadata.metadata("smtrain")[key]
    except (metadata.PackageNotFoundError, KeyError):  # a checkout without installation
        return None


def _lowest_versions() -> dict[str, str]:
    """The least version of each package of the extra `train`."""
    try:
        requirements = metadata.requires("smtrain") or []
    except metadata.PackageNotFoundError:
        requirements = []
    lowest_versions = dict.fromkeys(MODULES["train"], "0") if not requirements else {}
    for requirement in requirements:
        match = re.match(r"([\w.-]+)\s*>=\s*([\d.]+).*extra == ['\"]train['\"]", requirement)
        if match:
            lowest_versions[match[1]] = match[2]
    return lowest_versions


def processor(diagnostics: Diagnostics, processes: int) -> None:
    """Cores, memory and limits, for a training of so many processes."""
    cores, quota = cores_here(), _quota()
    diagnostics.fact("machine", "processor", processor_here())
    diagnostics.fact("machine", "cores", cores)
    diagnostics.fact("machine", "cores by quota", quota)
    diagnostics.fact("machine", "type", first_word("sys/devices/virtual/dmi/id/product_name"))
    if quota is not None and quota < 0.9 * cores:
        text = (
            f"this container may use {quota:g} of the {cores} cores that it sees, and torch starts"
            " a thread for each"
        )
        diagnostics.add("processor", "warning", text, f"set OMP_NUM_THREADS={max(1, int(quota))}")
    free, limit = memory_here(), memory_limit_here()
    total = first_word("proc/meminfo")
    total_bytes = int(total.split()[1]) * 1024 if total and total.startswith("MemTotal:") else None
    for name, size in (("memory", total_bytes), ("memory limit", limit), ("memory free", free)):
        diagnostics.fact("machine", f"{name}, GiB", None if size is None else round(size / GIB, 1))
    _memory(diagnostics, free, limit, processes)
    for name, value in sorted(os.environ.items()):
        if _VARIABLES.fullmatch(name):
            diagnostics.fact("environment", name, value)
    _limits(diagnostics)


def _memory(
    diagnostics: Diagnostics, free: float | None, limit: float | None, processes: int
) -> None:
    if free is None:
        diagnostics.add(
            "memory",
            "warning",
            "the free memory of this machine is unknown",
            "see that a few GiB are free",
        )
        return
    lowest_need, comfortable_need = PROCESS + 0.2 * GIB, (PROCESS + 1.0 * GIB) * processes
    text = f"{free / GIB:.1f} GiB of memory are free"
    remedy = "end other programs, or take a machine with more memory"
    if limit is not None:
        text += f" of the {limit / GIB:.1f} GiB that this container may use"
        remedy = "start the container with more memory (docker run --memory)"
    if free < lowest_need:
        diagnostics.add(
            "memory",
            "fault",
            f"{text}, and a training process needs {lowest_need / GIB:.2f} before its model",
            remedy,
        )
    elif free < comfortable_need:
        diagnostics.add(
            "memory",
            "warning",
            f"{text}, which is little for {processes} training processes",
            remedy,
        )
    else:
        diagnostics.add("memory", "ok", text)


def _quota() -> float | None:
    """Processor cores that the container may use by its quota; None without one."""
    for file, period in (("cpu.max", None), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = (CGROUP / file).read_text("utf-8").split()
            period_text = words[1] if period is None else (CGROUP / period).read_text("utf-8")
            quota = float(words[0]) / float(period_text)
        except (
            OSError,
            ValueError,
            IndexError,
            ZeroDivisionError,
        ):  # a quota of `max` is no number
            continue
        if quota > 0:
            return round(quota, 2)
    return None


def _limits(diagnostics: Diagnostics) -> None:
    """Limits of the shell that stop a training later on."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource_names = {
        "open files": "NOFILE",
        "processes": "NPROC",
        "locked memory": "MEMLOCK",
        "address space": "AS",
    }
    resource_names |= {"file size": "FSIZE", "processor time": "CPU"}
    soft = {
        name: resource.getrlimit(getattr(resource, f"RLIMIT_{short}"))[0]
        for name, short in resource_names.items()
    }
    for name, value in soft.items():
        diagnostics.fact("limits", name, "unlimited" if value == resource.RLIM_INFINITY else value)
    for name, option in (("file size", "f"), ("address space", "v"), ("processor time", "t")):
        if soft[name] != resource.RLIM_INFINITY:
            text = (
                f"the shell limits {name} of a process to {soft[name]}, at which a training ends or"
                " cannot begin"
            )
            diagnostics.add("limits", "warning", text, f"run `ulimit -{option} unlimited`")
    if soft["open files"] != resource.RLIM_INFINITY and soft["open files"] < 1024:
        text = (
            f"a process may open {soft['open files']} files only, fewer than checkpoints and data"
            " sets need"
        )
        diagnostics.add("limits", "warning", text, "run `ulimit -n 4096`")


def disks(diagnostics: Diagnostics, devices: int) -> None:
    """The folders that a training writes to; `devices` share /dev/shm."""
    try:
        temporary: Path | None = Path(tempfile.gettempdir())
    except OSError as error:
        temporary = None
        text = f"no temporary folder can be written to ({first_line(error)})"
        diagnostics.add(
            "disk",
            "fault",
            text,
            "set TMPDIR to a folder that you can write, on a disk with free space",
        )
    folders = {
        "the working folder": Path.cwd(),
        "the temporary folder": temporary,
        "SMTRAIN_HOME": home_path().absolute(),
    }
    for name, folder in folders.items():
        if folder is not None:
            _disk(
                diagnostics,
                name,
                next(parent for parent in (folder, *folder.parents) if parent.exists()),
            )
    _check_shared_memory(diagnostics, devices)


def _disk(diagnostics: Diagnostics, name: str, folder: Path) -> None:
    """Nothing is kept in the working folder unless the user asks for it, so its state is only a
    warning.
    """
    worst: Level = "warning" if name == "the working folder" else "fault"
    free = shutil.disk_usage(folder).free
    diagnostics.fact("disk", f"{name.removeprefix('the ')} free, GiB", round(free / GIB, 1))
    entries = os.statvfs(folder) if hasattr(os, "statvfs") else None
    try:
        probe(folder)
    except OSError as error:
        diagnostics.add(
            "disk", worst, f"{name} cannot be written to: {first_line(error)}", _MOVE[name]
        )
        return
    if entries is not None and entries.f_files and not entries.f_favail:
        diagnostics.add(
            "disk",
            worst,
            f"the disk of {name} takes no more files: its inodes are used up",
            _MOVE[name],
        )
    elif free < FULL:
        diagnostics.add(
            "disk", worst, f"{free / GIB:.2f} GiB are free in {name}: the disk is full", _MOVE[name]
        )
    elif free < _ROOM[name]:
        diagnostics.add(
            "disk",
            "warning",
            f"{free / GIB:.1f} GiB are free in {name}, which is little",
            _MOVE[name],
        )
    else:
        diagnostics.add("disk", "ok", f"{free / GIB:.1f} GiB are free in {name}")


def _check_shared_memory(diagnostics: Diagnostics, devices: int) -> None:
    """Shared memory, through which NCCL and data loaders of one host send."""
    name = "/dev/shm"  # noqa: S108
    folder = SYSTEM / name[1:]
    if not folder.is_dir():
        return
    usage = shutil.disk_usage(folder)
    diagnostics.fact("disk", f"{name}, GiB", round(usage.total / GIB, 2))
    diagnostics.fact("disk", f"{name} free, GiB", round(usage.free / GIB, 2))
    remedy = "start the container with --shm-size=8g, or mount a larger tmpfs on /dev/shm"
    if usage.free < FULL and devices > 1:
        text = (
            f"{usage.free / GIB:.2f} GiB of /dev/shm are free, through which the {devices} devices"
            " may have to send"
        )
        diagnostics.add("disk", "fault", text, f"delete what is left in it, or {remedy}")
    elif usage.total < SHM:
        diagnostics.add(
            "disk",
            "warning",
            f"{name} has {usage.total / GIB:.2f} GiB; NCCL and data loaders use it",
            remedy,
        )
    else:
        diagnostics.add("disk", "ok", f"{usage.free / GIB:.1f} GiB of /dev/shm are free")
