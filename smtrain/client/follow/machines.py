"""What the hosts of a job use of their machines, in few characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from smtrain.core.config.units import spell_bytes

NAMES = {
    "device": "devices", "device_memory": "device memory", "cpu": "CPU", "memory": "memory", "net_in": "net in",
    "net_out": "net out", "disk_read": "disk read", "disk_write": "disk write", "disk": "disk full",
}  # fmt: skip
"""Of the numbers of a host's line, as people read them, the dearest first."""
_APART = 0.1
"""Hosts whose shares differ by more are worth a look."""
_SLOW = 1e6  # bytes a second: a network or a disk that does less does nothing


def shown(hosts: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """(name, value) of what hosts use: the mean, and the range of shares where they differ much.

    What goes through networks and disks is left out where it is next to nothing, and so is how full a disk is that has
    room.
    """
    told = []
    for key, name in NAMES.items():
        values = [host[key] for host in hosts if key in host]
        if not values:
            continue
        mean, low, high = sum(values) / len(values), min(values), max(values)
        if rate(key):
            if high >= _SLOW:
                told.append((name, written(key, mean)))
        elif key != "disk" or high > 0.8:
            apart = f" ({low:.0%} to {high:.0%})" if high - low > _APART else ""
            told.append((name, f"{mean:.0%}{apart}"))
    return told


def written(key: str, value: float) -> str:
    """A number of a host's line for people."""
    return f"{spell_bytes(value)}/s" if rate(key) else f"{value:.0%}"


def rate(key: str) -> bool:
    """Whether it is bytes a second; the others are shares of 1."""
    return key.startswith(("net_", "disk_"))
