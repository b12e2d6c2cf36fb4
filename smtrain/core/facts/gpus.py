"""The needs of an instance type's GPUs: torch, CUDA and precision (`chips` in
core/facts/instances.toml).
"""

from __future__ import annotations

import re
from typing import Any

from smtrain.core.facts import instance, table


def chip_of(instance_type: str) -> str:
    """The GPU of a type, as NVIDIA names it; empty for a type without, or an unknown one."""
    return str((instance(instance_type) or {}).get("chip", ""))


def peak_tflops(chip: str) -> float | None:
    """Dense bf16 peak of a GPU by its data sheet, in 1e12 operations a second; None: unknown."""
    rows = table("instances")["instances"].values()
    peaks = (float(row["core_tflops"]) for row in rows if row.get("chip") == chip)
    return next(peaks, None)


def known_chips() -> list[str]:
    """The GPUs that a machine of one's own can name, sorted."""
    chips = {str(row["chip"]) for row in table("instances")["instances"].values() if "chip" in row}
    return sorted(
        chip for chip in chips if table("instances")["chips"].get(chip, {}).get("torch", True)
    )


def chip_named(name: str) -> str | None:
    """The known GPU in a device's name, such as "NVIDIA H200"; None: it is another one.

    A card for PCIe or in pairs (NVL) is slower than the one with the same name in a server.
    """
    if re.search(r"\b(PCIe|NVL)\b", name):
        return None
    # The longest first: "RTX PRO 6000" before a shorter name that it may hold.
    chips = sorted(known_chips(), key=len, reverse=True)
    return next((chip for chip in chips if re.search(rf"\b{re.escape(chip)}\b", name)), None)


def instance_with(name: str) -> dict[str, Any] | None:
    """The row of an instance type whose GPU a device's name has, with its `type`; None: it is
    another GPU.
    """
    chip = chip_named(name)
    rows: dict[str, dict[str, Any]] = table("instances")["instances"]
    return next(
        ({**row, "type": type_} for type_, row in rows.items() if chip and row.get("chip") == chip),
        None,
    )


def _needs(instance_type: str) -> dict[str, Any]:
    row: dict[str, Any] = table("instances")["chips"].get(chip_of(instance_type), {})
    return row


def has_bf16(instance_type: str) -> bool:
    """Whether the GPUs of a type compute bf16; True for other devices."""
    return bool(_needs(instance_type).get("bf16", True))


def no_bf16(instance_type: str) -> str:
    """The fault of bf16 on GPUs without it."""
    return (
        f"train.precision: {chip_of(instance_type)} GPUs ({instance_type}) have no bf16; set fp16"
        " or fp32"
    )


def without_kernels(instance_type: str) -> str | None:
    """The fault, with its remedy, of GPUs that are too old for every torch that smtrain runs on."""
    if _needs(instance_type).get("torch", True):
        return None
    return (
        f"compute.instance_type: {instance_type} has {chip_of(instance_type)} GPUs, for which no"
        " torch from 2.9 on has kernels; take ml.g5.xlarge"
    )


def cuda_needed(instance_type: str) -> str:
    """The releases of CUDA with kernels for the GPUs of a type, in words; empty if any has."""
    match _needs(instance_type).get("cuda", []):
        case [_, last]:
            return f"CUDA {last} or earlier"
        case [first]:
            return f"CUDA {first} or later"
    return ""


def has_kernels(cuda: str, instance_type: str) -> bool:
    """Whether a release of CUDA ("13.0") has kernels for the GPUs of a type."""
    first, *last = _needs(instance_type).get("cuda", ["0.0"])
    release = _numbers(cuda)
    return _numbers(first) <= release and all(
        release <= _numbers(last_release) for last_release in last
    )


def is_arm(instance_type: str) -> bool:
    """Whether the processors of a type are arm64; images and wheels are for x86_64 otherwise."""
    return (instance(instance_type) or {}).get("arch") == "arm64"


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))
