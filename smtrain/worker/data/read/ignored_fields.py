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

_MAX_NAMES = 200
"""The number of names kept: records whose keys are all different would fill the memory."""
_OTHER_FIELDS = "other fields"
_MAX_IN_SENTENCE = 20
EXAMPLES = 10
"""The most examples of a kind."""


class IgnoredText(dict[str, int]):
    """Counts of what is not read, by name: records with text in a field, or things of a kind."""

    def count(self, counts: Mapping[str, int] | Iterable[str]) -> None:
        """Add counts, or one for each name. After 200 names further ones are counted together."""
        pairs = counts.items() if isinstance(counts, Mapping) else ((name, 1) for name in counts)
        for name, number in pairs:
            key = name if name in self or len(self) < _MAX_NAMES else _OTHER_FIELDS
            self[key] = self.get(key, 0) + number


@dataclass
class Findings:
    """Counts of documents by the reason why they were `dropped`, of what was `noted` in them, and
    of `unread` text.

    `examples` has up to EXAMPLES texts by reason.
    """

    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    noted: Counter[str] = dataclasses.field(default_factory=Counter)
    examples: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    unread: IgnoredText = dataclasses.field(default_factory=IgnoredText)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Findings:
        """Read them from a JSON object that may have further fields."""
        dropped, noted, examples, unread = (
            record[finding_field.name] for finding_field in dataclasses.fields(cls)
        )
        return cls(Counter(dropped), Counter(noted), examples, IgnoredText(unread))

    def keep(self, reason: str, *texts: str) -> None:
        """Keep examples while there are fewer than EXAMPLES."""
        reason_examples = self.examples.setdefault(reason, [])
        reason_examples.extend(texts[: EXAMPLES - len(reason_examples)])

    def add(self, findings: Findings) -> None:
        """Add the findings in the text that follows."""
        self.dropped += findings.dropped
        self.noted += findings.noted
        for reason, texts in findings.examples.items():
            self.keep(reason, *texts)
        self.unread.count(findings.unread)


def ignored_text_sentence(counts: Mapping[str, int]) -> str:
    """All counts in one line, the most frequent first; "" without any."""
    if not counts:
        return ""
    by_frequency = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    suffix = (
        f" and {len(by_frequency) - _MAX_IN_SENTENCE} more in manifest.json"
        if len(by_frequency) > _MAX_IN_SENTENCE
        else ""
    )
    return (
        "not read: "
        + ", ".join(f"{name} {count:,}" for name, count in by_frequency[:_MAX_IN_SENTENCE])
        + suffix
    )


def holds_text(value: object) -> bool:
    """Whether a value of a record is or contains text, empty text apart."""
    if isinstance(value, str):
        return value != ""
    if isinstance(value, dict):
        return any(map(holds_text, value.values()))
    return isinstance(value, (list, tuple)) and any(map(holds_text, value))


def ignored_fields(row: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """The fields of a record that hold text and are not in `read`, which names nested ones as
    `meta.text`.
    """
    names = []
    for name, value in row.items():
        if name in read:
            continue
        inner = _inner_paths(name, read)
        if inner and isinstance(value, dict):
            names += [f"{name}.{inner_name}" for inner_name in ignored_fields(value, inner)]
        elif holds_text(value):
            names.append(name)
    return names


def _inner_paths(name: str, read: Collection[str]) -> list[str]:
    return [path[len(name) + 1 :] for path in read if path.startswith(f"{name}.")]


def count_ignored_columns(
    table: Any, read: Collection[str], *, of_json: bool = False
) -> IgnoredText:
    """Count such fields of an Arrow table or record batch; times that Arrow parsed from JSON
    (`of_json`) were text.
    """
    ignored_text = IgnoredText()
    for field, column in zip(table.schema, table.columns, strict=True):
        if field.name not in read:
            chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
            for chunk in chunks:
                _count_column(
                    ignored_text, field.name, chunk, _inner_paths(field.name, read), of_json
                )
    return ignored_text


def _count_column(
    ignored_text: IgnoredText, name: str, column: Any, read: Collection[str], of_json: bool
) -> None:
    if read and pa.types.is_struct(column.type):
        for field, inner in zip(column.type, column.flatten(), strict=True):
            if field.name not in read:
                _count_column(
                    ignored_text,
                    f"{name}.{field.name}",
                    inner,
                    _inner_paths(field.name, read),
                    of_json,
                )
    elif rows := int(_with_text(column, of_json).sum()):
        ignored_text.count({name: rows})


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


def count_ignored_in_parquet(
    table: Any, groups: Iterable[int], read: Collection[str]
) -> IgnoredText:
    """Count such fields of row groups of a `pyarrow.parquet.ParquetFile` from its footer only.

    A row counts if it has a value, even an empty one; for a column of lists the values count, up to
    the number of rows.
    """
    ignored_text = IgnoredText()
    metadata, tops = table.metadata, sorted(table.schema_arrow.names, key=len, reverse=True)
    for group in groups:
        rows: dict[str, int] = {}
        for leaf in range(metadata.num_columns):
            path = metadata.schema.column(leaf).path
            top = next((name for name in tops if f"{path}.".startswith(f"{name}.")), path)
            if top in read or any(f"{path}.".startswith(f"{name}.") for name in read):
                continue
            if metadata.schema.column(leaf).logical_type.type in ("STRING", "JSON", "ENUM"):
                name = path.partition(".list.")[0] if _inner_paths(top, read) else top
                chunk = metadata.row_group(group).column(leaf)
                rows[name] = max(
                    rows.get(name, 0), min(_values(chunk), metadata.row_group(group).num_rows)
                )
        ignored_text.count({name: count for name, count in rows.items() if count})
    return ignored_text


def _values(chunk: Any) -> int:
    """The number of values of a column chunk; 0 if the largest is empty text."""
    statistics = chunk.statistics if chunk.is_stats_set else None
    if statistics is not None and statistics.has_min_max and statistics.max in ("", b""):
        return 0
    return int(
        chunk.num_values
        - (statistics.null_count if statistics is not None and statistics.has_null_count else 0)
    )
