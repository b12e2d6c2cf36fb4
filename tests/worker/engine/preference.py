"""Steps on the pairs of TRL's golden run (tests/worker/golden_dpo), for worlds; the first argument
is the rank.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from smtrain.core.config.training import DpoSection, Validation
from smtrain.core.model.lora import Lora, targets_of
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.engine.base import OptimizerOptions, ParallelOptions
from smtrain.worker.engine.native import NativeEngine
from smtrain.worker.train.validation import Validator
from tests.worker.engine import cases

GOLDEN = Path(__file__).parents[1] / "golden_dpo"
KINDS: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "hinge": {"loss": "hinge"},
    "ipo": {"loss": "ipo"},
    "robust_0.1": {"loss": "robust", "label_smoothing": 0.1},
    "sigmoid_norm": {"loss": "sigmoid_norm"},
    "sigmoid_sft": {"sft_weight": 0.5},
    "sigmoid_beta_0.5": {"beta": 0.5},
}
"""The options of each golden run."""
LIMIT, STEPS, EACH = 24, 5, 4
OPTIMIZER = OptimizerOptions(weight_decay=0.0, grad_clip=0.0)
Row = list[int]


@cache
def expected() -> dict[str, Any]:
    made: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text("utf-8"))
    return made


@cache
def described() -> dict[str, Any]:
    made: dict[str, Any] = json.loads((GOLDEN / "model/config.json").read_text("utf-8"))
    return made


def engine(options: ParallelOptions, kind: str = "sigmoid", lora: bool = False) -> NativeEngine:
    config = described()
    adapter = (
        Lora(4, 8.0, targets=targets_of(ModelShape.from_config(config), ("all-linear",)))
        if lora
        else None
    )
    preference = DpoSection(**KINDS[kind])
    return NativeEngine(
        config, options, OPTIMIZER, open_weights(GOLDEN / "model", config), 0, adapter, preference
    )


def batch(
    rows: list[Row], references: torch.Tensor, length: int, most: int
) -> tuple[torch.Tensor, ...]:
    """Rows of pairs of TRL's tokens, one answer after another."""
    tokens = expected()["tokens"]["explicit"]
    shape = len(rows), length
    ids, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -100)
    segments, numbers = (
        torch.zeros(shape, dtype=torch.int64),
        torch.full((len(rows), most, 2), torch.nan),
    )
    for row, pairs in enumerate(rows):
        at = number = 0
        for place, pair in enumerate(pairs):
            numbers[row, place] = references[pair]
            for answer in ("chosen_ids", "rejected_ids"):
                prompt = tokens[pair]["prompt_ids"]
                whole = torch.tensor([*prompt, *tokens[pair][answer]][:LIMIT])
                end = at + len(whole) - 1
                ids[row, at:end] = whole[:-1]
                labels[row, at + len(prompt) - 1 : end] = whole[len(prompt) :]
                segments[row, at:end] = number
                number += 1
                segments[row, end:] = number
                at = end
    return ids, labels, segments, numbers


def rows_of(step: int, packed: int) -> list[Row]:
    """The pairs of a golden step in rows of `packed` pairs; the last of five steps has three
    pairs.
    """
    pairs = list(range(EACH * step, min(EACH * (step + 1), len(expected()["tokens"]["explicit"]))))
    return [pairs[at : at + packed] for at in range(0, EACH, packed)]


def references_of(e: NativeEngine, packed: int, length: int) -> torch.Tensor:
    """The reference's log-probabilities of all pairs, from the engine's weights as they are."""
    references = torch.zeros(EACH * STEPS, 2)
    for step in range(STEPS):
        rows = rows_of(step, packed)
        ids, labels, segments, _ = batch(rows, references, length, packed)
        made = e.log_probabilities(ids, labels, segments, packed)
        for row, pairs in enumerate(rows):
            references[pairs] = made[row, : len(pairs)]
    return references


def steps(
    rank: int,
    options: ParallelOptions,
    kind: str = "sigmoid",
    packed: int = 1,
    lora: bool = False,
    first: int = 0,
) -> list[dict[str, float]]:
    """The golden steps from `first` on: loss, gradient norm and metrics, and loss and accuracy
    before each step.
    """
    e = engine(options, kind, lora)
    return stepped(e, packed, references_of(e, packed, LIMIT * 2 * packed), range(first, STEPS))


def stepped(
    e: NativeEngine, packed: int, references: torch.Tensor, which: range
) -> list[dict[str, float]]:
    out = []
    for step in which:
        rows = rows_of(step, packed)
        share = len(rows) // e.dp_size
        mine = rows[e.dp_rank * share : (e.dp_rank + 1) * share]
        ids, labels, segments, numbers = batch(mine, references, LIMIT * 2 * packed, packed)
        before = e.evaluate(ids, labels, segments, numbers)
        result = e.step(ids, labels, 1e-3, segments, numbers)
        assert result.pairs is not None
        assert before.pairs == result.pairs
        assert abs(before.loss - result.loss) < 1e-6 * max(1.0, result.loss)
        assert before.tokens == sum(map(len, rows))
        assert before.correct == round(result.pairs.accuracy * before.tokens)
        out.append({"loss": result.loss, "grad_norm": result.grad_norm, **result.pairs.numbers()})
    return out


def validation_losses(rank: int, options: ParallelOptions, kind: str) -> list[float]:
    """The validation loss of the first step's pairs: in one batch, and in a batch for each pair."""
    e, rows = engine(options, kind), rows_of(0, 1)
    references = torch.zeros(EACH * STEPS, 2)

    def loss_of(batches: list[list[Row]]) -> float:
        held_out: Any = SimpleNamespace(
            batches=len(batches), batch=lambda n: batch(batches[n], references, LIMIT * 2, 1)
        )
        validator = Validator(e, held_out, Validation(interval=1), 1, accuracy=True)
        result = validator.judge(1, lambda _: None, lambda: False)
        assert result is not None
        assert result.tokens == len(rows)
        return result.loss

    return [loss_of([rows]), loss_of([[row] for row in rows])]


def mixture_steps(
    rank: int, config: dict[str, Any], options: ParallelOptions, packed: int
) -> list[dict[str, float]]:
    """The golden pairs with a mixture of experts: loss, gradient norm, metrics and auxiliary loss
    of each step.
    """
    source: Any = cases.Memory(config, cases.weights(config))
    e = NativeEngine(config, options, OPTIMIZER, source, 0, None, DpoSection())
    references, out = references_of(e, packed, LIMIT * 2 * packed), []
    for step in range(STEPS):
        rows = rows_of(step, packed)
        share = len(rows) // e.dp_size
        mine = rows[e.dp_rank * share : (e.dp_rank + 1) * share]
        ids, labels, segments, numbers = batch(mine, references, LIMIT * 2 * packed, packed)
        result = e.step(ids, labels, 1e-3, segments, numbers)
        assert result.pairs is not None
        assert result.routing is not None
        numbers_of = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "aux": result.routing.aux_loss,
        }
        out.append({**numbers_of, **result.pairs.numbers()})
    return out


def plain_steps(rank: int, config: dict[str, Any]) -> list[dict[str, float]]:
    """The sigmoid loss of Rafailov et al. 2023 (beta 0.1) by transformers and torch, an answer in
    each call.
    """
    model = cases.transformers_model(config).eval()
    reference, tokens = copy.deepcopy(model), expected()["tokens"]["explicit"]
    adamw = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=0.0
    )

    def log_probability(of: Any, pair: int, answer: str) -> torch.Tensor:
        prompt = tokens[pair]["prompt_ids"]
        whole = torch.tensor([[*prompt, *tokens[pair][answer]][:LIMIT]])
        logits = of(input_ids=whole[:, :-1], use_cache=False).logits.log_softmax(-1)
        made: torch.Tensor = logits.gather(-1, whole[:, 1:, None])[0, len(prompt) - 1 :].sum()
        return made

    out = []
    for step in range(STEPS):
        pairs = [pair for row in rows_of(step, 1) for pair in row]
        answers = [(pair, answer) for pair in pairs for answer in ("chosen_ids", "rejected_ids")]
        made = [
            log_probability(model, *one) - log_probability(reference, *one).detach()
            for one in answers
        ]
        rewards = 0.1 * torch.stack(made).view(-1, 2)
        loss = -F.logsigmoid(rewards[:, 0] - rewards[:, 1]).mean()
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        adamw.step()
        chosen, rejected = rewards.detach().mean(0).tolist()
        out.append(
            {
                "loss": float(loss.detach()),
                "grad_norm": float(norm),
                "rewards/chosen": chosen,
                "rewards/rejected": rejected,
            }
        )
    return out


def resumed(
    rank: int, options: ParallelOptions, lora: bool, folder: Path
) -> list[list[dict[str, float]]]:
    """Steps 2 to 4 of a run, and the same of one that resumes from the checkpoint after step 1."""
    e = engine(options, lora=lora)
    references = references_of(e, 2, LIMIT * 4)
    stepped(e, 2, references, range(2))
    e.save(folder, 2, {})
    again = engine(options, lora=lora)
    again.load(folder / "step_00000002")
    return [stepped(one, 2, references, range(2, STEPS)) for one in (e, again)]


def other_start(rank: int, options: ParallelOptions, source: Path) -> list[list[float]]:
    """Log-probabilities of another model's weights, and of the start's before and after them; then
    the first loss.
    """
    e = engine(options)
    start = references_of(e, 2, LIMIT * 4)
    e.begin_from(open_weights(source, described()))
    other = references_of(e, 2, LIMIT * 4)
    e.begin_from(open_weights(GOLDEN / "model", described()))
    again = references_of(e, 2, LIMIT * 4)
    return [one.flatten().tolist() for one in (start, other, again)] + [
        [stepped(e, 2, start, range(1))[0]["loss"]]
    ]
