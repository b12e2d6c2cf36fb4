"""Preference training against TRL's DPOTrainer itself, run here: padded batches there, packed rows
here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from smtrain.worker.data.load.rows import PairRows, rows_of
from smtrain.worker.data.manifest import DatasetManifest
from tests.worker.data.chats import write
from tests.worker.data.quiet import prepare_sft
from tests.worker.engine import preference
from tests.worker.engine.cases import mesh
from tests.worker.engine.preference import EACH, GOLDEN, KINDS, LIMIT
from tests.worker.engine.world import World

# The golden run has TRL's numbers in the gate; its libraries warn of coming changes.
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
THEIRS: dict[str, dict[str, Any]] = {
    "hinge": {"loss_type": ["hinge"]},
    "ipo": {"loss_type": ["ipo"]},
    "robust_0.1": {"loss_type": ["robust"], "label_smoothing": 0.1},
    "sigmoid_norm": {"loss_type": ["sigmoid_norm"]},
    "sigmoid_sft": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    "sigmoid_beta_0.5": {"beta": 0.5},
}
METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


def pairs(form: str) -> list[dict[str, Any]]:
    """20 pairs of other words than the golden ones, as text or as conversations of three turns."""
    generator = torch.Generator().manual_seed(11)

    def words(most: int) -> str:
        count = int(torch.randint(2, most, (), generator=generator))
        return " ".join(f"w{int(torch.randint(88, (), generator=generator))}" for _ in range(count))

    rows: list[dict[str, Any]] = []
    for _ in range(20):
        prompt, chosen, rejected = words(6), words(9), words(22)
        if form == "text":
            rows.append({"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"})
            continue
        before = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "w1"}]
        ask = [*before, {"role": "user", "content": "w2"}]
        both = {"chosen": chosen, "rejected": rejected}
        rows.append(
            {name: [*ask, {"role": "assistant", "content": text}] for name, text in both.items()}
        )
    return rows


def theirs(
    rows: list[dict[str, Any]], options: dict[str, Any], folder: Path
) -> list[dict[str, float]]:
    """Five steps of TRL's trainer over the rows in order."""
    trl = pytest.importorskip("trl")
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer

    losses: list[float] = []

    class InOrder(trl.DPOTrainer):  # type: ignore[name-defined, misc]
        def _get_train_sampler(self, *args: Any, **more: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, *args: Any, **more: Any) -> Any:
            loss = super().compute_loss(*args, **more)
            losses.append(float(loss.detach()))
            return loss

    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": EACH,
        "max_steps": 5,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_length": LIMIT,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "beta": 0.1,
        "optim": "adamw_torch",
        "disable_tqdm": True,
        **options,
    }
    loaded: Any = AutoModelForCausalLM
    words: Any = AutoTokenizer
    trainer = InOrder(
        model=loaded.from_pretrained(GOLDEN / "model", dtype=torch.float32),
        args=trl.DPOConfig(**settings),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=words.from_pretrained(GOLDEN / "model"),
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "rewards/margins" in entry]
    return [
        {"loss": loss, **{name: entry[name] for name in METRICS}}
        for loss, entry in zip(losses, logged, strict=True)
    ]


def ours(rank: int, data: Path, kind: str) -> list[dict[str, float]]:
    """The same five steps from the prepared folder, two pairs a row."""
    rows = rows_of(data, DatasetManifest.load(data), 2 * LIMIT - 2, 0)
    assert isinstance(rows, PairRows)
    e = preference.engine(mesh("111"), kind)
    out = []
    wide = PairRows(rows.samples, 2 * (2 * LIMIT - 2), 0, packing=True)
    first = [[at, at + 1] for at in range(0, 20, 2)]
    for pair in first:
        ids, labels, segments, _ = wide.rows([pair])
        wide.references[pair] = e.log_probabilities(ids, labels, segments, wide.most)[0, :2].numpy()
    for step in range(5):
        result = e.step(*_with_lr(wide.rows(first[2 * step : 2 * step + 2])))
        assert result.pairs is not None
        out.append({"loss": result.loss, **result.pairs.numbers()})
    rows.close()
    return out


def _with_lr(batch: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    ids, labels, segments, references = batch
    return ids, labels, 1e-3, segments, references


@pytest.mark.parametrize("form", ["text", "conversations"])
@pytest.mark.parametrize("kind", KINDS)
def test_five_steps_have_trl_s_numbers(kind: str, form: str, solo: World, tmp_path: Path) -> None:
    rows = pairs(form)
    wanted = theirs(json.loads(json.dumps(rows)), THEIRS.get(kind, {}), tmp_path / "trl")
    source = write(tmp_path / "a.jsonl", rows)
    prepare_sft(
        source,
        tmp_path / "data",
        GOLDEN / "model",
        seq_len=2 * LIMIT - 2,
        objective="dpo",
        workers=1,
    )
    (made,) = solo.run(ours, tmp_path / "data", kind)
    for mine, their in zip(made, wanted, strict=True):
        assert set(mine) == set(their)
        for name, value in mine.items():
            assert abs(value - their[name]) <= 1e-5 * max(1.0, abs(their[name])), (
                name,
                value,
                their[name],
            )
