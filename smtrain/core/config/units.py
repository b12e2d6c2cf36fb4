"""Parse and format durations (`90`, `"90s"`, `"10m"`, `"2h30m"`, `"3d"`) and counts of tokens
(`2e9`, `"1.5B"`).
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PARTS = re.compile(r"(\d+)\s*([smhd])")


def seconds(value: Any) -> Any:
    """Parse a duration into seconds; raises `ValueError` for other text."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    if text.isdigit():
        return int(text)
    if not text or _PARTS.sub("", text).strip():
        raise ValueError("a duration looks like 90, '10m', '2h30m' or '3d'")
    return sum(int(number) * _UNITS[unit] for number, unit in _PARTS.findall(text))


Seconds = Annotated[
    int,
    BeforeValidator(seconds),
    Field(ge=0),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}),
]


_COUNT_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_COUNT = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:e\d{1,2})?)\s*([kmbt]?)")


def count(value: Any) -> Any:
    """Parse a count (`2000000`, `"2e9"`, `"1.5B"`, `"500M"`); raises `ValueError` for other
    text.
    """
    if not isinstance(value, str):
        return value
    match = _COUNT.fullmatch(value.strip().lower())
    if not match:
        raise ValueError("a number of tokens looks like 2000000000, 2e9, '2B' or '500M'")
    return int(Decimal(match[1].replace("_", "")) * _COUNT_SUFFIXES[match[2]])


Count = Annotated[
    int,
    BeforeValidator(count),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}),
]


def spell(value: float) -> str:
    """Format seconds: `42 s`, `3 min 05 s`, `2 h 10 min`."""
    whole_seconds = round(value)
    if whole_seconds < 60:
        return f"{value:.1f} s" if value < 10 else f"{whole_seconds} s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60:02d} s"
    return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60:02d} min"


def spell_age(seconds: float) -> str:
    """Format an age in one unit: `42 s`, `7 min`, `3 h`, `12 d`."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def format_parameters(parameters: float) -> str:
    """Format a number of parameters in billions, or in millions if fewer: 6.74 B, 135 M."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 999.5e6 else f"{parameters / 1e6:.3g} M"


def spell_bytes(size: float) -> str:
    """Format bytes in decimal units: `512 B`, `4.1 kB`, `1.2 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
