"""The accelerators and networks of this machine: their files, their tools' answers, and torch's
view of them.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from smtrain.client.findings import Level
from smtrain.core.extras import present
from smtrain.core.facts import instance
from smtrain.core.text import with_article
from smtrain.tools.doctor.doctor_report import (
    SYSTEM,
    Answer,
    Diagnostics,
    ask,
    child_command,
    first_word,
    numbers,
)
from smtrain.tools.doctor.torch_probe import MARK

IMPORT = 120.0
"""Seconds for torch to be imported and to multiply two matrices on each device; Neuron compiles
them.
"""
_NVIDIA, _GPU_CLASS = "0x10de", "0x03"  # of PCI devices
_OLD_DRIVER = (
    2,
    26,
)  # Neuron's runtime of SDK 2.32 and later refuses these (containers' release notes, SDK 2.30)
_QUERY = "index,name,driver_version,memory.total,memory.used,compute_mode"
_BUSY, _ALMOST_FULL, _FREE = 0.1, 0.9, 0.8  # shares of a GPU's memory
_RUNFILE = (
    "install NVIDIA's driver for this kernel, or reboot after an update of either (`dmesg` says"
    " the reason)"
)
_CONTAINER = "in a container: start it with --gpus all and the NVIDIA container toolkit"
_GET_STARTED = (
    "install torch with the command for your device on PyTorch's `Get started` page"
    " (`smtrain help install`)"
)


@dataclass
class TorchView:
    """torch's view of the devices, from `torch_probe`."""

    kind: str = "cpu"
    """The accelerator's type; `cpu` without one."""
    count: int = 0
    """Accelerators that torch sees."""
    report: dict[str, Any] = field(default_factory=dict)
    """All that it said; empty if torch cannot be imported."""

    @property
    def processes(self) -> int:
        """Training processes of this machine: one for each accelerator."""
        return max(1, self.count)


def devices(diagnostics: Diagnostics) -> TorchView:
    """Look at the accelerators; returns torch's view of them."""
    view = _view(diagnostics)
    device_files = {
        "NVIDIA": _files("nvidia[0-9]*"),
        "AMD": _files("kfd"),
        "Neuron": _files("neuron[0-9]*"),
    }
    for name, files in device_files.items():
        diagnostics.fact("devices", f"{name} device files", len(files) or None)
    # In this order: a broken driver explains why torch sees nothing.
    sound = [
        _nvidia(diagnostics, view, device_files["NVIDIA"]),
        _neuron(diagnostics, view, device_files["Neuron"]),
    ]
    if view.report and all(sound):
        _compare_torch_with_files(diagnostics, view, device_files)
    _network(diagnostics, view)
    return view


def _files(pattern: str) -> list[Path]:
    return sorted((SYSTEM / "dev").glob(pattern))


def _view(diagnostics: Diagnostics) -> TorchView:
    """Import torch elsewhere, and say what happened to it."""
    if not present("torch"):
        return TorchView()  # `software` says so
    answer = ask(*child_command("smtrain.tools.doctor.torch_probe"), seconds=IMPORT)
    line = next((line for line in answer.out.splitlines() if line.startswith(MARK)), None)
    if line is None:
        reason = answer.failure_reason()
        remedy = (
            "install it again: `pip install --force-reinstall torch`; `python -c 'import torch'`"
            " shows the whole error"
        )
        if answer.state == "hangs":
            remedy = (
                "a driver may hang: reboot the machine; `python -X faulthandler -c 'import torch'`"
                " shows more"
            )
        diagnostics.add(
            "torch", "fault", f"torch is installed, but `import torch` {reason}", remedy
        )
        return TorchView()
    report: dict[str, Any] = json.loads(line.removeprefix(MARK))
    for name, key in (
        ("CUDA of torch", "cuda"),
        ("HIP of torch", "hip"),
        ("NCCL", "nccl"),
        ("threads", "threads"),
    ):
        diagnostics.fact("torch", name, report.get(key))
    diagnostics.fact("torch", "accelerator", report["accelerator"] or "none")
    if present("transformers") and (error := report.get("transformers_error")):
        diagnostics.add(
            "packages",
            "fault",
            f"transformers is installed, but cannot be imported ({error})",
            "install it again, for this torch: `pip install --force-reinstall --no-deps"
            " transformers`",
        )
    return TorchView(report["accelerator"] or "cpu", int(report["count"]), report)


def _compare_torch_with_files(
    diagnostics: Diagnostics, view: TorchView, device_files: dict[str, list[Path]]
) -> None:
    """The devices that torch sees against the files of devices that this machine has."""
    kinds = [name for name, files in device_files.items() if files]
    report, kind = view.report, view.kind
    if kind == "cpu":
        if kinds:
            diagnostics.add(
                "torch", "fault", *_explain_unseen(report, kinds[0], len(device_files[kinds[0]]))
            )
        elif report["cuda"] or report["hip"]:
            text = (
                f"torch {report['torch']} is built for GPUs, and this machine has none: it trains"
                " on the CPU"
            )
            diagnostics.add("torch", "warning", text, f"nothing, if it is meant; {_CONTAINER}")
        else:
            diagnostics.add(
                "torch",
                "ok",
                f"torch {report['torch']} trains on the CPU: this machine has no accelerator",
            )
        return
    for row in report["devices"]:
        sizes = [round(row[key] / 2**30, 1) for key in ("total", "free") if key in row]
        words = [row.get("name"), f"{sizes[0]} GiB, {sizes[1]} free" if len(sizes) == 2 else None]
        diagnostics.fact(
            "devices", f"{kind}:{row['index']}", ", ".join(filter(None, words)) or "there"
        )
        if device_files["AMD"] and row.get("free", 1) < _FREE * row.get(
            "total", 1
        ):  # nvidia-smi says it for all GPUs
            text = f"{kind}:{row['index']} is busy: {sizes[1]} of {sizes[0]} GiB are free"
            diagnostics.add(
                "device", "warning", text, "end the programs that `rocm-smi --showpids` lists"
            )
        if not row["works"]:
            reason = row.get("error", "the product of two matrices is wrong")
            remedy = (
                "end other programs on it; otherwise test the device with its vendor's tool, or"
                " replace it"
            )
            diagnostics.add(
                "torch", "fault", f"{kind}:{row['index']} does not compute ({reason})", remedy
            )
    files = max(map(len, device_files.values()))
    if kind == "cuda" and 0 < view.count < files and len(kinds) == 1:
        text = f"torch sees {view.count} of {files} GPUs"
        diagnostics.add(
            "torch",
            "warning",
            text,
            "unset CUDA_VISIBLE_DEVICES, or see that no GPU has failed (nvidia-smi)",
        )
    if all(row["works"] for row in report["devices"]):
        diagnostics.add("torch", "ok", f"torch {report['torch']} computes on {view.count} x {kind}")


def _explain_unseen(report: dict[str, Any], kind: str, count: int) -> tuple[str, str]:
    """The reason that torch does not see an existing device, and the remedy."""
    problem = (
        f"this machine has {count} {kind} device{'s' * (count != 1)}, and torch {report['torch']}"
        " sees none"
    )
    reasons = [report.get("error"), *report.get("warnings", ())]
    reason = next((candidate for candidate in reasons if candidate), None)
    if kind == "Neuron":
        if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
            return (
                f"{problem}: TORCH_DEVICE_BACKEND_AUTOLOAD is 0",
                "unset TORCH_DEVICE_BACKEND_AUTOLOAD",
            )
        version = _neuronx()
        if version is None:
            version_prefix = ".".join(map(str, numbers(report["torch"])[:2]))
            index = "--extra-index-url https://pip.repos.neuron.amazonaws.com"
            return (
                f"{problem}: torch-neuronx is not installed",
                f"run `pip install 'torch-neuronx=={version_prefix}.*' {index}`",
            )
        if numbers(version) < (2, 13):
            text = (
                f"{problem}: torch-neuronx {version} is of PyTorch/XLA, which engine native"
                " cannot use"
            )
            return (
                text,
                "use an image of Neuron 2.33 or later, or engine nxd on trn1 (`smtrain help engines`)",
            )
        return (
            f"{problem}{f' ({reason})' if reason else ''}",
            "run `python -c 'import torch_neuronx'`, and mend the fault that it names",
        )
    hiding = [
        name
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
        if os.environ.get(name) in ("", "-1")
    ]
    if hiding:
        return f"{problem}: {hiding[0]} hides them", f"unset {hiding[0]}"
    if not report["cuda"] and not report["hip"]:
        return f"{problem}: it is the build for CPUs", _GET_STARTED
    if (kind == "AMD") != bool(report["hip"]):
        return f"{problem}: it is the build for another maker's GPUs", _GET_STARTED
    if reason and "too old" in reason:
        return f"{problem}: {reason}", f"update the driver, or {_GET_STARTED} for an older CUDA"
    return f"{problem}{f' ({reason})' if reason else ''}", f"look at `nvidia-smi`; {_CONTAINER}"


def _neuronx() -> str | None:
    try:
        return metadata.version("torch-neuronx")
    except metadata.PackageNotFoundError:
        return None


def _has_access(diagnostics: Diagnostics, files: list[Path], kind: str) -> bool:
    closed_files = [file for file in files if not os.access(file, os.R_OK | os.W_OK)]
    if closed_files:
        text = (
            f"you may not open {kind} devices"
            f" ({', '.join(f'/dev/{file.name}' for file in closed_files[:3])})"
        )
        diagnostics.add(
            "driver",
            "fault",
            text,
            "add yourself to the group of these files (`ls -l /dev`), and log in again",
        )
    return not closed_files


def _nvidia(diagnostics: Diagnostics, view: TorchView, files: list[Path]) -> bool:
    """Ask nvidia-smi; False if the driver explains why torch cannot work."""
    answer = ask("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    on_bus = _on_bus()
    if answer.state == "missing":
        if files:
            remedy = "in a container: set NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            diagnostics.add(
                "driver", "warning", "nvidia-smi is not there, so the driver was not asked", remedy
            )
        elif on_bus:
            text = (
                f"{on_bus} NVIDIA GPU{'s are' if on_bus > 1 else ' is'} on the PCI bus, and no"
                " driver"
            )
            diagnostics.add("driver", "fault", text, f"{_RUNFILE}; {_CONTAINER}")
            return False
        return _has_access(diagnostics, files, "NVIDIA") if files else True
    if answer.state != "answers":
        if files or on_bus or answer.state == "hangs":
            remedy = (
                "reboot: a process or the driver is stuck" if answer.state == "hangs" else _RUNFILE
            )
            diagnostics.add(
                "driver",
                "fault",
                f"nvidia-smi is there, but {answer.failure_reason()}",
                f"{remedy}; {_CONTAINER}",
            )
            return False
        text = f"nvidia-smi is there, but {answer.failure_reason()}, and no NVIDIA GPU was found"
        diagnostics.add(
            "driver", "warning", text, f"nothing, if this machine has no GPU; else {_RUNFILE}"
        )
        return True
    return _gpus(diagnostics, view, answer)


def _gpus(diagnostics: Diagnostics, view: TorchView, answer: Answer) -> bool:
    """Read the rows of nvidia-smi: the driver's version, the busy GPUs."""
    rows = [
        [cell.strip() for cell in line.split(",")]
        for line in answer.out.splitlines()
        if line.count(",") >= 5
    ]
    sound = True
    for index, name, driver, total, used, mode in (row[:6] for row in rows):
        diagnostics.fact("devices", "NVIDIA driver", driver)
        diagnostics.fact("devices", f"GPU {index}", f"{name}, {total} MiB, {used} in use")
        if not _is_visible(index):
            continue
        share = (
            float(used) / float(total)
            if _is_number(used) and _is_number(total) and float(total)
            else 0.0
        )
        if mode == "Prohibited":
            text = f"GPU {index} takes no programs: its compute mode is Prohibited"
            diagnostics.add("device", "fault", text, f"run `sudo nvidia-smi -i {index} -c DEFAULT`")
        elif share > _BUSY:
            level: Level = "fault" if share > _ALMOST_FULL else "warning"
            text = f"GPU {index} is busy: {used} of {total} MiB are in use"
            remedy = (
                "end the programs that `nvidia-smi` lists, or choose other GPUs with"
                " CUDA_VISIBLE_DEVICES"
            )
            diagnostics.add("device", level, text, remedy)
    newest = re.search(r"CUDA Version: *([\d.]+)", ask("nvidia-smi").out)
    if newest:
        diagnostics.fact("devices", "CUDA of the driver", newest[1])
    torch_cuda = view.report.get("cuda")
    # Within a major version an older driver runs newer builds (CUDA's minor version compatibility).
    if newest and torch_cuda and numbers(newest[1])[:1] < numbers(torch_cuda)[:1]:
        text = (
            f"the NVIDIA driver is too old: it is for CUDA {newest[1]}, and torch"
            f" {view.report['torch']} for CUDA {torch_cuda}"
        )
        diagnostics.add(
            "driver", "fault", text, f"update the driver, or {_GET_STARTED} for CUDA {newest[1]}"
        )
        sound = False
    elif rows:
        diagnostics.add(
            "driver", "ok", f"NVIDIA driver {rows[0][2]}, {len(rows)} GPU{'s' * (len(rows) != 1)}"
        )
    return sound


def _is_visible(index: str) -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves a GPU to programs; other names than numbers in it leave
    all.
    """
    visible_indices = [
        word.strip()
        for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if word.strip()
    ]
    return (
        index in visible_indices or not all(map(_is_number, visible_indices)) or not visible_indices
    )


def _on_bus() -> int:
    """NVIDIA GPUs on the PCI bus, with a driver or without."""
    count = 0
    for folder in (SYSTEM / "sys/bus/pci/devices").glob("*"):
        vendor, class_ = (
            first_word(str(folder.relative_to(SYSTEM) / name)) or "" for name in ("vendor", "class")
        )
        count += vendor == _NVIDIA and class_.startswith(_GPU_CLASS)
    return count


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"\d+(\.\d+)?", text))


def _neuron(diagnostics: Diagnostics, view: TorchView, files: list[Path]) -> bool:
    """Ask the Neuron driver and neuron-ls; False if they explain why torch cannot work."""
    driver = first_word("sys/module/neuron/version")
    type_ = first_word("sys/devices/virtual/dmi/id/product_name") or ""
    diagnostics.fact("devices", "Neuron driver", driver)
    answer = ask("neuron-ls", "--json-output")
    if not files:
        if driver or type_.startswith(("trn", "inf")):
            driver_state = f"driver {driver} is loaded" if driver else "no driver is loaded"
            text = (
                f"this machine is {with_article(type_ or 'Neuron machine')} without Neuron devices:"
                f" {driver_state}"
            )
            remedy = (
                "run `sudo modprobe neuron`, or install aws-neuronx-dkms; in a container: start it"
                " with --device"
            )
            diagnostics.add(
                "driver", "fault", text, f"{remedy}=/dev/neuron0 and so on for each device"
            )
            return False
        if answer.state in ("fails", "hangs"):
            text = (
                f"neuron-ls is there, but {answer.failure_reason()}, and no Neuron device was found"
            )
            diagnostics.add(
                "driver",
                "warning",
                text,
                "nothing, if this machine has none; else install aws-neuronx-dkms",
            )
        return True
    if not _has_access(diagnostics, files, "Neuron"):
        return False
    if answer.state == "missing":
        remedy = "install aws-neuronx-tools, and put /opt/aws/neuron/bin on PATH"
        diagnostics.add(
            "driver", "warning", "neuron-ls is not there, so the driver was not asked", remedy
        )
    elif answer.state != "answers":
        remedy = (
            "reboot: a process or the driver is stuck"
            if answer.state == "hangs"
            else "load the driver again: `sudo modprobe -r neuron && sudo modprobe neuron`"
        )
        diagnostics.add(
            "driver", "fault", f"neuron-ls is there, but {answer.failure_reason()}", remedy
        )
        return False
    else:
        _cores(diagnostics, answer.out)
    version = _neuronx()
    if driver and version and numbers(version) >= (2, 13) and numbers(driver)[:2] <= _OLD_DRIVER:
        text = (
            f"the Neuron driver {driver} is too old for torch-neuronx {version}, whose runtime"
            " refuses 2.26 and older"
        )
        diagnostics.add(
            "driver", "fault", text, "update aws-neuronx-dkms, or take a newer machine image"
        )
        return False
    return True


def _cores(diagnostics: Diagnostics, text: str) -> None:
    """Read neuron-ls: the devices, their logical cores, and the processes on them."""
    try:
        rows: list[dict[str, Any]] = [row for row in json.loads(text) if isinstance(row, dict)]
        busy = [row for row in rows if row.get("neuron_processes")]
        count = sum(int(row.get("nc_count") or 0) for row in rows)
    except (ValueError, TypeError):
        diagnostics.add(
            "driver",
            "warning",
            "neuron-ls answers, but not as known",
            "send its output with this report",
        )
        return
    if not rows:
        return
    diagnostics.fact("devices", "Neuron devices", len(rows))
    diagnostics.fact("devices", "Neuron cores", count)
    diagnostics.fact("devices", "cores of a logical core", rows[0].get("logical_neuroncore_config"))
    diagnostics.fact("devices", "instance type by neuron-ls", rows[0].get("instance_type"))
    if busy:
        pids = sorted(
            {str(process.get("pid", "?")) for row in busy for process in row["neuron_processes"]}
        )
        level: Level = "fault" if len(busy) == len(rows) else "warning"
        text_of_busy = (
            f"{len(busy)} of {len(rows)} Neuron devices are busy (process {', '.join(pids[:5])})"
        )
        diagnostics.add(
            "device", level, text_of_busy, "end these processes: a Neuron core serves one at a time"
        )
    else:
        diagnostics.add("driver", "ok", f"{len(rows)} Neuron devices with {count} cores")


def _network(diagnostics: Diagnostics, view: TorchView) -> None:
    """EFA, which only trainings on several hosts need."""
    names = sorted(folder.name for folder in (SYSTEM / "sys/class/infiniband").glob("*"))
    diagnostics.fact("network", "InfiniBand and EFA devices", ", ".join(names) or "none")
    answer = ask("fi_info", "-p", "efa")
    diagnostics.fact(
        "network",
        "fi_info",
        {"missing": "not installed", "answers": "finds EFA"}.get(
            answer.state, answer.failure_reason()
        ),
    )
    type_ = first_word("sys/devices/virtual/dmi/id/product_name") or ""
    efa = any(name.startswith(("efa", "rdmap")) for name in names)
    row = instance(f"ml.{type_}")
    if row and row.get("efa") and not efa:
        remedy = (
            "launch it with EFA interfaces; in a container: start it with --device=/dev/infiniband"
        )
        diagnostics.add(
            "network",
            "warning",
            f"{type_} can have EFA, and none is here: several hosts would be slow",
            remedy,
        )
    if not efa:
        return
    if answer.state != "answers":
        text = "there are EFA devices, but fi_info " + (
            "is not there" if answer.state == "missing" else answer.failure_reason()
        )
        diagnostics.add(
            "network",
            "warning",
            text,
            "install AWS's EFA software (aws-efa-installer) on host and in the image",
        )
    else:
        diagnostics.add("network", "ok", f"EFA: {', '.join(names)}")
    if view.kind == "cuda":
        folders = ("opt/amazon/ofi-nccl", "opt/aws-ofi-nccl", "opt/amazon/aws-ofi-nccl")
        libraries = [SYSTEM / folder for folder in folders if (SYSTEM / folder).is_dir()]
        diagnostics.fact(
            "network",
            "NCCL over EFA",
            "aws-ofi-nccl" if libraries else "aws-ofi-nccl was not found",
        )
    _check_locked_memory(diagnostics)


def _check_locked_memory(diagnostics: Diagnostics) -> None:
    import resource

    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if soft != resource.RLIM_INFINITY:
        text = f"EFA locks memory, and a process may lock {soft / 2**20:.0f} MiB"
        diagnostics.add(
            "network",
            "warning",
            text,
            "run `ulimit -l unlimited`; in a container: --ulimit memlock=-1",
        )
