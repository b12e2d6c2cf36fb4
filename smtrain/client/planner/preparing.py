"""Time and packages that the passes over documents (data.filters, data.pii...) add to stage
prepare.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil

from smtrain.core.config import JobConfig
from smtrain.core.config.data import Data
from smtrain.core.config.units import spell
from smtrain.core.extras import MODULES
from smtrain.core.facts import table
from smtrain.core.protocol.entrypoints import EXTRAS, package_needs
from smtrain.core.targets import TARGETS

_DOCUMENT = 3000  # bytes
_BANDS = 16  # of the default similarity and permutations
_STORED_BYTES, _BYTES_A_KEY, _PASS_BYTES = (
    12,
    64,
    512 << 20,
)  # as worker/data/prepare/spread/driver.py has them
_SIZE = re.compile(r"\.(\d*)(x?)large$")


def refining_seconds(
    data: Data, kind: str, assumptions: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Seconds per byte of text of each pass, by its key, on a machine of this type with all its
    cores.
    """
    a = assumptions or table("prices")["assumptions"]
    passes = {
        "data.filters": data.filters,
        "data.near_duplicates": ("near",) if data.near_duplicates else (),
        "data.pii": ("pii",) if data.pii else (),
        "data.fix_mojibake": ("mojibake",) if data.fix_mojibake else (),
        "data.language": ("language",) if data.language else (),
        "data.decontaminate": ("tests",) if data.decontaminate else (),
    }
    seconds_per_mb = {
        key: sum(1 / a[f"{name}_mb_per_s_vcpu"] for name in names) for key, names in passes.items()
    }
    return {key: seconds / 1e6 / vcpus(kind) for key, seconds in seconds_per_mb.items() if seconds}


def reading_seconds(
    config: JobConfig, kind: str, size: float, assumptions: Mapping[str, float] | None = None
) -> float:
    """Seconds from the first byte of text to the last token."""
    a = assumptions or table("prices")["assumptions"]
    seconds_per_byte = 1 / (a["tokenize_mb_per_s"] * 1e6) + sum(
        refining_seconds(config.data, kind, a).values()
    )
    return float(seconds_per_byte * size / config.data.machines)


def vcpus(kind: str) -> int:
    """vCPUs of an instance type by its size: large has 2, xlarge 4, Nxlarge 4 N; other names count
    as xlarge.
    """
    size = _SIZE.search(kind)
    if size is None or size[2]:
        return 4 * int((size and size[1]) or 1)
    return 2


def duplicates_warning(data: Data, kind: str, assumptions: Mapping[str, float]) -> str:
    """State time and data a terabyte of finding duplicates on several machines; "" if it is not
    asked for.
    """
    rows = {
        "data.deduplicate": data.deduplicate,
        "data.near_duplicates": data.near_duplicates is not None,
    }
    if data.machines == 1 or not any(rows.values()):
        return ""
    passes = []
    for key, is_requested in rows.items():
        keys = 1e12 / _DOCUMENT * (_BANDS if key == "data.near_duplicates" else 1)
        tasks = ceil(keys * _BYTES_A_KEY / _PASS_BYTES)
        seconds = keys / assumptions["duplicate_keys_per_s_vcpu"] / vcpus(kind) / data.machines
        if is_requested:
            passes.append(
                f"{key} {spell(seconds)}, {keys * _STORED_BYTES / 1e9:.0f} GB written, then read in"
                f" pieces, {tasks} tasks of 0.5 GB of memory"
            )
    bands = f" and {_BANDS} bands" if rows["data.near_duplicates"] else ""
    return (
        f"prepare: a TB of text, at 3 KB a document{bands}, also takes {'; '.join(passes)}"
        " (computed)"
    )


def preparing_warnings(
    config: JobConfig, kind: str, size: float | None, assumptions: Mapping[str, float] | None = None
) -> list[str]:
    """Warnings about stage prepare: how long the passes take, for a gigabyte and for `size` bytes
    of text, and which packages the image needs.
    """
    data, out = config.data, []
    if passes := {} if data.prepared else refining_seconds(data, kind, assumptions):
        machines = data.machines
        machine_words = f"{kind}, {machines} of them" if machines > 1 else kind
        pass_words = ", ".join(
            f"{key} {spell(seconds * 1e9 / machines)}" for key, seconds in passes.items()
        )
        total_words = (
            f"; {spell(sum(passes.values()) * size / machines)} for this text" if size else ""
        )
        out.append(f"prepare: on {machine_words}, a GB of text takes {pass_words}{total_words}")
    if not data.prepared and (
        duplicates_note := duplicates_warning(
            data, kind, assumptions or table("prices")["assumptions"]
        )
    ):
        out.append(duplicates_note)
    if TARGETS[config.target].rented:
        for need in package_needs(config.model_dump()):
            if need == "data.machines" and data.machines > 1:
                continue  # Ray's wheel travels with the code
            packages = ", ".join(MODULES[EXTRAS[need]])
            has = (
                "which no image of AWS brings"
                if need in table("images")["contents"]["without"]
                else "if it has not"
            )
            out.append(
                f"{need} needs {packages} in the image, {has}: `smtrain image build` puts them in"
            )
    return out
