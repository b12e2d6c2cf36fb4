"""Counts of what no reader takes, by field, and of what is left out or changed, so that the user
hears of it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_MOST = 200
"""The number of names kept: records whose keys are all different would fill the memory."""
_OTHERS = "other fields"
_SHOWN = 20
EXAMPLES = 10
"""The most examples of a kind."""


class UnreadText(dict[str, int]):
    """Counts of what is not read, by name: records with text in a field, or things of a kind."""

    def count(self, more: Mapping[str, int] | Iterable[str]) -> None:
        """Add counts, or one for each name. After 200 names further ones are counted together."""
        pairs = more.items() if isinstance(more, Mapping) else ((name, 1) for name in more)
        for name, number in pairs:
            known = name if name in self or len(self) < _MOST else _OTHERS
            self[known] = self.get(known, 0) + number


@dataclass
class Findings:
    """Counts of documents by the reason why they were `dropped`, of what was `noted` in them, and
    of `unread` text.

    `examples` has up to EXAMPLES texts by reason.
    """

    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    noted: Counter[str] = dataclasses.field(default_factory=Counter)
    examples: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    unread: UnreadText = dataclasses.field(default_factory=UnreadText)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Findings:
        """Read them from a JSON object that may have further fields."""
        dropped, noted, examples, unread = (record[one.name] for one in dataclasses.fields(cls))
        return cls(Counter(dropped), Counter(noted), examples, UnreadText(unread))

    def keep(self, reason: str, *texts: str) -> None:
        """Keep examples while there are fewer than EXAMPLES."""
        kept = self.examples.setdefault(reason, [])
        kept.extend(texts[: EXAMPLES - len(kept)])

    def add(self, more: Findings) -> None:
        """Add the findings in the text that follows."""
        self.dropped += more.dropped
        self.noted += more.noted
        for reason, texts in more.examples.items():
            self.keep(reason, *texts)
        self.unread.count(more.unread)


def unread_sentence(unread: Mapping[str, int]) -> str:
    """All counts in one line, the most frequent first; "" without any."""
    if not unread:
        return ""
    ordered = sorted(unread.items(), key=lambda pair: (-pair[1], pair[0]))
    more = f" and {len(ordered) - _SHOWN} more in manifest.json" if len(ordered) > _SHOWN else ""
    return "not read: " + ", ".join(f"{name} {count:,}" for name, count in ordered[:_SHOWN]) + more


def holds_text(value: object) -> bool:
    """Whether a value of a record is or contains text, empty text apart."""
    if isinstance(value, str):
        return value != ""
    if isinstance(value, dict):
        return any(map(holds_text, value.values()))
    return isinstance(value, (list, tuple)) and any(map(holds_text, value))


def unread_fields(row: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """The fields of a record that hold text and are not in `read`, which names nested ones as
    `meta.text`.
    """
    names = []
    for name, value in row.items():
        if name in read:
            continue
        inner = _below(name, read)
        if inner and isinstance(value, dict):
            names += [f"{name}.{rest}" for rest in unread_fields(value, inner)]
        elif holds_text(value):
            names.append(name)
    return names


def _below(name: str, read: Collection[str]) -> list[str]:
    return [path[len(name) + 1 :] for path in read if path.startswith(f"{name}.")]


def unread_columns(table: Any, read: Collection[str], *, of_json: bool = False) -> UnreadText:
    """Count such fields of an Arrow table or record batch; times that Arrow parsed from JSON
    (`of_json`) were text.
    """
    unread = UnreadText()
    for field, column in zip(table.schema, table.columns, strict=True):
        if field.name not in read:
            chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
            for chunk in chunks:
                _count_column(unread, field.name, chunk, _below(field.name, read), of_json)
    return unread


def _count_column(
    unread: UnreadText, name: str, column: Any, read: Collection[str], of_json: bool
) -> None:
    if read and pa.types.is_struct(column.type):
        for field, inner in zip(column.type, column.flatten(), strict=True):
            if field.name not in read:
                _count_column(
                    unread, f"{name}.{field.name}", inner, _below(field.name, read), of_json
                )
    elif rows := int(_with_text(column, of_json).sum()):
        unread.count({name: rows})


def _with_text(column: Any, of_json: bool) -> NDArray[np.bool_]:
    """A mask of the rows of a column that hold text, bool [rows]."""
    kind, types = column.type, pa.types
    if types.is_dictionary(kind):
        return _with_text(column.dictionary_decode(), of_json)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return _plain(pc.fill_null(pc.greater(pc.binary_length(column), 0), False))
    if of_json and types.is_timestamp(kind):
        return _plain(column.is_valid())
    mask = np.zeros(len(column), bool)
    if types.is_struct(kind):
        for inner in column.flatten():
            mask |= _with_text(inner, of_json)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        parents = pc.list_parent_indices(column).to_numpy(zero_copy_only=False)
        mask[parents[_with_text(column.flatten(), of_json)]] = True
    return mask


def _plain(mask: Any) -> NDArray[np.bool_]:
    plain: NDArray[np.bool_] = mask.to_numpy(zero_copy_only=False)
    return plain


def unread_in_parquet(table: Any, groups: Iterable[int], read: Collection[str]) -> UnreadText:
    """Count such fields of row groups of a `pyarrow.parquet.ParquetFile` from its footer only.

    A row counts if it has a value, even an empty one; for a column of lists the values count, up to
    the number of rows.
    """
    unread = UnreadText()
    metadata, tops = table.metadata, sorted(table.schema_arrow.names, key=len, reverse=True)
    for group in groups:
        rows: dict[str, int] = {}
        for leaf in range(metadata.num_columns):
            path = metadata.schema.column(leaf).path
            top = next((name for name in tops if f"{path}.".startswith(f"{name}.")), path)
            if top in read or any(f"{path}.".startswith(f"{name}.") for name in read):
                continue
            if metadata.schema.column(leaf).logical_type.type in ("STRING", "JSON", "ENUM"):
                name = path.partition(".list.")[0] if _below(top, read) else top
                chunk = metadata.row_group(group).column(leaf)
                rows[name] = max(
                    rows.get(name, 0), min(_values(chunk), metadata.row_group(group).num_rows)
                )
        unread.count({name: count for name, count in rows.items() if count})
    return unread


def _values(chunk: Any) -> int:
    """The number of values of a column chunk; 0 if the largest is empty text."""
    known = chunk.statistics if chunk.is_stats_set else None
    if known is not None and known.has_min_max and known.max in ("", b""):
        return 0
    return int(
        chunk.num_values - (known.null_count if known is not None and known.has_null_count else 0)
    )
