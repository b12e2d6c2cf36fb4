"""The text of a record: a field, a nested one (`meta.text`), or a template of several (`{title}
{text}`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from smtrain.worker.data.read.record_fields import objective_remedy

_HOLE = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")


@dataclass(frozen=True)
class TextColumn:
    """A parsed `data.text_column`."""

    column: str

    @property
    def template(self) -> bool:
        return bool(self.fields)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that a template names, each once; empty for a plain field."""
        return tuple(dict.fromkeys(match[1] for match in _HOLE.finditer(self.column) if match[1]))

    @property
    def source_fields(self) -> tuple[str, ...]:
        """Every field to read."""
        return self.fields or (self.column,)

    def tops(self, names: Iterable[str]) -> tuple[str, ...]:
        """The columns to read of a table with these `names`."""
        table_columns = set(names)
        return tuple(
            dict.fromkeys(
                name if name in table_columns else name.split(".")[0] for name in self.source_fields
            )
        )

    def of_rows(self, batch: Any) -> Any:
        """The text of every row of an Arrow record batch; null if it is not a string."""
        import pyarrow as pa

        rows = batch.select(list(self.tops(batch.schema.names))).to_pylist()
        texts = [self.of(row)[0] for row in rows]
        return pa.array(
            [text if isinstance(text, (str, type(None))) else None for text in texts],
            pa.large_string(),
        )

    def of(self, row: dict[str, Any]) -> tuple[object, str]:
        """The text in a record, and a fault or "": a missing field or, in a template, one without
        text.
        """
        if not self.template:
            return _field(row, self.column)
        values: dict[str, str] = {}
        for name in self.fields:
            value, fault = _field(row, name)
            if fault:
                return None, fault
            if not isinstance(value, (str, int, float)) or isinstance(value, bool):
                return (
                    None,
                    (
                        f"{name!r} is {'null' if value is None else type(value).__name__}, not a"
                        " string"
                    ),
                )
            values[name] = str(value)
        return _HOLE.sub(lambda hole: values[hole[1]] if hole[1] else hole[0][0], self.column), ""


def _field(row: dict[str, Any], name: str) -> tuple[object, str]:
    if name in row:
        return row[name], ""
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            texts = [key for key, field_value in row.items() if isinstance(field_value, str)]
            remedy = f"; set data.text_column to {' or '.join(texts[:5])}" if texts else ""
            remedy = objective_remedy(row, "pretrain") or remedy
            return (
                None,
                f"no column {name!r}, only {', '.join(map(repr, row)) or 'nothing'}{remedy}",
            )
        value = value[part]
    return value, ""
