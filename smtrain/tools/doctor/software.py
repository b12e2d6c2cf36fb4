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
from smtrain.tools.doctor.gathered import SYSTEM, Gathered, first_word, numbers
from smtrain.version import __version__

NEEDED = ("torch", "transformers")
"""Packages without which nothing trains; the stages before and after training need the rest of the
extra `train`.
"""
SHOWN = (
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


def software(found: Gathered) -> None:
    """Python and the packages."""
    found.fact("software", "smtrain", __version__)
    found.fact(
        "software", "Python", f"{platform.python_implementation()} {platform.python_version()}"
    )
    found.fact(
        "software", "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    )
    found.fact("software", "C library", " ".join(platform.libc_ver()).strip() or None)
    found.fact(
        "software",
        "in a container",
        any((SYSTEM / name).exists() for name in (".dockerenv", "run/.containerenv")),
    )
    _python(found)
    versions = {name: _version(name) for name in SHOWN}
    for name, version in versions.items():
        found.fact("packages", name, version)
    least = _least()
    for name in NEEDED:
        version = versions[name]
        if version is None:
            found.add("packages", "fault", f"{name} is not installed", f"run `{_installing(name)}`")
        elif numbers(version) < numbers(least.get(name, "0")):
            found.add(
                "packages",
                "fault",
                f"{name} {version} is too old; smtrain needs {least[name]}",
                f"run `pip install '{name}>={least[name]}'`",
            )
    if not found.findings[1:]:
        found.add("packages", "ok", ", ".join(f"{name} {versions[name]}" for name in NEEDED))
    lacking = [name for name in least if name not in NEEDED and _version(name) is None]
    if lacking and versions["torch"] is not None:
        found.add(
            "packages",
            "warning",
            f"not installed: {', '.join(lacking)}, which the stages before and after use",
            f"run `{install('train', ' '.join(lacking))}`",
        )
    _together(found, versions["torch"], versions["torch-neuronx"])


def _python(found: Gathered) -> None:
    wanted = _declared("Requires-Python") or ""
    outside = [
        part
        for part in wanted.replace(" ", "").split(",")
        if (match := re.fullmatch(r"(>=|<=|<|>|!=|==)([\d.]+?)(\.\*)?", part))
        and not _holds(sys.version_info[: len(numbers(match[2]))], match[1], numbers(match[2]))
    ]
    if outside or platform.python_implementation() != "CPython":
        text = (
            f"Python {platform.python_version()} ({platform.python_implementation()}) is not one"
            " that smtrain runs on"
        )
        remedy = (
            f"make an environment with CPython {', '.join(sorted(wanted.split(','), reverse=True))}"
        )
        found.add("python", "fault", text, f"{remedy} (docs/install.md)")
    elif sys.maxsize < 2**32:
        found.add(
            "python",
            "fault",
            "this Python is a 32-bit program, for which there is no torch",
            "install a 64-bit one",
        )
    else:
        found.add("python", "ok", f"Python {platform.python_version()}")


def _holds(ours: tuple[object, ...], sign: str, other: tuple[int, ...]) -> bool:
    one = tuple(int(str(part)) for part in ours)
    return {
        ">=": one >= other,
        "<=": one <= other,
        "<": one < other,
        ">": one > other,
        "!=": one != other,
        "==": one == other,
    }[sign]


def _together(found: Gathered, torch: str | None, neuronx: str | None) -> None:
    """torch-neuronx is built for one minor version of torch, which its own version begins with."""
    if torch is None or neuronx is None:
        return
    if numbers(torch)[:2] != numbers(neuronx)[:2]:
        wanted = ".".join(map(str, numbers(neuronx)[:2]))
        found.add(
            "packages",
            "fault",
            f"torch-neuronx {neuronx} is built for torch {wanted}, and torch {torch} is installed",
            f"run `pip install 'torch=={wanted}.*'`, or install the torch-neuronx of your torch",
        )


def _installing(name: str) -> str:
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


def _declared(key: str) -> str | None:
    try:
        return metadata.metadata("smtrain")[key]
    except (metadata.PackageNotFoundError, KeyError):  # a checkout without installation
        return None


def _least() -> dict[str, str]:
    """The least version of each package of the extra `train`."""
    try:
        declared = metadata.requires("smtrain") or []
    except metadata.PackageNotFoundError:
        declared = []
    least = dict.fromkeys(MODULES["train"], "0") if not declared else {}
    for requirement in declared:
        match = re.match(r"([\w.-]+)\s*>=\s*([\d.]+).*extra == ['\"]train['\"]", requirement)
        if match:
            least[match[1]] = match[2]
    return least


def processor(found: Gathered, processes: int) -> None:
    """Cores, memory and limits, for a training of so many processes."""
    cores, quota = cores_here(), _quota()
    found.fact("machine", "processor", processor_here())
    found.fact("machine", "cores", cores)
    found.fact("machine", "cores by quota", quota)
    found.fact("machine", "type", first_word("sys/devices/virtual/dmi/id/product_name"))
    if quota is not None and quota < 0.9 * cores:
        text = (
            f"this container may use {quota:g} of the {cores} cores that it sees, and torch starts"
            " a thread for each"
        )
        found.add("processor", "warning", text, f"set OMP_NUM_THREADS={max(1, int(quota))}")
    free, limit = memory_here(), memory_limit_here()
    total = first_word("proc/meminfo")
    whole = int(total.split()[1]) * 1024 if total and total.startswith("MemTotal:") else None
    for name, size in (("memory", whole), ("memory limit", limit), ("memory free", free)):
        found.fact("machine", f"{name}, GiB", None if size is None else round(size / GIB, 1))
    _memory(found, free, limit, processes)
    for name, value in sorted(os.environ.items()):
        if _VARIABLES.fullmatch(name):
            found.fact("environment", name, value)
    _limits(found)


def _memory(found: Gathered, free: float | None, limit: float | None, processes: int) -> None:
    if free is None:
        found.add(
            "memory",
            "warning",
            "the free memory of this machine is unknown",
            "see that a few GiB are free",
        )
        return
    least, few = PROCESS + 0.2 * GIB, (PROCESS + 1.0 * GIB) * processes
    text = f"{free / GIB:.1f} GiB of memory are free"
    remedy = "end other programs, or take a machine with more memory"
    if limit is not None:
        text += f" of the {limit / GIB:.1f} GiB that this container may use"
        remedy = "start the container with more memory (docker run --memory)"
    if free < least:
        found.add(
            "memory",
            "fault",
            f"{text}, and a training process needs {least / GIB:.2f} before its model",
            remedy,
        )
    elif free < few:
        found.add(
            "memory",
            "warning",
            f"{text}, which is little for {processes} training processes",
            remedy,
        )
    else:
        found.add("memory", "ok", text)


def _quota() -> float | None:
    """Processor cores that the container may use by its quota; None without one."""
    for file, period in (("cpu.max", None), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = (CGROUP / file).read_text("utf-8").split()
            every = words[1] if period is None else (CGROUP / period).read_text("utf-8")
            quota = float(words[0]) / float(every)
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


def _limits(found: Gathered) -> None:
    """Limits of the shell that stop a training later on."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    shown = {
        "open files": "NOFILE",
        "processes": "NPROC",
        "locked memory": "MEMLOCK",
        "address space": "AS",
    }
    shown |= {"file size": "FSIZE", "processor time": "CPU"}
    soft = {
        name: resource.getrlimit(getattr(resource, f"RLIMIT_{short}"))[0]
        for name, short in shown.items()
    }
    for name, value in soft.items():
        found.fact("limits", name, "unlimited" if value == resource.RLIM_INFINITY else value)
    for name, option in (("file size", "f"), ("address space", "v"), ("processor time", "t")):
        if soft[name] != resource.RLIM_INFINITY:
            text = (
                f"the shell limits {name} of a process to {soft[name]}, at which a training ends or"
                " cannot begin"
            )
            found.add("limits", "warning", text, f"run `ulimit -{option} unlimited`")
    if soft["open files"] != resource.RLIM_INFINITY and soft["open files"] < 1024:
        text = (
            f"a process may open {soft['open files']} files only, fewer than checkpoints and data"
            " sets need"
        )
        found.add("limits", "warning", text, "run `ulimit -n 4096`")


def disks(found: Gathered, devices: int) -> None:
    """The folders that a training writes to; `devices` share /dev/shm."""
    try:
        temporary: Path | None = Path(tempfile.gettempdir())
    except OSError as error:
        temporary = None
        text = f"no temporary folder can be written to ({first_line(error)})"
        found.add(
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
            _disk(found, name, next(one for one in (folder, *folder.parents) if one.exists()))
    _shared(found, devices)


def _disk(found: Gathered, name: str, folder: Path) -> None:
    """Nothing is kept in the working folder unless the user asks for it, so its state is only a
    warning.
    """
    worst: Level = "warning" if name == "the working folder" else "fault"
    free = shutil.disk_usage(folder).free
    found.fact("disk", f"{name.removeprefix('the ')} free, GiB", round(free / GIB, 1))
    entries = os.statvfs(folder) if hasattr(os, "statvfs") else None
    try:
        probe(folder)
    except OSError as error:
        found.add("disk", worst, f"{name} cannot be written to: {first_line(error)}", _MOVE[name])
        return
    if entries is not None and entries.f_files and not entries.f_favail:
        found.add(
            "disk",
            worst,
            f"the disk of {name} takes no more files: its inodes are used up",
            _MOVE[name],
        )
    elif free < FULL:
        found.add(
            "disk", worst, f"{free / GIB:.2f} GiB are free in {name}: the disk is full", _MOVE[name]
        )
    elif free < _ROOM[name]:
        found.add(
            "disk",
            "warning",
            f"{free / GIB:.1f} GiB are free in {name}, which is little",
            _MOVE[name],
        )
    else:
        found.add("disk", "ok", f"{free / GIB:.1f} GiB are free in {name}")


def _shared(found: Gathered, devices: int) -> None:
    """Shared memory, through which NCCL and data loaders of one host send."""
    name = "/dev/shm"  # noqa: S108
    folder = SYSTEM / name[1:]
    if not folder.is_dir():
        return
    usage = shutil.disk_usage(folder)
    found.fact("disk", f"{name}, GiB", round(usage.total / GIB, 2))
    found.fact("disk", f"{name} free, GiB", round(usage.free / GIB, 2))
    remedy = "start the container with --shm-size=8g, or mount a larger tmpfs on /dev/shm"
    if usage.free < FULL and devices > 1:
        text = (
            f"{usage.free / GIB:.2f} GiB of /dev/shm are free, through which the {devices} devices"
            " may have to send"
        )
        found.add("disk", "fault", text, f"delete what is left in it, or {remedy}")
    elif usage.total < SHM:
        found.add(
            "disk",
            "warning",
            f"{name} has {usage.total / GIB:.2f} GiB; NCCL and data loaders use it",
            remedy,
        )
    else:
        found.add("disk", "ok", f"{usage.free / GIB:.1f} GiB of /dev/shm are free")
