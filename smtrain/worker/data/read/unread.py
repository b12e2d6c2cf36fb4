"""Text that the input holds and no reader takes: counted by field, so that it is named before anything is trained."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_MOST = 200
"""Names that are kept: records with names of their own as keys would fill the memory."""
_OTHERS = "other fields"
_SHOWN = 20


class UnreadText(dict[str, int]):
    """How often what is not read came, by its name: records with text in a field, or things of a kind."""

    def count(self, found: Mapping[str, int] | Iterable[str]) -> None:
        """Add counts, or one for each name. After 200 names further ones are counted together."""
        pairs = found.items() if isinstance(found, Mapping) else ((name, 1) for name in found)
        for name, number in pairs:
            known = name if name in self or len(self) < _MOST else _OTHERS
            self[known] = self.get(known, 0) + number


def unread_sentence(unread: Mapping[str, int]) -> str:
    """All of it in one line, the most frequent first; "" if there is none."""
    if not unread:
        return ""
    ordered = sorted(unread.items(), key=lambda pair: (-pair[1], pair[0]))
    more = f" and {len(ordered) - _SHOWN} more in manifest.json" if len(ordered) > _SHOWN else ""
    return "not read: " + ", ".join(f"{name} {count:,}" for name, count in ordered[:_SHOWN]) + more


def holds_text(value: object) -> bool:
    """Whether a value of a record is text that is not empty, or holds such."""
    if isinstance(value, str):
        return value != ""
    if isinstance(value, dict):
        return any(map(holds_text, value.values()))
    return isinstance(value, (list, tuple)) and any(map(holds_text, value))


def unread_fields(row: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """The fields of a record that hold text and are not `read`, which names nested ones as `meta.text`."""
    found = []
    for name, value in row.items():
        if name in read:
            continue
        inner = _below(name, read)
        if inner and isinstance(value, dict):
            found += [f"{name}.{rest}" for rest in unread_fields(value, inner)]
        elif holds_text(value):
            found.append(name)
    return found


def _below(name: str, read: Collection[str]) -> list[str]:
    return [path[len(name) + 1 :] for path in read if path.startswith(f"{name}.")]


def unread_columns(table: Any, read: Collection[str], *, of_json: bool = False) -> UnreadText:
    """The same of the rows of an Arrow table or record batch; times that Arrow saw in JSON (`of_json`) were text."""
    found = UnreadText()
    for field, column in zip(table.schema, table.columns, strict=True):
        if field.name not in read:
            chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
            for chunk in chunks:
                _count_column(found, field.name, chunk, _below(field.name, read), of_json)
    return found


def _count_column(found: UnreadText, name: str, column: Any, read: Collection[str], of_json: bool) -> None:
    if read and pa.types.is_struct(column.type):
        for field, inner in zip(column.type, column.flatten(), strict=True):
            if field.name not in read:
                _count_column(found, f"{name}.{field.name}", inner, _below(field.name, read), of_json)
    elif rows := int(_with_text(column, of_json).sum()):
        found.count({name: rows})


def _with_text(column: Any, of_json: bool) -> NDArray[np.bool_]:
    """Which rows of a column hold text, bool [rows]."""
    kind, types = column.type, pa.types
    if types.is_dictionary(kind):
        return _with_text(column.dictionary_decode(), of_json)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return _plain(pc.fill_null(pc.greater(pc.binary_length(column), 0), False))
    if of_json and types.is_timestamp(kind):
        return _plain(column.is_valid())
    made = np.zeros(len(column), bool)
    if types.is_struct(kind):
        for inner in column.flatten():
            made |= _with_text(inner, of_json)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        parents = pc.list_parent_indices(column).to_numpy(zero_copy_only=False)
        made[parents[_with_text(column.flatten(), of_json)]] = True
    return made


def _plain(mask: Any) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = mask.to_numpy(zero_copy_only=False)
    return found


def unread_in_parquet(table: Any, groups: Iterable[int], read: Collection[str]) -> UnreadText:
    """The same of row groups of a `pyarrow.parquet.ParquetFile`, by its footer: nothing more of the file is read.

    A row counts if it has a value, also an empty one; of a column of lists the values count, up to the rows.
    """
    found = UnreadText()
    about, tops = table.metadata, sorted(table.schema_arrow.names, key=len, reverse=True)
    for group in groups:
        rows: dict[str, int] = {}
        for leaf in range(about.num_columns):
            path = about.schema.column(leaf).path
            top = next((name for name in tops if f"{path}.".startswith(f"{name}.")), path)
            if top in read or any(f"{path}.".startswith(f"{name}.") for name in read):
                continue
            if about.schema.column(leaf).logical_type.type in ("STRING", "JSON", "ENUM"):
                name = path.partition(".list.")[0] if _below(top, read) else top
                chunk = about.row_group(group).column(leaf)
                rows[name] = max(rows.get(name, 0), min(_values(chunk), about.row_group(group).num_rows))
        found.count({name: count for name, count in rows.items() if count})
    return found


def _values(chunk: Any) -> int:
    """How many values of a column chunk are there; none if the largest is empty text."""
    known = chunk.statistics if chunk.is_stats_set else None
    if known is not None and known.has_min_max and known.max in ("", b""):
        return 0
    return int(chunk.num_values - (known.null_count if known is not None and known.has_null_count else 0))
