"""The form of a text that `smtrain init` was given: its objective and format, by its first record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from smtrain.core.config.textfiles import kind

if TYPE_CHECKING:
    from smtrain.worker.data.read.sources import SourceFile

Objective = Literal["pretrain", "sft", "dpo"]


@dataclass(frozen=True)
class DataForm:
    """The form of a text, by its first record.

    `format` is empty if the ending decides. `fault` says why `objective` cannot read the record,
    with the remedy; empty if it can.
    """

    objective: Objective = "pretrain"
    format: str = ""
    fault: str = ""


def form_of(path: str) -> DataForm:
    """Read the first record of a file, a folder, a glob or a demo:// text.

    The default form for other URIs, and if the packages that read are not installed. Raises
    DataError for files that cannot be read.
    """
    if "://" in path and not path.startswith("demo://"):
        return DataForm()
    try:
        return _form_of(path)
    except ModuleNotFoundError:  # the job has the package
        return DataForm()


def _form_of(path: str) -> DataForm:
    from smtrain.core.demo import materialise
    from smtrain.worker.data.read.record_fields import objective_of
    from smtrain.worker.data.read.records import KINDS
    from smtrain.worker.data.read.sources import find_files

    source = materialise(path) if path.startswith("demo://") else Path(path)
    has_no_ending = source.is_file() and kind(source.name) is None
    files = find_files(source, "text" if has_no_ending else "auto")
    record = _first_record(files[0]) if files[0].kind in KINDS else {}
    objective = objective_of(record)
    fault = _text_fault(files[0]) if objective == "pretrain" else ""
    return DataForm(objective, "text" if has_no_ending else "", fault)


def _first_record(file: SourceFile) -> Mapping[str, Any]:
    """The first record of a file; empty if its first block has none. Raises DataError."""
    from smtrain.worker.data.read.records import RecordColumns, read_records, record_blocks
    from smtrain.worker.data.tokenize.dialogue import COLUMNS
    from smtrain.worker.data.tokenize.preference import COLUMNS as PAIR_COLUMNS

    names = tuple(dict.fromkeys((*COLUMNS, *PAIR_COLUMNS)))
    blocks = record_blocks(file, RecordColumns(names, lambda names: None))
    rows = chain.from_iterable(read_records(block).rows for block in blocks)
    return next((row for _, row in rows), {})


def _text_fault(file: SourceFile) -> str:
    """The reason if the first block of a file has no text; empty if it has.

    Raises DataError for a damaged file.
    """
    from smtrain.core.errors import DataError
    from smtrain.worker.data.read.reading import read_block
    from smtrain.worker.data.read.records import KINDS
    from smtrain.worker.data.read.split_files import cut_file

    if file.kind in ("text", "megatron"):  # read whole; the config's own checks read the beginning
        return ""
    try:
        block = next(cut_file(file), None)
        bad = read_block(block).bad if block else []
    except DataError as error:
        if file.kind not in KINDS:
            raise
        return str(error).rstrip(".")  # a table without the column
    return str(bad[0]) if bad else ""
