"""The safetensors container: find the tensors in a file, and lay out a file to write.

The safetensors package opens only paths; we read ranges of objects in S3 too.
"""

from __future__ import annotations

import json
from math import prod
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.dtypes import BY_CODE
from smtrain.worker.checkpoint.storage import Place, strange
from smtrain.worker.checkpoint.stored_names import quantized_weights_error
from smtrain.worker.checkpoint.tensor_files import Tensor, TensorFile
from smtrain.worker.checkpoint.tensor_ranges import Slab, contiguous

_PACKED_TYPES = ("F4", "F6_E2M3", "F6_E3M2", "F8_E8M0")
"""Types of quantized weights: not whole bytes, or not numbers by themselves."""
# MAX_HEADER_SIZE of the safetensors library, which refuses longer headers too.
_HEADER_LIMIT = 100_000_000


def metadata(location: Place, file: str) -> dict[str, str]:
    """The strings in a file's header; call `slabs` first, which checks that the file is whole."""
    length = int.from_bytes(location.read(file, 0, 8), "little")
    strings = json.loads(bytes(location.read(file, 8, 8 + length))).get("__metadata__")
    return (
        {k: v for k, v in strings.items() if isinstance(v, str)}
        if isinstance(strings, dict)
        else {}
    )


def slabs(location: Place, file: str) -> dict[str, Slab]:
    """Name -> slab. Raises CheckpointError if the file is cut short or its header is invalid."""

    def damage_error(reason: str) -> CheckpointError:
        return strange(location, file) or CheckpointError(
            f"{location}/{file} is not a complete safetensors file ({reason}); copy this file"
            " again.",
            code="checkpoint.damaged",
        )

    total = location.files().get(file)
    if total is None:
        raise CheckpointError(
            f"{location}/{file} is missing; copy this file into it.", code="checkpoint.damaged"
        )
    if total < 8:
        raise damage_error(f"it has {total} bytes")
    length = int.from_bytes(location.read(file, 0, 8), "little")
    # Before the read: the first 8 bytes of another format would ask for exabytes.
    if length > min(_HEADER_LIMIT, total - 8):
        raise damage_error(f"its header would take {length} bytes")
    try:
        header = json.loads(
            bytes(location.read(file, 8, 8 + length)), object_pairs_hook=_refuse_duplicates
        )
    except (ValueError, RecursionError) as error:
        raise damage_error(f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise damage_error("its header is not a JSON object")
    # The only key of a header that names no tensor (safetensors' format).
    header.pop("__metadata__", None)
    out, spans = {}, []
    if packed_name := next(
        (n for n, a in header.items() if isinstance(a, dict) and a.get("dtype") in _PACKED_TYPES),
        None,
    ):
        raise quantized_weights_error(location, f"{packed_name} in {header[packed_name]['dtype']}")
    for name, entry in header.items():
        try:
            dtype, shape, (start, stop) = (
                BY_CODE[entry["dtype"]],
                tuple(entry["shape"]),
                entry["data_offsets"],
            )
            # Not isinstance: true in JSON would pass as the number 1.
            fits = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
            if not fits or stop - start != prod(shape) * dtype.itemsize:
                raise ValueError
        except (KeyError, ValueError, TypeError):
            raise damage_error(f"its header says {str(entry)[:200]} of {name[:200]!r}") from None
        spans.append((start, stop))
        out[name] = Slab(location, file, 8 + length + start, dtype, shape, contiguous(shape))
    # The format allows no overlaps and no holes, so that a file cannot be of two formats.
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise damage_error("its tensors overlap or leave a gap")
        end = stop
    if 8 + length + end != total:
        raise damage_error(f"it has {total:,} bytes instead of {8 + length + end:,}")
    return out


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys, of which readers would take different ones."""
    out = dict(pairs)
    if len(out) != len(pairs):
        duplicate = next(
            key
            for at, (key, _) in enumerate(pairs)
            if any(key == previous_key for previous_key, _ in pairs[:at])
        )
        raise ValueError(f"it has {duplicate[:200]!r} twice")
    return out


def container(
    file: str, tensors: dict[str, Tensor], strings: dict[str, str] | None = None
) -> TensorFile:
    """Lay out a file of these tensors, the widest types first so that each is aligned; `strings` go
    into its header.
    """
    # transformers 4 refuses a file whose metadata lacks this format (load_state_dict).
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(strings or {})}}
    at = 0
    spans = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        stop = at + tensor.size
        header[name] = {
            "dtype": tensor.dtype.code,
            "shape": list(tensor.shape),
            "data_offsets": [at, stop],
        }
        spans[name] = at
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    # Spaces, as the library pads: JSON allows them, and the numbers begin aligned to 8 bytes.
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return TensorFile(
        file,
        {name: len(head) + start for name, start in spans.items()},
        len(head) + at,
        [(0, head)],
    )
