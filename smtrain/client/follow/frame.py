"""Step records as a pandas DataFrame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from smtrain.core.errors import JobError
from smtrain.core.extras import missing

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMNS = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu")


def frame(records: Sequence[dict[str, float]]) -> DataFrame:
    """One row a step (the index), the standard columns first. Raises `JobError` if pandas is not installed."""
    try:
        import pandas
    except ImportError:
        raise JobError(missing("pandas")) from None
    more = sorted({key for record in records for key in record} - {*COLUMNS, "step", "of"})
    rows = [[record.get(column) for column in (*COLUMNS, *more)] for record in records]
    steps = pandas.Index([int(record["step"]) for record in records], name="step", dtype="int64")
    return pandas.DataFrame(rows, index=steps, columns=[*COLUMNS, *more], dtype="float64")
