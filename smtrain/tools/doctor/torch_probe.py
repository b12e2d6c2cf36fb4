"""torch's view of this machine's devices, in a separate process: an import or a driver may crash
or hang.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

MARK = "smtrain doctor: "
"""Begins the line with the result: libraries print lines too."""


def main() -> None:
    """Print torch's view of the machine, as JSON."""
    report: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        import torch

        report |= {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "threads": torch.get_num_threads(),
            "mkldnn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        }
        report |= _accelerator(torch)
        _transformers(report)
    report["warnings"] = [
        str(warning.message).splitlines()[0]
        for warning in caught_warnings
        if issubclass(warning.category, UserWarning)
    ]
    sys.stdout.write(f"\n{MARK}{json.dumps(report)}\n")
    sys.stdout.flush()


def _transformers(report: dict[str, Any]) -> None:
    try:
        from transformers import AutoModelForCausalLM

        assert AutoModelForCausalLM
    except Exception as error:
        report["transformers_error"] = _line(error)


def _accelerator(torch: Any) -> dict[str, Any]:
    """The kind, number and devices of the accelerator, or the reason for its absence."""
    if not hasattr(torch, "accelerator"):  # before 2.6; `software` says that it is too old
        return {"accelerator": None, "count": 0, "devices": []}
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        report: dict[str, Any] = {"accelerator": None, "count": 0, "devices": []}
        if torch.version.cuda or torch.version.hip:
            try:
                torch.cuda.init()  # says why
            except Exception as error:
                report["error"] = _line(error)
        return report
    # Neuron: a process outside a job uses its first core only.
    count = torch.accelerator.device_count()
    report = {"accelerator": device.type, "count": count}
    if device.type == "cuda":
        report["nccl"] = _nccl(torch)
    report["devices"] = [
        _device(torch, device.type, i) for i in range(1 if device.type == "neuron" else count)
    ]
    return report


def _nccl(torch: Any) -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:
        return None


def _device(torch: Any, kind: str, index: int) -> dict[str, Any]:
    """Name and memory of a device, and whether it multiplies two matrices rightly."""
    row: dict[str, Any] = {"index": index}
    try:
        module = getattr(torch, kind)
        if hasattr(module, "get_device_name"):
            row["name"] = str(module.get_device_name(index))
        if hasattr(module, "mem_get_info"):
            row["free"], row["total"] = map(int, module.mem_get_info(index))
        if kind == "cuda":
            row["capability"] = ".".join(map(str, module.get_device_capability(index)))
        a = torch.ones(16, 16, device=torch.device(kind, index))
        row["works"] = float((a @ a).sum().cpu()) == 16.0**3
    except Exception as error:
        row["works"], row["error"] = False, _line(error)
    return row


def _line(error: BaseException) -> str:
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
