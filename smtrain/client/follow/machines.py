"""The hosts' use of their machines, in few characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from smtrain.core.config.units import spell_bytes

NAMES = {
    "device": "devices",
    "device_memory": "device memory",
    "cpu": "CPU",
    "memory": "memory",
    "net_in": "net in",
    "net_out": "net out",
    "disk_read": "disk read",
    "disk_write": "disk write",
    "disk": "disk used",
}
"""Names of the numbers in a host's line, in order of cost."""
_NOTABLE_SPREAD = 0.1
"""Show the range of hosts whose shares differ by more."""
_SLOW = 1e6  # bytes a second: a slower network or disk is idle


def usage_rows(hosts: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """(name, value) of the hosts' use: the mean, and the range if the shares differ much.

    Slow network and disk rates are left out, and so is the fill of a disk that has room.
    """
    shares = []
    for key, name in NAMES.items():
        values = [host[key] for host in hosts if key in host]
        if not values:
            continue
        mean, low, high = sum(values) / len(values), min(values), max(values)
        if is_rate(key):
            if high >= _SLOW:
                shares.append((name, format_number(key, mean)))
        elif key != "disk" or high > 0.8:
            spread_note = f" ({low:.0%} to {high:.0%})" if high - low > _NOTABLE_SPREAD else ""
            shares.append((name, f"{mean:.0%}{spread_note}"))
    return shares


def format_number(key: str, value: float) -> str:
    """A number of a host's line as text."""
    return f"{spell_bytes(value)}/s" if is_rate(key) else f"{value:.0%}"


def is_rate(key: str) -> bool:
    """True for bytes a second; the other numbers are shares of 1."""
    return key.startswith(("net_", "disk_"))
