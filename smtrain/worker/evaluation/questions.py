"""Read a benchmark's files as records for the harness's tasks, each checked against the benchmark's
own layout.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from smtrain.core.benchmarks import AGIEVAL_CHINESE, AGIEVAL_CLOZE, BENCHMARKS, Parts
from smtrain.core.errors import DataError
from smtrain.core.files import MOST_JSON, open_regular_file, parse_json
from smtrain.worker.data.read.ignored_fields import IgnoredText, holds_text, ignored_fields

Record = dict[str, Any]
_LETTERS = "ABCDEFG"


class _UnfitError(Exception):
    """A record without its benchmark's layout; the text names what is wrong."""


def questions_in(
    name: str, part: str, paths: list[Path], ignored_text: IgnoredText
) -> list[Record]:
    """The records of one split of a part, as the harness's tasks name the fields.

    `ignored_text` counts the fields that no task uses. Raises `DataError` for a file that differs
    from the benchmark's own in form.
    """
    refuse_two_copies(name, part, paths)
    records: list[Record] = []
    for path in paths:
        for number, row in _rows(path):
            try:
                record, read = _READERS[name](row, part)
            except _UnfitError as error:
                raise DataError(
                    f"{path}: record {number} {error}, so it is not one of"
                    f" {BENCHMARKS[name].title}; correct it or remove the file."
                ) from None
            ignored_text.count(ignored_fields(row, read))
            records.append(record)
    if not records:
        raise DataError(
            f"{paths[0]} holds no question; put the file of {BENCHMARKS[name].title} there."
        )
    return records


def count_others(parts: Parts, read: tuple[str, ...], ignored_text: IgnoredText) -> None:
    """Count the files of a benchmark's splits that no task uses."""
    other_files = sum(
        len(paths)
        for splits in parts.values()
        for split, paths in splits.items()
        if split not in read
    )
    ignored_text.count({"files of other splits": other_files} if other_files else {})


def refuse_two_copies(name: str, part: str, paths: list[Path]) -> None:
    """Raise `DataError` if the files of a split are not the shards of one copy."""
    if len(paths) > 1 and not (
        len({path.parent for path in paths}) == 1 and paths[0].suffix == ".parquet"
    ):
        raise DataError(
            f"{paths[0]} and {paths[1]} are two copies of {BENCHMARKS[name].title}'s {part}; give a"
            " folder that has one of them."
        )


def _rows(path: Path) -> Iterator[tuple[int, Record]]:
    """Each record of a file with its number, from 1."""
    try:
        if path.suffix == ".parquet":
            rows: Any = _of_parquet(path)
        elif path.suffix == ".csv":
            rows = list(csv.DictReader(io.StringIO(_content(path), newline="")))
        elif path.suffix == ".json":
            document = parse_json(_content(path))
            rows = document.get("examples") if isinstance(document, dict) else document
            if not isinstance(rows, list):
                raise ValueError("it has no list of examples")
        else:
            rows = list(_of_lines(_content(path)))
    except (OSError, ValueError, EOFError, csv.Error, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); replace it by a whole copy.") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DataError(
                f"{path}: record {number} is not an object with fields; replace the file by a whole"
                " copy."
            )
        yield number, row


def _content(path: Path) -> str:
    """The text of a regular file, unpacked.

    Raises OSError, EOFError, ValueError and zlib.error for anything else.
    """
    with (
        open_regular_file(path) as file,
        gzip.open(file) if path.suffix == ".gz" else nullcontext(file) as raw,
    ):
        content = raw.read(MOST_JSON + 1)
    if len(content) > MOST_JSON:
        raise ValueError(f"it has more than {MOST_JSON:,} bytes")
    return content.decode("utf-8-sig")


def _of_lines(text: str) -> Iterator[Any]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield parse_json(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON: {error}") from None


def _of_parquet(path: Path) -> list[Record]:
    rows: list[Record] = parquet_table(path).to_pylist()
    return rows


def parquet_table(path: Path) -> Any:
    """The table of a Parquet file. Raises `DataError` if it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path} cannot be read ({reason}); replace it by a whole copy.") from error


def _text(row: Record, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise _UnfitError(f"has no text in {name}" if name in row else f"has no field {name}")
    return value


def _boolq(row: Record, _: str) -> tuple[Record, tuple[str, ...]]:
    key = "label" if "label" in row else "answer"
    if row.get(key) not in (True, False):  # 1 and 0 too; the hub's test split has -1
        raise _UnfitError(f"has no true or false in {key}")
    record = {
        "passage": _text(row, "passage"),
        "question": _text(row, "question"),
        "label": int(row[key]),
    }
    return record, ("passage", "question", key)


def _bbh(row: Record, _: str) -> tuple[Record, tuple[str, ...]]:
    return {"input": _text(row, "input"), "target": _text(row, "target")}, ("input", "target")


def _agieval(row: Record, part: str) -> tuple[Record, tuple[str, ...]]:
    """A record of the authors' JSON lines, or of the hub's copies, which have the prompt
    already.
    """
    cloze = part in AGIEVAL_CLOZE
    if "query" in row:
        if cloze:
            return {"query": _text(row, "query"), "answer": _text(row, "answer")}, (
                "query",
                "answer",
            )
        choices, gold = row.get("choices"), row.get("gold")
        if not isinstance(choices, list) or not isinstance(gold, list):
            raise _UnfitError("has no lists choices and gold")
        return {"query": _text(row, "query"), "choices": choices, "gold": gold}, (
            "query",
            "choices",
            "gold",
        )
    read = ("passage", "question", "options", "label", "answer")
    text = (row.get("passage") or "") + _agieval_prompt(row, part)
    if cloze:
        return {"query": text, "answer": _text(row, "answer")}, read
    return {"query": text, "choices": row["options"], "gold": _gold(row)}, read


def _agieval_prompt(row: Record, part: str) -> str:
    """The authors' prompt without examples (convert_zero_shot of AGIEval 5c77d07), which the hub's
    copies have.
    """
    question, chinese = _text(row, "question"), part in AGIEVAL_CHINESE
    if part in AGIEVAL_CLOZE:
        return f"问题：{question}\n答案：" if chinese else f"Q: {question}\nA: The answer is"
    options = row.get("options")
    if (
        not isinstance(options, list)
        or not 1 < len(options) <= len(_LETTERS)
        or not all(map(holds_text, options))
    ):
        raise _UnfitError("has no list of two to seven options")
    last = _LETTERS[len(options) - 1]
    if chinese:
        return f"问题：{question} 选项：{' '.join(options)}\n答案：从A到{last}, 我们应选择"
    return (
        f"Q: {question} Answer Choices: {' '.join(options)}\nA: Among A through {last}, the"
        " answer is"
    )


def _gold(row: Record) -> list[int]:
    """The numbers of the right options: a label may be `A C` or a list, and JEC-QA has `。` in one
    and an empty one.
    """
    label = row.get("label")
    option_letters = _LETTERS[: len(row["options"])]
    letters = (
        [letter for letter in label if isinstance(letter, str)]
        if isinstance(label, (str, list))
        else []
    )
    gold = [
        option_letters.index(letter)
        for letter in letters
        if len(letter) == 1 and letter in option_letters
    ]
    if not gold and label != []:
        raise _UnfitError(
            f"has the label {label!r}, which is no letter from A to {option_letters[-1]}"
        )
    return gold


def _ceval(row: Record, _: str) -> tuple[Record, tuple[str, ...]]:
    names = ("question", "A", "B", "C", "D")
    answer = _text(row, "answer").strip()
    if answer not in tuple("ABCD"):
        raise _UnfitError(f"has the answer {answer!r}, which is no letter from A to D")
    return {**{name: _text(row, name) for name in names}, "answer": answer}, (
        *names,
        "answer",
        "explanation",
    )


def _humaneval(row: Record, _: str) -> tuple[Record, tuple[str, ...]]:
    names = ("task_id", "prompt", "test", "entry_point")
    return {name: _text(row, name) for name in names}, (*names, "canonical_solution")


_READERS: dict[str, Callable[[Record, str], tuple[Record, tuple[str, ...]]]] = {
    "boolq": _boolq,
    "bbh": _bbh,
    "agieval": _agieval,
    "ceval": _ceval,
    "humaneval": _humaneval,
}
