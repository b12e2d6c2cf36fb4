"""Tasks of our own for long texts: a needle in a haystack, and the loss by position.

They need no network.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from smtrain.core.config.outputs import NEEDLE, POSITIONS
from smtrain.core.errors import DataError
from smtrain.core.pages.charts import heat_map
from smtrain.core.text import align_columns
from smtrain.worker.data.read.reading import read_block
from smtrain.worker.data.read.sources import find_files
from smtrain.worker.data.read.split_files import cut_file
from smtrain.worker.evaluation.harness import Measurement, Score

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Places of the needle, as shares of the text before the question."""
QUESTIONS, DOCUMENTS = 4, 8
"""Questions of each length and depth, and documents whose loss is measured, if no limit is given.
"""
_CHUNK = 1024  # positions whose logits are in memory at a time
_CITIES = (
    "Lisbon",
    "Oslo",
    "Cairo",
    "Lima",
    "Hanoi",
    "Quito",
    "Dublin",
    "Accra",
    "Vienna",
    "Tunis",
    "Riga",
    "Havana",
    "Sofia",
    "Perth",
    "Kyoto",
    "Turin",
)
_SUBJECTS = (
    "The old baker",
    "A young teacher",
    "The tall sailor",
    "My neighbour",
    "The quiet farmer",
    "A tired doctor",
)
_DID = (
    "walked past",
    "painted",
    "looked for",
    "forgot",
    "wrote about",
    "waited near",
    "drew",
    "photographed",
)
_OBJECTS = (
    "the red bridge",
    "a small garden",
    "the empty market",
    "an open window",
    "the last train",
    "a wooden boat",
)
_TIMES = (
    "in the morning",
    "before lunch",
    "after the rain",
    "on a cold day",
    "during the summer",
    "late at night",
)


@dataclass(frozen=True)
class LongRequest:
    """The long tasks that are asked for."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...] = ()
    """Tokens of the texts, rising; empty: an eighth, a quarter, a half and all of the model's
    positions.
    """
    text: Path | str | None = None
    """Long documents: the haystack, and what the loss is measured on; None: sentences of our own,
    for needle only.
    """
    limit: int | None = None
    """Questions of each cell, and documents; None: `QUESTIONS` and `DOCUMENTS`."""


@dataclass
class LongMeasurement:
    """The numbers of a model on long texts."""

    measurement: Measurement
    needle: dict[int, list[float]] = field(default_factory=dict)
    """Share of the needles found by length, one for each of `DEPTHS`."""
    losses: list[tuple[int, int, float]] = field(default_factory=list)
    """(first position, last position + 1, mean loss in nats) of each range."""
    lengths: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "lengths": list(self.lengths),
            "depths": list(DEPTHS),
            "needle": [[length, *cells] for length, cells in self.needle.items()],
            "loss_by_position": [list(row) for row in self.losses],
        }


def measure(
    folder: Path, adapter: Path | None, request: LongRequest, say: Callable[[str], None]
) -> LongMeasurement:
    """Measure the Hugging Face model in `folder`, with a PEFT adapter on it if one is given.

    Raises `DataError` if there is no document as long as the lengths, or the model has no such
    positions.
    """
    from smtrain.worker.generation.load import load

    reader = _LoadedModel(load(folder, adapter=adapter))
    lengths = request.lengths or lengths_for(reader.positions)
    if (
        reader.has_learned_positions
        and reader.positions is not None
        and lengths[-1] > reader.positions
    ):
        raise DataError(
            f"lengths: {lengths[-1]} is beyond the {reader.positions} positions that the model in"
            f" {folder} has learned; give shorter ones."
        )
    result = LongMeasurement(Measurement({}, {}), lengths=tuple(lengths))
    for task in request.tasks:
        say(f"{task}: texts of {', '.join(f'{length:,}' for length in lengths)} tokens")
        (_find_needles if task == NEEDLE else _loss_by_position)(reader, request, lengths, result)
    return result


def grids(report: Mapping[str, Any]) -> list[str]:
    """The numbers of long texts as tables of text: needles by length and depth, and the loss by
    position.
    """
    out: list[str] = []
    for side, numbers in _models(report):
        if numbers["needle"]:
            head = ["needles found", side, *(f"{depth:.0%} deep" for depth in numbers["depths"])]
            rows = [
                ["", f"{length:,} tokens", *(f"{cell:.2f}" for cell in cells)]
                for length, *cells in numbers["needle"]
            ]
            out += align_columns([head, *rows])
    losses = [
        (side, numbers["loss_by_position"])
        for side, numbers in _models(report)
        if numbers["loss_by_position"]
    ]
    if losses:
        ranges = zip(*(rows for _, rows in losses), strict=True)
        head = ["loss of positions", *(side for side, _ in losses)]
        out += align_columns(
            [
                head,
                *(
                    [f"{r[0][0]:,} to {r[0][1]:,}", *(f"{range_row[2]:.4f}" for range_row in r)]
                    for r in ranges
                ),
            ]
        )
    return out


def pictures(report: Mapping[str, Any]) -> dict[str, str]:
    """Heat maps of needles as SVG, by name."""
    return {
        f"{NEEDLE}-{side}": heat_map(
            f"needles found, {side}",
            [(f"{row[0]:,}", row[1:]) for row in numbers["needle"]],
            [f"{depth:.0%}" for depth in numbers["depths"]],
        )
        for side, numbers in _models(report)
        if numbers["needle"]
    }


def _models(report: Mapping[str, Any]) -> list[tuple[str, Any]]:
    measurements = report.get("long") or {}
    return [(side, measurements[side]) for side in ("before", "after") if measurements.get(side)]


def lengths_for(positions: int | None) -> tuple[int, ...]:
    """The lengths to try for a model of so many positions."""
    return tuple(max(64, (positions or 2048) // part) for part in (8, 4, 2, 1))


Tokens = Callable[[str], list[int]]
"""The ids of a text, without special tokens."""


class _LoadedModel:
    """A loaded model, and its tokenizer without special tokens."""

    def __init__(self, loaded_model: Any) -> None:
        from smtrain.core.model.families import FAMILIES
        from smtrain.core.model.hf_config import normalise

        self._loaded, self._model, self._tokenizer = (
            loaded_model,
            loaded_model.model,
            loaded_model.tokenizer,
        )
        self.positions, self.has_learned_positions = (
            loaded_model.positions,
            loaded_model.has_learned_positions,
        )
        full_model = self._model.get_base_model() if loaded_model.has_adapter else self._model
        is_known_family = full_model.config.model_type in FAMILIES
        self._scales = normalise(full_model.config.to_dict()).scales if is_known_family else None
        self._base = full_model.base_model if is_known_family else None
        bos = self._tokenizer.bos_token_id
        plain = self._tokenizer("a")["input_ids"]
        self.begin = [bos] if bos is not None and plain[:1] == [bos] else []
        """The ids that the tokenizer puts before a text."""

    def tokens(self, text: str) -> list[int]:
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        self._loaded.refuse_unknown_token([*self.begin, *ids])
        return ids

    def log_probabilities(
        self, ids: Sequence[int], first: int = 0
    ) -> tuple[list[float], list[bool]]:
        """For each token after position `first`: its log-probability, and whether the model finds
        it likeliest.
        """
        import torch

        row = torch.tensor([list(ids)], device=self._model.device)
        logps: list[float] = []
        hits: list[bool] = []
        with torch.no_grad():
            model = self._model if self._base is None else self._base
            answer = model(input_ids=row[:, :-1], use_cache=False)[0][
                0
            ]  # logits, or the last layer's output
            for start in range(first, len(ids) - 1, _CHUNK):
                rows = slice(start, min(start + _CHUNK, len(ids) - 1))
                logits = answer[rows].float() if self._base is None else self._logits(answer[rows])
                target_ids = row[0, rows.start + 1 : rows.stop + 1]
                target_logps = logits.log_softmax(-1).gather(1, target_ids[:, None])[:, 0]
                logps += target_logps.tolist()
                hits += (logits.argmax(-1) == target_ids).tolist()
        return logps, hits

    def _logits(self, hidden_states: Any) -> Any:
        logits = self._model.get_output_embeddings()(hidden_states).float()
        scales = self._scales or {}
        if "logits" in scales:
            logits = logits / scales["logits"]
        return (logits / scales["cap"]).tanh() * scales["cap"] if "cap" in scales else logits


def _find_needles(
    reader: _LoadedModel, request: LongRequest, lengths: Sequence[int], result: LongMeasurement
) -> None:
    needles_per_cell = request.limit or QUESTIONS
    haystack = haystack_of(reader.tokens, request.text, lengths[-1])
    hits_by_length: dict[int, list[float]] = {}
    for length in lengths:
        cells = [
            [_is_found(reader, haystack, (length, depth, n)) for n in range(needles_per_cell)]
            for depth in DEPTHS
        ]
        result.needle[length] = [sum(cell) / needles_per_cell for cell in cells]
        hits_by_length[length] = [hit for cell in cells for hit in cell]
    # The whole comes first: it is the task's main number.
    _add(result, NEEDLE, "acc", "none", [hit for row in hits_by_length.values() for hit in row])
    for length, row in hits_by_length.items():
        _add(result, NEEDLE, "acc", f"{length:,} tokens", row)
    _note(
        result,
        NEEDLE,
        [
            f"{length} {depth} {n}"
            for length in lengths
            for depth in DEPTHS
            for n in range(needles_per_cell)
        ],
    )


def _is_found(
    reader: _LoadedModel, haystack: Sequence[int], question: tuple[int, float, int]
) -> float:
    """1 if each token of the answer is the likeliest after those before it, as if the model wrote
    it; else 0.
    """
    ids, answer = needle_text(reader.tokens, reader.begin, haystack, *question)
    return float(all(reader.log_probabilities(ids, len(ids) - 1 - answer)[1]))


def needle_text(
    tokens: Tokens,
    begin: Sequence[int],
    haystack: Sequence[int],
    length: int,
    depth: float,
    number: int,
) -> tuple[list[int], int]:
    """The ids of a question, and how many of its last ones are the answer.

    It has `length` ids: text with the needle after a share `depth` of it, the question, and the
    answer. Needle and question are tokenized alike, so that a model need not know another spelling
    of the number.
    """
    chance = random.Random(f"{length} {depth} {number}")
    claim = tokens(f" The secret number of {chance.choice(_CITIES)} is")
    answer = tokens(f" {chance.randint(10_000, 99_999)}")
    needle = [*claim, *answer, *tokens(".")]
    room = length - len(begin) - len(needle) - len(claim) - len(answer)
    if room < 1:
        raise DataError(
            f"lengths: {length} tokens hold no needle with its question; give {length - room + 1}"
            " or more."
        )
    start = chance.randint(0, len(haystack) - room)
    hay, at = haystack[start : start + room], round(depth * room)
    return [*begin, *hay[:at], *needle, *hay[at:], *claim, *answer], len(answer)


def haystack_of(tokens: Tokens, text: Path | str | None, length: int) -> list[int]:
    """At least twice `length` tokens of text to hide needles in, so that questions differ."""
    out: list[int] = []
    for document in _documents(text) if text is not None else ():
        out += tokens(document)
        if len(out) >= 2 * length:
            return out
    chance = random.Random(0)
    while len(out) < 2 * length:
        sentences = (
            " ".join(map(chance.choice, (_SUBJECTS, _DID, _OBJECTS, _TIMES))) for _ in range(64)
        )
        out += tokens(" " + ". ".join(sentences) + ".")
    return out


def _loss_by_position(
    reader: _LoadedModel, request: LongRequest, lengths: Sequence[int], result: LongMeasurement
) -> None:
    if request.text is None:
        raise DataError(
            f"evaluate.text: is missing, and {POSITIONS} needs long documents; name some."
        )
    token_count, longest = lengths[-1] + 1 - len(reader.begin), ""
    rows: list[list[float]] = []
    digests = []
    for document in _documents(request.text):
        longest = max(longest, document, key=len)
        # A token has at least one byte, so short documents need not be tokenized.
        ids = reader.tokens(document) if len(document.encode()) >= token_count else []
        if len(ids) >= token_count:
            rows.append(
                [-logp for logp in reader.log_probabilities([*reader.begin, *ids[:token_count]])[0]]
            )
            digests.append(hashlib.sha256(document.encode()).hexdigest()[:16])
        if len(rows) == (request.limit or DOCUMENTS):
            break
    if not rows:
        max_length = len(reader.tokens(longest)) - 1 + len(reader.begin)
        or_shorter = f", or evaluate.lengths up to {max_length}" if max_length >= 64 else ""
        raise DataError(
            f"evaluate.text: no document of {request.text} has the {token_count} tokens that"
            f" {POSITIONS} needs; give longer documents{or_shorter}."
        )
    _add(
        result, POSITIONS, "loss", "none", [math.fsum(row) / len(row) for row in rows], higher=False
    )
    for first, last in pairwise((0, *lengths)):
        range_losses = [math.fsum(row[first:last]) / (last - first) for row in rows]
        result.losses.append((first, last, math.fsum(range_losses) / len(range_losses)))
        _add(result, POSITIONS, "loss", f"{first:,} to {last:,}", range_losses, higher=False)
    _note(result, POSITIONS, digests)


def _documents(text: Path | str) -> Iterator[str]:
    for file in find_files(text):
        for block in cut_file(file, "text"):
            yield from read_block(block).texts.to_pylist()


def _add(
    result: LongMeasurement,
    task: str,
    metric: str,
    part: str,
    values: Sequence[float],
    *,
    higher: bool = True,
) -> None:
    n = len(values)
    mean = math.fsum(values) / n
    error = (
        math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
        if n > 1
        else None
    )
    result.measurement.scores[task, metric, part] = Score(
        task, metric, part, mean, error, n, higher, tuple(values)
    )


def _note(result: LongMeasurement, task: str, questions: list[str]) -> None:
    result.measurement.questions[task] = questions
    result.measurement.first_metrics[task] = "acc" if task == NEEDLE else "loss"
