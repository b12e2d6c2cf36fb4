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
from smtrain.worker.data.read.cut import cut_file
from smtrain.worker.data.read.reading import read_block
from smtrain.worker.data.read.sources import find_files
from smtrain.worker.evaluation.harness import Measured, Score

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
_WHO = (
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
_WHAT = (
    "the red bridge",
    "a small garden",
    "the empty market",
    "an open window",
    "the last train",
    "a wooden boat",
)
_WHEN = (
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
class LongMeasured:
    """The numbers of a model on long texts."""

    measured: Measured
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
) -> LongMeasured:
    """Measure the Hugging Face model in `folder`, with a PEFT adapter on it if one is given.

    Raises `DataError` if there is no document as long as the lengths, or the model has no such
    positions.
    """
    from smtrain.worker.generation.load import load

    reader = _LoadedModel(load(folder, adapter=adapter))
    lengths = request.lengths or lengths_for(reader.positions)
    if reader.learned and reader.positions is not None and lengths[-1] > reader.positions:
        raise DataError(
            f"lengths: {lengths[-1]} is beyond the {reader.positions} positions that the model in"
            f" {folder} has learned; give shorter ones."
        )
    made = LongMeasured(Measured({}, {}), lengths=tuple(lengths))
    for task in request.tasks:
        say(f"{task}: texts of {', '.join(f'{length:,}' for length in lengths)} tokens")
        (_find_needles if task == NEEDLE else _loss_by_position)(reader, request, lengths, made)
    return made


def grids(report: Mapping[str, Any]) -> list[str]:
    """The numbers of long texts as tables of text: needles by length and depth, and the loss by
    position.
    """
    out: list[str] = []
    for which, made in _models(report):
        if made["needle"]:
            head = ["needles found", which, *(f"{depth:.0%} deep" for depth in made["depths"])]
            rows = [
                ["", f"{length:,} tokens", *(f"{cell:.2f}" for cell in cells)]
                for length, *cells in made["needle"]
            ]
            out += align_columns([head, *rows])
    losses = [
        (which, made["loss_by_position"])
        for which, made in _models(report)
        if made["loss_by_position"]
    ]
    if losses:
        ranges = zip(*(rows for _, rows in losses), strict=True)
        head = ["loss of positions", *(which for which, _ in losses)]
        out += align_columns(
            [
                head,
                *([f"{r[0][0]:,} to {r[0][1]:,}", *(f"{one[2]:.4f}" for one in r)] for r in ranges),
            ]
        )
    return out


def pictures(report: Mapping[str, Any]) -> dict[str, str]:
    """Heat maps of needles as SVG, by name."""
    return {
        f"{NEEDLE}-{which}": heat_map(
            f"needles found, {which}",
            [(f"{row[0]:,}", row[1:]) for row in made["needle"]],
            [f"{depth:.0%}" for depth in made["depths"]],
        )
        for which, made in _models(report)
        if made["needle"]
    }


def _models(report: Mapping[str, Any]) -> list[tuple[str, Any]]:
    made = report.get("long") or {}
    return [(which, made[which]) for which in ("before", "after") if made.get(which)]


def lengths_for(positions: int | None) -> tuple[int, ...]:
    """The lengths to try for a model of so many positions."""
    return tuple(max(64, (positions or 2048) // part) for part in (8, 4, 2, 1))


Tokens = Callable[[str], list[int]]
"""The ids of a text, without special tokens."""


class _LoadedModel:
    """A loaded model, and its tokenizer without special tokens."""

    def __init__(self, loaded: Any) -> None:
        from smtrain.core.model.families import FAMILIES
        from smtrain.core.model.hf_config import normalise

        self._loaded, self._model, self._tokenizer = loaded, loaded.model, loaded.tokenizer
        self.positions, self.learned = loaded.positions, loaded.learned
        whole = self._model.get_base_model() if loaded.adapted else self._model
        known = whole.config.model_type in FAMILIES
        self._scales = normalise(whole.config.to_dict()).scales if known else None
        self._base = whole.base_model if known else None
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
                wanted = row[0, rows.start + 1 : rows.stop + 1]
                taken = logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
                logps += taken.tolist()
                hits += (logits.argmax(-1) == wanted).tolist()
        return logps, hits

    def _logits(self, hidden: Any) -> Any:
        logits = self._model.get_output_embeddings()(hidden).float()
        scales = self._scales or {}
        if "logits" in scales:
            logits = logits / scales["logits"]
        return (logits / scales["cap"]).tanh() * scales["cap"] if "cap" in scales else logits


def _find_needles(
    reader: _LoadedModel, request: LongRequest, lengths: Sequence[int], made: LongMeasured
) -> None:
    each = request.limit or QUESTIONS
    haystack = haystack_of(reader.tokens, request.text, lengths[-1])
    found: dict[int, list[float]] = {}
    for length in lengths:
        cells = [
            [_is_found(reader, haystack, (length, depth, n)) for n in range(each)]
            for depth in DEPTHS
        ]
        made.needle[length] = [sum(cell) / each for cell in cells]
        found[length] = [one for cell in cells for one in cell]
    # The whole comes first: it is the task's main number.
    _add(made, NEEDLE, "acc", "none", [one for row in found.values() for one in row])
    for length, row in found.items():
        _add(made, NEEDLE, "acc", f"{length:,} tokens", row)
    _note(
        made,
        NEEDLE,
        [f"{length} {depth} {n}" for length in lengths for depth in DEPTHS for n in range(each)],
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
        sentences = (" ".join(map(chance.choice, (_WHO, _DID, _WHAT, _WHEN))) for _ in range(64))
        out += tokens(" " + ". ".join(sentences) + ".")
    return out


def _loss_by_position(
    reader: _LoadedModel, request: LongRequest, lengths: Sequence[int], made: LongMeasured
) -> None:
    if request.text is None:
        raise DataError(
            f"evaluate.text: is missing, and {POSITIONS} needs long documents; name some."
        )
    wanted, longest = lengths[-1] + 1 - len(reader.begin), ""
    rows: list[list[float]] = []
    digests = []
    for document in _documents(request.text):
        longest = max(longest, document, key=len)
        # A token has at least one byte, so short documents need not be tokenized.
        ids = reader.tokens(document) if len(document.encode()) >= wanted else []
        if len(ids) >= wanted:
            rows.append(
                [-logp for logp in reader.log_probabilities([*reader.begin, *ids[:wanted]])[0]]
            )
            digests.append(hashlib.sha256(document.encode()).hexdigest()[:16])
        if len(rows) == (request.limit or DOCUMENTS):
            break
    if not rows:
        most = len(reader.tokens(longest)) - 1 + len(reader.begin)
        or_shorter = f", or evaluate.lengths up to {most}" if most >= 64 else ""
        raise DataError(
            f"evaluate.text: no document of {request.text} has the {wanted} tokens that {POSITIONS}"
            f" needs; give longer documents{or_shorter}."
        )
    _add(made, POSITIONS, "loss", "none", [math.fsum(row) / len(row) for row in rows], higher=False)
    for first, last in pairwise((0, *lengths)):
        each = [math.fsum(row[first:last]) / (last - first) for row in rows]
        made.losses.append((first, last, math.fsum(each) / len(each)))
        _add(made, POSITIONS, "loss", f"{first:,} to {last:,}", each, higher=False)
    _note(made, POSITIONS, digests)


def _documents(text: Path | str) -> Iterator[str]:
    for file in find_files(text):
        for block in cut_file(file, "text"):
            yield from read_block(block).texts.to_pylist()


def _add(
    made: LongMeasured,
    task: str,
    metric: str,
    part: str,
    each: Sequence[float],
    *,
    higher: bool = True,
) -> None:
    n = len(each)
    mean = math.fsum(each) / n
    error = math.sqrt(math.fsum((one - mean) ** 2 for one in each) / (n - 1) / n) if n > 1 else None
    made.measured.scores[task, metric, part] = Score(
        task, metric, part, mean, error, n, higher, tuple(each)
    )


def _note(made: LongMeasured, task: str, questions: list[str]) -> None:
    made.measured.questions[task] = questions
    made.measured.listed[task] = "acc" if task == NEEDLE else "loss"
